"""Launch options of a sweep. Every value is checked before it can reach a shell script.

submitit writes the values into a shell script (as `#SBATCH` lines, and setup lines as they are), so
names are held to the characters that Slurm's own names have, and setup lines to plain words.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]{0,199}")
CONSTRAINT = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:=&|*()\[\]-]{0,199}")
SETUP = re.compile(r"[A-Za-z0-9._/:=@%+,~ -]{1,1000}")
SLURM_PATH = re.compile(r"[A-Za-z0-9._/=@+,~-]+")
LIMITS = {
    "max_parallel": (1, 100_000),
    "time": (1, 525_600),
    "nproc": (1, 1024),
    "cpus": (1, 1024),
    "gpus": (0, 64),
    "mem": (1, 100_000),
    "max_timeouts": (0, 1000),
}
SLURM_ONLY = ("mem", "partition", "constraint", "account", "qos", "setup")


@dataclass
class Launch:
    """The launch options of a sweep; raises UsageError for an unsafe or impossible value."""

    executor: str = option("local", "local (on this machine, and wait) or slurm (a job array)")
    max_parallel: int | None = option(None, "runs at a time (default: local 1, slurm all)")
    time: int | None = option(None, "minutes until a run is stopped and requeued (slurm: 60)")
    nproc: int = option(1, "processes of one run (default: 1)")
    cpus: int = option(1, "CPUs of one run, and its threads (default: 1)")
    gpus: int = option(0, "GPUs of one run (default: 0)")
    mem: int | None = option(None, "memory of one run in GB")
    partition: str | None = option(None, "Slurm partition")
    constraint: str | None = option(None, "Slurm constraint, such as a100|h100")
    account: str | None = option(None, "Slurm account")
    qos: str | None = option(None, "Slurm quality of service")
    setup: tuple[str, ...] = option((), "line for the job's shell before the run; can be repeated")
    max_timeouts: int = option(10, "how often a run is requeued after a time-out (default: 10)")

    def __post_init__(self) -> None:
        if self.executor not in ("local", "slurm"):
            raise UsageError(f"--executor must be local or slurm, got {self.executor!r}")
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, whole(value, name, low, high))
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            pattern = CONSTRAINT if name == "constraint" else NAME
            if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
                raise UsageError(f"--{name} {value!r}: not a {name} that Slurm can have")
        if not isinstance(self.setup, (list, tuple)):
            raise UsageError(f"--setup {self.setup!r}: not a list of lines")
        for line in self.setup:
            if not (isinstance(line, str) and SETUP.fullmatch(line)):
                raise UsageError(
                    f"--setup {line!r}: only plain words (letters, digits and ._/:=@%+,~-) can "
                    "stand here; put anything longer into a script and 'source' it"
                )
        self.setup = tuple(self.setup)

    def given(self) -> dict[str, Any]:
        """Return the options that are not at their default, for sweep.json."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setup"}
        changed = {n: v for n, v in values.items() if v != getattr(Launch, n)}
        return changed | ({"setup": list(self.setup)} if self.setup else {})

    def threads(self) -> int:
        """Return the threads of each process."""
        return max(1, self.cpus // self.nproc)


def launch_from(stored: dict[str, Any], command_line: dict[str, Any]) -> Launch:
    """Return checked launch options: those of a file, and those of the command line over them.

    Raises UsageError for an unknown option. On this machine, options of Slurm in a file are ignored,
    so that one file serves both executors.
    """
    names = [f.name for f in fields(Launch)]
    for name in stored:
        if name not in names:
            hint = nearest(str(name), names)
            raise UsageError(f"launch: unknown option {name!r}.{hint} Options: {', '.join(names)}")
    launch = Launch(**(stored | command_line))
    if launch.executor == "local":
        if foreign := [name for name in SLURM_ONLY if name in command_line]:
            raise UsageError(f"--{foreign[0]} is for --executor slurm")
        kept = {n: v for n, v in (stored | command_line).items() if n not in SLURM_ONLY}
        return Launch(**kept)
    return launch


def whole(value: Any, name: str, low: int, high: int) -> int:
    """Return a whole number within limits; raises UsageError."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,9}", str(value)):
        raise UsageError(f"{flag} {value!r}: not a whole number")
    if not low <= int(value) <= high:
        raise UsageError(f"{flag} {value}: must be from {low} to {high}")
    return int(value)


def check_out(out: Path, executor: str) -> None:
    """Raise UsageError if OUT cannot be written into a Slurm script, or not be printed."""
    text = str(out)
    if not text.isprintable() or "\\" in text or "'" in text or '"' in text:
        raise UsageError(f"--out {text!r}: has quotes, backslashes or control characters in it")
    if executor == "slurm" and not SLURM_PATH.fullmatch(text):
        raise UsageError(
            f"--out {text!r}: for Slurm the path may hold only letters, digits and ._/=@+,~-"
        )


def slurm_parameters(launch: Launch, out: Path) -> dict[str, Any]:
    """Return submitit's parameters of a Slurm job of this sweep."""
    minutes = launch.time or 60
    parameters = {
        "job_name": "metaseq-" + (re.sub(r"[^A-Za-z0-9._-]", "", out.name)[:40] or "sweep"),
        "time": minutes,
        "nodes": 1,
        "cpus_per_task": launch.cpus,
        "gpus_per_node": launch.gpus or None,
        "mem": f"{launch.mem}GB" if launch.mem else None,
        "partition": launch.partition,
        "constraint": launch.constraint,
        "account": launch.account,
        "qos": launch.qos,
        "setup": list(launch.setup) or None,
        "array_parallelism": launch.max_parallel or 1000,
        # Time to save before the limit; a third of it at most, or a short job would never run.
        "signal_delay_s": min(90, 20 * minutes),
    }
    return {name: value for name, value in parameters.items() if value is not None}
