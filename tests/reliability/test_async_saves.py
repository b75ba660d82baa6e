"""Checkpoints that are written while training goes on (trainer.async_save)."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from battery import configure, difference, train
from real_runs import rows

from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.tasks.masked_lm import MaskedLMTask

CASE = ("masked_lm", 0)
SHORT = ["trainer.max_update=6", "trainer.save_interval_updates=2"]
ASYNC = [*SHORT, "trainer.async_save=true"]


def test_training_goes_on_meanwhile(moons, tmp_path, monkeypatch):
    """The checkpoint of update 2 is written during update 3, and holds the weights of update 2."""
    third, waited, count = threading.Event(), [], []
    write, update = checkpoint._write, MaskedLMTask.update

    def slow_write(path: Path, pieces: Iterable[Any]) -> str:
        if "update_000000002" in str(path.parent) and path.name == "state.safetensors":
            waited.append(third.wait(20))
        return write(path, pieces)

    def counted_update(*arguments: object) -> object:
        count.append(1)
        if len(count) == 3:
            third.set()
        return update(*arguments)

    straight = train(configure(moons, tmp_path / "straight", CASE, *SHORT))
    monkeypatch.setattr(checkpoint, "_write", slow_write)
    monkeypatch.setattr(MaskedLMTask, "update", counted_update)
    options = [*ASYNC, "trainer.keep_last=9"]
    weights = train(configure(moons, tmp_path / "async", CASE, *options))
    assert waited == [True] and difference(straight, weights) == 0
    folders = [
        {p.name for p in (tmp_path / name / "checkpoints").iterdir()}
        for name in ("straight", "async")
    ]
    assert folders[0] <= folders[1] and "update_000000002" in folders[1]
    monkeypatch.undo()
    resumed = tmp_path / "resumed"
    stop = configure(moons, resumed, CASE, *ASYNC, "trainer.max_update=2")
    early = train(stop)
    path = manifests.folder_of(tmp_path / "async" / "checkpoints", 2)
    assert difference(early, checkpoint.load(path).weights) == 0
    assert difference(straight, train(configure(moons, resumed, CASE, *ASYNC))) == 0


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_file_that_cannot_be_written(policy, moons, tmp_path, monkeypatch):
    write = checkpoint._write

    def full_disk(path: Path, pieces: Iterable[Any]) -> str:
        if "update_000000002" in str(path.parent):
            raise OSError(28, "No space left")
        return write(path, pieces)

    monkeypatch.setattr(checkpoint, "_write", full_disk)
    save = tmp_path / "run"
    config = configure(moons, save, CASE, *ASYNC, f"trainer.on_save_error={policy}")
    if policy == "stop":
        with pytest.raises(CheckpointError, match="No space left"):
            train(config)
    else:
        train(config)
        messages = [row["message"] for row in rows(save, "event")]
        assert sum("cannot write checkpoint" in m for m in messages) == 1
        assert checkpoint.load(manifests.resolve(str(save))).state["update"] == 6
    assert not list((save / "checkpoints").glob(".tmp-*"))
