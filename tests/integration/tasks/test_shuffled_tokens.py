"""task.shuffle_tokens: every task that reads the rows of a corpus shuffles those of training."""

from dataclasses import fields
from typing import Any

import battery
import numpy as np
import pytest

from metaseq_lm import plugins
from metaseq_lm.core.registry import TASKS
from metaseq_lm.data.streams import Shard
from metaseq_lm.training.parts import build_task

FIRST = """
    electra_rtd span_boundary span_corruption prefix_lm masked_next_token masked_diffusion
    mixture meta_pseudo_label_soft next_latent joint_embedding
""".split()
CASES = [
    *(("masked_lm", i) for i in range(4)),
    *(("bert_pretraining", i) for i in range(2)),
    *(("causal_lm", i) for i in range(2)),
    *(("language_modeling", i) for i in (0, 2)),
    *((name, 0) for name in FIRST),
]


def test_every_task_with_the_option_has_a_case():
    plugins.load_all(str(battery.ROOT / "user_dir"))
    with_option = set()
    for name, entry in TASKS.entries.items():
        if entry.dataclass and "shuffle_tokens" in {item.name for item in fields(entry.dataclass)}:
            with_option.add(f"task={name}")
    assert {battery.task_of(case) for case in CASES} == with_option


def original(batch: Any) -> np.ndarray:
    """Return the rows of a batch before tokens were hidden, (rows, S)."""
    if hasattr(batch, "original"):
        tokens = batch.original
    elif hasattr(batch, "sources"):
        # Of diffusion a state predicts its own token, of the others the next one.
        predicted = batch.sources + (batch.weights is None)
        known = batch.targets >= 0
        tokens = batch.tokens.clone()
        tokens.flatten()[predicted[known]] = batch.targets[known]
    elif hasattr(batch, "masked") or hasattr(batch, "decoder_tokens") or batch.targets is None:
        tokens = batch.tokens
    else:
        counted = batch.targets >= 0
        at_row = np.nonzero(counted.numpy())[0]
        tokens = batch.tokens.clone()
        tokens[at_row, batch.positions[counted]] = batch.targets[counted]
    return tokens.flatten(0, -2).numpy()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_training_rows_are_shuffled_and_others_not(case, moons, tmp_path):
    plugins.load_all(str(battery.ROOT / "user_dir"))
    rows: dict[str, list[np.ndarray]] = {}
    for value in ("false", "true"):
        config = battery.configure(moons, tmp_path, case, f"task.shuffle_tokens={value}")
        task = build_task(config)
        for split in ("train", "valid"):
            streams = task.build_streams(split)
            stream = streams.get("unlabelled") or next(iter(streams.values()))
            batch = stream.micro_batches(0, Shard())[0]  # of a mixture the first objective's
            rows.setdefault(split, []).append(original(getattr(batch, "batch", batch)))
    ordered, shuffled = rows["train"]
    assert (np.sort(ordered, 1) == np.sort(shuffled, 1)).all()
    assert (ordered != shuffled).any(1).mean() > 0.8  # a row of four tokens may keep its order
    assert (rows["valid"][0] == rows["valid"][1]).all()
