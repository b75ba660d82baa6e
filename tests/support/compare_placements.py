"""Differences between the weights of runs on 1, 2 and 4 processes, with whole and with sharded
parameters.

    python tests/support/compare_placements.py [--only CASE ...] [--all] [--updates 10]

It trains cases of the battery in float64, with dropout. Each row has the largest absolute
difference between the weights of two runs:

* 1R to 4H: of 1, 2 and 4 processes (R replicate, S shard, H hybrid) with micro-batches, from one
  process with whole batches; `moved` is a run that goes on with other processes and placements
  three times;
* `stop`: of a run with 2S that stops half-way from one that does not, which is 0;
* `bits`: of a run that goes from 2S to 2R from one with 2R throughout, both with whole batches and
  without clipping: 0 where every sum has the same order.

Two and four processes pose as two nodes. A case is a criterion (`masked_lm`) or one of its further
cases (`masked_lm-1`); optimizers that need whole matrices are left out. Without --all, which
takes twice as long, these are the first case of each criterion and all of meta-learning by MAML.
The exit code is 1 if a difference is above 1e-12.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import battery
import real_runs
import small_data
import torch
from battery import Case, Run

from metaseq_lm import plugins

LIMIT = 1e-12
WHOLE_MATRICES = {
    f"optimizer={name}" for name in ("muon", "lamb", "adafactor", "soap")
}  # cannot be sharded
PLACEMENTS = {"R": "replicate", "S": "shard", "H": "hybrid"}
COUNTS = (1, 2, 4)
SETTINGS = [f"{count}{letter}" for count in COUNTS for letter in PLACEMENTS]
MOVES = [("2S", 0.3), ("4H", 0.6), ("1S", 0.8), ("2R", 1.0)]  # until which part of the updates
Weights = dict[tuple[Case, str], dict[str, torch.Tensor]]


def main() -> None:
    """Train everything and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE")
    parser.add_argument("--all", action="store_true", help="every case of the battery")
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()
    if options.updates < 3:
        parser.error("--updates must be at least 3: of fewer, several processes would make none")
    some = [c for c in battery.ALL if c in battery.FIRST or "meta_pretrain" in battery.task_of(c)]
    cases = battery.ALL if options.all or options.only else some
    cases = [c for c in cases if not options.only or {c[0], name_of(c)} & {*options.only}]
    cases = [c for c in cases if not WHOLE_MATRICES & {*battery.CASES[c[0]][c[1]]}]
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "log") as output:
        plugins.load_all(str(battery.ROOT / "user_dir"))
        weights = train(cases, options.updates, Path(folder), output)
    sys.exit(not report(cases, weights))


def name_of(case: Case) -> str:
    """Return the name of a case on the command line."""
    return f"{case[0]}-{case[1]}" if case[1] else case[0]


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[TextIO]:
    """Redirect the output of all processes to a file; yield the real output.

    The end of the file is printed if they fail.
    """
    with (
        open(log, "wb") as file,
        os.fdopen(os.dup(1), "w", buffering=1) as output,
        os.fdopen(os.dup(2), "w") as errors,
    ):
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield output
        except BaseException:
            errors.write(log.read_text(errors="replace")[-5000:])
            raise
        finally:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)


def train(cases: Sequence[Case], updates: int, place: Path, output: TextIO) -> Weights:
    """Train every run, one process group at a time; return the weights by (case, column)."""
    data = place / "moons"
    small_data.make_moons(data)

    def runs(column: str, setting: str, part: float = 1, *more: str) -> tuple[int, list[Run]]:
        count = int(setting[0])
        options = [f"engine.parallel={PLACEMENTS[setting[1]]}", "trainer.valid_split=''"]
        options += [f"trainer.max_update={round(part * updates)}", "trainer.log_interval=100"]
        return count, [
            (c, column, battery.dropped(*options, micro_batch(c, count), *more)) for c in cases
        ]

    whole = "engine.micro_batch_size=0"
    bits = [whole, "optimizer.clip_norm=0"]
    plan = [runs("whole", "1R", 1, whole), *(runs(setting, setting) for setting in SETTINGS)]
    plan += [runs("stop", "2S", part) for part in (0.5, 1)]
    plan += [runs("2R bits", "2R", 1, *bits)]
    plan += [runs("bits", setting, part, *bits) for setting, part in (("2S", 0.5), ("2R", 1))]
    plan += [runs("moved", setting, part) for setting, part in MOVES]
    weights: Weights = {}
    # In separate groups, because each sharded run leaves threads of gloo behind.
    for count, group in plan:
        began = time.monotonic()
        weights |= train_group(count, group, data, place)
        minutes = (time.monotonic() - began) / 60
        print(f"{len(group)} runs on {count} processes: {minutes:.1f} min", file=output)
    return weights


def micro_batch(case: Case, processes: int) -> str:
    """Return the option for micro-batches that divide a process's rows, unevenly if possible."""
    rows = 1 if battery.has_few_rows(case) else {1: 5, 2: 3, 4: 1}[processes]
    return f"engine.micro_batch_size={rows}"


def train_group(count: int, runs: Sequence[Run], data: Path, place: Path) -> Weights:
    """Train runs on `count` processes, which must agree to the last bit; return the weights."""
    first, *others = real_runs.train_on_replicas(count, min(count, 2), runs, data, place)
    for other in others:
        for run, weights in first.items():
            assert battery.difference(weights, other[run]) == 0, f"replicas differ: {run}"
    return first


def report(cases: Sequence[Case], weights: Weights) -> bool:
    """Print the differences; return whether all are small enough."""
    columns = [*SETTINGS, "moved", "stop", "bits"]
    print(f"{'case':28}" + "".join(f"{column:>8}" for column in columns))
    rows = []
    for case in cases:
        pairs = [("whole", column) for column in (*SETTINGS, "moved")]
        pairs += [("2S", "stop"), ("2R bits", "bits")]
        row = [battery.difference(weights[case, a], weights[case, b]) for a, b in pairs]
        print_row(name_of(case), row)
        rows.append(row)
    largest = [max(column) for column in zip(*rows)]
    print_row("largest", largest)
    return max(largest) <= LIMIT and largest[columns.index("stop")] == 0


def print_row(name: str, values: Sequence[float]) -> None:
    """Print a row of the table."""
    print(f"{name:28}" + "".join(f"{value:8.0e}" for value in values))


if __name__ == "__main__":
    main()
