"""Moving averages of the weights: what is saved and validated, and that runs go on exactly."""

import json
from pathlib import Path

import battery
import pytest
import real_runs
import torch
from torch import Tensor, nn

from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.checkpoint import Checkpoint
from metaseq_lm.training.averaging import MovingAverage
from metaseq_lm.training.parts import evaluate_split
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun

CASE = ("masked_lm", 0)
DECAY = 0.75
AVERAGED = f"trainer.average_decay={DECAY}"
SAVED = ["trainer.save_interval_updates=1", "trainer.keep_last=9", "engine.precision=fp64"]


def train(data: Path, save: Path, *more: str, updates: int = 4) -> list[Checkpoint]:
    """Train a run and return its checkpoints, oldest first."""
    battery.train_uncounted(
        battery.configure(data, save, CASE, f"trainer.max_update={updates}", *SAVED, *more)
    )
    return [checkpoint.load(path) for path in sorted((save / "checkpoints").glob("update_*"))]


def states(stored: Checkpoint) -> dict[str, Tensor]:
    """Return the averages and, where there are some, the trained weights of a checkpoint."""
    trained = stored.state.get("trained_weights", {})
    return stored.weights | {f"trained/{name}": weight for name, weight in trained.items()}


def test_checkpoints_hold_averages_and_trained_weights(moons: Path, tmp_path: Path) -> None:
    """The averages are those of a plain run's weights; training does not see them."""
    config = battery.configure(moons, tmp_path / "first", CASE, *SAVED)
    averages = battery.weights_of(TrainingRun(config))
    without_average = train(moons, tmp_path / "plain")
    averaged = train(moons, tmp_path / "averaged", AVERAGED)
    assert len(without_average) == len(averaged) == 4
    for without, stored in zip(without_average, averaged):
        averages = {n: DECAY * a + (1 - DECAY) * without.weights[n] for n, a in averages.items()}
        assert battery.difference(stored.state["trained_weights"], without.weights) == 0
        assert battery.difference(stored.weights, averages) < 1e-15
        assert battery.difference(stored.weights, without.weights) > 1e-4
        assert "trained_weights" not in without.state


def test_what_is_validated_is_what_is_saved(moons: Path, tmp_path: Path) -> None:
    """Also what a finished run scores its final splits with."""
    more = [AVERAGED, "trainer.final_splits=[valid]", "trainer.best_checkpoint_metric=''"]
    train(moons, tmp_path, *more)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (valid,) = (line["loss"] for line in lines if line["kind"] == "valid")
    parts = open_run(str(tmp_path))
    assert evaluate_split(parts, "valid").metrics["loss"] == valid
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"]["valid"]["loss"] == valid


def test_a_run_goes_on_bit_for_bit(moons: Path, tmp_path: Path) -> None:
    whole = train(moons, tmp_path / "whole", AVERAGED)[-1]
    train(moons, tmp_path / "parts", AVERAGED, updates=2)
    resumed = train(moons, tmp_path / "parts", AVERAGED)[-1]
    assert battery.difference(states(resumed), states(whole)) == 0


def test_averages_can_begin_and_end_where_a_run_goes_on(moons: Path, tmp_path: Path) -> None:
    """The training is the same; averages begin at the weights of that update."""
    without_average = train(moons, tmp_path / "plain")
    train(moons, tmp_path / "ends", AVERAGED, updates=3)
    ended = train(moons, tmp_path / "ends")[-1]
    assert battery.difference(ended.weights, without_average[-1].weights) == 0
    train(moons, tmp_path / "begins", updates=3)
    begun = train(moons, tmp_path / "begins", AVERAGED)[-1]
    for name, weight in begun.weights.items():
        before, after = without_average[-2].weights[name], without_average[-1].weights[name]
        torch.testing.assert_close(weight, DECAY * before + (1 - DECAY) * after, rtol=0, atol=1e-15)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_processes_change_no_average(moons: Path, tmp_path: Path, parallel: str) -> None:
    whole = train(moons, tmp_path / "whole", AVERAGED)[-1]
    more = ["trainer.max_update=4", *SAVED, AVERAGED, f"engine.parallel={parallel}"]
    real_runs.train_on_replicas(2, 1, [(CASE, parallel, more)], moons, tmp_path)
    folder = tmp_path / f"{CASE[0]}-{CASE[1]}-{parallel}" / "checkpoints"
    stored = checkpoint.load(folder / "last")
    assert battery.difference(states(stored), states(whole)) <= 1e-12


def test_an_update_that_the_device_refuses_moves_no_average() -> None:
    net = nn.Linear(2, 1)
    average = MovingAverage(net, DECAY)
    before = {name: tensor.clone() for name, tensor in average.averages.items()}
    with torch.no_grad():
        net.weight.add_(1.0)
    average.move(torch.tensor(True))
    assert battery.difference(average.averages, before) == 0
    average.move(torch.tensor(False))
    moved = {"weight": before["weight"] + 1 - DECAY, "bias": before["bias"]}
    assert battery.difference(average.averages, moved) < 1e-6
