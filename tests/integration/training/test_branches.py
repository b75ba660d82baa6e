"""Runs that go on from the plateau of another one, under a schedule of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import configure, train
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.folder import read_results
from metaseq_lm.training.run import TrainingRun

CASE = ("masked_lm", 0)
WSD = ["schedule=wsd", "schedule.warmup_updates=2"]
PLATEAU = [*WSD, "schedule.decay_ratio=0", "trainer.max_update=6"]


@pytest.fixture(scope="module")
def plateau(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates that ends at its plateau, with a checkpoint after four of them."""
    folder = tmp_path_factory.mktemp("branches") / "plateau"
    train(configure(moons, folder, CASE, *PLATEAU, "trainer.save_interval_updates=4"))
    return folder


def weights_at(save: Path) -> dict[str, Tensor]:
    return checkpoint.load(manifests.resolve(str(save))).weights


def results(save: Path) -> dict[str, Any]:
    values = read_results(save)
    assert values is not None
    return values


def losses(save: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
    return {row["update"]: row["loss"] for row in rows if row["kind"] == "train"}


def branch(save: Path, source: Path, *more: str) -> int:
    return main(["train", "--branch-from", str(source), "--save-dir", str(save), *more])


@pytest.mark.parametrize("updates", [8, 10])
def test_a_branch_is_the_run_that_was_trained_through(updates, plateau, moons, tmp_path):
    """One plateau serves several budgets, each with the plateau's FLOPs in its own."""
    decay = f"schedule.decay_ratio={(updates - 6) / updates}"
    more = ["--max-update", str(updates), "--schedule", "wsd", decay]
    assert branch(tmp_path / "branch", plateau, *more) == 0
    through = tmp_path / "through"
    expected = train(configure(moons, through, CASE, *WSD, decay, f"trainer.max_update={updates}"))
    weights = weights_at(tmp_path / "branch")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    ours, theirs = results(tmp_path / "branch"), results(through)
    for key in ("updates", "flops", "metrics"):
        assert ours[key] == theirs[key], key
    late = {update: loss for update, loss in losses(through).items() if update > 6}
    assert losses(tmp_path / "branch") == late and len(late) == updates - 6
    assert "another learning rate" not in (tmp_path / "branch" / "log.jsonl").read_text()


def test_a_branch_resumes_by_itself(plateau, tmp_path):
    """Stopped after two updates of its own, and after the plateau has gone."""
    options = ["--max-update", "10", "schedule.decay_ratio=0.4"]
    assert branch(tmp_path / "whole", plateau, *options) == 0
    moved = tmp_path / "plateau"
    moved.mkdir()
    for name in ("config.yaml", "checkpoints"):
        (moved / name).symlink_to(plateau / name)
    stopped = tmp_path / "stopped"
    short = ["--max-update", "8", "schedule.total_updates=10", *options[2:]]
    assert branch(stopped, moved, *short) == 0
    for name in ("config.yaml", "checkpoints"):
        (moved / name).unlink()
    assert main(["train", "--save-dir", str(stopped), "--max-update", "10"]) == 0
    ours, theirs = weights_at(stopped), weights_at(tmp_path / "whole")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert results(stopped)["flops"] == results(tmp_path / "whole")["flops"]


def test_a_branch_of_a_checkpoint_with_a_budget(plateau, tmp_path):
    """The budget pays for the updates before the branch, too."""
    spent = results(plateau)["flops"]
    source = plateau / "checkpoints" / "update_000000004"
    budget = ["trainer.max_update=0", f"trainer.max_flops={1.55 * spent}"]
    assert branch(tmp_path, source, *budget, "schedule.decay_ratio=0.4") == 0
    values = results(tmp_path)
    assert values["updates"] == 9
    assert 1.4 * spent < values["flops"] < 1.6 * spent
    assert min(losses(tmp_path)) == 5


def test_rates_that_differ_before_the_branch_are_reported(plateau, tmp_path):
    more = ["--max-update", "8", "schedule.decay_ratio=0.5"]
    assert branch(tmp_path, plateau, *more) == 0
    assert "update 5 of" in (tmp_path / "log.jsonl").read_text()


def test_a_branch_with_another_kind_of_schedule(plateau, tmp_path):
    more = ["--max-update", "7", "--schedule", "constant", "--warmup-updates", "2"]
    assert branch(tmp_path, plateau, *more) == 0
    assert results(tmp_path)["updates"] == 7


def test_what_a_branch_cannot_be(plateau, moons, tmp_path):
    config = configure(moons, tmp_path / "a", CASE, *WSD, f"branch_from={plateau}")
    config.trainer.max_update = 6
    with pytest.raises(UsageError, match="6 updates.*larger --max-update"):
        TrainingRun(config).train()
    more = [*WSD, f"branch_from={plateau}", "trainer.max_update=9", "seed=2"]
    with pytest.raises(Exception, match="seed is 1.*2"):
        TrainingRun(configure(moons, tmp_path / "b", CASE, *more)).train()
    more = [*WSD, f"branch_from={tmp_path / 'none'}", "trainer.max_update=9"]
    with pytest.raises(Exception, match="no such checkpoint"):
        TrainingRun(configure(moons, tmp_path / "c", CASE, *more)).train()
