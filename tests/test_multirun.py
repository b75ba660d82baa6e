"""`train -m` with Hydra's own launcher: the same runs as single ones, and truthful exit codes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from battery import CASES, TINY
from omegaconf import OmegaConf

from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parent.parent
MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=3"]


def sweep(data: Path, save: Path, *more: str) -> int:
    return main(["train", "-m", str(data), "--save-dir", str(save), *MLM, *more])


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


def test_every_job_is_the_run_that_train_makes(moons: Path, tmp_path: Path) -> None:
    out = tmp_path / "it's a sweep"  # a folder that must be quoted
    assert sweep(moons, out, "optimizer.lr=0.1,0.2", "--seed", "1,2") == 0
    assert {p.name for p in out.iterdir()} == {"multirun.yaml", "0", "1", "2", "3"}
    one = tmp_path / "one"
    assert main(["train", str(moons), f"--save-dir={one}", *MLM, "optimizer.lr=0.2", "seed=1"]) == 0
    same = [name for name in "0123" if weights(out / name) == weights(one)]
    assert len(same) == 1
    run = out / same[0]
    assert {p.name for p in run.iterdir()} == {p.name for p in one.iterdir()}
    ours, theirs = (OmegaConf.load(r / "config.yaml") for r in (run, one))
    assert (ours.pop("save_dir"), theirs.pop("save_dir")) == (str(run), str(one))
    assert ours == theirs


def test_the_recorded_command_repeats_the_job(moons: Path, tmp_path: Path) -> None:
    config = tmp_path / "conf"
    config.mkdir()
    (config / "mine.yaml").write_text("defaults: [base, _self_]\nlabel: from my config\n")
    mine = ["--config-dir", str(config), "--config-name", "mine"]
    plugin = ["--user-dir", str(ROOT / "user_dir"), "task=span_masking,masked_lm"]
    argv = sys.argv
    assert sweep(moons, tmp_path / "out", *mine, *plugin) == 0
    assert sys.argv is argv
    run = tmp_path / "out" / "0"
    assert "label: from my config" in (run / "config.yaml").read_text()
    command = (run / "command.txt").read_text()
    program = [sys.executable, "-m", "metaseq_lm", *shlex.split(command)[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "finished already" in done.stdout, done.stderr


def test_a_failing_job_stops_no_other_and_is_told(
    moons: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert sweep(moons, tmp_path, "init_from=/nowhere,null", "seed=1,2") == 1
    finished = [(tmp_path / name / "results.json").exists() for name in "0123"]
    assert finished == [False, False, True, True]
    shown = capfd.readouterr()
    assert "4 jobs, 2 finished" in shown.out and "Traceback" not in shown.err
    for name in "01":
        assert f"{tmp_path / name} ended with exit code 1" in shown.err


@pytest.mark.parametrize(
    "mistake, word",
    [
        ("optimizer.lrr=1,2", "optimizer.lr"),
        ("task=masked_lm,maskd_lm", "Did you mean 'masked_lm'"),
        ("seed=1,one", "one"),
        ("seed=1,[", "mismatched"),
        ("save_dir=a,b", "one folder"),
        ("hydra.launcher.partion=main", "hydra.launcher.partion"),
        ("hydra/launcher=nowhere", "hydra/launcher/nowhere"),
        ("data=''", "DATA"),
        ("--config-name=broken", "broken.yaml:1: "),
        ("--config-name=alone", "alone.yaml lacks keys"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, mistake: str, word: str
) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "alone.yaml").write_text("seed: 3\n")
    own = [f"--config-dir={tmp_path}"] if "config-name" in mistake else []
    assert sweep(moons, tmp_path / "out", mistake, *own) == 2
    text = capsys.readouterr().err
    assert text.count("metaseq-lm: ") == 1 and word in text and "Traceback" not in text
    assert not (tmp_path / "out").exists()


def test_a_launcher_that_is_not_installed_is_named(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher", None)
    assert sweep(moons, tmp_path / "out", "hydra/launcher=submitit_slurm") == 2
    assert "pip install hydra-submitit-launcher" in capsys.readouterr().err


def test_a_signal_stops_the_whole_sweep_with_a_checkpoint(moons: Path, tmp_path: Path) -> None:
    long = ["trainer.max_update=100000", "seed=1,2", f"--save-dir={tmp_path}"]
    command = [sys.executable, "-m", "metaseq_lm", "train", "-m", str(moons), *MLM, *long]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "0" / "log.jsonl"
    deadline = time.monotonic() + 60
    try:
        while not (log.exists() and '"update": 3' in log.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75 and "a checkpoint is saved" in err
    assert (tmp_path / "0" / "checkpoints" / "last").exists()
    assert not (tmp_path / "1").exists()
