"""Kills a training run again and again and starts it again; the result must be that of no kill.

  python tests/support/kill_and_resume.py --kills 200 [--nproc N ...] [--parallel shard] [--single]
  [--async-save] [--in-save K]

Each kill is a kill -9 of the whole process group. With --single every other kill hits only one
replica, and the others have to end by themselves. Half of the kills come at a random moment, half
while a checkpoint is being written, linked or pruned (which the plug-in tests/support/faults slows
down). Checks after each kill: every checkpoint is complete, none is lost, there is at most one
temporary copy, leftovers of earlier kills are gone, and the run resumed from the newest checkpoint.
Checks after a run has finished: log, weights and moments equal those of an undisturbed run to the
last bit. With several numbers of processes, each start has the next number and computes in float64,
and losses, weights and moments are compared to 1e-9.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import real_runs
from real_runs import FP64, Started, command, rows, same, until

from metaseq_lm.cli import main as program
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.manifests import CheckpointError

UPDATES = 30
KEPT = 2  # trainer.keep_last of real_runs.command
SLOW = {"METASEQ_LM_SLOW_SAVE": "0.012"}
SAVE_SECONDS = 0.15  # duration of a slowed save


@dataclass
class Counts:
    """Counts of events."""

    kills: int = 0
    single: int = 0  # kills of one replica
    in_save: int = 0  # kills that met a temporary copy or link
    runs: int = 0
    resumed: int = 0  # starts that visibly resumed from a checkpoint
    copies: int = 0  # most temporary copies at once
    troubles: list[str] = field(default_factory=list)


class Victim:
    """One run, started and killed until it is through."""

    def __init__(
        self,
        data: Path,
        save: Path,
        nproc: Sequence[int],
        counts: Counts,
        overrides: Sequence[str] = (),
    ) -> None:
        more = [
            *overrides,
            f"trainer.max_update={UPDATES}",
            "trainer.save_interval_updates=3",
        ]
        more += FP64 if len(nproc) > 1 else []
        self.arguments = command(data, save, *more)
        self.nproc = itertools.cycle(nproc)  # number of processes at the next start
        is_exact = len(nproc) == 1
        self.tolerance = 0.0 if is_exact else 1e-9
        # Each process chooses for itself how many positions it computes.
        self.ignored = {"seconds"} if is_exact else {"seconds", "flops"}
        self.save, self.checkpoints = save, save / "checkpoints"
        self.counts = counts
        self.errors = save.with_suffix(".err")
        self.printed = 0  # bytes printed in earlier lives

    def trouble(self, what: str) -> None:
        """Count something that must not happen."""
        self.counts.troubles.append(f"{self.save.name}: {what}")
        print(f"TROUBLE {self.counts.troubles[-1]}", flush=True)

    def start(self) -> Started:
        """Start or resume it."""
        self.printed = self.errors.stat().st_size if self.errors.exists() else 0
        nproc = next(self.nproc)
        more = ["--nproc", str(nproc)] if nproc > 1 else []
        return Started([*self.arguments, *more], self.errors, SLOW)

    def complete(self) -> set[str]:
        """Return the checkpoints that verify; others count as trouble."""
        good = set()
        for path in manifests.all_updates(self.checkpoints):
            try:
                checkpoint.load(path)
                good.add(path.name)
            except CheckpointError as error:
                self.trouble(str(error))
        return good

    def leftovers(self, since: float = 0.0) -> list[Path]:
        """Return temporary copies and links that changed after `since`."""
        result = []
        for path in self.checkpoints.glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError):
                result += [path] if path.lstat().st_ctime >= since else []
        return result

    def kill(self, run: Started, replica: int | None) -> bool:
        """Kill one replica, if there are any, or all; return whether the run was already over."""
        pids = run.replicas()
        if run.code is not None or replica is None or replica >= len(pids):
            through = run.code is not None
            run.kill_all()
            return through
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[replica], signal.SIGKILL)
        if run.wait() == 0:
            return True
        self.counts.single += 1
        text = run.text()[self.printed :]
        # Without output, the killed process was the fork that waits for its turn to run the
        # program.
        if text and (run.members() or f"replica {replica}" not in text):
            end = f"{run.code}, {run.members()} live: {text[-500:]}"
            self.trouble(f"after the death of replica {replica} the run ended with {end}")
        run.kill_all()
        return False

    def live_and_die(
        self, seconds: float, save_number: int | None, replica: int | None = None
    ) -> bool:
        """Start it and kill it after `seconds`, counted from its `save_number`-th save if given.

        With `replica` only that process is killed. Returns whether the run had finished before.
        """
        before, began = self.complete(), time.time()
        resumed_before = len(rows(self.save, "event"))
        run = self.start()
        for _ in range(save_number or 0):
            until(lambda: run.code is not None or self.leftovers(began), real_runs.LONG, "a save")
            until(lambda: run.code is not None or not self.leftovers(began), 60, "its end")
        if save_number is not None:
            until(lambda: run.code is not None or self.leftovers(began), real_runs.LONG, "a save")
        end = time.monotonic() + seconds
        while run.code is None and time.monotonic() < end:
            time.sleep(0.001)
        saving = bool(self.leftovers(began))
        through = self.kill(run, replica)
        if through and run.code:
            self.trouble(f"a start ended with {run.code}: {run.text()[-500:]}")
        self.counts.kills += not through
        self.counts.in_save += not through and (saving or bool(self.leftovers(began)))
        self.check(before, rows(self.save, "event")[resumed_before:], began)
        return through

    def check(self, before: set[str], events: list[dict], began: float) -> None:
        """Compare the files on disk after a life with those before it."""
        left, good = self.leftovers(), self.complete()
        copies = [p for p in left if not p.is_symlink() and p.name.startswith(".tmp-update")]
        self.counts.copies = max(self.counts.copies, len(copies))
        if len(copies) > 1:
            self.trouble(f"{len(copies)} temporary copies")
        best = self.checkpoints / "best"
        for name in before - good:
            if sum(other > name for other in good) < KEPT:
                self.trouble(f"{name} is lost; there are {sorted(good)}")
        for link in ("best", "last"):
            if (self.checkpoints / link).is_symlink() and not (self.checkpoints / link).exists():
                self.trouble(f"'{link}' points at nothing")
        if best.is_symlink() and best.resolve().name not in good:
            self.trouble("the best checkpoint is lost")
        if events:
            self.counts.resumed += 1
            said = " ".join(e["message"] for e in events)
            if not before or f"{max(before)} at update" not in said or len(events) != 1:
                self.trouble(f"resumed otherwise than from {max(before, default=None)}: {said}")
            old = [p.name for p in left if p.lstat().st_ctime < began - 0.1]
            if old:
                self.trouble(f"an earlier leftover stayed: {old}")

    def check_result(self, straight: Path) -> None:
        """Compare log and state with the undisturbed run."""
        for kind in ("train", "valid"):
            expected = {row["update"]: row for row in rows(straight, kind)}
            found = rows(self.save, kind)
            if {row["update"] for row in found} != expected.keys():
                self.trouble(f"the {kind} log has other updates")
            differing = sorted(
                {
                    r["update"]
                    for r in found
                    if not same(r, expected.get(r["update"]), self.tolerance)
                }
            )
            if differing:
                self.trouble(f"the {kind} log differs at {differing}")
        ends = [checkpoint.load(manifests.resolve(str(s), "last")) for s in (self.save, straight)]
        found, expected = (
            end.weights | {n: v for n, v in end.state.items() if n not in self.ignored}
            for end in ends
        )
        unequal = [n for n in expected if not same(found.get(n), expected[n], self.tolerance)]
        if unequal or found.keys() != expected.keys():
            self.trouble(f"weights or state differ in {unequal or found.keys() ^ expected.keys()}")
        links = [(s / "checkpoints" / "best").resolve().name for s in (self.save, straight)]
        if links[0] != links[1]:
            self.trouble(f"the best checkpoint is {links[0]} instead of {links[1]}")
        results = [json.loads((s / "results.json").read_text()) for s in (self.save, straight)]
        metrics = [result["metrics"] for result in results]
        if not same(*metrics, self.tolerance) or self.leftovers():
            self.trouble(f"results {results[0]['metrics']}, leftovers {self.leftovers()}")


def make_data(folder: Path) -> Path:
    """Binarise a small text."""
    generator = random.Random(1)
    lines = [" ".join(str(generator.randint(0, 9)) for _ in range(8)) for _ in range(400)]
    text = folder / "text"
    text.write_text("\n".join(lines) + "\n")
    files = ["--trainpref", str(text), "--validpref", str(text), "--destdir", str(folder / "data")]
    tokenizer = ["--tokenizer-corpus", str(text), "--vocab-size", "300"]
    assert program(["preprocess", *files, *tokenizer]) == 0
    return folder / "data"


def torture(
    data: Path,
    out: Path,
    kills: int,
    nproc: int | Sequence[int],
    seed: int,
    overrides: Sequence[str] = (),
    single: bool = False,
    in_save: int = 0,
) -> Counts:
    """Kill runs under `out` until there were `kills` kills and the last run has finished.

    With `single` every other kill hits a single replica. At least `in_save` kills hit a save. With
    several numbers of processes, each start has the next number.
    """
    nproc = [nproc] if isinstance(nproc, int) else nproc
    counts, chance = Counts(), random.Random(seed)
    straight = Victim(data, out / "straight", nproc, Counts(), overrides)
    run = straight.start()
    began = time.monotonic()
    assert run.wait() == 0, run.text()
    life = time.monotonic() - began
    for number in itertools.count():
        if counts.kills >= kills and counts.in_save >= in_save:
            break
        victim = Victim(data, out / f"run{number}", nproc, counts, overrides)
        counts.runs += 1
        through = False
        while not through:
            replica = chance.randrange(min(nproc)) if single and counts.kills % 2 else None
            if counts.kills >= kills and counts.in_save >= in_save:
                through = victim.live_and_die(real_runs.LONG, None)
            elif counts.kills >= kills or chance.random() < 0.5:
                through = victim.live_and_die(
                    chance.uniform(0, SAVE_SECONDS), chance.choice([0, 0, 0, 1, 2]), replica
                )
            else:
                through = victim.live_and_die(chance.uniform(0, life), None, replica)
        victim.check_result(straight.save)
    return counts


def summary(counts: Counts, seconds: float) -> str:
    """Return the last line of output."""
    return (
        f"{counts.kills} kills ({counts.single} of one replica, {counts.in_save} inside a save) of "
        f"{counts.runs} runs, "
        f"{counts.resumed} resumptions seen, {counts.copies} temporary copies at most, "
        f"{len(counts.troubles)} troubles, {seconds:.0f} s"
    )


def main() -> int:
    """Parse the command line, torture, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--nproc", type=int, nargs="+", default=[1], help="processes, of each start the next"
    )
    parser.add_argument("--parallel", default="replicate", help="engine.parallel of the runs")
    parser.add_argument("--single", action="store_true", help="every other kill: one replica only")
    parser.add_argument("--async-save", action="store_true", help="with trainer.async_save")
    parser.add_argument("--in-save", type=int, default=0, help="kills that meet a save, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="a binarised corpus (default: one is made)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        data = args.data or make_data(Path(folder))
        out, overrides = Path(folder), [f"engine.parallel={args.parallel}"]
        overrides += ["trainer.async_save=true"] * args.async_save
        counts = torture(
            data, out, args.kills, args.nproc, args.seed, overrides, args.single, args.in_save
        )
        print(summary(counts, time.monotonic() - began))
    return int(bool(counts.troubles))


if __name__ == "__main__":
    sys.exit(main())
