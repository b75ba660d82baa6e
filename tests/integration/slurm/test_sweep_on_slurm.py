"""Sweeps on a real Slurm: the array, preemption, and that `status` tells the truth
about each end.
"""

import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from real_runs import reached
from sweeping import (
    LONG,
    SHORT,
    SLOW,
    processes,
    result_of,
    states_of,
    submitted,
    sweep,
    wait_until,
)

from metaseq_lm.cli import main
from metaseq_lm.sweeps.folder import SweepFolder

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]
ON_SLURM = ("--executor", "slurm", "--time", "30")


@pytest.fixture(scope="module")
def undisturbed(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str]]:
    """Weights and curve of the long run of seed 1 that nothing interrupts."""
    save = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", str(moons), "--save-dir", str(save), "seed=1", *LONG]) == 0
    return result_of(save)


def job(out: Path, run: str) -> str:
    return states_of(out)[run].job


def wait_for(out: Path, run: str, *wanted: str, seconds: float = 90) -> None:
    """Wait until a run is in one of the `wanted` states; each look starts programs of Slurm."""
    wait_until(lambda: states_of(out)[run].state in wanted, seconds, interval=0.5)


def test_an_array_with_a_failing_run(moons: Path, tmp_path: Path) -> None:
    """Two at a time; what failed, and only that, is submitted again."""
    source, out = tmp_path / "source", tmp_path / "out"
    grid = ["--grid", f"init_from=null,{source}", "--seeds", "1,2", "--max-parallel", "2"]
    command = [moons, "--out", out, *grid, *ON_SLURM, *SHORT]
    assert sweep(*command) == 0
    most = 0

    def over() -> bool:
        nonlocal most
        now = [state.state for state in states_of(out).values()]
        most = max(most, now.count("running"))
        return not {"running", "pending"} & set(now)

    wait_until(over, 120, interval=0.3)
    assert most == 2
    found = states_of(out)
    failed = [name for name, state in found.items() if state.state == "failed"]
    good = [name for name, state in found.items() if state.state == "finished"]
    assert len(failed) == len(good) == 2 and all("source" in name for name in failed)
    assert "exit code 2" in found[failed[0]].reason
    accounting = ["sacct", "-X", "-n", "-P", "-o", "State", "-j", found[failed[0]].job]
    wait_until(lambda: subprocess.check_output(accounting, text=True).strip() == "FAILED")

    shutil.copytree(out / good[0], source)
    assert sweep("resubmit", "--failed", out) == 0
    assert submitted(out)[4:] == failed
    for name in failed:
        wait_for(out, name, "finished")
    assert sweep(*command) == 0
    assert len(submitted(out)) == 6


def test_several_runs_of_a_job(moons: Path, tmp_path: Path) -> None:
    """A run that fails does not end the others; one waits while another of its job runs."""
    out, source = tmp_path / "out", tmp_path / "source"
    grid = ["--grid", f"init_from={source},null", "--seeds", "1,2", "--runs-per-job", "3"]
    assert sweep(moons, "--out", out, *grid, *ON_SLURM, *SHORT) == 0
    seen = set()

    def over() -> bool:
        now = [state.state for state in states_of(out).values()]
        seen.update(itertools.pairwise(now))
        return not {"running", "pending"} & set(now)

    wait_until(over, 120, interval=0.3)
    rows = [row for row in SweepFolder(out).rows() if row["kind"] == "submit"]
    assert [row.get("part") for row in rows] == [0, 1, 2, None]
    assert len({row["job"] for row in rows[:3]}) == 1
    assert [state.state for state in states_of(out).values()] == ["failed", "finished"] * 2
    assert seen & {("failed", "running"), ("running", "pending")}
    single = tmp_path / "single"
    assert main(["train", str(moons), "--save-dir", str(single), "seed=1", *SHORT]) == 0
    assert result_of(out / "init_from=null-seed=1") == result_of(single)


