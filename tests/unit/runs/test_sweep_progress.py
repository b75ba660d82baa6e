"""What `sweep status` knows of a run that is under way."""

from pathlib import Path

import pytest

from metaseq_lm.sweeps.states import State, lines, progress


def state(**changes) -> State:
    return State(**{"run": "a", "stage": "train", "state": "running", **changes})


@pytest.mark.parametrize(
    "changes, remaining, text",
    [
        ({"update": 25, "max_update": 100, "seconds": 30.0}, 90.0, "about 1 min 30 s left"),
        ({"update": 0, "max_update": 100}, None, "0/100"),
        ({"update": 25, "seconds": 30.0}, None, "25/?"),
        ({"update": 25, "max_update": 100, "seconds": 30.0, "state": "failed"}, None, "25/100"),
    ],
)
def test_remaining_time(changes: dict, remaining: float | None, text: str) -> None:
    run = state(**changes)
    assert run.remaining == remaining
    (line,) = lines([run])
    assert text in line and ("left" in line) == (remaining is not None)


def test_updates_to_make_before_the_run_has_a_folder(tmp_path: Path) -> None:
    arguments = ["trainer.max_update=7", "task=masked_lm", "trainer.max_update=150"]
    assert progress(tmp_path / "none", arguments) == (0, 150, 0.0)
    assert progress(tmp_path / "none", ["trainer.max_update=${x}"]) == (0, 0, 0.0)
