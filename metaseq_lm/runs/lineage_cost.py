"""Cumulative cost (FLOPs, seconds, updates, words) of a run's ancestors.

Ancestors are the run that it started from, its teachers, and their ancestors. Costs are stored by
the folder of the run (or the file of outputs) that they were spent on, so that a shared ancestor
counts once. An unrecorded cost makes the total unknown, not smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import read_results

_KEYS = ("seconds", "flops", "updates")
WORDS = "words"  # earlier versions did not count them
# By resolved folder: seconds, FLOPs, updates, words. None: some costs are not on record.
Costs = dict[str, dict[str, float]] | None


def cost_of_ancestors(source: str, prefer: str = "last") -> Costs:
    """Return the cost of the run `source` (a checkpoint or run folder) and of all its ancestors."""
    path = manifests.resolve(source, prefer)
    folder = path.parent.parent
    results = read_results(folder)
    if results is None:
        return None
    cost = {str(folder): {key: results[key] for key in _KEYS}}
    if isinstance(words := results.get("words_seen"), int):
        cost[str(folder)][WORDS] = words
    pretraining = results["pretraining"]
    return merge_costs([pretraining["runs"], cost]) if pretraining else cost


def merge_costs(parts: Iterable[Costs]) -> Costs:
    """Return all costs, each folder once; None if one of the parts is unknown."""
    merged: dict[str, dict[str, float]] = {}
    for part in parts:
        if part is None:
            return None
        merged |= part
    return merged


def check_costs(costs: Any) -> Costs:
    """Return costs that were read from a file; ValueError if they are malformed."""
    rows = {} if costs is None else costs
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ValueError("its costs are not those of folders")
    for row in rows.values():
        numbers = [row.get(key) for key in _KEYS] + [row.get(WORDS, 0)]
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise ValueError(f"its costs are not {', '.join(_KEYS)}")
    return None if costs is None else rows


def total_cost(costs: Costs, source: str | None) -> dict[str, Any] | None:
    """Return results.json's "pretraining": sums, `source` (init_from) and costs by run.

    None if the run has no ancestors; unknown numbers are None.
    """
    if costs == {}:
        return None
    rows = [] if costs is None else list(costs.values())
    sums: dict[str, Any] = {}
    for key in (*_KEYS, WORDS):
        is_known = costs is not None and all(key in row for row in rows)
        sums[key] = sum(row[key] for row in rows) if is_known else None
    return sums | {"run": source, "runs": costs}
