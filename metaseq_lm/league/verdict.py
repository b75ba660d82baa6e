"""Verdicts: is an objective better than the baseline, equivalent, worse, or is it undecided?

A difference has to pass the two tests of `stats.DEFAULT_TEST`. Equivalence is decided by Welch's
interval of the difference (two one-sided tests: Schuirmann 1987, doi:10.1007/BF01068419).

The same holds of gains over untrained models. These differ between objectives, because their tokens
see different contexts: a row may be above another before any training. The difference of two gains
is a contrast of four means (a row and its untrained models, the baseline and its own).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from metaseq_lm.reporting.stats import (
    DEFAULT_TEST,
    LEVEL,
    MOST_SEEDS,
    Errors,
    difference_of,
    holm,
    interval,
    pooled_sd,
)

BETTER, EQUIVALENT, WORSE, UNDECIDED = "better", "equivalent", "worse", "undecided"
VERDICTS = (BETTER, EQUIVALENT, WORSE, UNDECIDED)
Samples = Sequence[Sequence[float]]


@dataclass(frozen=True)
class DecisionRule:
    """The rule of a verdict, fixed before the runs.

    Attributes:
        smallest_effect: The smallest difference that matters, positive, in units of the metric.
        level: The level of the tests; verdicts of a difference are corrected for `comparisons`.
        lower_is_better: The direction of the metric.
        comparisons: The number of planned comparisons with the baseline.

    Raises ValueError for an effect, a level or a number outside its range.
    """

    smallest_effect: float
    level: float = LEVEL
    lower_is_better: bool = False
    comparisons: int = 1

    def __post_init__(self) -> None:
        if not (self.smallest_effect > 0 and math.isfinite(self.smallest_effect)):
            raise ValueError(f"smallest_effect={self.smallest_effect}: it must be positive")
        if not 0 < self.level < 0.5:
            raise ValueError(f"level={self.level}: it must be between 0 and 0.5")
        if self.comparisons < 1:
            raise ValueError(f"comparisons={self.comparisons}: it must be at least 1")


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

    def over(self, base: "Gain") -> Samples:
        """Return the samples of the difference from another gain, see `contrast`."""
        return self.scores, base.scores, self.untrained, base.untrained

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
        return interval(*self.samples, level=level)


@dataclass(frozen=True)
class _Contrast:
    """A difference of means and its error, before any correction.

    Attributes:
        difference: Mean of the scores minus mean of the baseline, whatever the direction; for
            gains, the difference of gains.
        interval: The 1 - 2 level interval of the difference; None if a sample has only one score.
        p: Two-sided p of `stats.DEFAULT_TEST`.
        sd: The sd pooled over the two sides; None if no side has two scores.
        sizes: The number of seeds of the row and of the baseline.
        errors: Errors in addition to the variance over seeds, which further seeds do not reduce.
    """

    difference: float
    interval: tuple[float, float] | None
    p: float
    sd: float | None
    sizes: tuple[int, int]
    errors: Errors = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Decision(_Contrast):
    """The verdict on one row, with its numbers.

    Attributes:
        verdict: One of VERDICTS.
        corrected: `p` after Holm's correction.
        rule: The rule that decided.
    """

    verdict: str
    corrected: float
    rule: DecisionRule

    @property
    def is_negligible(self) -> bool:
        """Whether the whole interval lies within the smallest effect that matters."""
        return _within(self.interval, self.rule.smallest_effect)

    @property
    def is_large(self) -> bool:
        """Whether the whole interval lies beyond the smallest effect, on one side."""
        if self.interval is None:
            return False
        low, high = self.interval
        return low > self.rule.smallest_effect or high < -self.rule.smallest_effect

    @property
    def is_within_reach(self) -> bool:
        """Whether any number of seeds could call equal rows equivalent, see `errors`."""
        from scipy.stats import norm

        error = math.sqrt(sum(item.variance for item in self.errors))
        return float(norm.isf(self.rule.level)) * error < self.rule.smallest_effect

    @cached_property
    def seeds(self) -> int | None:
        """The seeds of each side that would decide, see `Test.seeds_that_decide`.

        If a large difference only lacks seeds, the number that shows it. None for a decided row,
        without a spread, or if MOST_SEEDS would not be enough.
        """
        if self.verdict != UNDECIDED or self.sd is None:
            return None
        effect = abs(self.difference) if self.is_large else self.rule.smallest_effect
        return DEFAULT_TEST.seeds_that_decide(
            effect, self.sd, self.rule.level, self.rule.comparisons, equivalence=not self.is_large
        )

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.verdict == EQUIVALENT:
            return self.verdict
        if self.verdict == UNDECIDED:
            return f"undecided: {self.remedy}"
        if self.is_negligible:
            return f"{self.verdict}, but by less than matters"
        return self.verdict if self.is_large else f"{self.verdict}, perhaps by less than matters"

    @property
    def remedy(self) -> str:
        """What would decide an undecided row."""
        if self.sd is None:
            return "one seed each has no spread"
        seeds = self.seeds
        if self.errors and not self.is_within_reach:
            return "more seeds alone would not decide, because of the errors of tuning and items"
        if seeds is None:
            return f"more than {MOST_SEEDS} seeds each would be needed"
        if seeds <= min(self.sizes):
            return f"{seeds} seeds each decide in 4 of 5 cases, here they did not"
        if self.is_large:
            return f"{seeds} seeds each would show a difference as large as this"
        return f"{seeds} seeds each would decide"


def decide_all(
    pairs: Sequence[Samples], rule: DecisionRule, errors: Sequence[Errors] = ()
) -> list[Decision]:
    """Return the verdict on each pair of a row and its baseline, see `contrast`.

    `errors` are additional errors of each pair.

    *better* and *worse*: p is below the level after Holm's correction for all pairs. *equivalent*:
    neither, and the 1 - 2 level interval of the difference lies within the smallest effect.
    Otherwise *undecided*. If the rule has more comparisons than there are pairs, the correction
    uses the rule's number. Seeds that would decide on gains count the untrained models of each side
    as well.
    """
    rule = replace(rule, comparisons=max(rule.comparisons, len(pairs)))
    contrasts = []
    for samples, further in zip(pairs, errors or [()] * len(pairs)):
        contrasts.append(contrast(samples, rule.level, further))
    # Comparisons that were planned but not made count in the correction, as if they showed nothing.
    missing = [1.0] * (rule.comparisons - len(contrasts))
    decisions = []
    for item, corrected in zip(contrasts, holm([*(item.p for item in contrasts), *missing])):
        verdict = UNDECIDED
        if corrected < rule.level:
            verdict = WORSE if (item.difference > 0) == rule.lower_is_better else BETTER
        elif _within(item.interval, rule.smallest_effect):
            verdict = EQUIVALENT
        decisions.append(Decision(**vars(item), verdict=verdict, corrected=corrected, rule=rule))
    return decisions


def contrast(samples: Samples, level: float, errors: Errors = ()) -> _Contrast:
    """Return a difference of scores or of gains with its 1 - 2 `level` interval.

    If two gains have the same untrained models, it is the difference of the scores. A gain of which
    a side has one score tests nothing. Raises ValueError if a side has no scores or a score that is
    not finite.

    Args:
        samples: The scores of a row and of its baseline, then those of their untrained models if it
            is a difference of gains.
        level: As in `DecisionRule`.
        errors: Errors in addition to the variance over seeds.
    """
    arrays = [checked(scores) for scores in samples]
    # The means of the same untrained models cancel out, but their variance would count twice.
    if len(arrays) > 2 and np.array_equal(arrays[2], arrays[3]):
        arrays = arrays[:2]
    errors = tuple(error for error in errors if error.variance > 0)
    p = 1.0
    if len(arrays) == 2 or min(map(len, arrays)) > 1:
        p = DEFAULT_TEST.p(*arrays, errors=errors)
    return _Contrast(
        difference_of(*arrays),
        interval(*arrays, level=level, errors=errors),
        p,
        pooled_sd(*arrays),
        (len(arrays[0]), len(arrays[1])),
        errors=errors,
    )


def checked(scores: Sequence[float]) -> np.ndarray:
    """Return scores as an array; raises ValueError if it is empty or has a nonfinite score."""
    x = np.asarray(scores, dtype=float)
    if not x.size or not np.isfinite(x).all():
        raise ValueError(f"a verdict needs finite scores, not {list(scores)}")
    return x


def _within(interval: tuple[float, float] | None, effect: float) -> bool:
    """Return whether an interval lies strictly between -effect and effect."""
    return interval is not None and -effect < interval[0] and interval[1] < effect
