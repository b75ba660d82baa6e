"""Sweeps on this machine with real runs: failures, signals, orphans, the snapshot, going on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import expect, expect_facts
from real_runs import reached
from sweeping import (
    LONG,
    ROOT,
    SHORT,
    SLOW,
    processes,
    result_of,
    start_sweep,
    states_of,
    submitted,
    sweep,
    wait_until,
)

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.sweeps.job import Snapshot
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.submit import LocalRuns

# Names of submitit's process, and of the training below it.
WRAPPER, TRAINING = "metaseq-job", "metaseq-run"


@pytest.fixture(scope="module")
def undisturbed(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str]]:
    """Weights and curve of the long run of seed 1 that nothing interrupts."""
    save = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", str(moons), "--save-dir", str(save), "seed=1", *LONG]) == 0
    return result_of(save)


def test_a_failing_run_and_what_is_launched_again(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs at a time; one fails until what it starts from is there."""
    source = tmp_path / "source"
    out = tmp_path / "out"
    grid = ["--grid", f"init_from=null,{source}", "--max-parallel", "2"]
    command = [moons, "--out", out, *grid, *SHORT]
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        assert sweep(*command) == 1
    shown = capsys.readouterr().out
    counts = re.findall(r"(\d)/2 runs over, (\d) active", shown)
    assert ("0", "2") in counts and counts[-1] == ("2", "0")
    expect_facts(shown, "1 finished, 1 failed")
    found = states_of(out)
    (failed,) = (name for name, state in found.items() if state.state == "failed")
    assert "source" in failed
    assert "exit code 2" in found[failed].reason and "no such checkpoint" in found[failed].reason
    (good,) = found.keys() - {failed}
    assert (found[good].update, found[good].max_update) == (3, 3)

    shutil.copytree(out / good, source)
    capsys.readouterr()
    assert sweep("resubmit", "--failed", out) == 0
    assert "1/1 runs over" in capsys.readouterr().out
    assert submitted(out)[2:] == [failed]
    assert sweep(*command) == 0
    assert "nothing to launch" in capsys.readouterr().out
    assert sweep("status", out) == 0
    expect_facts(capsys.readouterr().out, "2 runs:", "2 finished")
    assert sweep("resubmit", "--failed", out) == 0
    assert len(submitted(out)) == 3


def test_a_local_sweep_shows_the_remaining_time_in_one_line(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaseq_lm.sweeps.submit.PROGRESS", 0.3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sweep(moons, "--out", tmp_path / "out", *LONG, *SLOW) == 0
    shown = capsys.readouterr().out
    status = [line for line in shown.splitlines() if "1 active" in line]
    # Of the last line the run may have ended, with nothing left.
    assert len(status) > 1 and "about" in "".join(status) and "?" not in shown
    assert len([line for line in shown.split("\n") if "1 active" in line]) == 1


def test_diverged_runs_are_launched_again_only_when_asked_for(moons: Path, tmp_path: Path) -> None:
    command = [moons, "--out", tmp_path / "out", "optimizer.lr=1e30", *SHORT]
    assert sweep(*command) == 1
    state = states_of(tmp_path / "out")["seed=1"]
    assert state.state == "diverged" and "not finite" in state.reason
    assert sweep(*command) == 1
    assert len(submitted(tmp_path / "out")) == 1
    assert sweep("resubmit", "--failed", tmp_path / "out", "--diverged") == 1
    assert len(submitted(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)]
)
def test_interrupted_and_gone_on_with(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple, number: int
) -> None:
    """Ctrl-C reaches the whole process group; the runs save all the same."""
    out = tmp_path / "out"
    command = [moons, "--out", out, *LONG, *SLOW]
    process = start_sweep(tmp_path / "shown", *command)
    wait_until(lambda: reached(out / "seed=1") >= 20)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send(number)
    held.unlink()
    assert process.wait() == 75, process.text()
    shown = process.text()
    expect((75, shown), 75, "same command")
    assert not processes(str(out))
    state = states_of(out)["seed=1"]
    assert state.state == "interrupted" and 0 < state.update < state.max_update
    assert sweep(*command) == 0
    assert result_of(out / "seed=1") == undisturbed


