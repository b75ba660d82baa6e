"""Differences of scores as gates see them: how often the screen errs, and Welch's test."""

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.league.differences import compare


@pytest.mark.parametrize(
    ("seeds", "sds", "rate"),
    [
        *(((8, 8), (1, 1), 0.024), ((8, 4), (1, 1), 0.025), ((8, 3), (1, 1), 0.030)),
        ((8, 4), (1, 2), 0.030),
    ],
)
def test_the_screen_errs_as_often_as_documented(
    seeds: tuple[int, int], sds: tuple[float, float], rate: float
) -> None:
    """Rows without an effect, normal scores: above or below by more than the quantile."""
    rng = np.random.default_rng(0)
    signs = []
    for _ in range(4000):
        scores, others = (rng.normal(scale=sd, size=n) for n, sd in zip(seeds, sds))
        result = compare(scores, others, lower_is_better=False)
        assert result is not None
        signs.append(result.sign)
    for sign in (1, -1):
        assert stats.binomtest(signs.count(sign), len(signs), rate).pvalue > 1e-3


def test_a_difference_is_that_of_welchs_test() -> None:
    """At the edge of the two-sided level, with 8 seeds against 4 of another spread."""
    scores, others = np.linspace(0, 1, 8), np.array([0.0, 0.3, 1.4, 2.0])
    error = stats.ttest_ind(scores, others, equal_var=False)
    limit = error.confidence_interval(0.95)
    shift = (limit.high - limit.low) / 2 - (scores.mean() - others.mean())
    for extra, sign in ((1e-6, 1), (-1e-6, 0)):
        result = compare(scores + shift + extra, others, lower_is_better=False)
        assert result is not None and result.sign == sign


def test_a_control_of_one_run_has_the_spread_and_the_freedom_of_the_row() -> None:
    scores = np.linspace(0, 1, 8)
    error = scores.std(ddof=1) * np.sqrt(1 / 8 + 1)
    limit = stats.t.ppf(0.975, 7) * error
    for gap, sign in ((1.01 * limit, 1), (0.99 * limit, 0), (-1.01 * limit, -1)):
        for one, other in ((scores, [0.5 - gap]), ([0.5 + gap], scores)):
            result = compare(one, other, lower_is_better=False)
            assert result is not None and result.sign == sign
