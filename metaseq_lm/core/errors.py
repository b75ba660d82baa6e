"""Errors of commands, each with its documented exit code.

0 ok, 1 error, 2 wrong usage, 3 diverged, 75 interrupted with a checkpoint saved, 130 interrupted.
Wrong usage is what the user typed: a name, an option, a configuration, a path that is not there or
not what the command needs. An error is what became of the rest: damaged files, a full disk. A
user's mistake is raised as one of these classes and printed by the command line as one message; any
other exception is a bug of this package and keeps its traceback, or one of a plug-in, whose line is
named.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from metaseq_lm.core.output import hide_status, is_quiet, printable

# Environment variable of runs that no user watches one by one: those of sweeps and scripts.
NO_HINTS = "METASEQ_LM_NO_HINTS"
# Environment variable with which an error inside a plug-in keeps its traceback.
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

    A reader that closes the pipe early (head, less) is no error.
    """
    try:
        main()
        sys.stdout.flush()
    except MetaseqError as error:
        say(f"{Path(sys.argv[0]).name}: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
