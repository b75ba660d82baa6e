"""Going on with a run: unchanged, and with other options, data, code or torch
(docs/how_to/training.md).
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import CASES, TINY
from omegaconf import OmegaConf
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.runs import checkpoint
from metaseq_lm.training import checkpointing

MLM = [*CASES["masked_lm"][0], *TINY, "engine.tensorboard=false", "trainer.log_interval=1"]
START = ["optimizer.lr=1e-3", "task.batch_size=4", "schedule.warmup_updates=2"]
LINEAR = ["schedule=linear", "schedule.warmup_updates=0"]


@pytest.fixture
def work(moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `data`, and two updates of a run in `run`."""
    shutil.copytree(moons, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "data", "--save-dir", "run", *MLM, *START, "--max-update", "2"]) == 0
    return tmp_path


def go_on(*words: str, code: int = 0) -> None:
    """Go on with the run for four updates in all."""
    assert main(["train", "--save-dir", "run", "--max-update", "4", *words]) == code


def last(folder: str = "run") -> checkpoint.Checkpoint:
    return checkpoint.load(Path(folder) / "checkpoints" / "last")


def log(kind: str, folder: str = "run") -> list[dict[str, Any]]:
    lines = map(json.loads, (Path(folder) / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def events() -> str:
    return "\n".join(line["message"] for line in log("event"))


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that say what it is."""
    paths = [folder / "config.yaml", folder / "log.jsonl", folder / "results.json"]
    return {str(p): p.read_bytes() for p in [*paths, *folder.glob("checkpoints/*/state.pt")]}


def refused(capsys: pytest.CaptureFixture, *words: str, say: str) -> None:
    """Check that the run does not go on, says what the pattern `say` does, and stays as it is."""
    capsys.readouterr()
    before = files(Path("run"))
    assert main(["train", "--save-dir", "run", "--max-update", "4", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert re.search(say, said) and "Traceback" not in said, said
    assert files(Path("run")) == before


@pytest.mark.parametrize("words", [[], ["data"], ["data", *MLM, *START]])
def test_unchanged(words: list[str], work: Path) -> None:
    """By the stored configuration or the command: bitwise one run of four updates."""
    main(["train", "data", "--save-dir", "whole", *MLM, *START, "--max-update", "4"])
    go_on(*words)
    whole, resumed = last("whole"), last()
    assert all(torch.equal(w, resumed.weights[n]) for n, w in whole.weights.items())
    assert [line["loss"] for line in log("train")] == [x["loss"] for x in log("train", "whole")]
    configs = [OmegaConf.load(Path(f) / "config.yaml") for f in ("run", "whole")]
    configs[0].save_dir = "whole"
    assert configs[0] == configs[1]
    assert "reset" not in events() and "software" not in events()
    expect_facts(events(), "trainer.max_update 2 -> 4")


@pytest.mark.parametrize("part", ["schedule", "optimizer"])
def test_other_lr(part: str, work: Path, capsys: pytest.CaptureFixture) -> None:
    refused(capsys, "--lr", "1e-4", say="lr is 0.001 there, 0.0001 here.*add --reset schedule")
    refused(capsys, "--lr", "1e-4", "--reset", "data", say="--reset schedule,data")
    positions = last().state["positions"]
    go_on("--lr", "1e-4", "--reset", part)
    expect_facts(events(), f"reset {part}; ", "optimizer.lr 0.001 -> 0.0001")
    assert log("train")[-1]["lr_main"] < 1e-4 and log("train")[-1]["update"] == 4
    assert last().state["positions"] == {"train": 2 * positions["train"]}
    steps = last().state["optimizers"]["main"]["state"][0]["step"]
    assert steps == (4 if part == "schedule" else 2)
    assert last().state["optimizers"]["main"]["updates"] == 4  # of the schedule
    assert OmegaConf.load("run/config.yaml").optimizer.lr == 1e-4
    go_on("--max-update", "5")  # what was reset stays so


def test_other_batch_size(work: Path, capsys: pytest.CaptureFixture) -> None:
    refused(capsys, "--batch-size", "8", say="add --reset data,")
    go_on("--batch-size", "8", "--reset", "data")
    expect_facts(events(), "reset data; ", "task.batch_size 4 -> 8")
    assert last().state["positions"] == {"train": 2}  # from the start of the data
    assert last().state["optimizers"]["main"]["state"][0]["step"] == 4


def test_other_data(work: Path, capsys: pytest.CaptureFixture) -> None:
    lines = "".join(f"{n} {n + 1} {n + 2}\n" for n in range(10, 70))
    Path("t.txt").write_text(lines)
    arguments = ["--destdir", "new", "--tokenizer-from", "data", "--trainpref", "t.txt"]
    assert main(["preprocess", *arguments, "--validpref", "t.txt"]) == 0
    refused(capsys, "new", say="add --reset data,")
    go_on("new", "--reset", "data")
    expect_facts(events(), "trainer.max_update 2 -> 4, data ")
    assert last().state["best"]["update"] == 4  # scores on other data are not compared
    arguments[3:4] = []
    arguments[2:3] = ["--tokenizer", "char"]
    arguments[1] = "char"
    assert main(["preprocess", *arguments, "--validpref", "t.txt"]) == 0
    refused(capsys, "char", "--reset", "data", "--max-update", "5", say="tokenizer")


def test_other_budget_of_a_schedule_that_ends(work: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.rmtree("run")
    first = ["train", "data", "--save-dir", "run", *MLM, *LINEAR, "--max-update", "2"]
    assert main(first) == 0
    refused(capsys, say="schedule.total_updates is 2 there, 4 here.*add --reset")
    go_on("--reset", "schedule")
    rates = [line["lr_main"] / 5e-4 for line in log("train")]
    lr = OmegaConf.load("run/config.yaml").optimizer.lr
    assert [rate * 5e-4 / lr for rate in rates] == pytest.approx([0.5, 0.0, 0.25, 0.0])


@pytest.mark.parametrize("software", ["code", "torch"])
def test_other_software(software: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and one event says so."""
    if software == "code":
        monkeypatch.setattr(checkpointing, "code_hash", lambda user_dir: "0123abcd")
        new = "0123abcd"
    else:
        monkeypatch.setattr(torch, "__version__", "9.9.9")
        new = "9.9.9"
    old = last().manifest[software]
    go_on()
    said = [m for m in events().splitlines() if "other software" in m]
    assert len(said) == 1 and f"{software} {old} -> {new}" in said[0]
    assert last().manifest[software] == new


def test_a_checkpoint_of_an_earlier_version_goes_on(work: Path) -> None:
    """Its manifest knows no software."""
    for file in Path("run/checkpoints").glob("*/manifest.json"):
        manifest = json.loads(file.read_text())
        file.write_text(
            json.dumps({k: v for k, v in manifest.items() if k not in ("code", "torch")})
        )
    go_on()
    assert "software" not in events()


@pytest.mark.parametrize(
    "words, say",
    [
        (["--reset", "schedul"], "'schedule'"),
        (["seed=2"], "seed is 1 there, 2 here.*another --save-dir"),
        (["seed=2", "--reset", "schedule"], "init_from=run"),
        (["--max-update", "2", "--reset", "optimizer"], "larger --max-update"),
    ],
)
def test_mistakes(words: list[str], say: str, work: Path, capsys: pytest.CaptureFixture) -> None:
    refused(capsys, *words, say=say)


def test_reset_of_nothing(work: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "data", "--save-dir", "none", *MLM, "--reset", "data"]) == 2
    assert "none holds none" in capsys.readouterr().err and not Path("none").exists()
