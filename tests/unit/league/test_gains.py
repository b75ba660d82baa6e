import math

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.league.gains import Gain, decide_gains, gain_contrast
from metaseq_lm.league.verdict import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    Rule,
    decide,
    permutation_p,
    welch_p,
)

RNG = np.random.default_rng(3)
NOISE = np.linspace(-1, 1, 8)


def gain(level, untrained, scale=1.0, controls=8):
    return Gain(level + scale * NOISE, untrained + scale * NOISE[:controls])


def test_a_gain_has_the_interval_of_welch_and_the_spread_of_its_control():
    scores, untrained = RNG.normal(0.7, 0.03, 8), RNG.normal(0.5, 0.01, 6)
    one = Gain(scores, untrained)
    test = stats.ttest_ind(scores, untrained, equal_var=False)
    expected = test.confidence_interval(0.9)
    assert one.interval(0.05) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert one.mean == pytest.approx(scores.mean() - untrained.mean())
    pairs = np.subtract.outer(scores, untrained)  # of all runs and all untrained models
    assert one.sd == pytest.approx(
        math.hypot(np.std(pairs.mean(axis=1), ddof=1), np.std(pairs.mean(axis=0), ddof=1))
    )
    alone = Gain([0.7], [0.5, 0.6])
    assert (alone.sd, alone.interval(0.05)) == (None, None)


def test_the_interval_of_a_difference_of_gains_is_that_of_satterthwaite():
    """Four samples of equal size and spread: four times the variance of one, 4 (n - 1) degrees."""
    seeds = np.array([0.1, 0.2, 0.3])
    item = gain_contrast(Gain(seeds + 0.4, seeds), Gain(seeds, seeds + 0.1), 0.05)
    error = math.sqrt(4 * seeds.var(ddof=1) / 3)
    half = stats.t.isf(0.05, 8) * error
    assert item.difference == pytest.approx(0.5)
    assert item.interval == pytest.approx((0.5 - half, 0.5 + half))
    assert item.sd == pytest.approx(math.sqrt(2) * seeds.std(ddof=1))
    p = stats.t.sf(0.5 / error, 8) * 2
    samples = seeds + 0.4, seeds, seeds, seeds + 0.1
    assert welch_p(*samples) == pytest.approx(p)
    # Three scores against three cannot have a smaller p than .1.
    assert item.p == pytest.approx(0.1) and p < 0.01


def test_p_is_the_larger_of_two_and_knows_the_spread_of_controls():
    scores, base = RNG.normal(1.0, 0.1, 8), RNG.normal(0.9, 0.1, 8)
    untrained, other = RNG.normal(0.5, 0.5, 8), RNG.normal(0.4, 0.5, 8)
    item = gain_contrast(Gain(scores, untrained), Gain(base, other), 0.05)
    shifted = permutation_p(scores - untrained.mean(), base - other.mean())
    assert item.p == pytest.approx(welch_p(scores, base, untrained, other))
    assert item.p > shifted  # which takes the means of the controls for known


def test_a_head_start_is_no_gain():
    """The row is better before training and gains as much: its score is better, its gain is not."""
    ahead, base = gain(20, 10), gain(12, 2)
    assert decide(ahead.scores, base.scores, Rule(2.0)).verdict == BETTER
    (decision,) = decide_gains([(ahead, base)], Rule(2.0))
    assert decision.verdict == EQUIVALENT and decision.difference == pytest.approx(0)


@pytest.mark.parametrize("lower, better, worse", [(False, BETTER, WORSE), (True, WORSE, BETTER)])
def test_the_direction_turns_the_verdict_on_a_gain(lower, better, worse):
    rule = Rule(0.5, lower_is_better=lower)
    pairs = [(gain(20, 1), gain(10, 0)), (gain(10, 1), gain(20, 0))]
    assert [d.verdict for d in decide_gains(pairs, rule)] == [better, worse]


def test_the_same_untrained_models_leave_the_test_of_the_scores():
    """They are one sample: as two their spread would be counted twice, and it cancels."""
    scores, base, untrained = NOISE + 5, NOISE * 0.5, NOISE * 20
    (decision,) = decide_gains([(Gain(scores, untrained), Gain(base, untrained))], Rule(1.0))
    assert vars(decision) == vars(decide(scores, base, Rule(1.0)))
    apart = Gain(base, untrained + 0.001)
    assert decide_gains([(Gain(scores, untrained), apart)], Rule(1.0))[0].verdict == UNDECIDED


def test_controls_without_spread_leave_the_test_of_the_scores():
    scores, base = NOISE + 5, NOISE * 0.5
    item = gain_contrast(Gain(scores, [1.0, 1.0]), Gain(base, [2.0, 2.0, 2.0]), 0.05)
    expected = decide(scores, base + -1.0, Rule(1.0))
    assert item.difference == pytest.approx(expected.difference)
    assert item.p == pytest.approx(expected.p)
    # Controls without spread have no degrees of freedom.
    assert item.interval == pytest.approx(expected.interval)


def test_single_untrained_models_decide_nothing():
    one = Gain(NOISE + 50, [0.0])
    (decision,) = decide_gains([(one, gain(0, 0))], Rule(1.0))
    assert (decision.verdict, decision.p, decision.interval) == (UNDECIDED, 1.0, None)


def test_gains_are_corrected_for_the_comparisons_of_the_plan():
    pairs = [(gain(9, 0), gain(0, 1)), (gain(0, 0), gain(0, 1))]
    first = decide_gains(pairs, Rule(0.1, comparisons=7))[0]
    assert first.corrected == pytest.approx(7 * first.p) and first.verdict == BETTER


@pytest.mark.parametrize("scores, untrained", [([], [0.5]), ([0.5], []), ([0.5], [math.nan])])
def test_gains_need_finite_scores(scores, untrained):
    with pytest.raises(ValueError, match="finite"):
        Gain(scores, untrained)
