"""Errors of differences in addition to seeds: the choice of settings, and of test items.

The sd of choice is the sd of the expected score over draws of the tuning seeds (`sweeps.trials`).
Three seeds that agree by chance show none, so the error of a row is pooled over the rows of its
budget. It is enlarged by T / (T - 1) for T tuning seeds, because draws underestimate it.
docs/results/league.md has the simulation.

If runs recorded their right answers by block of items, the error of a difference comes from its
values in the blocks: rows that are right and wrong on the same items differ by less than two
samples would. Otherwise each accuracy has the binomial variance, as if each row had its own items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from metaseq_lm.evaluation.suites import SHARE
from metaseq_lm.league.plan import FEWEST
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import seed_scores
from metaseq_lm.reporting.stats import POWER, Error, Errors
from metaseq_lm.runs.suite_results import HITS, OVERALL

# The largest sd of choice of two settings, in sd of a tuning seed over the root of their number.
# Settings that differ by d are confused with P = Phi(-d / (sd sqrt(2 / T))): d sqrt(P (1 - P)).
WORST = 0.5438


def choice_error(sds: Sequence[float], seeds: int, sides: int) -> Error:
    """Return the variance that choices add to a difference.

    `sds` are the sd of choice of the rows of the budget, `seeds` the number of tuning seeds of
    each, `sides` the number of rows, out of the two in the difference, that were tuned. The
    variance has half of the degrees of freedom of the tuning seeds: if these agree by chance, a row
    shows no choice, so its sd is less informative than that of normal scores.
    """
    variance = sides * float(np.mean(np.square(sds))) * seeds / (seeds - 1)
    return Error(variance, len(sds) * (seeds - 1) / 2)


def tuning_seeds_needed(noise: float, effect: float, level: float, comparisons: int) -> int:
    """Return how many tuning seeds (at least FEWEST) keep an effect visible despite the choice.

    Visible means a power of POWER at `level` / `comparisons` with any number of final seeds, for
    settings that differ in the worst way, see WORST. `noise` is the sd of a score of one tuning
    seed.
    """
    from scipy.stats import norm

    quantiles = float(norm.isf(level / (2 * comparisons)) + norm.ppf(POWER))
    return max(FEWEST, 1 + math.ceil(2 * (quantiles * WORST * noise / effect) ** 2 - 1e-9))


_ACCURACY = "accuracy"


@dataclass(frozen=True, eq=False)
class Items:
    """The test items of a metric, or of a part of a mean, in the unit of the whole.

    Attributes:
        variance: Variance of the part, p (1 - p) / n for a share p of n items.
        blocks: The part in each block of items, (B,); empty if it is not recorded.
    """

    variance: float
    blocks: np.ndarray


def items_of(runs: Sequence[Run], metric: str, weight: float = 1.0) -> tuple[Items, ...] | None:
    """Return the items of a score, or of each part of a mean, times a weight; None if unknown.

    Only accuracies on all items of a suite, or of a group of items, are shares of items, and so is
    `share`, the part of what can be known beyond the word. Losses, and accuracies on rows that
    choose, are not. All seeds are scored with the same items, so their number does not matter.
    """
    if not runs:
        return None
    if parts := runs[0].means.get(metric, ()):
        known: list[Items] = []
        for part in parts:
            if (items := items_of(runs, part, weight / len(parts))) is None:
                return None
            known += items
        return tuple(known)
    group, _, name = metric.rpartition(".")
    counts = [run.metrics[f"{group}.n"] for run in runs if f"{group}.n" in run.metrics]
    if name == SHARE:
        name, known_beyond = _ACCURACY, _known_beyond_word(runs[0], f"{group}.{_ACCURACY}")
        weight = weight / known_beyond if known_beyond else 0.0
    scores = seed_scores(runs, f"{group}.{name}")
    if not (scores and counts and weight and name.endswith(_ACCURACY)) or name.startswith("valid"):
        return None
    share = math.fsum(scores) / len(scores)
    variance = share * (1 - share) / min(counts) * weight**2
    blocks = _blocks_of(runs, group) if name == _ACCURACY else np.array([])
    return (Items(variance, weight * blocks),)


def _known_beyond_word(run: Run, metric: str) -> float:
    """Return the accuracy that the exact reader of both sides adds to the word alone, or 0."""
    suite = run.suite_of(metric)
    levels = suite.references.get(_ACCURACY, {}) if suite else {}
    return levels["bayes"] - levels["word"] if {"bayes", "word"} <= levels.keys() else 0.0


def _blocks_of(runs: Sequence[Run], name: str) -> np.ndarray:
    """Return the mean accuracy over runs of a suite in blocks of its items; empty if unknown."""
    accuracies = []
    for run in runs:
        suite = next((suite for suite in run.suites if suite.name == name), None)
        group = suite.groups[OVERALL] if suite else {}
        hits = np.array(group.get(HITS, ()), dtype=float)
        if not len(hits):
            return hits
        sizes = [len(block) for block in np.array_split(np.arange(group["n"]), len(hits))]
        accuracies.append(hits / sizes)
    if len(set(map(len, accuracies))) > 1:
        return np.array([])
    means: np.ndarray = np.mean(accuracies, axis=0)
    return means


def item_errors(*sides: tuple[int, Sequence[Items]]) -> Errors:
    """Return the errors from test items of a signed sum of scores.

    If all sides have a part by block, its error is that of the sum in the blocks; otherwise each
    side has its own error. `sides` are the sign of each score and its items, () if unknown.
    """
    lengths = {len(items) for _, items in sides}
    if len(lengths) > 1:
        return [Error(item.variance) for item in chain.from_iterable(items for _, items in sides)]
    errors: list[Error] = []
    for parts in zip(*(items for _, items in sides)):
        sizes = {len(part.blocks) for part in parts}
        if sizes == {0} or len(sizes) > 1:
            errors += [Error(part.variance) for part in parts]
            continue
        (count,) = sizes
        total = sum(sign * part.blocks for (sign, _), part in zip(sides, parts))
        errors.append(Error(float(np.var(total, ddof=1)) / count, count - 1))
    return errors
