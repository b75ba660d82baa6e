"""Launch options of a sweep. Every value is checked before it can reach a shell script.

submitit writes the values into a shell script (as `#SBATCH` lines, and setup lines verbatim), so
names are limited to the characters of Slurm's own names, and setup lines to plain words.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options, flag_of, option
from metaseq_lm.core.secrets import masked
from metaseq_lm.core.structured import read_values

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]{0,199}")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:=&|*()\[\]-]{0,199}")
_SETUP = re.compile(r"[A-Za-z0-9._/:=@%+,~ -]{1,1000}")
_LARGEST_ARRAY = 4_000_000  # larger than any cluster allows
# submitit replaces these in a path by numbers; a backslash is an escape in Slurm's log names.
_NO_SLURM_PATH = re.compile(r"\\|%[jtAa]")


@dataclass
class Launch:
    """The launch options of a sweep; raises UsageError for an unsafe or impossible value."""

    executor: str = option(
        "local",
        "local (on this machine, and wait) or slurm (a job array) (default: local)",
        choices=("local", "slurm"),
    )
    max_parallel: int | None = option(
        None, "runs at a time (default: local 1, slurm all)", at_least=1, at_most=100_000
    )
    time: int | None = option(
        None, "minutes until a job is stopped and requeued (slurm: 60)", at_least=1, at_most=525_600
    )
    nodes: int = option(
        1, "nodes of one run (default: 1)", at_least=1, at_most=10_000, slurm_only=True
    )
    nproc: int = option(
        1, "processes of one run, on each node (default: 1)", at_least=1, at_most=1024
    )
    cpus: int = option(
        1, "CPUs of one run on each node, and its threads (default: 1)", at_least=1, at_most=1024
    )
    gpus: int = option(0, "GPUs of one run, on each node (default: 0)", at_least=0, at_most=64)
    runs_per_gpu: int = option(
        1, "local runs that share a GPU, with --gpus 1 (default: 1)", at_least=1, at_most=64
    )
    runs_per_job: int = option(
        1,
        "runs that a job trains one after the other, started faster (default: 1)",
        at_least=1,
        at_most=100_000,
        slurm_only=True,
    )
    mem: int | None = option(
        None, "memory of one run in GB, on each node", at_least=1, at_most=100_000, slurm_only=True
    )
    partition: str | None = option(None, "Slurm partition", pattern=NAME, slurm_only=True)
    constraint: str | None = option(
        None, "Slurm constraint, such as a100|h100", pattern=_CONSTRAINT, slurm_only=True
    )
    account: str | None = option(None, "Slurm account", pattern=NAME, slurm_only=True)
    qos: str | None = option(None, "Slurm quality of service", pattern=NAME, slurm_only=True)
    setup: tuple[str, ...] = option(
        (),
        "line for the job's shell before the run; can be repeated",
        metavar="LINE",
        repeated=True,
        slurm_only=True,
    )
    max_timeouts: int = option(
        10, "how often a run is requeued after a time-out (default: 10)", at_least=0, at_most=1000
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value, pattern = item.name, getattr(self, item.name), item.metadata.get("pattern")
            if value is not None and pattern is not None and not pattern.fullmatch(value):
                raise UsageError(f"{flag_of(name)} {value!r}: not a {name} that Slurm accepts")
        for line in self.setup:
            if not _SETUP.fullmatch(line):
                raise UsageError(
                    f"--setup {line!r}: only plain words (letters, digits and ._/:=@%+,~-) can "
                    "stand here; put anything longer into a script and 'source' it"
                )
            if masked(line.split()) != shlex.join(line.split()):
                raise UsageError(
                    "--setup: the job's script would show a secret in it to all; export it "
                    "before you give this command (Slurm passes the environment on), or "
                    "'source' a file of yours"
                )
        if self.runs_per_gpu > 1 and (self.gpus != 1 or self.executor == "slurm"):
            raise UsageError("--runs-per-gpu is for local runs with --gpus 1")
        if self.runs_per_job > 1 and self.nodes > 1:
            raise UsageError("--runs-per-job is for runs on one node")
        self.setup = tuple(self.setup)
        check_options(Launch, self, name_option=flag_of)

    def non_default(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, for sweep.json."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setup"}
        changed = {n: v for n, v in values.items() if v != getattr(Launch, n)}
        return changed | ({"setup": list(self.setup)} if self.setup else {})

    def threads(self) -> int:
        """Return the threads of each process."""
        return max(1, self.cpus // self.nproc)


def launch_from(stored: dict[str, Any], command_line: Mapping[str, Any]) -> Launch:
    """Return checked launch options of a file, overridden by those of the command line.

    `command_line` may have other options, too, and None for options that are not given. The local
    executor ignores options of Slurm in a file, so that one file serves both executors. Raises
    UsageError for an unknown option.
    """
    names = [item.name for item in fields(Launch)]
    named = {name: command_line[name] for name in names if command_line.get(name) is not None}
    values = read_values(Launch, stored, "launch") | named
    launch = Launch(**values)
    if launch.executor == "slurm":
        return launch
    slurm_only = [item.name for item in fields(Launch) if "slurm_only" in item.metadata]
    for name in slurm_only:
        if name in named:
            raise UsageError(f"{flag_of(name)} is for --executor slurm")
    return Launch(**{name: value for name, value in values.items() if name not in slurm_only})


def check_out(out: Path, executor: str) -> None:
    """Raise UsageError if OUT cannot be written into a Slurm script or cannot be printed."""
    text = str(out)
    if not text.isprintable():
        raise UsageError(f"--out {text!r}: has characters in it that cannot be printed")
    if executor == "slurm" and (match := _NO_SLURM_PATH.search(text)):
        raise UsageError(
            f"--out {text!r}: has {match[0]!r} in it, which cannot be in a name for Slurm; "
            "choose another path"
        )


def log_parameters(launch: Launch, folder: Path, array: bool) -> dict[str, Any]:
    """Return submitit's log names if the folder has a "%", which is special to Slurm; else {}."""
    if "%" not in str(folder):
        return {}
    name = f"{str(folder).replace('%', '%%')}/{'%A_%a' if array else '%j'}"
    step = [f"--output={name}_%t_log.out", f"--error={name}_%t_log.err"]
    script = {"output": f"{name}_0_log.out", "error": f"{name}_0_log.err"}
    srun_args = slurm_parameters(launch, folder)["srun_args"]
    return {"additional_parameters": script, "srun_args": [*srun_args, *step]}


def slurm_parameters(launch: Launch, out: Path) -> dict[str, Any]:
    """Return submitit's parameters of a Slurm job of this sweep."""
    minutes = launch.time or 60
    parameters = {
        "job_name": "metaseq-" + (re.sub(r"[^A-Za-z0-9._-]", "", out.name)[:40] or "sweep"),
        "time": minutes,
        "nodes": launch.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": launch.cpus,
        "gpus_per_node": launch.gpus or None,
        "mem": f"{launch.mem}GB" if launch.mem else None,
        "partition": launch.partition,
        "constraint": launch.constraint,
        "account": launch.account,
        "qos": launch.qos,
        "setup": list(launch.setup) or None,
        "array_parallelism": launch.max_parallel or _LARGEST_ARRAY,
        # Time to save before the limit, at most a third of it, or a short job would never run.
        "signal_delay_s": min(90, 20 * minutes),
        # srun does not inherit cpus_per_task from sbatch. A killed task ends its step, but a task
        # that is ready first does not end the others.
        "srun_args": [f"--cpus-per-task={launch.cpus}", "--kill-on-bad-exit=1", "--wait=0"],
    }
    return {name: value for name, value in parameters.items() if value is not None}
