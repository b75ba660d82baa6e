"""Torch's operations and CPU time in an update of Two Moons, compared with a plain loop.

python scripts/benchmarks/moons_profile.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import moons_speed
import torch
from torch.profiler import ProfilerActivity, profile
from training import build, fetched

UPDATES = 20


def main() -> None:
    """Print a line for each objective and variant."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = moons_speed.make_data(Path(folder))
        print("objective  variant  operations  CPU ms  us an operation")
        for config in ("hard", "soft"):
            for name, (operations, seconds) in measured(contestants(data, config)).items():
                each = 1e6 * seconds / operations
                print(f"{config:9}  {name:7}  {operations:10}  {1e3 * seconds:6.1f}  {each:15.2f}")


def contestants(data: Path, config: str) -> dict[str, Callable[[int], None]]:
    """Return functions that make update n, ours and the plain loop's, on loaded batches."""
    run = build(data, [], moons_speed.CONFIG, config)
    source = fetched(run)
    updates = [next(source) for _ in range(UPDATES)]
    run.model.train()
    reference = moons_speed.plain_loop(build(data, [], moons_speed.CONFIG, config))
    micro_steps = [moons_speed.micro_steps(batches) for _, batches in updates]

    def ours(number: int) -> None:
        update, batches = updates[number]
        run.engine.begin(update)
        run.task.update(run.engine, run.model, batches)

    def theirs(number: int) -> None:
        getattr(reference, f"update_{config}")(micro_steps[number])

    return {"ours": ours, "plain": theirs}


def measured(updates: dict[str, Callable[[int], None]]) -> dict[str, tuple[int, float]]:
    """Return median operations and CPU seconds of an update, with contestants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(UPDATES - 1):
        for name, update in updates.items():
            began = time.process_time()
            update(number)
            times[name].append(time.process_time() - began)
    lines = {}
    for name, update in updates.items():
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            update(UPDATES - 1)
        operations = sum(e.count for e in trace.key_averages() if e.key.startswith("aten::"))
        lines[name] = operations, statistics.median(times[name][4:])
    return lines


if __name__ == "__main__":
    main()
