"""The `srun` step of this process: its rank among the tasks, and their rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.distributed import gate

HOST = "127.0.0.1"
STORE_FILE = "METASEQ_LM_STORE"  # environment variable with the file of a store
_PORTS = 8  # number of ports to choose from
_MEETING = 300.0  # seconds until all tasks must have started
_LEAVING = 30.0  # seconds that the first task waits for the others to end


@dataclass(frozen=True)
class Step:
    """The rank of a task in its step; by default it is the only task."""

    number: int = 0
    tasks: int = 1
    local_number: int = 0
    local_tasks: int = 1  # on this node
    name: str = ""  # identifies this start of the step; it changes with a requeue
    ports: tuple[int, ...] = (0,)
    nodes: str = ""
    address: str = HOST
    is_local: bool = True  # all tasks are on this machine

    def host(self) -> str:
        """Return the address of the first task."""
        if self.is_local:
            return HOST
        if self.address or not self.nodes:
            return self.address
        command = ["scontrol", "show", "hostnames", self.nodes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()[0]

    def variables(self, rank: int = 0, count: int = 1) -> dict[str, int]:
        """Return torchrun's variables for process `rank` of the `count` processes of each task."""
        return {
            "RANK": self.number * count + rank,
            "LOCAL_RANK": self.local_number * count + rank,
            "WORLD_SIZE": self.tasks * count,
            "LOCAL_WORLD_SIZE": self.local_tasks * count,
        }


def step_of(environment: Mapping[str, str]) -> Step:
    """Return the rank of this process in a step of several tasks, `Step()` outside one."""
    # SLURM_STEP_NUM_TASKS exists only in steps; SLURM_NTASKS also exists in a batch script, where
    # no other process would join.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "SLURM_PROCID" not in environment:
        return Step()
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    # Other steps on a node start at other ports, all below those of outgoing connections (Linux
    # gives these 32768 and more).
    port = 20000 + (100 * int(job) + int(step)) % 12000
    ports = tuple(range(port, port + _PORTS))
    if "MASTER_PORT" in environment:
        ports = (int(environment["MASTER_PORT"]),)
    counts = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Step(
        number=int(environment["SLURM_PROCID"]),
        tasks=tasks,
        local_number=int(environment.get("SLURM_LOCALID", "0")),
        local_tasks=counts[int(environment.get("SLURM_NODEID", "0"))],
        name=f"{job}.{step}, start {environment.get('SLURM_RESTART_COUNT', '0')}",
        ports=ports,
        nodes=environment.get("SLURM_STEP_NODELIST", ""),
        address=environment.get("MASTER_ADDR", ""),
        is_local=environment.get("SLURM_STEP_NUM_NODES") == "1",
    )