@pytest.mark.parametrize("who", ["wrapper", "train"])
def test_a_preempted_job_is_requeued_once(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple, who: str
) -> None:
    """USR2 sent to submitit's process, or only to the training below it."""
    out = tmp_path / "out"
    process = start_sweep(tmp_path / "shown", moons, "--out", out, *LONG, *SLOW)
    wait_until(lambda: reached(out / "seed=1") >= 20)
    name = WRAPPER if who == "wrapper" else TRAINING
    (target,) = processes(str(out), name)
    os.kill(target, signal.SIGUSR2)
    held.unlink()
    assert process.wait() == 0, process.text()
    state = states_of(out)["seed=1"]
    assert (state.state, state.requeued) == ("finished", 1)
    assert submitted(out) == ["seed=1"]
    assert result_of(out / "seed=1") == undisturbed


def test_cancel_leaves_no_process(
    moons: Path, tmp_path: Path, held: Path, undisturbed: tuple
) -> None:
    out = tmp_path / "out"
    command = [moons, "--out", out, "--seeds", "1,2", *LONG, *SLOW]
    process = start_sweep(tmp_path / "shown", *command)
    wait_until(lambda: reached(out / "seed=1") >= 20)
    assert sweep("cancel", out) == 0
    held.unlink()
    assert not processes(str(out))
    assert process.wait(10) == 75, process.text()
    found = states_of(out)
    assert (found["seed=1"].state, found["seed=2"].state) == ("cancelled", "waiting")
    assert sweep("resubmit", "--failed", out, *SLOW) == 1  # seed=2 was never launched
    assert submitted(out) == ["seed=1", "seed=1"]
    assert result_of(out / "seed=1") == undisturbed


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "victim, code, end, reason",
    [
        ("sweep", -signal.SIGKILL, "interrupted", "SIGTERM"),
        ("server", 1, "interrupted", "SIGTERM"),
        (WRAPPER, 1, "lost", ""),
        (TRAINING, 1, "failed", "SIGKILL"),
    ],
)
def test_a_killed_process_ends_the_run(
    moons: Path,
    tmp_path: Path,
    held: Path,
    undisturbed: tuple,
    victim: str,
    code: int,
    end: str,
    reason: str,
) -> None:
    """The server imported PyTorch and has no threads; without it, or the command, the run saves."""
    out = tmp_path / "out"
    command = [moons, "--out", out, *LONG, *SLOW]
    process = start_sweep(tmp_path / "shown", *command)
    wait_until(lambda: reached(out / "seed=1") >= 20)
    (training,), (task,) = processes(str(out), TRAINING), processes(str(out), WRAPPER)
    server = parent(parent(task))
    assert parent(training) == task and parent(server) == process.pid
    assert "Threads:\t1\n" in Path(f"/proc/{server}/status").read_text()
    pids = {"sweep": process.pid, "server": server, WRAPPER: task, TRAINING: training}
    os.kill(pids[victim], signal.SIGKILL)
    held.unlink()
    assert process.wait() == code, process.text()
    wait_until(lambda: not processes(str(out)), 30)
    # A process that is just ending has no command line any more, but is still there.
    wait_until(lambda: states_of(out)["seed=1"].state != "running", 30)
    state = states_of(out)["seed=1"]
    assert state.state == end and reason in state.reason
    if end == "interrupted":
        assert sweep(*command) == 0
        assert result_of(out / "seed=1") == undisturbed


