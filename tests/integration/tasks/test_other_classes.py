"""A head's numbers mean names: data whose classes are others, or in another order, are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import sentence_sets
from outcomes import expect_error
from sentence_runs import configure

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.runs.manifests import read_manifest
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.trainer import Trainer


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The same set three times, once with its classes turned around."""
    place = tmp_path / "data"
    sentence_sets.write_corpus(place)
    sentence_sets.learnable(place / "single", "single")
    for name, step in (("same", 1), ("turned", -1)):
        shutil.copytree(place / "single", place / name)
        manifest = Manifest.load(place / name)
        manifest.details["labels"] = manifest.details["labels"][::step]
        manifest.save(place / name)
    return place


def test_another_set_is_scored_if_it_has_the_classes(place, tmp_path, capsys):
    TrainingRun(
        configure(place, tmp_path / "run", "task.labelled=single", "trainer.max_update=1")
    ).train()
    score = ["evaluate", str(tmp_path / "run"), "--split", "valid"]
    assert main([*score, "task.labelled=same"]) == 0
    capsys.readouterr()
    expect_error(capsys, main([*score, "task.labelled=turned"]), 2, "on turned with")


def test_a_kept_head_has_the_classes(place, tmp_path):
    TrainingRun(
        configure(place, tmp_path / "run", "task.labelled=single", "trainer.max_update=1")
    ).train()
    start = [f"init_from={tmp_path / 'run'}", "task.keep_head=true", "trainer.max_update=1"]
    TrainingRun(configure(place, tmp_path / "on", "task.labelled=same", *start)).train()
    with pytest.raises(UsageError, match="with the classes"):
        TrainingRun(configure(place, tmp_path / "off", "task.labelled=turned", *start))


def test_the_classes_are_those_at_the_start(place, tmp_path, monkeypatch):
    """Data that change while a run trains do not change what its checkpoints say of them."""
    save = Trainer.save

    def late(self: Trainer, *how: Any, **more: Any) -> None:
        shutil.copy(place / "turned" / "manifest.json", place / "same" / "manifest.json")
        save(self, *how, **more)

    monkeypatch.setattr(Trainer, "save", late)
    run = tmp_path / "run"
    TrainingRun(configure(place, run, "task.labelled=same", "trainer.max_update=1")).train()
    found = read_manifest((run / "checkpoints" / "last").resolve())["facts"]["labels"]["same"]
    assert found == Manifest.load(place / "single").details["labels"]
    assert main(["evaluate", str(run), "--split", "valid"]) == 2