def _tasks_per_node(counts: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form, such as 2(x3),1."""
    result: list[int] = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        result += [int(count)] * int(times or 1)
    return result


def node_name() -> str:
    """Return the name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Meeting:
    """The launchers of a step's tasks, which communicate through a store of the first task.

    On one machine the store is a file that only this user can open. Between nodes it is behind a
    `Gate`, and the first task leaves the secret in `folder`, which all nodes see. The step and
    `command` identify the meeting. `signals` that arrive end the wait for others.
    """

    def __init__(
        self, step: Step, command: Sequence[str], signals: Sequence[int], folder: str = ""
    ) -> None:
        self.step, self.signals, self.folder = step, signals, folder
        self.name = f"{step.name}: {' '.join(command)}"
        self.deadline = time.monotonic() + _MEETING
        self.last_look = 0.0
        self.private: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0
        self.store: Any = None
        if step.tasks == 1:
            self.private = tempfile.TemporaryDirectory(prefix="metaseq-lm-")
        elif step.number == 0:
            self.store = self._open()
        else:
            self.store = self._connect()

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which replicas find the store and each other."""
        interfaces = {}
        if self.step.is_local:
            lo = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            interfaces = {"GLOO_SOCKET_IFNAME": lo, "NCCL_SOCKET_IFNAME": f"={lo}"}
        if self.private is None:
            # The launcher holds the store, as torchrun's agent does, so that it outlives every
            # replica.
            agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            return {"MASTER_ADDR": HOST, "MASTER_PORT": str(self.port), **agent, **interfaces}
        return {STORE_FILE: f"{self.private.name}/store", **interfaces}

    def _open(self) -> Any:
        from torch.distributed import TCPStore  # the wrapper of a job starts without torch

        key = gate.key_of(self._secret(), self.name)
        for port in self.step.ports:
            with contextlib.suppress(OSError):  # another job has this port
                entrance = self._listen(port)
                inside = socket.create_server((HOST, 0))
                self.port = inside.getsockname()[1]
                gate.Gate(entrance, (HOST, self.port), key, is_first=True)
                return TCPStore(
                    HOST,
                    self.port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=inside.detach(),
                )
        ports = " ".join(map(str, self.step.ports))
        raise MetaseqError(
            f"{self.step.host()}: no port is free of {ports}; set MASTER_PORT to one that is"
        )

    def _listen(self, port: int) -> socket.socket:
        """Return a socket that all nodes can reach, also by IPv6 if available."""
        if self.step.is_local:
            return socket.create_server((HOST, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))

    def _connect(self) -> Any:
        from torch.distributed import TCPStore

        host = self.step.host()
        while not self.signals:
            secret = gate.read_secret(self.folder, create=False)
            if not secret:
                self._wait(
                    f"{node_name()} sees no {gate.FILE} in {self.folder}, which all nodes have to "
                    f"see (or set {gate.SECRET})"
                )
                continue
            key = gate.key_of(secret, self.name)
            if port := gate.find(host, self.step.ports, key):
                inside = gate.Gate(socket.create_server((HOST, 0)), (host, port), key, False)
                self.port = inside.port
                with contextlib.suppress(RuntimeError):  # the first task has just ended
                    return TCPStore(HOST, self.port, is_master=False)
            self._wait(f"{node_name()} does not reach the first task on {host}")
        return None

    def _secret(self) -> bytes:
        while (secret := gate.read_secret(self.folder, create=True)) is None:
            self._wait(f"{self.folder}: its {gate.FILE} is damaged; remove it. Nothing was read")
        return secret

    def _wait(self, problem: str) -> None:
        if time.monotonic() > self.deadline:
            raise MetaseqError(f"{problem}, {_MEETING:.0f} s after the start of the step")
        time.sleep(0.2)

    def complete(self) -> bool:
        """Wait until all tasks have joined; return False if one was stopped before."""
        if self.step.tasks == 1:
            return True
        if self.store is None:
            return False
        joined = self.store.add("joined", 1)
        while joined < self.step.tasks:
            if self.signals or self.outcome() is not None:
                return False
            self._wait(f"only {joined} of {self.step.tasks} tasks started")
            joined = self.store.add("joined", 0)
        return True

    def report(self, code: int, message: str) -> tuple[int, str]:
        """Report how this task ended if it is the first to fail; return the first failure."""
        if self.step.tasks > 1 and self.store is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # the first task has ended
                text = self.store.compare_set("outcome", "", json.dumps([code, message]))
                code, message = json.loads(text)
        return code, message

    def explain(self, rank: int, reason: str) -> None:
        """Report the reason of a replica's end to the replicas of all nodes."""
        if self.step.tasks > 1 and self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"failed/{rank}", reason)

    def node_suffix(self) -> str:
        """Return " on NODE" for messages, "" on a single machine."""
        if self.step.tasks == 1:
            return ""
        return f" on {node_name()}"

    def outcome(self) -> tuple[int, str] | None:
        """Return the failure that a task reported, None without one; polls once a second."""
        if self.step.tasks == 1 or time.monotonic() < self.last_look + 1:
            return None
        self.last_look = time.monotonic()
        with contextlib.suppress(RuntimeError, ValueError):
            if self.store.check(["outcome"]):
                code, message = json.loads(self.store.get("outcome"))
                return code, message
        return None

    def leave(self) -> None:
        """Mark this task as ended and remove its files.

        The first task waits for the others, which may need its store.
        """
        if self.private is not None:
            self.private.cleanup()
        if self.step.tasks == 1 or self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            over = self.store.add("left", 1)
            end = time.monotonic() + _LEAVING
            while self.step.number == 0 and over < self.step.tasks and time.monotonic() < end:
                time.sleep(0.1)
                over = self.store.add("left", 0)
