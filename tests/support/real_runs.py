"""Real runs of the program in separate processes, for tests that kill, stop or break them.

A run is forked from a server that has imported everything, which saves most of its start-up, and is
the ordinary program from there on. Its replicas (--nproc) are also forked, and are children of its
supervisor as usual. With `fresh`, everything is started like by a user.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import battery
import torch
from battery import CASES, TINY, Case, Run
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FAULTS = str(ROOT / "tests" / "support" / "faults")
REPEATS = int(os.environ.get("METASEQ_LM_REPEATS", "1"))
LONG = 120.0  # seconds within which anything ends on a busy machine


MLM = ("masked_lm", 0)
FP64 = ["engine.precision=fp64", "model.dropout=0", "model.attention_dropout=0"]


def command(data: Path, save: Path, *more: str, case: tuple[str, int] = MLM) -> list[str]:
    """Return the arguments of a small run with the plug-in that breaks it."""
    places = ["train", str(data), "--save-dir", str(save), "--user-dir", FAULTS]
    small = ["task.valid_size=16", "trainer.validate_interval_updates=4", "trainer.keep_last=2"]
    name, number = case
    return [*places, f"criterion={name}", *CASES[name][number], *TINY, *small, *more]


class Started:
    """A started run, with its own session, so that none of its processes is missed."""

    def __init__(
        self,
        arguments: list[str],
        errors: Path,
        environment: dict[str, str] | None = None,
        fresh: bool = False,
        file_limit: int = 0,
    ) -> None:
        self.errors = errors
        self.sent = errors.with_suffix(".sent")
        standard = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        environment = standard | {"METASEQ_LM_SENT": str(self.sent)} | (environment or {})
        self.process: Any
        if fresh:
            with open(errors, "ab") as file:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "metaseq_lm", *arguments],
                    env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        else:
            context = multiprocessing.get_context("forkserver")
            serve()
            given = (arguments, str(errors), environment, file_limit)
            self.process = context.Process(target=forked, args=given)
            self.process.start()
        self.pid: int = self.process.pid
        until(lambda: session(self.pid) in (self.pid, None), LONG, "a session")

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return self.process.exitcode

    def wait(self, seconds: float = LONG) -> int:
        """Return the exit code; fail if the run does not end in time."""
        try:
            until(lambda: self.code is not None, seconds, f"the end of {self.pid}")
        except AssertionError as error:
            self.kill_all()
            raise AssertionError(f"{error}\n{self.text()}") from None
        assert self.code is not None
        return self.code

    def text(self) -> str:
        """Return its output so far."""
        return self.errors.read_text(errors="replace") if self.errors.exists() else ""

    def send(self, number: int, to: int | None = None) -> None:
        """Send a signal only to one process, the first, like Slurm and `kill` in a terminal."""
        os.kill(to or self.pid, number)
        self.sent.touch()

    def members(self) -> list[int]:
        """Return the living processes of this run, including the first."""
        everyone = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
        return sorted(p for p in everyone if session(p) == self.pid)

    def replicas(self) -> list[int]:
        """Return the processes of the replicas in rank order."""
        return [p for p in self.members() if p != self.pid]

    def kill_all(self) -> None:
        """kill -9 the whole process group and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        until(lambda: not self.members(), LONG, "the killed processes to go")
        until(lambda: self.code is not None, LONG, "the exit code")


