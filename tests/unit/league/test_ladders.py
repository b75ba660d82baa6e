"""Crossovers, FLOPs at equal score and intervals of ladders whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.league.ladders import (
    ObjectiveLadder,
    _crossings,
    crossover,
    draw_means,
    equal_score,
    interval,
)

BUDGETS = 10.0 ** np.arange(13, 15.5, 0.5)
FALLING, RISING = [0.52, 0.55, 0.58, 0.61, 0.64], [0.50, 0.54, 0.58, 0.62, 0.66]
NOISE = np.array([-1.2, -0.7, -0.3, 0.0, 0.1, 0.4, 0.6, 1.1])


def ladder(means, sd=0.0, budgets=BUDGETS):
    scores = [mean + sd * NOISE for mean in means]
    return ObjectiveLadder.of(dict(zip(budgets, scores)))


def meet(one, other, level=0.05):
    rng = np.random.default_rng(1)
    return crossover(one.drawn(rng), other.drawn(rng), level)


def test_lines_meet_where_they_do():
    """At a budget of the ladder, and between two of them: .52 + .06 x = .51 + .08 x at x = 1/2."""
    assert meet(ladder(FALLING), ladder(RISING)).budget == pytest.approx(1e14)
    x = np.log10(BUDGETS) - 13
    between = meet(ladder(0.52 + 0.06 * x), ladder(0.505 + 0.08 * x))
    assert between.budget == pytest.approx(10**13.75)
    assert between.none == 0 and between.interval == pytest.approx((10**13.75,) * 2)
    assert between.p < 0.001


def test_the_last_change_counts_and_a_tie_at_an_end_is_none():
    logs = np.arange(4.0)
    differences = np.array(
        [[1, -1, 1, -3], [1, 0, 0, -1], [0, 0, 1, 2], [2, 1, 0, 0], [1, 0, 1, 1], [-1, 1, 1, 1]]
    )
    places = _crossings(logs, differences.astype(float))
    assert places == pytest.approx([2.25, 2, np.nan, np.nan, np.nan, 0.5], nan_ok=True)


def test_parallel_lines_do_not_meet():
    apart = meet(ladder(FALLING, 0.01), ladder(np.array(FALLING) + 0.1, 0.01))
    assert (apart.budget, apart.none, apart.p) == (None, 1.0, 1.0)


def test_equal_lines_meet_about_as_often_as_not_and_nothing_is_established():
    """Of two budgets two independent differences have different signs in half of the draws."""
    one = ladder(FALLING[:2], 0.01, BUDGETS[:2])
    same = meet(one, one)
    assert same.none == pytest.approx(0.5, abs=0.03) and same.p == 1.0


def test_a_crossover_holds_only_if_both_ends_do():
    """One objective is far ahead at the end, and not by more than chance at the start."""
    steep = meet(ladder([0.5, 0.9], 0.01, BUDGETS[:2]), ladder([0.501, 0.7], 0.01, BUDGETS[:2]))
    assert steep.budget is not None and steep.p > 0.3
    clear = meet(ladder([0.5, 0.9], 0.01, BUDGETS[:2]), ladder([0.6, 0.7], 0.01, BUDGETS[:2]))
    assert clear.p < 0.001 and clear.none < 0.001


def test_the_interval_of_a_mean_is_nearly_that_of_student():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=8)
    low, high = interval(draw_means(scores, rng, 100_000), 0.05)
    expected = stats.t.interval(0.95, 7, scores.mean(), scores.std(ddof=1) / math.sqrt(8))
    assert (high - low) / (expected[1] - expected[0]) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("seeds", [3, 8])
def test_intervals_cover_at_their_level(seeds):
    """300 samples: 95 % have a standard error of 1.3 points. The plain bootstrap of 3 covers 75."""
    rng, covered, plain = np.random.default_rng(seeds), 0, 0
    for _ in range(300):
        scores = rng.normal(size=seeds)
        low, high = interval(draw_means(scores, rng, 2000), 0.05)
        covered += low < 0 < high
        low, high = interval(rng.choice(scores, (2000, seeds)).mean(axis=1), 0.05)
        plain += low < 0 < high
    assert covered / 300 == pytest.approx(0.95, abs=0.04)
    assert plain < covered - (3 if seeds == 8 else 30)


def test_one_seed_has_no_interval():
    lone = ObjectiveLadder.of({1e12: [0.5], 2e12: [0.5, 0.6]})
    draws = lone.drawn(np.random.default_rng(0)).draws
    assert interval(draws[:, 0], 0.05) is None and interval(draws[:, 1], 0.05)
    assert lone.least_seeds == 1


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        ObjectiveLadder.of({1e12: [0.5, math.nan]})


def reach(budget, score, means, budgets=(1e12, 4e12), lower=True, sd=0.0):
    rng = np.random.default_rng(0)
    rung = ladder([score], sd, [budget]).drawn(rng)
    return equal_score(rung, ladder(means, sd, budgets).drawn(rng), lower, 0.05)


@pytest.mark.parametrize(
    "score, means, ratio, ends",
    [
        (2.5, [3.0, 2.0], 4.0, (4.0, 4.0)),  # a ladder of two budgets is a line over log FLOPs
        (3.5, [3.0, 2.0], 8.0, None),  # the first budget is a bound
        (3.5, [3.0], 8.0, None),
        (1.5, [3.0, 2.0], math.nan, None),  # never
        (1.5, [3.0], math.nan, None),
        (2.5, [3.0, 2.0, 2.8, 1.0], 4.0, (4.0, 4.0)),  # the first time, though it is lost again
    ],
)
def test_flops_at_equal_score(score, means, ratio, ends):
    budgets = (1e12, 4e12, 8e12, 16e12)[: len(means)]
    found, interval = reach(8e12, score, means, budgets)
    assert found == pytest.approx(ratio, nan_ok=True)
    assert interval == (ends and pytest.approx(ends))


def test_the_interval_of_flops_at_equal_score():
    ratio, (low, high) = reach(8e12, 2.5, [3.0, 2.0], sd=0.05)
    assert ratio == pytest.approx(4.0) and low < 4.0 < high
    assert reach(8e12, 0.6, [0.5, 0.7], lower=False)[0] == pytest.approx(4.0)
    # Reached on average, but by so few draws that an interval would say too much.
    assert reach(8e12, 2.0, [3.0, 2.0], sd=0.05)[1] is None
