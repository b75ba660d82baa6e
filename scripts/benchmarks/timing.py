"""Paired timing: variants in separate processes, stepped in turn, compared round by round."""

from __future__ import annotations

import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

THREADS = 1
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")

# A step does some work and returns {"amount": units of work, ...}; other entries are kept.
Step = Callable[[], dict[str, Any]]


@dataclass
class Variant:
    """How to make a step: `make(**options)` is called in the variant's own process."""

    make: Callable[..., Step]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """The rounds of one variant: results of its steps with "cpu" and "wall" seconds."""

    rounds: list[dict[str, Any]]
    peak: int  # peak resident bytes of the whole process

    def rates(self, clock: str = "cpu") -> list[float]:
        """Return units of work per second of each round."""
        return [r["amount"] / r[clock] for r in self.rounds]


@dataclass
class Figure:
    """One line of the report: `ratio` is ours against the reference."""

    name: str
    ours: float
    reference: float
    ratio: float
    unit: str
    rounds: int
    spread: tuple[float, float]  # smallest and largest ratio of a round
    target: float | None
    lower_is_better: bool = False
    wall_ratio: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.lower_is_better else self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        """Return the fields and further conditions of the figure."""
        return asdict(self) | {
            "reached": self.reached,
            "threads": THREADS,
            "versions": versions(),
            "machine": f"{platform.system()} {platform.machine()}",
        }


def versions() -> dict[str, str]:
    """Return the versions of the measured software."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would start from the parent's size on Linux.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _serve(pipe: Connection, variant: Variant, warm_up: int) -> None:
    import torch

    torch.set_num_threads(THREADS)
    step = variant.make(**variant.options)
    for _ in range(warm_up):
        step()
    pipe.send("ready")
    while pipe.recv() == "step":
        cpu, wall = time.process_time(), time.perf_counter()
        result = step()
        seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        pipe.send(result | seconds)
    pipe.send(peak_memory())


def paired(variants: dict[str, Variant], rounds: int, warm_up: int = 1) -> dict[str, Measured]:
    """Step the variants in turn `rounds` times; only one works at a time."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, variant in variants.items():
        pipes[name], other = context.Pipe()
        process = context.Process(target=_serve, args=(other, variant, warm_up), daemon=True)
        process.start()
        other.close()  # so that the death of a variant is an EOFError here
        processes.append(process)
        assert pipes[name].recv() == "ready"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants)[number % len(variants) :] + list(variants)[: number % len(variants)]
        for name in order:
            pipes[name].send("step")
            results[name].append(pipes[name].recv())
    measured = {}
    for name, pipe in pipes.items():
        pipe.send("stop")
        measured[name] = Measured(results[name], pipe.recv())
    for process in processes:
        process.join()
    return measured


def speed(
    name: str,
    ours: Measured,
    reference: Measured,
    unit: str,
    target: float | None,
    note: str = "",
) -> Figure:
    """Return how many times faster ours is in CPU seconds."""
    ratios = [a / b for a, b in zip(ours.rates(), reference.rates())]
    wall = [a / b for a, b in zip(ours.rates("wall"), reference.rates("wall"))]
    return Figure(
        name,
        statistics.median(ours.rates()),
        statistics.median(reference.rates()),
        statistics.median(ratios),
        unit,
        len(ratios),
        (min(ratios), max(ratios)),
        target,
        wall_ratio=statistics.median(wall),
        note=note,
    )


def cost(
    name: str,
    ours: Measured,
    reference: Measured,
    unit: str,
    target: float | None,
    note: str = "",
) -> Figure:
    """Return our time over the reference's; the values are seconds per unit."""
    fast = speed(name, ours, reference, unit, target, note)
    assert fast.wall_ratio is not None
    fast.ours, fast.reference = 1 / fast.ours, 1 / fast.reference
    fast.ratio, fast.wall_ratio = 1 / fast.ratio, 1 / fast.wall_ratio
    fast.spread = (1 / fast.spread[1], 1 / fast.spread[0])
    fast.lower_is_better = True
    return fast


def memory(
    name: str, ours: Measured, reference: Measured, target: float | None, note: str = ""
) -> Figure:
    """Return the ratio of peak resident memory."""
    ratio = ours.peak / reference.peak
    megabytes = (ours.peak / 1e6, reference.peak / 1e6)
    spread = (ratio, ratio)
    return Figure(name, *megabytes, ratio, "MB", 1, spread, target, lower_is_better=True, note=note)