def serve() -> None:
    """Start the server to fork from, which imports the program first."""
    before = dict(os.environ)
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [before.get("PYTHONPATH")])]
    os.environ.update(PYTHONPATH=":".join(paths), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    forkserver.set_forkserver_preload(["imported_first"])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def forked(arguments: list[str], errors: str, environment: dict[str, str], limit: int) -> None:
    """Be the program, in a forked process."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    # A sweep may have started the server to fork from, with the signals of a terminal blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["metaseq-lm", *arguments]
    from metaseq_lm.cli import program
    from metaseq_lm.distributed import launcher

    if "--nproc" in arguments:
        count = int(arguments[arguments.index("--nproc") + 1])
        Forked.waiting = [Forked.fork(program) for _ in range(count)]
        launcher.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]
    if arguments[0] in ("sweep", "league"):
        import warm_server

        warm_server.replace("fork")
    program()


class Forked:
    """Replaces subprocess.Popen in the supervisor by starting a process that was forked earlier."""

    waiting: ClassVar[list[tuple[int, int]]] = []  # process and the pipe with its environment

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, pipe = Forked.waiting.pop(0)
        self.returncode: int | None = None
        os.write(pipe, json.dumps(env).encode() + b"\n")
        os.close(pipe)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    @staticmethod
    def fork(program: Callable[[], None]) -> tuple[int, int]:
        """Fork a process that waits for its environment, before the supervisor starts threads."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(reading)
            return pid, writing
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            environment = json.loads(pipe.readline() or "null")
        code = 0
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
            signal.signal(signal.SIGINT, handler)
            try:
                program()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def on_replicas(world: int, function: Callable, *arguments: Any, seconds: float = LONG) -> None:
    """Call `function`, which joins the process group, in `world` replicas; all must return."""
    from torch.distributed import TCPStore

    serve()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    given = [(rank, world, store.port, function, arguments) for rank in range(world)]
    processes = [context.Process(target=as_replica, args=each) for each in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * world


def train_on_replicas(
    world: int, nodes: int, runs: Sequence[Run], data: Path, out: Path, rows_for_all: bool = True
) -> list[dict[tuple[Case, str], dict[str, Tensor]]]:
    """Train runs in `world` replicas that pose as `nodes` nodes; return weights of each replica.

    Weights are by (case, label). Without `rows_for_all`, the first replica has no rows in any
    batch.
    """
    on_replicas(world, battery.replicated, data, out, nodes, runs, rows_for_all, seconds=10_000)
    return [torch.load(out / f"weights.{r}.pt", weights_only=True) for r in range(world)]


def as_replica(rank: int, world: int, port: int, function: Callable, arguments: tuple) -> None:
    """Be one of the replicas of `on_replicas`."""
    shared = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in shared.items()})
    function(*arguments)


# ---------------------------------------------------------------- looking


def until(done: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait for `done`; a failure message has `what`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.002)


def session(pid: int) -> int | None:
    """Return the session of a process, None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[3])


def listens(pid: int, number: int = signal.SIGTERM) -> bool:
    """Return whether a process handles a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def rows(save: Path, kind: str, name: str = "log.jsonl") -> list[dict]:
    """Return the whole lines of one kind in a log, without time and checksum."""
    file = save / name
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    untimed = [{k: r[k] for k in r.keys() - {"seconds", "checksum"}} for r in lines]
    return [row for row in untimed if row["kind"] == kind]


def records(save: Path, rank: int = 0) -> list[dict]:
    """Return the records of a replica, update by update."""
    file = save / f"record.{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def reached(save: Path) -> int:
    """Return the last update in the log."""
    found = rows(save, "train")
    return found[-1]["update"] if found else 0


def final(save: Path) -> tuple[bytes, dict]:
    """Return the bytes of the last weights and the rest of the state, without times."""
    import safetensors.torch

    from metaseq_lm.runs import checkpoint, manifests

    found = checkpoint.load(manifests.resolve(str(save), "last"))
    state = {k: v for k, v in found.state.items() if k != "seconds"}
    return safetensors.torch.save(found.weights), state


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Return whether nested containers of tensors are equal; without tolerance, to the last bit."""
    import torch

    if isinstance(a, torch.Tensor) and tolerance:
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], tolerance) for k in a)
    if isinstance(a, float) and isinstance(b, float) and tolerance:
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return a == b


def faults(*each: dict) -> dict[str, str]:
    """Return the environment that makes the plug-in break a run."""
    return {"METASEQ_LM_FAULTS": json.dumps(each)}
