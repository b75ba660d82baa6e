"""`train --nproc N`: starts N replicas of a command on this machine and waits for them.

As one of several tasks of an `srun` step, it starts N of the step's replicas, and ends together
with the other tasks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from metaseq_lm.core.errors import Interrupted, MetaseqError
from metaseq_lm.distributed.signals import PARENT_DIES, handled_signals, last_signal
from metaseq_lm.distributed.step import Meeting, Step, step_of

PATIENCE = 15.0  # seconds for the other replicas to end by themselves after one failed


def _environment_of(rank: int, count: int, step: Step, shared: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a replica: torchrun's variables, share of the cores, `shared`."""
    cores = max(1, usable_cores() // count)
    variables = step.variables(rank, count) | {PARENT_DIES: os.getpid()}
    # The store's log would repeat our messages as stack traces.
    defaults = {"OMP_NUM_THREADS": str(cores), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    numbers = {name: str(value) for name, value in variables.items()}
    return {**defaults, **os.environ, **numbers, **shared}


def usable_cores() -> int:
    """Return how many cores this process may use; a job often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(count: int, arguments: Sequence[str], folder: str = "") -> int:
    """Run `metaseq-lm ARGUMENTS` as `count` replicas; return the exit code of the run.

    Each task of a step of `srun` starts `count` replicas, and all of them form one process group,
    with the secret in the `folder` of the run. Signals are passed on to all replicas. Raises
    MetaseqError naming a replica that was killed.
    """
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        _send(children, number)

    handlers = {number: signal.signal(number, forward) for number in handled_signals()}
    signals += filter(None, [last_signal()])  # while this process read its configuration
    meeting = None
    try:
        step = step_of(os.environ)
        meeting = Meeting(step, arguments, signals, folder)
        if not meeting.complete():
            return meeting.report(Interrupted.exit_code, "")[0]
        for rank in range(count):
            environment = _environment_of(rank, count, step, meeting.variables())
            children.append(subprocess.Popen([*program(), *arguments], env=environment))
        for number in signals:  # one may have arrived before all replicas were started
            _send(children, number)
        return watch(children, signals, meeting)
    finally:
        _send(children, signal.SIGKILL)
        if meeting is not None:
            meeting.leave()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _send(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)


def watch(
    children: Sequence[subprocess.Popen[bytes]], signals: Sequence[int], meeting: Meeting
) -> int:
    """Wait for all replicas; PATIENCE seconds after one fails, here or elsewhere, kill the others.

    Returns 0, or the exit code of the first that failed.
    """
    outcome: tuple[int, str] | None = None  # exit code and message of the first failed replica
    deadline = float("inf")
    # A list, not a generator: every child must be polled.
    while any([child.poll() is None for child in children]):  # noqa: C419
        if outcome is None:
            outcome = _outcome_of(children, signals, meeting) or meeting.outcome()
            if outcome is not None:
                deadline = time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            _send(children, signal.SIGKILL)
        time.sleep(0.05)
    code, message = outcome or _outcome_of(children, signals, meeting) or (0, "")
    if message:
        raise MetaseqError(message)
    return code


def _outcome_of(
    children: Sequence[subprocess.Popen[bytes]], signals: Sequence[int], meeting: Meeting
) -> tuple[int, str] | None:
    """Return exit code and message of the first replica to fail on any node, if one failed here."""
    first = _find_failed(children)
    if first is None:
        return None
    code = children[first].returncode
    # The signal came before the replica could handle it.
    if -code in signals or (code == 130 and signal.SIGINT in signals):
        return meeting.report(Interrupted.exit_code, "")
    if code >= 0:
        return meeting.report(code, "")
    number = meeting.step.number * len(children) + first
    process = f"process {children[first].pid}{meeting.node_suffix()}"
    meeting.explain(number, f"{process} was killed by {signal.Signals(-code).name}")
    return meeting.report(
        1,
        f"replica {number} ({process}) was killed by {signal.Signals(-code).name}; "
        "if nobody did that, memory ran out. Start the run again, it resumes "
        "from the last checkpoint",
    )


def _find_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the number of a failed replica, preferably a killed one: it makes others fail."""
    ended = [r for r, child in enumerate(children) if child.returncode]
    return min(ended, key=lambda r: children[r].returncode > 0, default=None)


def program(root: Path | None = None) -> list[str]:
    """Return the start of a command line that runs this program from the package under `root`.

    The default is the package that runs now. `-m metaseq_lm` would prefer a package in the working
    directory.
    """
    folder = str((root or Path(__file__).parents[2]).resolve())
    return python_command(folder, "from metaseq_lm.cli import program; program()")


def python_command(folder: str, code: str) -> list[str]:
    """Return the beginning of a command that runs Python `code` with `folder` first in sys.path."""
    return [sys.executable, "-u", "-c", f"import sys; sys.path[0] = {folder!r}; {code}"]
