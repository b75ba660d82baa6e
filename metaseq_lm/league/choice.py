"""The error of a difference that comes from the choice of settings.

The sd of choice is the sd of the expected score over draws of the tuning seeds (`sweeps.draws`).
Three seeds that agree by chance show none, so the error of a row is pooled over the rows of its
budget. It is enlarged by T / (T - 1) for T tuning seeds, because draws underestimate it.
docs/results/league.md has the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from metaseq_lm.reporting.stats import POWER, Error

FEWEST = 3  # tuning seeds that make a choice part of the experiment
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
