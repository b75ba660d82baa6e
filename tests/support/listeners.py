"""Addresses that a command's processes listen on, read from /proc while any of them lives."""

import contextlib
import ipaddress
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "METASEQ_LM_TEST_MARK"  # environment variable inherited by the processes of a command
# The states of sockets that receive from anyone: listening, and datagrams without a peer.
TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
ACCEPTING = 1 << 16  # flag of a Unix socket
PAUSE = 0.005  # seconds between checks


class Listeners(threading.Thread):
    """Polls the sockets of all processes that were started with MARK=`mark`.

    Attributes:
        seen: The addresses that they listen on, such as 127.0.0.1 or unix:/tmp/x.
        processes: The process ids.
        over: Set it to stop.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark = f"{MARK}={mark}".encode()
        self.seen: set[str] = set()
        self.processes: set[str] = set()
        self.over = threading.Event()
        self.earlier = set(os.listdir("/proc"))
        self.known = set(listening())  # sockets of other processes, or in `seen`

    def run(self) -> None:
        """Poll until `over` is set."""
        while not self.over.wait(PAUSE):
            self.look()

    def look(self) -> None:
        """Poll once."""
        for name in set(os.listdir("/proc")) - self.earlier - self.processes:
            with contextlib.suppress(OSError):  # it has ended
                if self.mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    self.processes.add(name)
        sockets = set().union(*map(sockets_of, self.processes)) - self.known
        addresses = listening() if sockets else {}  # takes some milliseconds
        found = sockets & addresses.keys()
        self.seen |= {addresses[inode] for inode in found}
        self.known |= found


def sockets_of(process: str) -> set[str]:
    """Return the inodes of the sockets of a process, none if it has ended."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):  # it was closed
                found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return {name[len("socket:[") : -1] for name in found if name.startswith("socket:")}


def listening() -> dict[str, str]:
    """Return the addresses of all sockets that receive from anyone, by inode."""
    found = {}
    for table, state in TABLES.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                packed = bytes.fromhex(fields[1].split(":")[0])  # words in the machine's order
                words = struct.unpack(f"={len(packed) // 4}I", packed)
                address = ipaddress.ip_address(struct.pack(f">{len(words)}I", *words))
                found[fields[9]] = str(address)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & ACCEPTING:
            found[fields[6]] = f"unix:{''.join(fields[7:])}"
    return found


def listeners_of(command: list[str], place: Path) -> Listeners:
    """Run a Python command in a folder to its end; return the listeners of its processes."""
    looking = Listeners(f"{os.getpid()}-{time.monotonic_ns()}")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment[MARK] = looking.mark.decode().partition("=")[2]
    looking.start()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=place,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
    finally:
        looking.over.set()
        looking.join()
    assert done.returncode == 0, done.stderr
    return looking