@pytest.mark.parametrize("seeds", ["1", "1,2"])
@pytest.mark.parametrize("name", ["50% [é] #1, a", """it's "a" = {b} $HOME;x 日本"""])
def test_odd_paths(name: str, seeds: str, moons: Path, tmp_path: Path) -> None:
    """Runs, logs and states are found; the logs of the jobs are beside them."""
    out = tmp_path / name / "out"
    assert sweep(moons, "--out", out, "--seeds", seeds, *ON_SLURM, *SHORT) == 0
    for seed in seeds.split(","):
        wait_for(out, f"seed={seed}", "finished")
    logs = sorted(path.name for path in (out / "jobs/0001").glob("*_log.out"))
    assert len(logs) == len(seeds.split(",")) and all("%" not in log for log in logs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def preempt(name: str) -> None:
    """Send what a preemption sends: TERM and, a moment later, submitit's signal."""
    for number in ("TERM", "USR2"):
        subprocess.run(["scancel", name, "--signal", number], check=True)


def test_a_preempted_run_ends_like_an_undisturbed_one(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple
) -> None:
    out = tmp_path / "out"
    assert sweep(moons, "--out", out, "--seeds", "1,2", *ON_SLURM, *LONG, *SLOW) == 0
    wait_until(lambda: reached(out / "seed=1") >= 20)
    preempt(job(out, "seed=1"))
    held.unlink()
    for run in ("seed=1", "seed=2"):
        wait_for(out, run, "finished")
    found = states_of(out)
    assert found["seed=1"].requeued == 1
    assert submitted(out) == ["seed=1", "seed=2"]
    assert result_of(out / "seed=1") == undisturbed
    wait_until(lambda: not processes(str(out)), 30)


def test_a_signal_to_the_training_alone(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple
) -> None:
    """The training saves and exits with 75; the job is requeued although it saw no signal."""
    out = tmp_path / "out"
    assert sweep(moons, "--out", out, *ON_SLURM, *LONG, *SLOW) == 0
    wait_until(lambda: reached(out / "seed=1") >= 20)
    (training,) = processes(str(out), "metaseq-run")
    os.kill(training, signal.SIGUSR1)
    held.unlink()
    wait_for(out, "seed=1", "finished")
    assert states_of(out)["seed=1"].requeued == 1
    assert result_of(out / "seed=1") == undisturbed


def test_scancel_and_sweep_cancel(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple
) -> None:
    """One run is ended by scancel, the others, of which two never started, by `sweep cancel`."""
    out = tmp_path / "out"
    seeds = ("--seeds", "1,2,3,4", "--max-parallel", "2")
    assert sweep(moons, "--out", out, *seeds, *ON_SLURM, *LONG, *SLOW) == 0
    wait_until(lambda: reached(out / "seed=1") >= 20)
    subprocess.run(["scancel", job(out, "seed=1")], check=True)
    assert sweep("cancel", out) == 0
    held.unlink()
    for run in ("seed=1", "seed=2", "seed=3", "seed=4"):
        wait_for(out, run, "cancelled")
    wait_until(lambda: not processes(str(out)), 60)
    found = states_of(out)
    assert 0 < found["seed=1"].update < 120 and found["seed=4"].update == 0
    assert sweep("resubmit", "--failed", out, *SLOW) == 0
    assert submitted(out)[4:] == ["seed=1", "seed=2", "seed=3", "seed=4"]
    wait_for(out, "seed=1", "finished")
    assert result_of(out / "seed=1") == undisturbed
    assert sweep("cancel", out) == 0


def test_a_killed_wrapper_leaves_no_process(moons: Path, tmp_path: Path, held: Path) -> None:
    out = tmp_path / "out"
    assert sweep(moons, "--out", out, *ON_SLURM, *LONG, *SLOW) == 0
    wait_until(lambda: reached(out / "seed=1") >= 20)
    (wrapper,) = processes(str(out), "metaseq-job")
    os.kill(wrapper, signal.SIGKILL)
    held.unlink()
    wait_for(out, "seed=1", "failed")
    wait_until(lambda: not processes(str(out)), 60)
    assert "FAILED" in states_of(out)["seed=1"].reason


def test_sweep_refused_by_sbatch_ends_with_one_message(
    moons: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    command = [moons, "--out", tmp_path / "out", *ON_SLURM, "--partition", "nowhere", *SHORT]
    assert sweep(*command) == 1
    text = capfd.readouterr().err
    assert "metaseq-lm: sbatch refused" in text and "Traceback" not in text
    assert text.count("sbatch: error: Batch job submission failed") == 1
    assert states_of(tmp_path / "out")["seed=1"].state == "waiting"


@pytest.mark.slow
def test_a_run_that_times_out_too_often(moons: Path, tmp_path: Path) -> None:
    """A limit of one minute, no requeue allowed: all updates are saved, the end is a time-out.

    On a busy machine the minute may be over before the first update.
    """
    out = tmp_path / "out"
    limits = ("--executor", "slurm", "--time", "1", "--max-timeouts", "0")
    endless = [*SHORT, *SLOW, "trainer.max_update=100000000"]
    assert sweep(moons, "--out", out, *limits, *endless) == 0
    wait_for(out, "seed=1", "timeout", seconds=150)
    state = states_of(out)["seed=1"]
    assert "timed-out" in state.reason and state.update == reached(out / "seed=1")
    wait_until(lambda: not processes(str(out)), 60)
