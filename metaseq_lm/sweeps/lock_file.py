"""Locks of folders: held by an open file, or by a file that names its owner."""

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.core.files import full_disk_message, without_link

# Seconds after which the lock of a process that is not visible from here is broken; holding it
# takes far less than one second.
GRACE = 120.0
PATIENCE = 10.0  # seconds after which a waiting process names the owner


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a file inside the block; MetaseqError says `busy` if another process does.

    The lock ends with the process, however it ends.
    """
    with open(path, "ab", opener=without_link) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MetaseqError(busy) from None
        yield


class LockFile:
    """A lock that is held as long as a file exists.

    It works on NFS 3 and later and names its owner, so a dead owner is detected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the lock and hold it inside the block."""
        owner = f"{_place()} {os.getpid()} {process_start(os.getpid())} {uuid.uuid4().hex}"
        try:
            self._acquire(owner)
            yield
        finally:
            self._remove(owner)  # unless another process broke the lock

    def _acquire(self, owner: str) -> None:
        holder, since, is_told, pause = None, 0.0, False, 0.001
        while not self._create(owner):
            current = self._owner()
            if current != holder:
                holder, since = current, time.monotonic()
            waited = time.monotonic() - since
            if _is_dead(current) or (waited > GRACE and not _is_here(current)):
                self._remove(current)
                continue
            if waited > PATIENCE and not is_told:
                is_told = True
                say(f"{self.path}: waits for {_describe(current)}, which holds this lock")
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _create(self, owner: str) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        try:
            with full_disk_message(self.path):
                os.write(descriptor, owner.encode())
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        return True

    def _owner(self) -> str:
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _remove(self, owner: str) -> None:
        """Remove the file if `owner` owns it; processes of one machine do so one by one."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            if self._owner() == owner:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(folder)


def _place() -> str:
    """Return the host, its boot and the namespace of process ids, each without blanks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} - -"


def _is_dead(owner: str) -> bool:
    """Return whether the owner of a lock, a process, has certainly ended."""
    words = owner.split(" ")
    if len(words) != 6 or not words[3].isdecimal() or words[1] == "-":
        return False  # written by an earlier version, or not written yet
    host, boot, *_ = _place().split(" ")
    if words[0] == host and words[1] != boot:
        return True  # the machine was rebooted
    return _is_here(owner) and str(process_start(int(words[3]))) != words[4]


def _is_here(owner: str) -> bool:
    return owner.startswith(f"{_place()} ") and " - - " not in owner


def _describe(owner: str) -> str:
    words = owner.split(" ")
    return f"process {words[3]} on {words[0]}" if len(words) == 6 else "an unknown process"


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    parts = text.rpartition(")")[2].split()
    return 0 if parts[0] in "ZX" else int(parts[19])
