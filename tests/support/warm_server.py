"""The server that forks the runs of a local sweep, itself forked from a process with torch.

It imports the package from the sweep's snapshot and goes on like a server that the command starts.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import real_runs

from metaseq_lm.distributed import signals
from metaseq_lm.sweeps import server


class Popen:
    """Replaces subprocess.Popen for `python -u -c CODE`, with pipes as standard streams."""

    def __init__(self, command: list[str], env: dict[str, str], method: str) -> None:
        reading, asking = multiprocessing.Pipe(duplex=False)
        answered, answering = multiprocessing.Pipe(duplex=False)
        given = [reading, answering, Connection(os.dup(2), readable=False)]
        context = multiprocessing.get_context(method)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._process = context.Process(target=_be, args=(command, env, os.getcwd(), given, mask))
        self._process.start()
        self.stdin = os.fdopen(os.dup(asking.fileno()), "w")
        self.stdout = os.fdopen(os.dup(answered.fileno()))
        for end in (*given, asking, answered):
            end.close()

    def wait(self) -> int | None:
        """Wait for the process and return its exit code, negative for a signal."""
        self._process.join()
        return self._process.exitcode


def _be(
    command: list[str],
    env: dict[str, str],
    folder: str,
    given: Sequence[Connection],
    mask: set[signal.Signals],
) -> None:
    """Be the process of a command, with its name and without files of the one that forked it."""
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for descriptor, stream in enumerate(given):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks among them
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])  # of the command line
    ctypes.memmove(start, "\0".join(command).encode().ljust(end - start, b"\0"), end - start)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
    for name, module in list(sys.modules.items()):  # the package and plug-ins
        if not (getattr(module, "__file__", None) or installed[0]).startswith(installed):
            del sys.modules[name]
    sys.path.insert(0, "")
    sys.argv = command[3:]
    exec(command[3], {"__name__": "__main__"})


def replace(method: str) -> None:
    """Fork servers from this process, or from the server of `real_runs` with "forkserver"."""

    def start(command: list[str], env: dict[str, str], **streams: object) -> Popen:
        if method == "forkserver":
            real_runs.serve()
        return Popen(command, env, method)

    replaced: Any = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)
    server.subprocess = replaced
