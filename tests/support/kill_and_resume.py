"""Kills a training run again and again and starts it again; the result must be that of no kill.

  python tests/support/kill_and_resume.py --kills 200 [--nproc N]

Each kill is a kill -9 of the whole process group: half of them at a random moment, half while a
checkpoint is being written, linked or pruned (which the plug-in tests/support/faults slows down). Checked
after each: every checkpoint is complete, none is lost, at most one temporary copy is there, what
an earlier kill left is gone, the run resumed from the newest one. Checked when a run is through:
log, weights and moments are those of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import real_runs
from real_runs import Started, command, final, rows, same, until

from metaseq_lm.cli import main as program
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.checkpoint import CheckpointError

UPDATES = 30
KEPT = 2  # trainer.keep_last of real_runs.command
SLOW = {"METASEQ_LM_SLOW_SAVE": "0.004"}
SAVE_SECONDS = 0.12  # what a slowed save takes


@dataclass
class Counts:
    """What happened."""

    kills: int = 0
    in_save: int = 0  # of them, those that left a temporary copy or link
    runs: int = 0
    resumed: int = 0  # starts that were seen to resume from a checkpoint
    copies: int = 0  # most temporary copies at once
    troubles: list[str] = field(default_factory=list)


class Victim:
    """One run, started and killed until it is through."""

    def __init__(self, data: Path, save: Path, nproc: int, counts: Counts) -> None:
        more = [f"trainer.max_update={UPDATES}", "trainer.save_interval_updates=3"]
        more += ["--nproc", str(nproc)] if nproc > 1 else []
        self.arguments = command(data, save, *more)
        self.save, self.checkpoints = save, save / "checkpoints"
        self.counts = counts
        self.errors = save.with_suffix(".err")

    def trouble(self, what: str) -> None:
        """Count what must not happen."""
        self.counts.troubles.append(f"{self.save.name}: {what}")
        print(f"TROUBLE {self.counts.troubles[-1]}", flush=True)

    def start(self) -> Started:
        """Start or resume it."""
        return Started(self.arguments, self.errors, SLOW)

    def complete(self) -> set[str]:
        """Return the checkpoints that verify; one that does not is trouble."""
        good = set()
        for path in checkpoint.all_updates(self.checkpoints):
            try:
                checkpoint.load(path)
                good.add(path.name)
            except CheckpointError as error:
                self.trouble(str(error))
        return good

    def leftovers(self) -> list[Path]:
        """Return temporary copies and links."""
        return list(self.checkpoints.glob(".tmp-*")) if self.checkpoints.exists() else []

    def live_and_die(self, seconds: float, save_number: int | None) -> bool:
        """Start it and kill it after `seconds`, counted from its `save_number`-th save if given.

        Returns whether it was through before.
        """
        before, began = self.complete(), time.time()
        resumed_before = len(rows(self.save, "event"))
        run = self.start()
        for _ in range(save_number or 0):
            until(lambda: run.code is not None or self.leftovers(), real_runs.LONG, "a save")
            until(lambda: run.code is not None or not self.leftovers(), 60, "its end")
        if save_number is not None:
            until(lambda: run.code is not None or self.leftovers(), real_runs.LONG, "a save")
        end = time.monotonic() + seconds
        while run.code is None and time.monotonic() < end:
            time.sleep(0.001)
        through = run.code is not None
        run.kill_all()
        if through and run.code:
            self.trouble(f"a start ended with {run.code}: {run.text()[-500:]}")
        self.counts.kills += not through
        self.check(before, rows(self.save, "event")[resumed_before:], began)
        return through

    def check(self, before: set[str], events: list[dict], began: float) -> None:
        """Compare what is on the disk after a life with what was there before it."""
        left, good = self.leftovers(), self.complete()
        copies = [p for p in left if not p.is_symlink() and p.name.startswith(".tmp-update")]
        self.counts.in_save += bool(left)
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
        """Compare log and state with those of the undisturbed run."""
        for kind in ("train", "valid"):
            expected = {row["update"]: row for row in rows(straight, kind)}
            found = rows(self.save, kind)
            if {row["update"] for row in found} != expected.keys():
                self.trouble(f"the {kind} log has other updates")
            differing = sorted({r["update"] for r in found if r != expected.get(r["update"])})
            if differing:
                self.trouble(f"the {kind} log differs at {differing}")
        (weights, state), (wanted, other) = final(self.save), final(straight)
        unequal = [name for name in other if not same(state.get(name), other[name])]
        if weights != wanted or unequal:
            self.trouble(f"final weights equal: {weights == wanted}; state differs in {unequal}")
        links = [(s / "checkpoints" / "best").resolve().name for s in (self.save, straight)]
        if links[0] != links[1]:
            self.trouble(f"the best checkpoint is {links[0]} instead of {links[1]}")
        results = [json.loads((s / "results.json").read_text()) for s in (self.save, straight)]
        if results[0]["metrics"] != results[1]["metrics"] or self.leftovers():
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


def torture(data: Path, out: Path, kills: int, nproc: int, seed: int) -> Counts:
    """Kill runs under `out` until there were `kills` kills and the last run is through."""
    counts, chance = Counts(), random.Random(seed)
    straight = Victim(data, out / "straight", nproc, Counts())
    run = straight.start()
    began = time.monotonic()
    assert run.wait() == 0, run.text()
    life = time.monotonic() - began
    for number in itertools.count():
        if counts.kills >= kills:
            break
        victim = Victim(data, out / f"run{number}", nproc, counts)
        counts.runs += 1
        through = False
        while not through:
            if counts.kills >= kills:
                through = victim.live_and_die(real_runs.LONG, None)
            elif chance.random() < 0.5:
                through = victim.live_and_die(
                    chance.uniform(0, SAVE_SECONDS), chance.choice([0, 0, 0, 1, 2])
                )
            else:
                through = victim.live_and_die(chance.uniform(0, life), None)
        victim.check_result(straight.save)
    return counts


def summary(counts: Counts, seconds: float) -> str:
    """Return the line that is printed in the end."""
    return (
        f"{counts.kills} kills ({counts.in_save} inside a save) of {counts.runs} runs, "
        f"{counts.resumed} resumptions seen, {counts.copies} temporary copies at most, "
        f"{len(counts.troubles)} troubles, {seconds:.0f} s"
    )


def main() -> int:
    """Parse the command line, torture, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="a binarised corpus (default: one is made)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        data = args.data or make_data(Path(folder))
        counts = torture(data, Path(folder), args.kills, args.nproc, args.seed)
        print(summary(counts, time.monotonic() - began))
    return int(bool(counts.troubles))


if __name__ == "__main__":
    sys.exit(main())
