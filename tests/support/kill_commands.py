"""Kills commands with kill -9 at random moments and runs them again: the result is that of no kill.

  python tests/support/kill_commands.py [--only search watch] [--count 5] [--seed 1]

A command dies with its process group. Jobs of a sweep or a league have their own groups: they die
in every other kill and go on alone otherwise. A line for each kill names the file written last.
Weights, trials, scores and tables are compared byte for byte, without times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agreement
import kill_and_resume
import synthetic
from league_plans import SMALL, write_plan
from real_runs import Started, final, same
from small_data import make_moons
from sweeping import TINY, processes

from metaseq_lm.cli import main as program

LONG = 1200.0  # seconds within which a search ends on a busy machine
WORLD = ["preprocess", "--world", "quad", "--world-seed", "11", "--quiet"]
WORLD += ["--world-documents", "400", "--world-held-out", "40"]
SEARCH = ["--search", "optimizer.lr=log 1e-3..1e-1", "--search-prune", "none"]
SEARCH += ["--search-flops", f"{2.3 * SMALL:.0f}", "trainer.max_update=0"]
SEARCH += [f"trainer.max_flops={SMALL:.0f}", *TINY, "--seeds", "1"]
FINETUNE = ["score", "--suite", "finetune"]
FINETUNED = ["epochs=2", "batch_size=8", "lr=3e-3", "tokens=16"]


@dataclass(frozen=True)
class Kind:
    """A command to kill.

    Attributes:
        kills: Default number of kills, without --count.
        prepare: Prepares a folder for the command.
        words: The command to run in such a folder.
        result: Returns its results there.
        finish: Called before the last life, so that a watching command can end.
        seconds: Seconds from its first file to the latest kill, None for its whole duration.
        loses: Whether killed work is given up, so that only common results are compared.
        over: The exit code if all work is already done, as after a kill at the end.
    """

    kills: int
    prepare: Callable[[Path], object]
    words: Callable[[Path], list[str]]
    result: Callable[[Path], dict[str, Any]]
    finish: Callable[[Path], object] = lambda place: None
    seconds: float | None = None
    loses: bool = False
    over: int = 0


def contents(folder: Path) -> dict[str, Any]:
    """Return the bytes of files below a folder; for JSON, values without times and checksums."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {
        str(p.relative_to(folder)): timeless(json.loads(p.read_text()))
        if p.suffix == ".json"
        else p.read_bytes()
        for p in files
    }


def timeless(value: Any) -> Any:
    """Return a JSON value without parts that differ from run to run."""
    if isinstance(value, list):
        return [timeless(v) for v in value]
    if not isinstance(value, dict):
        return value
    timed = {"seconds", "started", "ended", "peak_memory", "checksum", "command", "files"}
    return {k: timeless(v) for k, v in value.items() if k not in timed}


def results_of(run: Path) -> dict[str, Any]:
    """Return the weights, the state and the scores of a run."""
    weights, state = final(run)
    scores = timeless(json.loads((run / "results.json").read_text()))
    return {"weights": weights, "state": state, "scores": scores}


def results_of_search(place: Path) -> dict[str, Any]:
    """Return the finished trials by values, and the chosen run."""
    found: dict[str, Any] = {}
    for file in sorted(place.glob("out/search/all/*/trial.json")):
        trial = json.loads(file.read_text())
        if trial["state"] == "finished":
            score = {"score": trial["score"], **results_of(file.parent)}
            key = f"trial {trial['values']}"
            assert same(found.setdefault(key, score), score), f"two results of {key}"
    (run,) = place.glob("out/lr=*")
    return found | {run.name: results_of(run)}


def results_of_league(place: Path) -> dict[str, Any]:
    """Return every run by folder, and the tables."""
    runs = [p.parent for p in sorted(place.glob("out/*/*/*/results.json"))]
    tables = [*place.glob("out/*.csv"), *place.glob("out/*.md")]
    found: dict[str, Any] = {str(p.relative_to(place)): results_of(p) for p in runs}
    return found | {p.name: p.read_bytes() for p in tables}


