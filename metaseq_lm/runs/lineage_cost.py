"""Cumulative cost (FLOPs, seconds, updates) of a run's ancestors.

Ancestors are the run that it started from, its teachers, and what those came from. Costs are kept
by the folder of the run (or the file of outputs) that they were spent on, so that a shared ancestor
counts once. A cost that is not on record makes the total unknown, not smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import read_results

KEYS = ("seconds", "flops", "updates")
# By resolved folder: seconds, FLOPs and updates. None: not all of it is on record.
Costs = dict[str, dict[str, float]] | None


def ancestors(source: str, prefer: str = "last") -> Costs:
    """Return the cost of the run `source` (a checkpoint or run folder) and of all its ancestors."""
    path = manifests.resolve(source, prefer)
    folder = path.parent.parent
    results = read_results(folder)
    if results is None:
        return None
    cost = {str(folder): {key: results[key] for key in KEYS}}
    pretraining = results["pretraining"]
    return union([pretraining["runs"], cost]) if pretraining else cost


def union(parts: Iterable[Costs]) -> Costs:
    """Return all costs, those of one folder once; None if one of the parts is not known."""
    merged: dict[str, dict[str, float]] = {}
    for part in parts:
        if part is None:
            return None
        merged |= part
    return merged


def checked(costs: Any) -> Costs:
    """Return costs that were read from a file; ValueError if they are malformed."""
    rows = {} if costs is None else costs
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ValueError("its costs are not those of folders")
    for row in rows.values():
        if not all(isinstance(row.get(key), (int, float)) for key in KEYS):
            raise ValueError(f"its costs are not {', '.join(KEYS)}")
    return None if costs is None else rows


def total(costs: Costs, source: str | None) -> dict[str, Any] | None:
    """Return results.json's "pretraining": sums, `source` (init_from) and costs by run.

    None if the run has no ancestors; numbers that are not known are None.
    """
    if costs == {}:
        return None
    sums = {
        key: None if costs is None else sum(cost[key] for cost in costs.values()) for key in KEYS
    }
    return sums | {"run": source, "runs": costs}
