"""Results of items in nested groups, such as the paradigms of a phenomenon."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.evaluation.suites import OVERALL, GroupMetrics, References, Results

SEPARATOR = "/"  # between the names of a group and of a group inside it
MACRO = "_macro"
# Prefix of metrics' names, and suffix of numbers of ties.
STRICT, SOFT, TIES = "strict_", "soft_", "ties"

# Groups of an item, the widest first.
Groups = tuple[str, ...]


def group_value(text: str) -> str:
    """Return the value of a field as a group name: BLiMP's "syntax/semantics" with "_"."""
    return text.replace(SEPARATOR, "_")


def names_of(groups: Groups) -> list[str]:
    """Return the names of nested groups: "binding", "binding/principle_A_case_1"."""
    return [SEPARATOR.join(groups[: depth + 1]) for depth in range(len(groups))]


def check_groups(items: Sequence[Groups], scored: Iterable[Groups]) -> None:
    """Raise UsageError if a group has no item that was scored."""
    counts = Counter(chain.from_iterable(map(names_of, items)))
    empty = counts.keys() - set(chain.from_iterable(map(names_of, scored)))
    for name in sorted(empty):
        raise UsageError(
            f"group '{name}' is empty: all of its items ({counts[name]:,}) are longer than the "
            "rows of this run; --too-long cut scores a part of them, or leave them out of the data "
            "or train with longer rows (task.tokens_per_sample)"
        )


def results_by_group(
    items: Sequence[Groups],
    values: np.ndarray,
    metrics: Callable[[np.ndarray], dict[str, float]],
    *macro: str,
    of_widest: bool = False,
) -> Results:
    """Return the metrics of all items and of each group.

    Groups that contain groups, and all items, also have metrics with the suffix MACRO: the
    unweighted mean over the narrowest groups in them, however many items these have. With
    `of_widest` only all items have them, and the means are over the widest groups.

    Args:
        items: The groups of each item.
        values: The values from which metrics are computed; the first axis is over items.
        metrics: Returns the metrics of some entries, at least one.
        macro: The metrics that are also averaged over groups.
        of_widest: Whether to average over the widest groups.
    """
    members: dict[str, list[int]] = {}
    for number, groups in enumerate(items):
        for name in names_of(groups):
            members.setdefault(name, []).append(number)
    results = {OVERALL: GroupMetrics(len(items), metrics(values))}
    for name in sorted(members):
        results[name] = GroupMetrics(len(members[name]), metrics(values[members[name]]))
    averaged: dict[str, set[str]] = {}
    for groups in set(items):
        *wider, last = names_of(groups[:1] if of_widest else groups)
        for name in (OVERALL, *wider):
            averaged.setdefault(name, set()).add(last)
    for name, inner in averaged.items():
        for metric in macro:
            mean = np.mean([results[group].metrics[metric] for group in sorted(inner)])
            results[name].metrics[metric + MACRO] = float(mean)
    return results


def chance_references(results: Results) -> References:
    """Return the results of guessing as references of metrics, without undefined values.

    A guess has no ties: strict accuracies and numbers of ties are left out.
    """
    references: References = {}
    for group, content in results.items():
        for metric, value in content.metrics.items():
            if not (metric.startswith(STRICT) or metric.endswith(TIES) or math.isnan(value)):
                references.setdefault(group, {})[metric] = {"chance": value}
    return references
