"""Warm-ups of the size of a batch and of the length of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import configure, train

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.streams import Shard
from metaseq_lm.tasks.protocols import facts_of
from metaseq_lm.training.parts import build_task
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

CASE = ("masked_lm", 0)
WINDOWS = ["task.sample_break_mode=none", "task.batch_size=16", "trainer.max_update=20"]
ROWS = ["task.batch_warmup_ratio=0.4", "task.batch_start=0.25"]
LENGTHS = ["task.length_warmup_updates=5", "task.length_start=0.5"]


def config_of(data: Path, save: Path, *more: str) -> RunConfig:
    return configure(data, save, CASE, *WINDOWS, *more)


def batches(config: RunConfig, numbers: range) -> list[Any]:
    stream = build_task(config).build_streams("train")["train"]
    return [stream.micro_batches(number, Shard())[0] for number in numbers]


def test_rows_and_their_length_rise_by_a_line(moons: Path, tmp_path: Path) -> None:
    shapes = [tuple(b.tokens.shape) for b in batches(config_of(moons, tmp_path, *ROWS), range(10))]
    assert [rows for rows, _ in shapes] == [4, 5, 7, 8, 10, 11, 13, 14, 16, 16]
    shapes = [
        tuple(b.tokens.shape) for b in batches(config_of(moons, tmp_path, *LENGTHS), range(7))
    ]
    assert [length for _, length in shapes] == [17, 20, 23, 27, 30, 34, 34]
    assert {rows for rows, _ in shapes} == {16}


def test_a_cut_row_is_the_beginning_of_the_whole_one(moons: Path, tmp_path: Path) -> None:
    still = ["task.mask_prob=0"]
    (cut,) = batches(config_of(moons, tmp_path, *LENGTHS, *still), range(1))
    (whole,) = batches(config_of(moons, tmp_path, *still), range(1))
    assert torch.equal(cut.tokens[:, :16], whole.tokens[:, :16])
    assert torch.equal(cut.tokens[:, 16], whole.tokens[:, -1])  # [SEP]
    assert cut.padding is None


@pytest.mark.parametrize("more", [ROWS, LENGTHS, [*ROWS, *LENGTHS]])
def test_a_run_costs_what_its_price_says(more: list[str], moons: Path, tmp_path: Path) -> None:
    config = config_of(moons, tmp_path, *more, "trainer.valid_split=''")
    price = estimate_price(config).flops
    train(config)
    spent = json.loads((tmp_path / "results.json").read_text())["flops"]
    # Rows are whole numbers, and attention grows with the square of their length.
    assert 20 * price == pytest.approx(spent, rel=0.03)
    full = estimate_price(config_of(moons, tmp_path)).flops
    assert price == pytest.approx(full * config.task.mean_size(20), rel=1e-12)


def test_mean_size() -> None:
    """By hand: over four of ten updates rows rise from a quarter of their number."""
    options = WarmupConfig(batch_warmup_updates=4)
    assert options.mean_size(10) == pytest.approx((0.25 + 0.4375 + 0.625 + 0.8125 + 6) / 10)
    halves = WarmupConfig(
        batch_warmup_updates=2, batch_start=0.5, length_warmup_ratio=0.5, length_start=0.5
    )
    assert halves.mean_size(4) == pytest.approx((0.25 + 0.75 * 0.75 + 1 + 1) / 4)
    assert WarmupConfig().mean_size(7) == 1.0


def test_what_a_warm_up_cannot_be(moons: Path, tmp_path: Path) -> None:
    """Another length of the run changes a share; rows of two segments are not cut."""
    short = [*ROWS, "trainer.max_update=10"]
    train(config_of(moons, tmp_path / "a", *short))
    with pytest.raises(MetaseqError, match=r"warmup_updates.*\[4, 0\] then, \[8, 0\] now"):
        TrainingRun(config_of(moons, tmp_path / "a", *ROWS)).train()
    config = configure(moons, tmp_path / "b", ("masked_lm", 2), *LENGTHS)
    with pytest.raises(UsageError, match="two segments are not cut"):
        build_task(config).build_streams("train")
    config = configure(moons, tmp_path / "c", ("bert_pretraining", 1), *ROWS)
    with pytest.raises(UsageError, match="several batches"):
        build_task(config)
    assert "warmup_updates" not in facts_of(build_task(config_of(moons, tmp_path / "d")))
