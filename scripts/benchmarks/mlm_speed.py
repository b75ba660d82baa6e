"""Masked LM, 12 layers of width 256, against BertForMaskedLM: time, memory and FLOPs of a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timing import Figure, Step, Variant, memory, paired, speed
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from training import first_batches, made_up_corpus, updates

# Ours also imports it, so that peak memory only differs by the models.
from transformers import BertConfig, BertForMaskedLM

from metaseq_lm.runs.flops import FlopMeter

VOCAB, LENGTH, LAYERS = 30522, 128, 12
LR = 1e-4
OVERRIDES = ["task=masked_lm", "model=bert_small", "schedule=constant", f"optimizer.lr={LR}"]
OVERRIDES += ["optimizer.betas=[0.9,0.999]", "optimizer.eps=1e-8"]
OVERRIDES += ["model.token_embed_dim=0", "model.max_positions=128"]


def labels_of(batch: dict[str, Any]) -> Tensor:
    """Return the targets in transformers' form: one per position, -100 for none."""
    labels = torch.full_like(batch.tokens, -100)
    row, column = torch.nonzero(batch.targets >= 0, as_tuple=True)
    labels[row, batch.positions[row, column]] = batch.targets[row, column]
    return labels


def our_step(folder: Path, rows: int) -> Step:
    """Make updates of our masked_lm task, data included."""
    return updates(folder, OVERRIDES, rows)


def bert_step(folder: Path, rows: int, vocab: int = VOCAB, layers: int = LAYERS) -> Step:
    """Train transformers' model of the same size the usual way, on preloaded batches."""
    loaded = first_batches(folder, [*OVERRIDES, f"task.batch_size={rows}"], 8)
    prepared = [(batch.tokens, labels_of(batch)) for batch in loaded]
    sizes = BertConfig(
        vocab_size=vocab,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = BertForMaskedLM(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    count = 0
    meter = FlopMeter()

    def step() -> dict[str, Any]:
        nonlocal count
        tokens, labels = prepared[count % len(prepared)]
        count += 1
        counted = meter.total
        with meter.count(tokens):
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"amount": 1, "loss": loss.item(), "flops": meter.total - counted}

    return step


def matmul(size: int = 2048) -> Step:
    """Multiply square matrices, for the rate of the machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)

    def step() -> dict[str, Any]:
        for _ in range(5):
            torch.mm(a, b, out=out)
        return {"amount": 5 * 2 * size**3}

    return step


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield step time, peak memory and FLOP rate."""
    rows = 8 if quick else 32
    folder = made_up_corpus(folder / "mlm", VOCAB, 400 * (LENGTH - 2) * 4)
    options = {"folder": folder, "rows": rows}
    variants = {
        "ours": Variant(our_step, options),
        "bert": Variant(bert_step, options),
        "matmul": Variant(matmul),
    }
    done = paired(variants, rounds=5 if quick else 3, warm_up=3)
    ours, bert, peak = done["ours"], done["bert"], done["matmul"]
    shape = f"12 layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    first, last = (f"{d.rounds[-1]['loss']:.2f}" for d in (ours, bert))
    note = f"{shape}; loss of the last step: {first} and {last}"
    yield speed("mlm_step", ours, bert, "steps/s", 2.0, note)
    yield memory("mlm_memory", ours, bert, 0.65, f"{shape}; of the whole process")
    rates = [r["flops"] / r["cpu"] / 1e9 for r in ours.rounds]
    limits = [r / 1e9 for r in peak.rates()]
    shares = [a / b for a, b in zip(rates, limits)]
    yield Figure(
        "mlm_flop_rate",
        statistics.median(rates),
        statistics.median(limits),
        statistics.median(shares),
        "GFLOP/s",
        len(shares),
        (min(shares), max(shares)),
        None,
        note=f"{shape}; reference: a matrix product of size 2048",
    )
