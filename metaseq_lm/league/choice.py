"""The choice of a setting as part of the experiment: which settings tuning could have chosen.

Tuning seeds are a sample: other seeds would have chosen another setting with another expected
score. We therefore draw the tuning seeds with replacement, the same seeds for all settings, and
choose again. The sd of the expected score over draws is the sd of choice. Three seeds that agree by
chance show none, so the error of a row is pooled over the rows of its budget. It is enlarged by T /
(T - 1) for T tuning seeds, because draws underestimate it. docs/results/league.md has the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

from metaseq_lm.reporting.stats import POWER, Error

FEWEST = 3  # tuning seeds that make a choice part of the experiment
MOST = 3  # settings of which final seeds run
_ENUMERATED = 8  # tuning seeds up to which all draws are counted (8 have 6,435 different ones)
DRAWS = 10_000  # random draws for more seeds
# The largest sd of choice of two settings, in sd of a tuning seed over the root of their number.
# Settings that differ by d are confused with P = Phi(-d / (sd sqrt(2 / T))): d sqrt(P (1 - P)).
WORST = 0.5438


@lru_cache(maxsize=8)
def seed_draws(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return draws with replacement, (draws, seeds) counts of each seed, and probabilities."""
    if seeds > _ENUMERATED:
        rng = np.random.default_rng(0)
        return rng.multinomial(seeds, [1 / seeds] * seeds, DRAWS), np.full(DRAWS, 1 / DRAWS)
    drawn = combinations_with_replacement(range(seeds), seeds)
    counts = np.array([np.bincount(draw, minlength=seeds) for draw in drawn])
    orders = [math.factorial(seeds) / math.prod(map(math.factorial, row)) for row in counts]
    return counts, np.array(orders) / seeds**seeds


def shares_of_best(scores: np.ndarray, lower_is_better: bool) -> np.ndarray:
    """Return the share of draws of the seeds in which each setting has the best mean.

    Scores are (settings, seeds); the first of equal settings is the best.
    """
    counts, probabilities = seed_draws(scores.shape[1])
    sums = scores @ counts.T
    best = (sums if lower_is_better else -sums).argmin(axis=0)
    return np.bincount(best, probabilities, minlength=len(scores))


def plausible_settings(shares: np.ndarray, least: float) -> list[int]:
    """Return the settings that are best in a share of `least` or more of the draws, at least one.

    The most frequent ones come first; there are at most MOST.
    """
    order = np.argsort(-shares, kind="stable")[:MOST].tolist()
    return [i for i in order if shares[i] >= least - 1e-9] or order[:1]


def sd_of_choice(means: Sequence[float], shares: Sequence[float]) -> float:
    """Return the sd of the mean of the setting that a draw chooses, given the shares of draws."""
    centre = np.average(means, weights=shares)
    return math.sqrt(np.average((np.asarray(means) - centre) ** 2, weights=shares))


def choice_error(sds: Sequence[float], seeds: int, sides: int) -> Error:
    """Return the variance that choices add to a difference.

    It has half of the degrees of freedom of the tuning seeds: if these agree by chance, a row shows
    no choice, so its sd is less informative than that of normal scores.

    Args:
        sds: The sd of choice of each row of the budget.
        seeds: The tuning seeds of each.
        sides: Number of rows, out of the two in the difference, that were tuned.
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
