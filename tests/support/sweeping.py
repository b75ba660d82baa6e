"""Helpers of sweep tests: tiny runs, their states, and remaining processes."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_runs import Started

from metaseq_lm.cli import main
from metaseq_lm.sweeps import launching
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import _outcome_file
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.states import State, read_states
from metaseq_lm.sweeps.submit import RunBatch, _job_of

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "task=masked_lm",
    "task.sample_break_mode=eos",
    "task.tokens_per_sample=34",
    "task.batch_size=16",
    "model.encoder_layers=1",
    "model.encoder_embed_dim=8",
    "model.encoder_ffn_embed_dim=16",
    "model.encoder_attention_heads=2",
    "model.max_positions=34",
    "schedule.warmup_updates=4",
    "engine.tensorboard=false",
    "engine.threads=1",
    "trainer.log_interval=1",
]
LONG = [*TINY, "trainer.max_update=120"]
SLOW = ["--user-dir", str(ROOT / "tests" / "support" / "slow_updates.py")]  # of some seconds
SHORT = [*TINY, "trainer.max_update=3"]


def sweep(*arguments: str | Path) -> int:
    """Run the command in this process."""
    # A resubmission loads the plug-in from the sweep's snapshot, a different file of the same name.
    sys.modules.pop("slow_updates", None)
    return main(["sweep", *map(str, arguments)])


def start_sweep(output: Path, *arguments: str | Path) -> Started:
    """Run the command in its own process group, like a shell, with output into a file."""
    return Started(["sweep", *map(str, arguments)], output)


def states_of(out: Path) -> dict[str, State]:
    """Return the states of a sweep by run name."""
    return {state.run: state for state in read_states(SweepFolder(out))}


def record_outcome(
    out: Path, run: str, state: str, message: str = "", code: int = 0, source: str = "0" * 16
) -> None:
    """Record an ended local job of a run, as if a sweep had launched it from snapshot `source`."""
    folder = SweepFolder(out)
    place = folder.new_jobs_folder()
    entry = {"run": run, "executor": "local", "job": "1", "folder": f"jobs/{place.name}"}
    folder.append("submit", **entry, code=source, host=socket.gethostname(), start=1)
    outcome = {"state": state, "stage": "", "exit_code": code, "message": message}
    _outcome_file(place, "1").write_text(json.dumps(outcome))


def train_in_process(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None
) -> None:
    """Make sweeps train their runs in the test's process, one after the other.

    `before` is called before each stage. Trials of a search are still trained in jobs.
    """
    run_locally = launching.run_locally

    def work(
        batches: Sequence[RunBatch],
        launch: Launch,
        report: Callable[[SweepFolder, PlannedRun], None],
    ) -> None:
        for batch in batches:
            if batch.make_job is not _job_of:
                run_locally([batch], launch, report)
                continue
            for run in batch.runs:
                job = _job_of(batch.folder, [run], launch, batch.code)
                for _, _, arguments in job.runs[run.name]:
                    before()
                    assert main(["train", *arguments, "--quiet"]) == 0
                out, source = batch.folder.path, batch.code.folder.name
                record_outcome(out, run.name, "finished", source=source)
                report(batch.folder, run)

    monkeypatch.setattr(launching, "run_locally", work)


def submitted(out: Path) -> list[str]:
    """Return the names of submitted runs, in order and with repetitions."""
    return [row["run"] for row in SweepFolder(out).rows() if row["kind"] == "submit"]


def wait_until(condition: Callable[[], Any], seconds: float = 180, interval: float = 0.1) -> Any:
    """Wait for a true value and return it; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(interval)
    raise AssertionError(f"not within {seconds} s: {condition}")


def processes(*words: str) -> list[int]:
    """Return the other processes with all `words` in their name and command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            files = (place / "comm", place / "cmdline")
            command = "\0".join(file.read_bytes().decode(errors="replace") for file in files)
        except OSError:
            continue
        if all(word in command for word in words) and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


def result_of(run: Path) -> tuple[bytes, list[str]]:
    """Return the bytes of a run's final weights, and its log without seconds and checksums."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = {
        (line["kind"], line["update"]): {
            k: v for k, v in line.items() if k not in ("seconds", "checksum")
        }
        for line in lines
        if line["kind"] != "event"
    }
    weights = (run / "checkpoints" / "last" / "model.safetensors").read_bytes()
    return weights, [json.dumps(kept[key]) for key in sorted(kept)]
