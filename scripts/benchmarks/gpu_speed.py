"""Updates on a GPU by the clock: tokens/s, and their share of the card's rate.

The card's rate is measured in the same run: the FLOPs per second of a large bf16 matrix product.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Figure
from training import build, fetched, real_tokens, train

TARGET = 0.5  # share of the rate of a matrix product


@dataclass
class Round:
    """Consecutive updates: their tokens, counted FLOPs and seconds by the clock."""

    tokens: int
    flops: float
    seconds: float


def synchronise(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(device: str, size: int, rounds: int, products: int = 20) -> float:
    """Return the FLOPs per second of a square bf16 matrix product, the best of `rounds`."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(rounds + 1):  # the first one warms up and is seldom the best
        synchronise(device)
        began = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return products * 2 * size**3 / best


def copy_rate(device: str, size: int, rounds: int) -> float:
    """Return the bytes per second, read and written, of copies of `size` bytes, the best."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(rounds + 1):
        synchronise(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def launch_seconds(device: str, operations: int) -> float:
    """Return the host's seconds for a small operation, without waiting for the device."""
    x = torch.zeros(8, device=device)
    for _ in range(2):  # the first round warms up
        synchronise(device)
        began = time.perf_counter()
        for _ in range(operations):
            x.add_(1.0)
        seconds = (time.perf_counter() - began) / operations
    synchronise(device)
    return seconds


def measured(folder: Path, overrides: list[str], rounds: int, updates: int) -> list[Round]:
    """Train like the trainer, data included, and return `rounds` of `updates` updates each.

    Two earlier updates are not measured; they count the FLOPs of shapes.
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
    """Return tokens/s, tokens/s at `peak` FLOPs per second, and their ratio."""
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
