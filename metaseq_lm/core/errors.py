"""Errors of commands, each with its documented exit code.

0 ok, 1 error, 2 wrong usage, 3 diverged, 75 interrupted with a checkpoint saved, 130 interrupted.
Wrong usage is a mistake in the command: a wrong name, option or configuration, or a path that does
not exist or is not of the kind needed. Errors are other failures, such as damaged files or a full
disk. These classes are printed by the command line as one message. Any other exception is a bug:
of this package, which keeps its traceback, or of a plug-in, where the message names the line.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from metaseq_lm.core.output import hide_status, is_quiet, printable

__all__ = ["MetaseqError", "UsageError"]

# Environment variable for runs of sweeps and scripts, which no user watches one by one.
NO_HINTS = "METASEQ_LM_NO_HINTS"
# Environment variable that keeps the traceback of an error inside a plug-in.
TRACEBACK = "METASEQ_LM_TRACEBACK"


class MetaseqError(Exception):
    """A failure the user can act on; the message names file, location and remedy."""

    exit_code = 1
    is_printed = False  # whether another replica has printed the same message


class UsageError(MetaseqError):
    """A wrong name, option, path or configuration: nothing was started."""

    exit_code = 2


class MissingError(MetaseqError):
    """A given path does not exist, or is not of the kind that the command needs."""

    exit_code = UsageError.exit_code


class DivergedError(MetaseqError):
    """Loss or gradient is not finite; the last checkpoint is unchanged."""

    exit_code = 3


class Interrupted(MetaseqError):
    """A signal stopped the run; a checkpoint was saved, from which the run can be resumed."""

    exit_code = 75
    signal = 0


class ReplicaLost(MetaseqError):
    """Another replica ended, failed or hangs; the message names it."""


def say(message: str) -> None:
    """Print a line on stderr; do nothing if it is closed or full."""
    with contextlib.suppress(OSError):
        hide_status()
        print(printable(message), file=sys.stderr, flush=True)


def hint(message: str) -> None:
    """Print a line of advice on stderr, unless --quiet is given or the variable NO_HINTS is set."""
    if not os.environ.get(NO_HINTS) and not is_quiet():
        say(message)


def run_script(main: Callable[[], None]) -> None:
    """Run a script of `examples`; a MetaseqError ends it with its message and exit code.

    It is no error if a reader closes the pipe early (head, less).
    """
    try:
        main()
        sys.stdout.flush()
    except MetaseqError as error:
        say(f"{Path(sys.argv[0]).name}: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
