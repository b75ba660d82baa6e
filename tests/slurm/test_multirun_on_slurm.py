"""`train -m hydra/launcher=submitit_slurm` on a real Slurm: what sacct says is what happened."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from battery import CASES, TINY

from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parents[2]
MLM = [*CASES["masked_lm"][0], *TINY]
SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=main"]

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm")]


@pytest.fixture
def start(moons: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start sweeps; what a failed test left running is ended."""
    started: list[tuple[subprocess.Popen, Path]] = []

    def one(save: Path, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "metaseq_lm", "train", "-m", str(moons), *MLM, *SLURM]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, f"--save-dir={save}", *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append((process, save))
        return process

    yield one
    for process, save in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
            subprocess.run(["scancel", job_of(save)])


def slurm_says(command: str, *arguments: str) -> list[str]:
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def accounts(
    job: str, columns: str, *more: str, until: str = "", count: int = 1
) -> list[list[str]]:
    """Return the rows of sacct, which lags: ask until there are `count`, all over, one `until`."""
    for _ in range(60):
        rows = slurm_says("sacct", "-X", "-n", "-P", "-j", job, "-o", columns, *more)
        cells = [row.split("|") for row in rows]
        open_states = ("RUNNING", "PENDING", "COMPLETING")
        over = not any(c in open_states for row in cells for c in row)
        if over and until in str(cells) and len(cells) >= count:
            break
        time.sleep(0.5)
    return cells


def job_of(save: Path) -> str:
    """Return the number of the sweep's job, an array if it has several."""
    return min((p.name for p in (save / ".submitit").iterdir() if p.name.isdigit()), key=int)


def wait_for_update(process: subprocess.Popen, run: Path, update: int) -> None:
    log = run / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and f'"update": {update},' in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


def test_an_array_two_at_a_time_with_jobs_that_fail(start, moons: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    plugin = ["--user-dir", str(ROOT / "user_dir"), "criterion=span_boundary"]
    plugin += [
        "task=span_masking",
        "criterion.boundary_weight=0.5",
    ]  # classes that a job must load first
    grid = ["init_from=null,/nowhere", "seed=1,2", "hydra.launcher.array_parallelism=2"]
    process = start(out, "trainer.max_update=3", *plugin, *grid)
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 1 and "4 jobs, 2 finished" in shown, shown
    assert "Traceback" not in shown
    rows = accounts(job_of(out), "JobID,State,ExitCode,Start,End", count=4)
    states = [(state, code) for _, state, code, _, _ in sorted(rows)]
    assert states == [("COMPLETED", "0:0")] * 2 + [("FAILED", "1:0")] * 2
    spans = [row[3:] for row in rows]
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 2
    alone = ["train", str(moons), "--save-dir", str(tmp_path / "one"), *MLM, *plugin]
    assert main([*alone, "trainer.max_update=3", "seed=2"]) == 0
    assert weights(tmp_path / "one") == weights(out / "1") != weights(out / "0")


# Stopped, the process gets TERM and USR2 at once when it goes on.
@pytest.mark.parametrize("signals", [["USR2"], ["STOP", "TERM", "USR2", "CONT"]])
def test_a_preempted_job_is_requeued_and_ends_the_same(
    start, moons: Path, tmp_path: Path, signals: list[str]
) -> None:
    out, calendar = tmp_path / "sweep", ["trainer.max_update=600", "trainer.log_interval=50"]
    process = start(out, *calendar)
    wait_for_update(process, out / "0", 150)
    job = job_of(out)
    for name in signals:
        slurm_says("scancel", "--signal", name, job)
    assert main(["train", str(moons), "--save-dir", str(tmp_path / "one"), *MLM, *calendar]) == 0
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0, shown
    states = [row[0] for row in accounts(job, "State", "-D", until="COMPLETED")]
    assert states == ["REQUEUED", "COMPLETED"]
    assert sorted(p.name for p in out.iterdir()) == [".submitit", "0", "multirun.yaml"]
    assert "resumed" in (out / "0" / "log.jsonl").read_text()
    assert weights(out / "0") == weights(tmp_path / "one")


def test_a_cancelled_job_stays_cancelled(start, tmp_path: Path) -> None:
    process = start(tmp_path, "trainer.max_update=100000", "trainer.log_interval=50")
    wait_for_update(process, tmp_path / "0", 50)
    job = job_of(tmp_path)
    slurm_says("scancel", job)
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 1 and "CANCELLED" in shown and "Traceback" not in shown
    assert (tmp_path / "0" / "checkpoints" / "last").exists()
    states = [row[0] for row in accounts(job, "State", "-D", until="CANCELLED")]
    assert [state.split()[0] for state in states] == ["CANCELLED"]


def test_a_refused_submission_says_why(start, tmp_path: Path) -> None:
    process = start(tmp_path, "hydra.launcher.partition=nowhere")
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "invalid partition" in shown and "Traceback" not in shown
