"""The `srun` step of this process: its rank among the tasks, and their rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from metaseq_lm.core.errors import MetaseqError

HOST = "127.0.0.1"
PORTS = 8  # to choose from
MEETING = 300.0  # seconds until all tasks must have started
LEAVING = 30.0  # seconds that the first task waits for the others to end


@dataclass(frozen=True)
class Step:
    """The rank of a task in its step; by default it is the only task."""

    number: int = 0
    tasks: int = 1
    local_number: int = 0
    local_tasks: int = 1  # on this node
    name: str = ""  # of this start of the step; after a requeue it is another
    ports: tuple[int, ...] = (0,)
    nodes: str = ""
    address: str = HOST

    def host(self) -> str:
        """Return the address of the first task."""
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
    """Return the rank of this process in a step of several tasks, `Step()` outside one.

    SLURM_STEP_NUM_TASKS exists in steps only; SLURM_NTASKS exists in a batch script too, where no
    other process would join.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "SLURM_PROCID" not in environment:
        return Step()
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    port = 20000 + (100 * int(job) + int(step)) % 12000
    ports = tuple(range(port, port + PORTS))
    if "MASTER_PORT" in environment:
        ports = (int(environment["MASTER_PORT"]),)
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Step(
        number=int(environment["SLURM_PROCID"]),
        tasks=tasks,
        local_number=int(environment.get("SLURM_LOCALID", "0")),
        local_tasks=counts[int(environment.get("SLURM_NODEID", "0"))],
        name=f"{job}.{step}, start {environment.get('SLURM_RESTART_COUNT', '0')}",
        ports=ports,
        nodes=environment.get("SLURM_STEP_NODELIST", ""),
        address=environment.get("MASTER_ADDR", ""),
    )


def tasks_per_node(counts: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form, such as 2(x3),1."""
    result: list[int] = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        result += [int(count)] * int(times or 1)
    return result


def machine() -> str:
    """Return the name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Attempt(threading.Thread):
    """Connects to the store of a meeting at one port; `store` is None if there is none.

    A thread, because torch waits without end for a program that listens and does not answer.
    """

    def __init__(self, host: str, port: int, name: str) -> None:
        super().__init__(daemon=True)
        self.address, self.meeting = (host, port), name
        self.store: Any = None

    def run(self) -> None:
        from torch.distributed import TCPStore

        with contextlib.suppress(OSError, RuntimeError):  # no store, or another program
            socket.create_connection(self.address, 2).close()
            store = TCPStore(*self.address, is_master=False, timeout=timedelta(seconds=5))
            if store.get("name") == self.meeting.encode():
                self.store = store


class Meeting:
    """The launchers of a step's tasks, which communicate through a store of the first task.

    `command` names the meeting, besides the step; `signals` that arrive end the waiting for others.
    """

    def __init__(self, step: Step, command: Sequence[str], signals: Sequence[int]) -> None:
        self.step, self.signals = step, signals
        self.name = f"{step.name}: {' '.join(command)}"
        self.host = step.host()
        self.deadline = time.monotonic() + MEETING
        self.last_look = 0.0
        self.store: Any = self._open() if step.number == 0 else self._connect()

    def _open(self) -> Any:
        from torch.distributed import TCPStore  # the wrapper of a job starts without torch

        for port in self.step.ports:
            with contextlib.suppress(RuntimeError):  # another job has this port
                store = TCPStore(self.host, port, is_master=True, wait_for_workers=False)
                store.set("name", self.name)
                return store
        ports = " ".join(map(str, self.step.ports))
        raise MetaseqError(
            f"{self.host}: no port is free of {ports}; set MASTER_PORT to one that is"
        )

    def _connect(self) -> Any:
        attempts: dict[int, Attempt] = {}
        while not self.signals:
            for port in self.step.ports:
                if port not in attempts or not attempts[port].is_alive():
                    attempts[port] = Attempt(self.host, port, self.name)
                    attempts[port].start()
            for attempt in attempts.values():
                attempt.join(0.05)
                if attempt.store is not None:
                    return attempt.store
            self._wait(f"{machine()} does not reach the first task on {self.host}")
        return None

    def _wait(self, problem: str) -> None:
        if time.monotonic() > self.deadline:
            raise MetaseqError(f"{problem}, {MEETING:.0f} s after the start of the step")
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
        return f" on {machine()}" if self.step.tasks > 1 else ""

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
        """Mark this task as ended; the first waits for the others, which may need its store."""
        if self.step.tasks == 1 or self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            over = self.store.add("left", 1)
            end = time.monotonic() + LEAVING
            while self.step.number == 0 and over < self.step.tasks and time.monotonic() < end:
                time.sleep(0.1)
                over = self.store.add("left", 0)