def make_league(place: Path) -> None:
    """Write a plan of two objectives, without controls."""
    make_moons(place / "data")
    less: dict[str, Any] = {"controls": {"untrained": False}, "budgets": [SMALL]}
    less |= {"tuning__grid": {"optimizer.lr": [0.001]}, "tuning__widen": 0}
    write_plan(place / "plan.yaml", place / "data", **less)


def make_scored(place: Path) -> None:
    """Train a run and make two sets to fine-tune it on."""
    data = agreement.make_data(place)
    agreement.make_run(data, place / "run", 20)
    for task in ("mrpc", "rte"):
        for split, count in (("train", 80), ("valid", 30)):
            file = place / f"{task}.{split}.jsonl"
            agreement.write_labelled_pairs(file, count, 5, (1, 0))
        words = ["preprocess", "--benchmark", f"babylm/{task.upper()}", "--source", str(place)]
        assert program([*words, "--destdir", str(data)]) == 0


def make_watched(place: Path) -> None:
    """Make a finished run and an unfinished one."""
    synthetic.make_run(place / "runs" / "a")
    synthetic.make_run(place / "runs" / "b", seed=2).joinpath("results.json").rename(
        place / "results.json"
    )


KINDS = {
    "search": Kind(
        15,
        lambda place: make_moons(place / "data"),
        lambda place: ["sweep", f"{place}/data", "--out", f"{place}/out", *SEARCH],
        results_of_search,
        loses=True,
    ),
    "league": Kind(
        10,
        make_league,
        lambda place: ["league", f"{place}/plan.yaml", "--out", f"{place}/out"],
        results_of_league,
    ),
    "world": Kind(
        5,
        lambda place: None,
        lambda place: [*WORLD, "--destdir", f"{place}/out"],
        lambda place: contents(place / "out"),
        over=2,
    ),
    "watch": Kind(
        5,
        make_watched,
        lambda place: ["report", f"{place}/runs", "--out", f"{place}/out", "--watch"],
        lambda place: contents(place / "out"),
        lambda place: shutil.copy(place / "results.json", place / "runs" / "b"),
        seconds=2.0,
    ),
    "suites": Kind(
        5,
        make_scored,
        lambda place: [*FINETUNE, f"{place}/run", "--data", f"{place}/data", *FINETUNED],
        lambda place: contents(place / "run" / "suites"),
    ),
}


def newest(place: Path, since: float) -> str:
    """Return the file written last after `since`, with # for digits; "" without one."""
    last, found = since, ""
    for folder, children, names in os.walk(place):
        children[:] = [c for c in children if c != "code"]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                changed = os.lstat(os.path.join(folder, name)).st_ctime
                if changed > last:
                    last, found = changed, os.path.relpath(os.path.join(folder, name), place)
    return re.sub(r"\d+", "#", found)


