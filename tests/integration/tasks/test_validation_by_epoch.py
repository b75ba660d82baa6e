"""Validation after each epoch of fine-tuning, and the table of an example made of it."""

import json
import subprocess
import sys
from pathlib import Path

import battery
import pytest

from metaseq_lm.core.loading import load_config
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.run import TrainingRun

EPOCHS = Path(__file__).resolve().parents[3] / "examples/meta_pretrain/epochs.py"
TASK = ["task=sentence_prediction", "criterion=sentence_prediction", "model.segments=2"]
SET = ["task.labelled=pairs", "task.batch_size=8", "task.tokens_per_sample=12"]


def values(data: Path, *more: str) -> tuple[int, int]:
    config = load_config([*battery.TINY, *TASK, *SET, f"data={data}", "save_dir=x", *more])
    trainer = prepare_config(config).trainer
    return trainer.max_update, trainer.validate_interval_updates


@pytest.mark.parametrize(
    "more, wanted",
    [
        (["task.epochs=4", "task.validate_epochs=1"], (12, 3)),  # 20 examples in batches of 8
        (["task.epochs=4", "task.validate_epochs=0.4"], (12, 1)),
        (["task.epochs=4", "task.validate_epochs=0.1"], (12, 1)),
        (["task.epochs=4"], (12, 500)),
        (["task.validate_epochs=2", "trainer.max_update=7"], (7, 6)),
        (["trainer.max_update=7"], (7, 500)),
        (["task.epochs=4", "task.train_size=9"], (8, 500)),
    ],
)
def test_epochs_become_updates(more: list[str], wanted: tuple[int, int], pairs: Path) -> None:
    assert values(pairs, *more) == wanted


def test_each_epoch_is_validated_and_comes_into_the_table(pairs: Path, tmp_path: Path) -> None:
    """Mean and standard deviation over two seeds, worked out by hand from the logs."""
    found: list[list[float]] = []
    for seed in (1, 2):
        place = tmp_path / f"seed{seed}"
        more = [f"data={pairs}", f"save_dir={place}", f"seed={seed}", "label=k5"]
        epochs = ["task.epochs=3", "task.validate_epochs=1", "optimizer.lr=0.02"]
        TrainingRun(load_config([*battery.TINY, *TASK, *SET, *more, *epochs])).train()
        lines = [json.loads(row) for row in (place / "log.jsonl").read_text().splitlines()]
        valid = [line for line in lines if line["kind"] == "valid"]
        assert [line["update"] for line in valid] == [3, 6, 9]
        found.append([100 * line["accuracy"] for line in valid])
    command = [sys.executable, str(EPOCHS), str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "epoch 3 |" in shown and "epoch 4" not in shown
    cells = [f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f}" for a, b in zip(*found)]
    assert f"| k5 | 2 | {' | '.join(cells)} |" in shown
