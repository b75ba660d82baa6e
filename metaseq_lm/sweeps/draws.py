"""Draws of tuning seeds: which settings tuning could have chosen.

Tuning seeds are a sample: other seeds would have chosen another setting with another expected
score. We therefore draw the tuning seeds with replacement, the same seeds for all settings, and
choose again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

MOST = 3  # settings of which final seeds run
_ENUMERATED = 8  # tuning seeds up to which all draws are counted (8 have 6,435 different ones)
DRAWS = 10_000  # random draws for more seeds


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
