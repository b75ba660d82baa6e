"""Going on with a run whose init_from lies elsewhere, is gone or has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import CASES, TINY
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.runs import checkpoint

MLM = [*CASES["masked_lm"][0], *TINY, "engine.tensorboard=false", "trainer.log_interval=1"]


@pytest.fixture
def work(moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the run `first`, and two updates of `run`, which started from it."""
    (tmp_path / "data").symlink_to(moons)
    monkeypatch.chdir(tmp_path)
    for name, seed in (("first", 1), ("other", 2)):
        words = ["--save-dir", name, *MLM, f"seed={seed}", "--max-update", "2"]
        assert main(["train", "data", *words]) == 0
    assert go_on("first", updates=2) == 0
    return tmp_path


def go_on(source: str | None, updates: int = 4, save: str = "run") -> int:
    """Train by the whole command, or by --save-dir alone without a `source`."""
    words = ["--save-dir", save, "--max-update", str(updates)]
    if source is not None:
        words += ["data", *MLM, "model=inherit", f"init_from={source}", "seed=3"]
        words = [word for word in words if not word.startswith("model.")]
    return main(["train", *words])


def events() -> list[str]:
    lines = map(json.loads, Path("run/log.jsonl").read_text().splitlines())
    return [line["message"] for line in lines if line["kind"] == "event"]


def last(folder: str = "run") -> checkpoint.Checkpoint:
    return checkpoint.load(Path(folder) / "checkpoints" / "last")


def pretraining() -> dict[str, Any]:
    return json.loads(Path("run/results.json").read_text())["pretraining"]


@pytest.mark.parametrize(
    "change, sources, note",
    [
        (shutil.rmtree, ("first", None), "first is not"),
        (
            lambda first: first.rename("moved"),
            ("moved", "moved/checkpoints/last"),
            "first -> moved",
        ),
        (lambda first: first.rename("moved"), ("first", None), "first is not"),
        (lambda first: shutil.copytree(first, "copy"), ("copy",), "first -> copy"),
        (lambda first: go_on(None, updates=3, save="first"), ("first", None), "first has other"),
    ],
)
def test_a_run_goes_on_with_its_own_weights(change, sources, note, work):
    """Bitwise as if nothing had changed, with one event and the same cost of its ancestors."""
    shutil.copytree("run", "whole")
    assert go_on(None, save="whole") == 0
    before = pretraining()
    change(Path("first"))
    shutil.copytree("run", "stored")
    for source in sources:
        shutil.rmtree("run")
        shutil.copytree("stored", "run")
        assert go_on(source) == 0
        assert sum(note in event for event in events()) == 1, events()
        weights = last("whole").weights
        assert all(torch.equal(w, weights[name]) for name, w in last().weights.items())
        assert pretraining()["runs"] == before["runs"]
        # The new place is on record, and is no news the next time.
        assert go_on(None, updates=5) == 0
        moved = note.startswith("first ->")
        assert sum("init_from" in event for event in events()) == (1 if moved else 2)


def test_a_finished_run_compares_its_start(work, capsys):
    """Other weights are an error with a remedy, as other data are; without any it is finished."""
    assert go_on("first") == 0
    content = last().weights
    Path("first").rename("gone")
    capsys.readouterr()
    for source in ("gone", "first", None):
        assert go_on(source) == 0
        assert "finished already (4" in capsys.readouterr().out
    Path("other").rename("first")
    before = Path("run/results.json").read_bytes()
    for source in ("first", None):
        expect_error(capsys, go_on(source), 1, "init_from first has", "another --save-dir")
    assert Path("run/results.json").read_bytes() == before
    assert go_on(None, updates=5) == 0
    assert sum("goes on with" in event for event in events()) == 1
    assert last().weights.keys() == content.keys()


@pytest.mark.parametrize("source", ["other", "nowhere", "null"])
def test_another_start_is_another_run(source, work, capsys):
    files = {path: path.read_bytes() for path in Path("run").rglob("*.*") if path.is_file()}
    capsys.readouterr()
    words = ["train", "--save-dir", "run", "--max-update", "4", f"init_from={source}"]
    now = None if source == "null" else source
    expect_error(capsys, main(words), 2, f"'first' there, {now!r} here", "another --save-dir")
    assert files == {p: p.read_bytes() for p in Path("run").rglob("*.*") if p.is_file()}


def test_checkpoints_of_earlier_versions(work):
    """They do not record the weights of init_from: the old place is looked at, if it is there."""
    for manifest in Path("run").glob("checkpoints/*/manifest.json"):
        content = json.loads(manifest.read_text())
        content.pop("start", None)  # "last" is the same file
        manifest.write_text(json.dumps(content))
    shutil.copytree("first", "copy")
    shutil.copytree("run", "stored")
    assert go_on("copy") == 0
    assert sum("first -> copy" in event for event in events()) == 1
    for source, code in (("copy", 2), ("first", 0)):
        shutil.rmtree("run")
        shutil.copytree("stored", "run")
        shutil.rmtree("first", ignore_errors=True)
        assert go_on(source) == code
    assert sum("first is not" in event for event in events()) == 1
    assert pretraining()["flops"] is None  # not known, which is not zero


def test_a_run_without_a_checkpoint_needs_its_start(work, capsys):
    shutil.rmtree("run/checkpoints")
    expect_error(capsys, go_on("other"), 2, "'first' there, 'other'")
    shutil.rmtree("first")
    expect_error(capsys, go_on(None), 2, "first: ", "no such checkpoint")


def test_damaged_costs_are_named(work, capsys):
    manifest = (Path("run/checkpoints/last") / "manifest.json").resolve()
    content = json.loads(manifest.read_text())
    content["start"]["costs"] = {"first": {"flops": "x"}}
    manifest.write_text(json.dumps(content))
    expect_error(capsys, go_on(None), 1, "checkpoints is damaged")