def differing_parts(a: Any, b: Any, name: str = "") -> list[str]:
    """Return the keys at which two nested dictionaries differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        parts = [differing_parts(a.get(k), b.get(k), f"{name}/{k}") for k in keys]
        return [part for each in parts for part in each]
    return [] if same(a, b) else [f"{name}: {str(a)[:60]}, {str(b)[:60]}"]


class Tortured:
    """A command that is killed in its folder, `place`/now."""

    def __init__(self, kind: Kind, place: Path, seed: int) -> None:
        self.kind, self.place, self.chance = kind, place, random.Random(seed)
        self.now, self.errors = place / "now", place / "printed.txt"
        self.hits: Counter[str] = Counter()  # number of kills by the file written last
        self.troubles: list[str] = []
        self.kills = 0
        kind.prepare(self.now)
        shutil.copytree(self.now, place / "before", symlinks=True)
        kind.finish(self.now)
        run, began = self._start(), time.time()
        first = self._first_file(run, began)
        assert run.wait(LONG) == 0, run.text()
        self.seconds = kind.seconds or time.time() - first
        self.wanted = kind.result(self.now)

    def _start(self) -> Started:
        return Started(self.kind.words(self.now), self.errors)

    def _first_file(self, run: Started, began: float) -> float:
        """Wait for a file to change or for the end; return the time."""
        while run.code is None and not newest(self.now, began):
            time.sleep(0.01)
        return time.time()

    def _kill(self, run: Started, with_jobs: bool) -> None:
        # Before and after, because the command may be starting one.
        for pid in processes(f"{self.now}/", "submitit") if with_jobs else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.kill_all()
        while with_jobs and (alive := processes(f"{self.now}/")):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def live_and_die(self) -> int | None:
        """Start it and kill it; return its exit code if it ended before the kill."""
        began = time.time()
        run = self._start()
        self._first_file(run, began)
        end = time.time() + self.chance.uniform(0, self.seconds)
        with_jobs = self.chance.random() < 0.5
        while run.code is None and time.time() < end:
            time.sleep(0.005)
        code = run.code
        if code is None:
            self._kill(run, with_jobs)
            self.kills += 1
            where = newest(self.now, began) or "(nothing)"
            self.hits[where] += 1
            print(f"  kill {self.kills} {'all' if with_jobs else 'group'}: {where}", flush=True)
        return code

    def compare(self) -> None:
        """Compare with undisturbed results."""
        found = self.kind.result(self.now)
        names = self.wanted.keys() | found.keys()
        if self.kind.loses:
            names = self.wanted.keys() & found.keys()
        differing = [
            n for n in sorted(names) if not same(self.wanted.get(n, ""), found.get(n, None))
        ]
        if differing:
            parts = {n: differing_parts(self.wanted.get(n), found.get(n)) for n in differing}
            self.troubles.append(f"after kill {self.kills} differ: {parts}")
        print(f"  through: {len(names) - len(differing)} equal of {len(names)}", flush=True)

    def torture(self, kills: int) -> None:
        """Kill it `kills` times; whenever it finishes, compare and start in a new folder."""
        is_over = False
        while not is_over:
            shutil.rmtree(self.now)
            shutil.copytree(self.place / "before", self.now, symlinks=True)
            code, failures = None, 0
            while code != 0 and failures < 3:
                if self.kills < kills:
                    code = self.live_and_die()
                else:
                    self.kind.finish(self.now)
                    code, is_over = self._start().wait(LONG), True
                if code and code == self.kind.over:
                    code = 0
                if code:
                    failures += 1
                    said = self.errors.read_text()[-600:]
                    self.troubles.append(f"after kill {self.kills} it ended with {code}: {said}")
            if code == 0:
                self.compare()


def torture(name: str, place: Path, kills: int, seed: int) -> list[str]:
    """Kill one kind of command, print a summary line, return the troubles."""
    began = time.monotonic()
    if name == "async":
        data = kill_and_resume.make_data(place)
        more = ["trainer.async_save=true"]
        counts = kill_and_resume.torture(data, place, kills, 2, seed, more, in_save=kills // 3)
        print(f"async: {kill_and_resume.summary(counts, time.monotonic() - began)}", flush=True)
        return counts.troubles
    (place / "now").mkdir()
    tortured = Tortured(KINDS[name], place, seed)
    tortured.torture(kills)
    hits = ", ".join(f"{n} {where}" for where, n in tortured.hits.most_common())
    seconds = f"{time.monotonic() - began:.0f} s"
    troubles = len(tortured.troubles)
    print(f"{name}: {tortured.kills} kills, {troubles} troubles, {seconds}; {hits}", flush=True)
    return tortured.troubles


def main() -> int:
    """Parse the command line, kill, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["async", *KINDS], default=["async", *KINDS])
    parser.add_argument("--count", type=int, help="kills of each kind (default: sixty in all)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    troubles = []
    for name in args.only:
        kills = args.count or (KINDS[name].kills if name in KINDS else 20)
        with tempfile.TemporaryDirectory() as folder:
            troubles += torture(name, Path(folder), kills, args.seed)
    for trouble in troubles:
        print(f"TROUBLE {trouble}")
    return int(bool(troubles))


if __name__ == "__main__":
    sys.exit(main())
