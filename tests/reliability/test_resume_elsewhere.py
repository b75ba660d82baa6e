"""The same run on other numbers of processes: the same samples, and the same losses
up to rounding.
"""

import json
from pathlib import Path

import pytest
import torch
from battery import configure
from real_runs import FP64, REPEATS, Started, command, final, records, rows

from metaseq_lm.training.run import TrainingRun

RECORD = {"METASEQ_LM_RECORD": "1"}
MICRO = "engine.micro_batch_size=3"


def chain(
    data: Path,
    save: Path,
    counts: list[int],
    *more: str,
    updates: int = 3,
    sharded: tuple[int, ...] = (),
) -> Path:
    """Train some updates on each number of processes in turn, on shards in the turns `sharded`."""
    for turn, count in enumerate(counts):
        options = [f"trainer.max_update={updates * (turn + 1)}"]
        options += ["engine.parallel=shard"] if turn in sharded else []
        options += ["--nproc", str(count)] if count > 1 else []
        run = Started(command(data, save, *more, *options), save.with_suffix(".err"), RECORD)
        assert run.wait() == 0, run.text()
    return save


def samples(save: Path, ranks: int = 4) -> dict[int, list[int]]:
    """Return the sample numbers of each update, from the first replica's to the last's."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in records(save, rank):
            parts = line["samples"]["train"]
            found.setdefault(line["update"], []).extend(s for part in parts for s in part)
    return found


def losses(save: Path) -> torch.Tensor:
    """Return the training losses."""
    lines = rows(save, "train")
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    return torch.tensor([line["loss"] for line in lines], dtype=torch.float64)


def moments(state: dict) -> list[torch.Tensor]:
    """Return the moments of a saved state in the order of the parameters."""
    state = state["optimizers"]["main"]["state"]
    return [v for n in sorted(state) for v in state[n].values() if v.dim()]


@pytest.mark.slow
@pytest.mark.parametrize("precision, limit", [("fp32", 1e-5), ("fp64", 1e-12)])
def test_resume_on_one_two_four_and_one_process_gives_equal_losses(
    precision, limit, moons, tmp_path
):
    """Order of samples per update exactly, losses and moments up to the order of summation."""
    more = [*(FP64 if precision == "fp64" else []), f"seed={REPEATS}"]
    straight = chain(moons, tmp_path / "straight", [1], *more, updates=12)
    # The turn on 4 processes has shards, the last everything again.
    moved = chain(moons, tmp_path / "moved", [1, 2, 4, 1], *more, MICRO, sharded=(2,))
    assert samples(straight) == samples(moved) and len(samples(moved)) == 12
    assert all(len(s) == 16 for s in samples(moved).values())
    difference = (losses(straight) - losses(moved)).abs() / losses(straight)
    assert difference.max() <= limit
    for a, b in zip(moments(final(straight)[1]), moments(final(moved)[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e3 * limit, atol=limit)
    # Each process chooses its own number of positions to predict, so nearly the same FLOPs.
    spent = [json.loads((p / "results.json").read_text())["flops"] for p in (straight, moved)]
    assert spent[1] == pytest.approx(spent[0], rel=0.1)


@pytest.mark.slow
def test_shards_of_two_go_to_four_and_to_whole_parameters(moons, tmp_path):
    """The same losses and moments as without shards, up to the order of summation."""
    counts = [2, 4, 2]
    shards = chain(moons, tmp_path / "shards", counts, *FP64, sharded=(0, 1))
    whole = chain(moons, tmp_path / "whole", counts, *FP64)
    assert torch.allclose(losses(shards), losses(whole), rtol=0, atol=1e-12)
    for a, b in zip(moments(final(shards)[1]), moments(final(whole)[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    # A process holds its rows of the parameters and of their two moments.
    for count, turn in ((2, 0), (4, 1)):
        lines = [records(shards, rank) for rank in range(count)]
        lines = [next(line for line in k if line["update"] == 3 * turn + 2) for k in lines]
        parameters = lines[0]["parameters"]
        assert sum(line["held"] for line in lines) == parameters
        assert all(line["moments"] == 2 * line["held"] for line in lines)
        assert max(line["held"] for line in lines) <= parameters * (1 / count + 0.05)
    assert {line["moments"] for line in records(whole)} == {2 * parameters}


# ---------------------------------------------------------------- limits


def test_flops_stop_the_same_update_on_one_and_two_processes(moons, tmp_path):
    """The limit holds for the sum over the processes."""
    probe = TrainingRun(
        configure(moons, tmp_path / "probe", ("masked_lm", 0), "trainer.max_update=1")
    )
    probe.train()
    limit = 6.5 * probe.trainer.flops.total
    for count in (1, 2):
        save = tmp_path / str(count)
        more = ["trainer.max_update=100", "--max-flops", f"{limit:.0f}"]
        more += ["--nproc", str(count)] if count > 1 else []
        run = Started(command(moons, save, *more), save.with_suffix(".err"))
        assert run.wait() == 0, run.text()
    one, two = (json.loads((tmp_path / n / "results.json").read_text()) for n in "12")
    assert one["stopped_by"] == two["stopped_by"] == "max_flops"
    assert one["flops"] == pytest.approx(two["flops"], rel=1e-3) and one["flops"] >= limit
    assert one["updates"] == two["updates"] < 12
    assert one["replicas"] == 1 and two["replicas"] == 2


@pytest.mark.parametrize(
    "name, value, raised", [("max_flops", 1e7, 1e12), ("max_seconds", 0.2, 60)]
)
def test_a_raised_limit_goes_on(name, value, raised, moons, tmp_path):
    def train(limit: float, last: int) -> dict:
        more = [f"trainer.{name}={limit}", f"trainer.max_update={last}", "trainer.valid_split=''"]
        run = TrainingRun(configure(moons, tmp_path, ("masked_lm", 0), *more))
        run.train()
        return json.loads((tmp_path / "results.json").read_text())

    first = train(value, 100000)
    assert first["stopped_by"] == name and 0 < first["updates"] < 100000
    assert (tmp_path / "checkpoints" / "last").resolve().name.endswith(str(first["updates"]))
    assert train(value, 100000) == first  # the same limit: nothing is left to do
    last = first["updates"] + 5
    second = train(raised, last)
    assert second["stopped_by"] == "max_update" and second["updates"] == last
    assert [row["update"] for row in rows(tmp_path, "train")] == list(range(1, last + 1))


def test_a_paused_run_goes_on_as_if_it_had_not_stopped(moons, tmp_path):
    """The budget makes the schedule, not the pause."""

    def train(folder: str, *more: str) -> TrainingRun:
        budget = ["trainer.max_update=0", "trainer.max_flops=2e8"]
        config = configure(moons, tmp_path / folder, ("masked_lm", 0), *budget, *more)
        run = TrainingRun(config)
        run.train()
        return run

    paused = train("paused", "trainer.pause_flops=5e7")
    first = json.loads((tmp_path / "paused" / "results.json").read_text())
    assert first["stopped_by"] == "pause_flops" and 5e7 <= first["flops"] < 8e7
    assert first["metrics"]["valid"] == paused.trainer.last_valid
    resumed, whole = train("paused"), train("whole")
    assert resumed.trainer.update == whole.trainer.update == first["max_update"]
    assert first["updates"] < first["max_update"]
    weights = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
