"""Masked LM and ELECTRA of base size, and ModernBERT's encoder, in bf16 on a GPU: tokens/s, and the
share of what it can give.

What it can give is measured in the same run: the FLOPs per second of a large bf16 matrix product.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Figure
from training import build, fetched, made_up_corpus, real_tokens, train

VOCAB = 30522
TARGET = 0.5  # of the rate of a matrix product
ON_GPU = ["engine.device=cuda", "engine.precision=bf16"]
# The number of targets is the same in every batch: FLOPs are counted once for each shape.
# Variants of each family: with the paper's dropout, without any, and without in a compiled step.
# What takes longest to start comes last, so that a run that is cut has printed the rest.
VARIANTS = {
    "": [],
    "_no_dropout": ["model.dropout=0", "model.attention_dropout=0"],
    "_compiled": ["model.dropout=0", "model.attention_dropout=0", "engine.compile=true"],
}
FAMILIES = {
    "gpu_mlm": ["task=masked_lm", "model=bert_base", "task.mask_rounding=nearest"],
    "gpu_electra": ["task=electra", "criterion=electra_rtd", "model=electra_base"],
    "gpu_modern": ["task=masked_lm", "model=modern_base", "task.mask_rounding=nearest"],
}


@dataclass
class Round:
    """Some updates one after another: their tokens, counted FLOPs and seconds by the clock."""

    tokens: int
    flops: float
    seconds: float


def synchronise(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(device: str, size: int, rounds: int, products: int = 20) -> float:
    """Return the FLOPs per second of a square bf16 matrix product, the best of `rounds`."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(rounds + 1):  # the first one warms up; the best is seldom that
        synchronise(device)
        began = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return products * 2 * size**3 / best


def measured(folder: Path, overrides: list[str], rounds: int, updates: int) -> list[Round]:
    """Train as the trainer does, data included, and return `rounds` of so many updates.

    Two updates before them are not measured; their shapes' FLOPs are counted there.
    """
    run = build(folder, overrides)
    run.model.train()
    source = fetched(run)
    measurements = []
    for number in range(rounds + 1):
        synchronise(run.engine.device.type)
        counted, tokens, began = run.flops.total, 0, time.perf_counter()
        for _ in range(updates if number else 2):
            update, batches = next(source)
            train(run, update, batches)
            every = (micro for stream in batches.values() for batch in stream for micro in batch)
            tokens += sum(real_tokens(micro) for micro in every)
        synchronise(run.engine.device.type)
        seconds = time.perf_counter() - began
        measurements.append(Round(int(tokens), run.flops.total - counted, seconds))
    return measurements[1:]


def share_of(name: str, rounds: list[Round], peak: float, note: str) -> Figure:
    """Return tokens/s beside those at `peak` FLOPs per second, and their ratio."""
    speeds = [r.tokens / r.seconds for r in rounds]
    limits = [peak * r.tokens / r.flops for r in rounds]
    shares = [r.flops / r.seconds / peak for r in rounds]
    flops = statistics.median(r.flops / r.seconds for r in rounds)
    return Figure(
        name,
        statistics.median(speeds),
        statistics.median(limits),
        statistics.median(shares),
        "tokens/s",
        len(rounds),
        (min(shares), max(shares)),
        TARGET,
        wall_ratio=statistics.median(shares),
        note=f"{note}; {flops / 1e12:.4g} of {peak / 1e12:.4g} TFLOP/s of a bf16 matrix product",
    )


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the share of each family; nothing, with a message, without a GPU."""
    if not torch.cuda.is_available():
        print("gpu: no CUDA device, skipped", file=sys.stderr, flush=True)
        return
    rows, length = (8, 128) if quick else (32, 512)
    rounds, updates = (3, 5) if quick else (5, 20)
    folder = made_up_corpus(folder / "gpu", VOCAB, (length - 2) * 4000)
    peak = matmul_rate("cuda", 4096 if quick else 8192, rounds)
    sizes = [f"task.batch_size={rows}", f"task.tokens_per_sample={length}"]
    note = f"{torch.cuda.get_device_name()}, {rows} rows of {length}, vocabulary {VOCAB}"
    for variant, settings in VARIANTS.items():
        for family, overrides in FAMILIES.items():
            torch.cuda.reset_peak_memory_stats()
            run = measured(folder, [*overrides, *sizes, *settings, *ON_GPU], rounds, updates)
            memory = torch.cuda.max_memory_allocated() / 1e9
            yield share_of(family + variant, run, peak, f"{note}, peak {memory:.3g} GB")
            torch.cuda.empty_cache()
