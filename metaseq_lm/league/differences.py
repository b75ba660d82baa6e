"""Differences of scores as gates see them: is a sample better than another, or than a level?

A score exceeds another, or a level such as chance, if Welch's 1 - LEVEL interval of the difference
of the means over seeds is above 0. This is a screen, not the test of the league's verdicts. Without
any effect 2.4 % of normal samples are called better (8 seeds against 8), 2.5 % (8 against 4) or
3.0 % (8 against 3), and equal shares worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaseq_lm.league.loss_gates import number
from metaseq_lm.reporting.stats import LEVEL, half_width, mean_error


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
        difference = self.mean - self.other
        if self.lower_is_better:
            difference = -difference
        width = half_width(self.error, self.freedom, LEVEL / 2)
        return int(difference > width) - int(-difference > width)

    @property
    def text(self) -> str:
        """The means and the error."""
        return f"{number(self.mean)} against {number(self.other)}, {self.error_text}"

    @property
    def error_text(self) -> str:
        """The error."""
        return "no spread" if math.isnan(self.error) else f"standard error {number(self.error)}"


def compare(
    scores: Sequence[float], others: Sequence[float] | float, lower_is_better: bool
) -> Difference | None:
    """Return the difference of scores from others, or from a fixed level; None if one is empty.

    A single score has the spread of the other sample. Against a level, or another single score, it
    has none and is neither better nor worse.
    """
    x, y = np.asarray(scores, dtype=float), np.asarray(others, dtype=float)
    if not x.size or not y.size:
        return None
    samples = (x, y) if y.ndim else (x,)
    error, freedom = math.nan, math.nan
    if min(map(len, samples)) > 1:
        error, freedom = mean_error(*samples)
    elif sum(map(len, samples)) > 2:
        error, freedom = mean_error(*samples, pooled=True)
    return Difference(float(x.mean()), float(y.mean()), error, freedom, lower_is_better)


def side(lower_is_better: bool) -> str:
    """Return the side on which a better score lies, in a word."""
    return "below" if lower_is_better else "above"
