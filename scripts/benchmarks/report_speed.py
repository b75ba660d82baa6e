"""Reports of about 500 runs against their limits: 10 CPU seconds and 300 MB.

The runs come from the archive that ships with the laptop division of the league, read from the
archive and from a folder for each run. A command starts in a fresh process, with the start
included, and writes all its files: tables, figures, the page.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from timing import Figure, Measured, cost, memory, peak_memory

import metaseq_lm

PLAN = "laptop"
ARCHIVE = Path(metaseq_lm.__file__).parent / "league" / f"{PLAN}.jsonl.gz"
METRIC = "topic.accuracy"
LOGGED = 100  # lines of training in a log; the archive has only the last
SECONDS, PEAK = 10.0, 300_000_000


def write_folders(archive: Path, folder: Path) -> int:
    """Write a folder for each run of an archive; return the number of runs."""
    from omegaconf import OmegaConf

    from metaseq_lm.reporting.archive import read

    runs = read(archive)
    for i, run in enumerate(runs):
        run_folder = folder / str(i)
        run_folder.mkdir(parents=True)
        config = OmegaConf.to_yaml(OmegaConf.create(run.values))
        (run_folder / "config.yaml").write_text(config, encoding="utf-8")
        # Scores of suites are in separate files; here they are among the results.
        results = dict(run.results or {})
        if METRIC in run.metrics:
            split, _, name = METRIC.partition(".")
            results["metrics"] = results["metrics"] | {split: {name: run.metrics[METRIC]}}
        (run_folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        lines = list(run.log)
        for line in run.log:
            if line.get("kind") == "train":
                last = line["update"]
                steps = range(1, LOGGED)
                lines += [line | {"update": max(1, last * step // LOGGED)} for step in steps]
        lines.sort(key=lambda line: line.get("update", 0))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run_folder / "log.jsonl").write_text(text, encoding="utf-8")
    return len(runs)


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a command of metaseq-lm; return the seconds of this process so far, and its memory."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # only figures go to stdout
        from metaseq_lm.cli import main

        if code := main(list(arguments)):
            raise RuntimeError(f"metaseq-lm {' '.join(arguments)} ended with exit code {code}")
    wall = time.perf_counter() - start
    return {"amount": 1, "cpu": time.process_time(), "wall": wall, "peak": peak_memory()}


def measure(arguments: Sequence[str], rounds: int) -> Measured:
    """Run a command `rounds` times, each in a separate process."""
    done = []
    for _ in range(rounds):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            done.append(pool.apply(run_command, (arguments,)))
    return Measured(done, max(result["peak"] for result in done))


def against_limits(name: str, ours: Measured, note: str) -> Iterator[Figure]:
    """Yield seconds and memory of a command as shares of its limits."""
    limit = {"amount": 1, "cpu": SECONDS, "wall": SECONDS}
    limits = Measured([limit] * len(ours.rounds), PEAK)
    yield cost(name, ours, limits, "s", 1.0, f"{note}; the reference is the limit")
    yield memory(f"{name}_memory", ours, limits, 1.0, f"{note}; the reference is the limit")


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield CPU seconds and peak memory of each command."""
    runs, out = folder / "report" / "runs", folder / "report" / "out"
    count = write_folders(ARCHIVE, runs)
    scores = ["--metric", METRIC, "--out", str(out)]
    commands = {
        "league_report": ["league", "report", PLAN, "--out", str(out)],
        "report_archive": ["report", str(ARCHIVE), *scores],
        "report_folders": ["report", str(runs), *scores],
    }
    for name, arguments in commands.items():
        ours = measure(arguments, rounds=1 if quick else 3)
        yield from against_limits(name, ours, f"{count} runs, all files")
