"""Soft labels at NLP size (6 layers, width 256): what a micro-step costs in plain masked-LM steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from metaseq_lm import plugins
from metaseq_lm.config import load_config
from metaseq_lm.data.vocabulary import Vocabulary, special_symbols
from metaseq_lm.engine import Engine
from metaseq_lm.registry import TASKS
from metaseq_lm.run import build_model
from mlm_speed import LENGTH, bert_step, masked_rows
from timing import Figure, Step, Variant, cost, paired

VOCAB, LAYERS = 30000, 6
TARGETS = {"exact": 3.5, "finite_difference": 2.3}


def soft_update(folder: Path, rows: int, hypergradient: str, labelled: bool) -> Step:
    """Make soft-label updates of one micro-step.

    Support and query rows are masked text, or with `labelled` rows where every position has a target;
    in training each is half of the draws.
    """
    torch.manual_seed(1)
    specials = special_symbols()
    words = [f"w{i}" for i in range(VOCAB - len(specials))]
    Vocabulary([*specials, *words]).save(folder / "dict.txt")
    plugins.load_all()
    config = load_config(
        [
            f"data={folder}",
            "task=meta_pseudo_label",
            "task.labelled=[any]",
            "task.batches_per_update=1",
            f"task.batch_size={rows}",
            "criterion=meta_pseudo_label_soft",
            f"criterion.hypergradient={hypergradient}",
            f"model.encoder_layers={LAYERS}",
        ]
    )
    task = TASKS.build(config.task._name, config)
    model = build_model(task, config, "cpu").train()
    engine = Engine(task.build_optimizers(model))
    batches = {name: [[micro_step(rows, labelled and name != "unlabelled")]] for name in STREAMS}
    update = 0

    def step() -> dict[str, Any]:
        nonlocal update
        engine.begin(update)
        update += 1
        logs = task.update(engine, model, batches)
        return {"amount": 1, "loss": float(logs["teacher_mlm"])}

    return step


STREAMS = ("unlabelled", "support", "query")


def micro_step(rows: int, labelled: bool) -> dict[str, Any]:
    """Return rows with the leading axis of micro-steps that the task works on."""
    batch = masked_rows(rows, VOCAB)
    if labelled:
        batch["positions"] = torch.arange(LENGTH).expand(rows, -1).clone()
        batch["targets"] = torch.full((rows, LENGTH), 2)
    every = {name: batch[name][None] for name in ("original", "tokens", "positions", "targets")}
    sizes = {
        "targets": (every["targets"] >= 0).sum((1, 2)),
        "tokens": torch.tensor([rows * LENGTH]),
        "rows": torch.tensor([rows]),
    }
    return every | {"padding": None, "sizes": sizes, "rows": np.arange(rows)[None]}


def figures(folder: Path, given: Optional[Path], quick: bool) -> Iterator[Figure]:
    """Yield the cost of exact and finite-difference micro-steps."""
    rows = 4 if quick else 16
    shape = f"6 layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    bert = Variant(bert_step, {"rows": rows, "vocab": VOCAB, "layers": LAYERS})
    for labelled in (False,) if quick else (False, True):
        what = "labelled rows" if labelled else "masked text"
        suffix = "_labelled" if labelled else ""
        options = {"folder": folder, "rows": rows, "labelled": labelled}
        variants = {
            kind: Variant(soft_update, options | {"hypergradient": kind}) for kind in TARGETS
        }
        done = paired(variants | {"bert": bert}, rounds=3 if quick else 2)
        for kind, target in TARGETS.items():
            peak = f"peak {done[kind].peak / 1e6:.0f} MB against {done['bert'].peak / 1e6:.0f}"
            note = f"{shape}; support and query: {what}; {peak}"
            name = f"soft_{kind}{suffix}"
            yield cost(name, done[kind], done["bert"], "s/step", target, note)
