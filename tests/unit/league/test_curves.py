"""Fits of curves that are known, and what they predict."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.league.curves import (
    POWER_LAW,
    SATURATION,
    Fit,
    form_of,
    has_logits,
    held_out_errors,
    logit_line,
    naive_predictions,
    rejection,
    why_not_predictable,
)
from metaseq_lm.league.ladders import ObjectiveLadder
from metaseq_lm.reporting.numbers import Metric

BUDGETS = np.array([1e12, 4e12, 1.6e13, 6.4e13])
NEXT = 2.56e14
NARROW = 1e12 * 2.0 ** np.arange(6)
LEVEL = 0.05
NONE = np.zeros(8)
LOGIT_LINE = logit_line(1.0)


def power_law(budgets, level=1.8, part=2.5, power=0.3):
    return level + part * (budgets / 1e12) ** -power


def line_of_logits(budgets, slope=0.5, top=1.0):
    return top / (1 + np.exp(-(slope * np.log(budgets / 1e13))))


def ladder(means, noise=NONE, budgets=BUDGETS):
    return ObjectiveLadder.of(dict(zip(budgets, np.asarray(means)[:, None] + noise)))


def fit(means, form, noise=NONE, budgets=BUDGETS, draws=400):
    return Fit(ladder(means, noise, budgets).drawn(np.random.default_rng(0), draws), form)


@pytest.mark.parametrize("power", [0.05, 0.3, 1.5])
@pytest.mark.parametrize("level", [0.0, 1.8])
def test_a_power_law_is_recovered(level, power):
    curve = fit(power_law(BUDGETS, level, power=power), POWER_LAW)
    assert curve.parameters[0] == pytest.approx([level, 2.5, power], rel=1e-4, abs=1e-4)
    assert curve.value(NEXT) == pytest.approx(power_law(NEXT, level, power=power), rel=1e-6)
    assert curve.misfit_p == 1.0 and not rejection(curve, LEVEL)
    low, high = curve.interval(NEXT, LEVEL, np.random.default_rng(0))
    assert (low, high) == pytest.approx((curve.value(NEXT),) * 2, rel=1e-6)


def test_a_logit_line_is_recovered():
    curve = fit(line_of_logits(BUDGETS), LOGIT_LINE)
    assert curve.parameters[0] == pytest.approx([0.5 * math.log(0.1), 0.5])
    assert curve.value(NEXT) == pytest.approx(line_of_logits(NEXT))


@pytest.mark.parametrize("top", [0.885, 0.6])
def test_a_line_below_a_known_ceiling_is_recovered(top):
    means = line_of_logits(BUDGETS, top=top)
    curve = fit(means, logit_line(top))
    assert curve.parameters[0] == pytest.approx([0.5 * math.log(0.1), 0.5])
    assert curve.value(NEXT) == pytest.approx(line_of_logits(NEXT, top=top))
    assert curve.value(1e30) <= top < fit(means, LOGIT_LINE).value(1e30)


@pytest.mark.parametrize("top", [1.0, 0.68])
def test_an_asymptote_is_recovered(top):
    """A - K C^-g, the mirror of a loss; scores that would go on above 1 stay below it."""
    curve = fit(1 - power_law(BUDGETS, 1 - top, part=0.3), SATURATION)
    assert curve.parameters[0] == pytest.approx([1 - top, 0.3, 0.3], rel=1e-4, abs=1e-4)
    assert curve.value(NEXT) == pytest.approx(1 - power_law(NEXT, 1 - top, part=0.3), rel=1e-6)
    assert fit([0.2, 0.5, 0.8, 0.99], SATURATION).value(1e30) <= 1


def test_a_loss_that_rises_is_flat_and_never_below_zero():
    rising = fit([2.0, 2.1, 2.2, 2.3], POWER_LAW)
    assert rising.parameters[0, 1] == 0 and rising.value(NEXT) == pytest.approx(2.15)
    steep = fit([4.0, 2.0, 0.9, 0.1], POWER_LAW)
    assert steep.parameters[0, 0] >= 0 and steep.value(NEXT) > 0


def test_means_that_lie_on_no_curve_are_rejected():
    """A change of phase: chance, chance, then nearly solved, with small noise."""
    noise = 0.004 * np.array([-1.2, -0.7, -0.3, 0, 0.1, 0.4, 0.6, 1.1])
    jump = fit([0.51, 0.50, 0.93, 0.95], LOGIT_LINE, noise)
    assert jump.misfit_p < 0.01 and "logit" in rejection(jump, LEVEL)
    assert not rejection(fit(line_of_logits(BUDGETS) + 0.001, LOGIT_LINE, noise), LEVEL)


def test_the_interval_has_the_error_of_the_line_and_that_of_the_next_mean():
    """A line through 4 means, one step on: 1/4 + 2.5^2 / 5 of their variance, and 1 of the next."""
    noise = 0.01 * np.array([-1.2, -0.7, -0.3, 0, 0.1, 0.4, 0.6, 1.1])
    flat = fit([0.5] * 4, LOGIT_LINE, noise, draws=4000)
    low, high = flat.interval(NEXT, LEVEL, np.random.default_rng(0))
    error = noise.std(ddof=1) / math.sqrt(8) * math.sqrt(1.5 + 1)
    # Draws of 8 scatter like Student's t with 7 degrees of freedom: variance 7/5.
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(7 / 5) * error, rel=0.1)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_errors_of_other_ladders_widen_the_interval(count):
    """By Student's t times their root mean square, from three on."""
    curve, errors = fit([0.5] * 4, LOGIT_LINE, draws=20_000), [0.03, -0.03] * 5
    low, high = curve.interval(NEXT, LEVEL, np.random.default_rng(0), errors[:count])
    half = stats.t.isf(LEVEL / 2, count) * 0.03 if count > 2 else 0.0
    assert ((high - low) / 2, (high + low) / 2) == pytest.approx((half, 0.5), rel=0.05, abs=1e-9)


