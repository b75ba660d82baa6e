"""Signals that ask a run to stop. They are recorded, and handled between two updates."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from metaseq_lm.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# scancel sends only TERM; a preemption sends TERM and, some seconds later, submitit's signal.
SECOND_SIGNAL = 5.0
# Environment variable with the id of the parent process; this process must end with it.
PARENT_DIES = "METASEQ_LM_PARENT_DIES"

_received: list[int] = []
_listening = False


def last_signal() -> int:
    """Return the last stop signal received while listening, or 0."""
    return _received[-1] if _received else 0


def pending_signals() -> list[float]:
    """Return 1.0 for the last received signal and 0.0 for all others, to sum over replicas."""
    return [float(last_signal() == number) for number in SIGNALS]


def agree_on_signal(votes: Sequence[float]) -> int:
    """Return the signal with votes from replicas, the highest of several, or 0."""
    return max((number for number, count in zip(SIGNALS, votes, strict=True) if count), default=0)


def make_interruption(number: int, progress: str) -> Interrupted:
    """Return the error that ends a run for a signal; `progress` is the state of the run."""
    error = Interrupted(
        f"stopped by {signal.Signals(number).name} {progress}, start the same command "
        "again to go on"
    )
    error.signal = number
    return error


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process handles; not HUP if it is ignored (nohup)."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _record(number: int, frame: FrameType | None) -> None:
    if not _received and sys.stderr.isatty():
        # Not print: the signal may have interrupted one.
        with contextlib.suppress(OSError):  # the terminal may have hung up
            os.write(2, b"\nmetaseq-lm: stopping after this update or the next\n")
    _received.append(number)


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Record stop signals inside the block; has no effect when nested or in another thread."""
    global _listening
    if _listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    # The handler only records, so that a second signal does no harm, even during a save.
    handlers = {number: signal.signal(number, _record) for number in handled_signals()}
    _listening = True
    try:
        yield
    finally:
        _listening = False
        _received.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent that the environment names dies."""
    parent = os.environ.pop(PARENT_DIES, "")
    if parent:
        follow_parent()
        if os.getppid() != int(parent):  # it died before the request
            os.kill(os.getpid(), signal.SIGTERM)


def follow_parent() -> None:
    """Request SIGTERM when the parent process dies (Linux only)."""
    if sys.platform.startswith("linux"):
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def name_process(name: str) -> None:
    """Set the name that `ps -e` shows, of at most 15 characters (Linux only)."""
    # Forked processes share the first one's command line.
    if sys.platform.startswith("linux"):
        PR_SET_NAME = 15
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
