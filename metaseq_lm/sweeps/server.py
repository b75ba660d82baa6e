"""A process that forks the jobs of a local sweep, so that PyTorch is imported only once.

The server imports the package, and everything that a run needs, from a snapshot of the code. It
starts no thread and draws no random number. For each request it forks a controller of submitit,
which forks the job's task, which forks the training runs. Each run begins with warm imports and is
otherwise the same process as `metaseq-lm train`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.local.local import Controller, LocalExecutor, LocalJob

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.distributed import launcher, signals

_START = "from metaseq_lm.cli.jobs import serve; serve(sys.argv[-1])"
END = "end"  # the last request; a command that died does not send it
YEAR = 525_600  # minutes; submitit's local executor always has a limit
_SAVING_SECONDS = 30  # between submitit's signal at the time limit and its kill
_FORK = multiprocessing.get_context("fork")


class Forked:
    """A forked process with the methods of `subprocess.Popen` that submitit and jobs call."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._process = _FORK.Process(target=_run, args=(function, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the process and return its exit code, negative for a signal."""
        self._process.join()
        return self._process.exitcode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function in a new process, without the signal handlers of its parent."""
    for number in signals.SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    function(*arguments)


# ---------------------------------------------------------------- in the process of the sweep


class Server:
    """The server of one snapshot of the code, seen from the command that launches runs."""

    def __init__(self, code: str, threads: int, lock: Path) -> None:
        command = [*launcher.python_command(code, _START), str(lock)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(self, folder: Path, environment: dict[str, str]) -> int:
        """Fork the controller of a job; return its process id. Raises MetaseqError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([str(folder), environment]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise MetaseqError(f"the process that forks runs has ended ({code}); start again")
        return int(answer)

    def close(self) -> None:
        """End the server after its jobs have ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(END, file=self._process.stdin, flush=True)
            self._process.stdin.close()
        self._process.wait()


class ForkExecutor(LocalExecutor):
    """submitit's local executor, with controllers that a server forks."""

    def __init__(self, folder: Path, server: Server, max_timeouts: int) -> None:
        super().__init__(folder, max_timeouts)
        self.server = server

    def _submit_command(self, command: str) -> LocalJob[Any]:
        gpus = self.parameters["visible_gpus"][: self.parameters["gpus_per_node"]]
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_JOB_NUM_NODES": 1,
            "SUBMITIT_LOCAL_NODEID": 0,
            "SUBMITIT_LOCAL_NTASKS": 1,
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": _SAVING_SECONDS,
            "SUBMITIT_LOCAL_TIMEOUT_S": 60 * self.parameters["timeout_min"],
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        }
        environment = dict(os.environ) | {name: str(value) for name, value in variables.items()}
        return LocalJob(self.folder, str(self.server.fork(self.folder, environment)))


# ---------------------------------------------------------------- in the server


def fork_jobs(lock: str) -> None:
    """Fork controllers as requested on standard input, until it and all controllers have ended.

    If the command died before its runs, these get SIGTERM, and the server holds the lock of the
    sweep until they have saved, because a new command must not start earlier.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number in signals.SIGNALS:  # the command passes them on to the runs
        signal.signal(number, signal.SIG_IGN)
    jobs: list[Forked] = []
    while True:
        jobs = [job for job in jobs if job.poll() is None]
        if not select.select([requests], [], [], 0.1)[0]:
            continue
        if (line := requests.readline().strip()) in ("", END):
            break
        folder, environment = json.loads(line)
        jobs.append(Forked(_control, folder, environment, (requests, answers)))
        print(jobs[-1].pid, file=answers, flush=True)
    if line != END:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            for job in jobs:
                job.send_signal(signal.SIGTERM)
            for job in jobs:
                job.wait()


def _control(folder: str, environment: dict[str, str], pipes: tuple[IO[str], ...]) -> None:
    for pipe in pipes:
        pipe.close()
    signals.follow_parent()
    os.environ.clear()
    os.environ.update(environment)
    _Controller(Path(folder)).run()


class _Controller(Controller):
    """submitit's controller, which restarts its task after a time-out; it forks the task."""

    def start_tasks(self) -> None:
        """Fork the task, with its log files."""
        self.folder.mkdir(exist_ok=True)
        paths = JobPaths(self.folder, self.pid, 0)
        self.stdouts, self.stderrs = [paths.stdout.open("a")], [paths.stderr.open("a")]
        self.tasks.append(Forked(_begin_task, self))  # type: ignore[arg-type]


def _begin_task(controller: _Controller) -> None:
    os.dup2(controller.stdouts[0].fileno(), 1)
    os.dup2(controller.stderrs[0].fileno(), 2)
    os.environ.update(
        SUBMITIT_LOCAL_LOCALID="0",
        SUBMITIT_LOCAL_GLOBALID="0",
        SUBMITIT_LOCAL_JOB_ID=controller.pid,
    )
    process_job(controller.folder)
