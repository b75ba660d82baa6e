"""A staged sweep, teachers and then their student, goes on from wherever a signal stopped it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bam_bench
import safetensors.numpy

from metaseq_lm.cli import main
from metaseq_lm.methods.bam import teachers
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import StageRun, expand
from metaseq_lm.training.trainer import Trainer

STAGES = [
    {"name": "two", "overrides": ["task.labelled=[words,values]"]},
    {"name": "one", "overrides": ["task.labelled=[few]"]},
    {"name": "student", "overrides": [bam_bench.ALL, "task.teachers=[{two},{one}]"]},
]
# In the second update of each stage, and after the first set that a teacher of two has been asked
# about.
STOPS = {("two", 1), ("one", 1), ("student", 1), ("stored", "words")}


def stages_of(data: Path, out: Path) -> tuple[StageRun, ...]:
    content = {"data": str(data), "stages": STAGES, "overrides": bam_bench.OPTIONS, "seeds": [3]}
    (run,) = expand(normalise(content), out)
    return run.stages


def finished(stages: tuple[StageRun, ...]) -> int:
    """Train the stages as a job does, again from the first one after each stop;
    return the stops.
    """
    for stops in range(9):
        for stage in stages:
            code = main(["train", *stage.arguments])
            if code:
                assert code == 75, stage.name
                break
        else:
            return stops
    raise AssertionError("it is stopped again and again")


def test_stops_at_any_stage_leave_no_trace(bam_sets, tmp_path, monkeypatch):
    """To the last bit: teachers, what they say, the student."""
    straight = stages_of(bam_sets, tmp_path / "straight")
    assert finished(straight) == 0
    left = set(STOPS)

    def stop(here: tuple[str, Any]) -> None:
        if here in left:
            left.remove(here)
            os.kill(os.getpid(), signal.SIGTERM)

    def signalled(real: Callable[..., Any], place: Callable[..., tuple[str, Any]]) -> Callable:
        def wrapped(*arguments: Any) -> None:
            real(*arguments)
            stop(place(*arguments))

        return wrapped

    def update(trainer: Trainer, number: int, batches: Any) -> tuple[str, int]:
        return Path(trainer.config.save_dir).parent.name, number

    def stored(path: Path, *_: Any) -> tuple[str, str]:
        return "stored", path.name.removesuffix(teachers.SUFFIX)

    monkeypatch.setattr(Trainer, "_update", signalled(Trainer._update, update))
    monkeypatch.setattr(teachers, "store", signalled(teachers.store, stored))
    stopped = stages_of(bam_sets, tmp_path / "stopped")
    assert finished(stopped) == len(STOPS) and not left
    for stage in stopped:
        folders = [tmp_path / name / stage.folder for name in ("straight", "stopped")]
        found = [f / "checkpoints" / "last" / "model.safetensors" for f in folders]
        assert found[0].read_bytes() == found[1].read_bytes(), stage.name
        assert bam_bench.logged(folders[0])[-1]["loss"] == bam_bench.logged(folders[1])[-1]["loss"]
        files = [sorted(folder.glob(f"outputs/*/*{teachers.SUFFIX}")) for folder in folders]
        assert len(files[0]) == {"two": 2, "one": 1, "student": 0}[stage.name] == len(files[1])
        for one, other in zip(*files):
            tables = [safetensors.numpy.load_file(file)["outputs"] for file in (one, other)]
            assert (tables[0] == tables[1]).all(), one
