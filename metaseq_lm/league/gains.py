"""Gains over untrained models: does training add more to a row than to the baseline?

Untrained models of objectives differ, since what a token sees differs: a row may be above another
before any training. The difference of two gains is a contrast of four means (a row and its
untrained models, the baseline and its own), which are independent samples.

No permutation of four samples is an exact test of equal gains. One of trained against untrained
runs within each objective tests that training adds nothing to either; where it adds much to both it
sees no difference. One of the runs and controls of two objectives tests that these are the same, so
a difference before training would count. What is permuted here are the trained scores less the mean
of the untrained ones: exact if those means were known, otherwise with a p that is too small. So it
only guards against seeds that happen to agree; the test is Welch's, with the degrees of freedom of
Satterthwaite, and a difference has to pass both. docs/results/league.md has the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaseq_lm.league.verdict import (
    Contrast,
    Decision,
    Errors,
    Rule,
    checked,
    contrast,
    difference_of,
    judge,
    permutation_p,
    pooled_sd,
    present,
    welch_interval,
    welch_p,
)


@dataclass(frozen=True)
class Gain:
    """The scores of a row and those of its untrained models, in the order of their seeds.

    Raises ValueError for a side without scores, or with one that is not finite.
    """

    scores: Sequence[float]
    untrained: Sequence[float]

    def __post_init__(self) -> None:
        checked(self.scores)
        checked(self.untrained)

    @property
    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores and those of untrained models as arrays."""
        return checked(self.scores), checked(self.untrained)

    @property
    def mean(self) -> float:
        """The difference of the means."""
        return difference_of(*self.samples)

    @property
    def sd(self) -> float | None:
        """The sd of a score less that of an untrained model; None if a side has one score only."""
        scores, untrained = self.samples
        if min(len(scores), len(untrained)) < 2:
            return None
        return float(np.sqrt(scores.var(ddof=1) + untrained.var(ddof=1)))

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return Welch's 1 - 2 `level` interval; None if a side has one score only."""
        return welch_interval(*self.samples, level=level)


def decide_gains(
    pairs: Sequence[tuple[Gain, Gain]], rule: Rule, errors: Sequence[Errors] = ()
) -> list[Decision]:
    """Return the verdict on the gain of each row beside that of its baseline.

    `errors` are further ones of each pair, if there are any. The verdicts are those of
    `verdict.decide_all`, corrected for all pairs, or for the comparisons of the rule if those are
    more. The seeds that would decide are runs and untrained models of each side.
    """
    contrasts = []
    for (gain, base), further in zip(pairs, errors or [()] * len(pairs)):
        contrasts.append(gain_contrast(gain, base, rule.level, present(further)))
    return judge(contrasts, rule)


def gain_contrast(gain: Gain, base: Gain, level: float, errors: Errors = ()) -> Contrast:
    """Return the difference of two gains with its 1 - 2 `level` interval.

    Where both have the same untrained models it is that of the scores. A side with one score tests
    nothing.
    """
    (scores, untrained), (base_scores, base_untrained) = gain.samples, base.samples
    if np.array_equal(untrained, base_untrained):
        return contrast(scores, base_scores, level, errors)
    samples = scores, base_scores, untrained, base_untrained
    return Contrast(
        difference_of(*samples),
        welch_interval(*samples, level=level, errors=errors),
        _gains_p(*samples, errors=errors) if min(map(len, samples)) > 1 else 1.0,
        pooled_sd(*samples),
        (len(scores), len(base_scores)),
        errors=errors,
    )


def _gains_p(
    scores: np.ndarray,
    base: np.ndarray,
    untrained: np.ndarray,
    base_untrained: np.ndarray,
    errors: Errors = (),
) -> float:
    """Return the two-sided p of a difference of gains: no less than that of either test."""
    by_permutation = permutation_p(scores - untrained.mean(), base - base_untrained.mean())
    by_welch = welch_p(scores, base, untrained, base_untrained, errors=errors)
    return max(by_permutation, by_welch)
