"""What was spent before a run: on the run that it started from, on its teachers, on what made those.

Costs are kept by the folder of the run (or the file of outputs) that they were spent on, so that
what two of them share counts once. What is not on record makes the sum unknown, not smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.folder import read_results

KEYS = ("seconds", "flops", "updates")
# By resolved folder: seconds, FLOPs and updates. None: not all of it is on record.
Costs = Optional[dict[str, dict[str, float]]]


def behind(source: str, prefer: str = "last") -> Costs:
    """Return the cost of the run of `source` (a checkpoint or run) and of all that it came from."""
    place = checkpoint.resolve(source, prefer)
    folder = place.parent.parent
    results = read_results(folder)
    if results is None:
        return None
    own = {str(folder): {key: results[key] for key in KEYS}}
    before = results["pretraining"]
    if not before:
        return own
    if "runs" not in before:  # of an earlier version, which kept the sum only
        name = str(Path(before["run"]).resolve())
        return {name: {key: before[key] for key in KEYS}} | own
    return union([before["runs"], own])


def union(parts: Iterable[Costs]) -> Costs:
    """Return all costs, those of one folder once; None if one of the parts is not known."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def checked(costs: Any) -> Costs:
    """Return costs that were read from a file; ValueError if they are none."""
    rows = {} if costs is None else costs
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ValueError("its costs are not those of folders")
    for row in rows.values():
        if not all(isinstance(row.get(key), (int, float)) for key in KEYS):
            raise ValueError(f"its costs are not {', '.join(KEYS)}")
    return costs


def summed(costs: Costs, source: str | None) -> Optional[dict[str, Any]]:
    """Return the sums as results.json has them, with `source`, what the run started from, and "runs".

    None if there was nothing before the run; numbers that are not known are None.
    """
    if costs == {}:
        return None
    totals = {
        key: None if costs is None else sum(cost[key] for cost in costs.values()) for key in KEYS
    }
    return totals | {"run": source, "runs": costs}
