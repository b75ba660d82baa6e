"""Differences of scores as gates see them: is a sample better than another, or than a level?

A score exceeds another, or a level such as chance, if the difference of the means over seeds is
more than Student's t standard errors, two-sided at LEVEL, with Welch's degrees of freedom. This is
a screen, not the test of the league's verdicts. Without any effect 2.4 % of normal samples are
called better (8 seeds against 8), 2.5 % (8 against 4) or 3.0 % (8 against 3), and equal shares
worse. 2 standard errors in place of the quantile, which is 2.2, 2.4 and 2.7, would err in 3.2, 4.3
and 5.5 %; where the control scatters twice as much, in 5.7 % (8 against 4) in place of 3.0 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaseq_lm.league.loss_gates import number
from metaseq_lm.league.verdict import welch_error
from metaseq_lm.reporting.significance import LEVEL


@dataclass(frozen=True)
class Difference:
    """Means of two samples of scores, and the standard error of their difference.

    Attributes:
        mean: Mean of the first sample.
        other: Mean of the second sample, or a level.
        error: The standard error of the difference; NaN if no side has a spread.
        freedom: Its degrees of freedom.
        lower_is_better: The direction of the scores.
    """

    mean: float
    other: float
    error: float
    freedom: float
    lower_is_better: bool

    @property
    def sign(self) -> int:
        """1 if the first is better by more than chance, -1 if the second is, else 0."""
        from scipy.stats import t as student_t

        difference = self.other - self.mean if self.lower_is_better else self.mean - self.other
        if math.isnan(self.error):
            return 0
        limit = float(student_t.isf(LEVEL / 2, self.freedom)) * self.error if self.error else 0.0
        return int(difference > limit) - int(-difference > limit)

    @property
    def text(self) -> str:
        """The means and the error."""
        return f"{number(self.mean)} against {number(self.other)}, {self.error_text}"

    @property
    def error_text(self) -> str:
        """The error."""
        return "no spread" if math.isnan(self.error) else f"standard error {number(self.error)}"


def compare(
    scores: Sequence[float], others: Sequence[float], lower_is_better: bool
) -> Difference | None:
    """Return the difference of two samples of scores, None if one is empty.

    A sample of one score is given the variance of the other sample.
    """
    if not len(scores) or not len(others):
        return None
    x, y = np.asarray(scores, dtype=float), np.asarray(others, dtype=float)
    error, freedom = math.nan, math.nan
    if min(len(x), len(y)) > 1:
        error, freedom = _error_of(x, y)
    elif max(len(x), len(y)) > 1:
        spread, freedom = max(x, y, key=len), float(max(len(x), len(y)) - 1)
        error = float(spread.std(ddof=1)) * math.sqrt(1 / len(x) + 1 / len(y))
    return Difference(float(x.mean()), float(y.mean()), error, freedom, lower_is_better)


def against(scores: Sequence[float], level: float, lower_is_better: bool) -> Difference | None:
    """Return the difference of a sample of scores from a fixed level, None if it is empty.

    A single score has no spread, so it is neither better nor worse.
    """
    if not len(scores):
        return None
    x, error = np.asarray(scores, dtype=float), math.nan
    if len(x) > 1:
        error = float(x.std(ddof=1)) / math.sqrt(len(x)) if np.ptp(x) else 0.0
    return Difference(float(x.mean()), level, error, len(x) - 1.0, lower_is_better)


def _error_of(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the standard error of the difference of two samples, and its degrees of freedom."""
    if not (np.ptp(x) or np.ptp(y)):
        return 0.0, math.nan
    error, freedom = welch_error(x, y)
    return float(error), float(freedom)


def side(lower_is_better: bool) -> str:
    """Return the side on which a better score lies, in a word."""
    return "below" if lower_is_better else "above"