def test_errors_of_last_budgets_that_are_held_out():
    """Of a line, of one that ends 0.1 below it, and of none: too short, or above the ceiling."""
    line, top = line_of_logits(BUDGETS, top=0.9), logit_line(0.9)
    cases = [(ladder(line - [0, 0, 0, below]), top) for below in (0, 0.1)]
    cases += [(ladder(line[:3], budgets=BUDGETS[:3]), top), (ladder(line), logit_line(0.2))]
    cases.append((ObjectiveLadder.of({}), top))
    assert held_out_errors(cases) == pytest.approx([0, 0.1])


@pytest.mark.parametrize(
    "form, curve, sd", [(LOGIT_LINE, line_of_logits, 0.02), (POWER_LAW, power_law, 0.02)]
)
def test_intervals_of_predictions_cover_at_about_their_level(form, curve, sd):
    """80 ladders of 4 budgets and 5 seeds: 95 % have a standard error of 2.4 points."""
    rng = np.random.default_rng(4)
    covered, rejected = 0, 0
    for _ in range(80):
        scores = curve(BUDGETS)[:, None] + rng.normal(scale=sd, size=(4, 5))
        one = Fit(ObjectiveLadder.of(dict(zip(BUDGETS, scores))).drawn(rng, 300), form)
        low, high = one.interval(NEXT, LEVEL, rng)
        covered += low < curve(NEXT) + rng.normal(scale=sd, size=5).mean() < high
        rejected += bool(rejection(one, LEVEL))
    assert 0.88 <= covered / 80 and rejected <= 10
    assert low > curve(NEXT) - 0.2 and high < curve(NEXT) + 0.2


@pytest.mark.parametrize(
    "form, budgets, seeds, expected",
    [
        (LOGIT_LINE, BUDGETS[:3], 8, "^3 budgets; logit linear in log C needs 4$"),
        (POWER_LAW, BUDGETS, 8, "^4 budgets; .* needs 5$"),
        (LOGIT_LINE, BUDGETS, 2, "fewer than 3 seeds"),
        (LOGIT_LINE, NARROW[:4], 8, "^1.0e12 to 8.0e12 is a factor of 8; .* needs 30, 1.5 decades"),
        (POWER_LAW, NARROW[:5], 8, "is a factor of 16; .* needs 30"),
        (LOGIT_LINE, NARROW, 8, "2.0e15 is further above 3.2e13 than that is above 1.0e12"),
        (LOGIT_LINE, 1e12 * np.array([1, 3, 10, 30]), 8, "further above"),
        (LOGIT_LINE, BUDGETS, 3, ""),
        (POWER_LAW, [*BUDGETS, NEXT], 3, ""),
    ],
)
def test_too_short_a_ladder_is_refused(form, budgets, seeds, expected):
    budgets = np.array(budgets)
    reason = why_not_predictable(
        ladder(line_of_logits(budgets), np.zeros(seeds), budgets), form, 8 * NEXT
    )
    assert re.search(expected, reason) and bool(reason) == bool(expected)


@pytest.mark.parametrize("top, last", [(1.0, 1.0), (0.885, 0.9)])
def test_a_mean_that_is_not_below_the_ceiling_has_no_logit(top, last):
    solved = ladder([0.5, 0.7, 0.8, last])
    assert f"{top:.4g}" in why_not_predictable(solved, logit_line(top), NEXT)
    assert has_logits(solved.at(BUDGETS[:3]), logit_line(top)) and has_logits(solved, SATURATION)


def test_the_form_is_that_of_the_metric():
    assert form_of(Metric.of("probe.accuracy", [0.5])) is SATURATION
    assert form_of(Metric.of("probe.accuracy", [0.5]), 0.885).ceiling == 0.885
    assert form_of(Metric.of("wer", [0.5])).bounds == (0, 1)
    assert form_of(Metric.of("valid.loss", [2.0])) is POWER_LAW
    assert form_of(Metric.of("pearson", [0.2])) is None


def test_naive_predictions():
    one = ladder([0.5, 0.5, 0.6, 0.7])
    assert naive_predictions(one, NEXT) == pytest.approx({"last": 0.7, "line": 0.8})
    assert naive_predictions(one, 1.28e14) == pytest.approx({"last": 0.7, "line": 0.75})
    assert naive_predictions(one.at([1e12]), NEXT) == {"last": 0.5}
