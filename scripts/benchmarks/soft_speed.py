"""Soft labels at NLP size (6 layers, width 256): a micro-step in units of masked-LM steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlm_speed import LENGTH, bert_step
from timing import Figure, Step, Variant, cost, paired
from training import build, first_batches, made_up_corpus, train

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.methods.meta_pseudo_label.episodes import UnlabelledBatch

VOCAB, LAYERS = 30000, 6
TARGETS = {"exact": 3.5, "finite_difference": 2.3}


def soft_update(folder: Path, rows: int, hypergradient: str, labelled: bool) -> Step:
    """Make soft-label updates of one micro-step.

    Support and query rows are masked text or, with `labelled`, rows with a target at every
    position; in training each kind is half of the draws.
    """
    (batch,) = first_batches(folder, ["task=masked_lm", f"task.batch_size={rows}"], 1)
    overrides = [
        "task=meta_pseudo_label",
        "task.labelled=[any]",
        "task.batches_per_update=1",
        f"task.batch_size={rows}",
        "criterion=meta_pseudo_label_soft",
        f"criterion.hypergradient={hypergradient}",
        f"model.encoder_layers={LAYERS}",
        "model.attention_dropout=0.1",
    ]
    run = build(folder, overrides)
    run.model.train()
    batches = {name: [[micro_step(batch, labelled and name != "unlabelled")]] for name in STREAMS}
    update = 0

    def step() -> dict[str, Any]:
        nonlocal update
        counted = run.flops.total
        logs = train(run, update, batches)
        update += 1
        flops = run.flops.total - counted
        return {"amount": 1, "loss": float(logs["teacher_mlm"]), "flops": flops}

    return step


STREAMS = ("unlabelled", "support", "query")


def micro_step(batch: TokenBatch, labelled: bool) -> UnlabelledBatch:
    """Return masked rows in the form of the task, with a leading axis of micro-steps."""
    rows = len(batch.tokens)
    positions, targets = batch.positions[None], batch.targets[None]
    if labelled:
        positions = torch.arange(LENGTH).expand(1, rows, -1).clone()
        targets = torch.full((1, rows, LENGTH), 2)
    sizes = {
        "targets": (targets >= 0).sum((1, 2)),
        "tokens": torch.tensor([rows * LENGTH]),
        "rows": torch.tensor([rows]),
    }
    return UnlabelledBatch(
        tokens=batch.tokens[None],
        original=batch.tokens[None],  # the masked text does not matter for speed
        positions=positions,
        targets=targets,
        sizes=sizes,
        rows=np.arange(rows)[None],
    )


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the cost of exact and finite-difference micro-steps."""
    rows = 4 if quick else 16
    shape = f"6 layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    folder = made_up_corpus(folder / "soft", VOCAB, 1000 * (LENGTH - 2))
    sizes = {"rows": rows, "vocab": VOCAB, "layers": LAYERS}
    bert = Variant(bert_step, {"folder": folder} | sizes)
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
            work = done[kind].rounds[0]["flops"] / done["bert"].rounds[0]["flops"]
            note = f"{shape}; support and query: {what}; {work:.1f} times the FLOPs; {peak}"
            name = f"soft_{kind}{suffix}"
            yield cost(name, done[kind], done["bert"], "s/step", target, note)
