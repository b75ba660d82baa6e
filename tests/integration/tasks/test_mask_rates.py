"""Options of masks that change in training: every task that has them follows the update."""

from dataclasses import fields
from pathlib import Path

import battery
import numpy as np
import pytest

from metaseq_lm import plugins
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import TASKS
from metaseq_lm.data.streams import Shard
from metaseq_lm.training.parts import build_task
from metaseq_lm.training.price import estimate_price

CASES = [
    *(("masked_lm", 0), ("masked_lm", 2), ("bert_pretraining", 0), ("bert_pretraining", 1)),
    *(("masked_next_token", 0), ("electra_rtd", 0), ("span_boundary", 0), ("joint_embedding", 0)),
]


def test_every_task_with_the_option_has_a_case() -> None:
    plugins.load_all(str(battery.ROOT / "user_dir"))
    with_option = set()
    for name, entry in TASKS.entries.items():
        if entry.dataclass and "mask_rates" in {item.name for item in fields(entry.dataclass)}:
            with_option.add(f"task={name}")
    assert {battery.task_of(case) for case in CASES} == with_option


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_rate_follows_the_update(case: battery.Case, moons: Path, tmp_path: Path) -> None:
    """Of one batch or several an update, and in no other split."""
    plugins.load_all(str(battery.ROOT / "user_dir"))
    rates = ["task.mask_rates=[0.6,0.2]", "task.mask_phases=[0.5,0.5]", "trainer.max_update=6"]
    task = build_task(battery.configure(moons, tmp_path, case, *rates))
    per_update = task.needs(0)["train"]

    def share(split: str, number: int) -> float:
        stream = task.build_streams(split)[split].at_update(number // per_update)
        (batch,) = stream.micro_batches(number, Shard())
        return float((batch.targets >= 0).sum() / (batch.tokens > 0).sum())

    first, second = (
        np.mean([share("train", number) for number in range(begin, begin + 3 * per_update)])
        for begin in (0, 3 * per_update)
    )
    assert 2.5 < first / second < 3.5
    assert share("valid", 0) < 0.2


def test_a_budget_counts_the_mean_rate(moons: Path, tmp_path: Path) -> None:
    """An update at the first rate costs a third more than one at the last."""
    rows = ["task.sample_break_mode=none", "task.tokens_per_sample=34", "model.encoder_layers=1"]
    costs = {}
    for name, more in {
        "mean": ["task.mask_prob=0.375"],
        "first": ["task.mask_prob=0.5"],
        "falling": ["task.mask_rates=[0.5,0.25]"],
        "phases": ["task.mask_rates=[0.5,0.25]", "task.mask_phases=[0.5,0.5]"],
    }.items():
        config = battery.configure(moons, tmp_path, ("masked_lm", 0), *rows, *more)
        costs[name] = estimate_price(config).flops
    assert costs["mean"] == costs["falling"] == costs["phases"] < 0.9 * costs["first"]


def test_energies_need_one_rate(moons: Path, tmp_path: Path) -> None:
    case, rates = ("electric_nce", 0), "task.mask_rates=[0.3,0.1]"
    with pytest.raises(UsageError, match="exact_counts=true"):
        build_task(battery.configure(moons, tmp_path, case, rates))
    build_task(battery.configure(moons, tmp_path, case, rates, "criterion.exact_counts=true"))
