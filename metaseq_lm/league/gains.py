"""Gains over untrained models: does training add more to a row than to the baseline?

Untrained models of objectives differ, because their tokens see different contexts: a row may be
above another before any training. The difference of two gains is a contrast of four means (a row
and its untrained models, the baseline and its own), which are independent samples.

No permutation of four samples is an exact test of equal gains. Permuting trained and untrained runs
within each objective tests that training adds nothing to either; it sees no difference if training
adds much to both. Permuting the runs and controls of two objectives tests that these are the same,
so a difference before training would count. We permute the trained scores minus the mean of the
untrained ones. That is exact if those means are known; otherwise p is too small. It therefore only
guards against seeds that happen to agree. The main test is Welch's, with Satterthwaite's degrees of
freedom, and a difference has to pass both. docs/results/league.md has the simulation.
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
    """The scores of a row and of its untrained models, in the order of their seeds.

    Raises ValueError if a side has no scores or a score that is not finite.
    """

    scores: Sequence[float]
    untrained: Sequence[float]

    def __post_init__(self) -> None:
        checked(self.scores)
        checked(self.untrained)

    @property
    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """The scores of trained and untrained models as arrays."""
        return checked(self.scores), checked(self.untrained)

    @property
    def mean(self) -> float:
        """The difference of the means."""
        return difference_of(*self.samples)

    @property
    def sd(self) -> float | None:
        """The sd of a trained minus an untrained score; None if a side has only one score."""
        scores, untrained = self.samples
        if min(len(scores), len(untrained)) < 2:
            return None
        return float(np.sqrt(scores.var(ddof=1) + untrained.var(ddof=1)))

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return Welch's 1 - 2 `level` interval; None if a side has only one score."""
        return welch_interval(*self.samples, level=level)


def decide_gains(
    pairs: Sequence[tuple[Gain, Gain]], rule: Rule, errors: Sequence[Errors] = ()
) -> list[Decision]:
    """Return the verdict on each row's gain against the gain of its baseline.

    `errors` are additional errors of each pair. Verdicts are decided as in `verdict.decide_all`,
    and corrected for the number of pairs or the rule's comparisons, whichever is larger. The seeds
    that would decide count both runs and untrained models of each side.
    """
    contrasts = []
    for (gain, base), further in zip(pairs, errors or [()] * len(pairs)):
        contrasts.append(gain_contrast(gain, base, rule.level, present(further)))
    return judge(contrasts, rule)


def gain_contrast(gain: Gain, base: Gain, level: float, errors: Errors = ()) -> Contrast:
    """Return the difference of two gains with its 1 - 2 `level` interval.

    If both have the same untrained models, it is the difference of the scores. A side with one
    score tests nothing.
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
    """Return the two-sided p of a difference of gains, the larger p of the two tests."""
    by_permutation = permutation_p(scores - untrained.mean(), base - base_untrained.mean())
    by_welch = welch_p(scores, base, untrained, base_untrained, errors=errors)
    return max(by_permutation, by_welch)