def test_two_commands_at_once(moons: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_sweep(tmp_path / "shown", moons, "--out", out, *LONG, *SLOW)
    wait_until(lambda: out.is_dir() and processes(str(out), WRAPPER))
    second = start_sweep(tmp_path / "second", moons, "--out", out, *LONG, *SLOW)
    assert second.wait() == 1 and "another 'sweep' command" in second.text()
    assert sweep("cancel", out) == 0
    assert process.wait() == 75


def test_runs_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    runs = LocalRuns(Launch(gpus=1, runs_per_gpu=2, max_parallel=6))
    assert [runs.gpus_of(slot) for slot in range(6)] == [[4], [7], [9], [4], [7], [9]]
    runs = LocalRuns(Launch(gpus=2))
    assert runs.gpus_of(0) == [4, 7]
    assert LocalRuns(Launch(max_parallel=9)).gpus_of(8) == []
    for wanted in (
        Launch(gpus=1, runs_per_gpu=2, max_parallel=7),
        Launch(gpus=1, max_parallel=4),
        Launch(gpus=2, max_parallel=2),
    ):
        with pytest.raises(UsageError, match="3 GPUs here"):
            LocalRuns(wanted)
    for refused in ({"gpus": 2}, {"gpus": 0}, {"gpus": 1, "executor": "slurm"}):
        with pytest.raises(UsageError, match="--runs-per-gpu"):
            Launch(runs_per_gpu=2, **refused)


def test_stages_follow_each_other(moons: Path, tmp_path: Path) -> None:
    """The second stage starts from the first one's checkpoint; a label of odd
    characters arrives.
    """
    label = 'it\'s; $(touch canary) `id` "q" \\ %j ~ é'
    file = tmp_path / "sweep.yaml"
    content = {
        "data": os.path.relpath(moons, tmp_path),
        "stages": [
            {"name": "first", "overrides": ["trainer.max_update={n}"]},
            {"name": "second", "overrides": ["init_from={first}/checkpoints/last"]},
        ],
        "grid": {"n": [2], "second:trainer.max_update": [3], "label": [label]},
        "overrides": SHORT[:-1],
    }
    file.write_text(json.dumps(content))
    out = tmp_path / "out"
    assert sweep(file, "--out", out) == 0
    ((name, state),) = states_of(out).items()
    assert (state.state, state.stage) == ("finished", "second")
    from omegaconf import OmegaConf

    config = OmegaConf.load(out / "second" / name / "config.yaml")
    assert config.label == label and config.trainer.max_update == 3
    assert config.init_from == str(out / "first" / name / "checkpoints" / "last")
    assert OmegaConf.load(out / "first" / name / "config.yaml").trainer.max_update == 2
    assert not list(tmp_path.rglob("canary"))


def test_runs_of_a_sweep_give_no_hints(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """That a model cannot be exported is said to who trains one, not in each job."""
    options = [*SHORT, "model.token_embed_dim=4"]
    assert main(["train", str(moons), *options, "--dry-run"]) == 0
    assert "cannot be exported" in capsys.readouterr().err
    out = tmp_path / "out"
    assert sweep(moons, "--out", out, *options) == 0
    logs = [p.read_text() for p in out.rglob("*.err")]
    assert any("train 3/3" in log for log in logs)
    assert not [log for log in logs if "cannot be exported" in log]


def test_the_snapshot_is_what_runs(moons: Path, tmp_path: Path) -> None:
    """Package and plug-in are broken after the first run was launched; the second
    does not notice.
    """
    tree, out = tmp_path / "tree", tmp_path / "out"
    kept = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "metaseq_lm", tree / "metaseq_lm", ignore=kept)
    shutil.copytree(ROOT / "user_dir", tree / "user_dir", ignore=kept)
    command = [moons, "--out", out, "--seeds", "1,2", "--user-dir", tree / "user_dir", *SHORT]
    program = [sys.executable, "-m", "metaseq_lm", "sweep", *map(str, command)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(program, env=environment, cwd=tree)
    wait_until(lambda: out.is_dir() and processes(str(out), WRAPPER))
    for file in (
        "metaseq_lm/cli/train.py",
        "metaseq_lm/training/trainer.py",
        "user_dir/__init__.py",
    ):
        (tree / file).write_text("raise SystemExit(9)\n")
    assert process.wait(timeout=240) == 0
    (code,) = (out / "code").iterdir()
    assert (out / "seed=2" / "code").resolve() == code
    assert not [p for p in code.rglob("*") if "raise SystemExit(9)" in text_of(p)]
    top = {p.name for p in code.iterdir()}
    assert top == {"metaseq_lm", "plugin"}


def text_of(path: Path) -> str:
    return path.read_text() if path.suffix == ".py" else ""


def test_a_snapshot_is_named_by_its_content(tmp_path: Path) -> None:
    plugin = tmp_path / "plug"
    (plugin / "data").mkdir(parents=True)
    (plugin / "__init__.py").write_text("x = 1\n")
    (plugin / "data" / "corpus.bin").write_text("not code")
    out = plugin / "runs"  # inside of what is copied
    out.mkdir()
    first = Snapshot(out, str(plugin), None).take()
    again = Snapshot(out, str(plugin), None).take()
    assert first == again and [first.folder] == list((out / "code").iterdir())
    assert first.user_dir == str(first.folder / "plugin" / "plug")
    assert {p.name for p in (first.folder / "plugin").rglob("*") if p.is_file()} == {"__init__.py"}
    (plugin / "__init__.py").write_text("x = 2\n")
    second = Snapshot(out, str(plugin), None).take()
    assert second.folder != first.folder
    assert (first.folder / "plugin/plug/__init__.py").read_text() == "x = 1\n"


def test_the_wrapper_does_without_torch() -> None:
    """It stays beside the training all the time, and must start fast."""
    code = "import metaseq_lm.sweeps.job, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
