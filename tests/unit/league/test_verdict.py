import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.league.verdict import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    DecisionRule,
    Gain,
    contrast,
    decide_all,
)
from metaseq_lm.reporting.stats import interval

EIGHT = np.linspace(-1, 1, 8)  # mean 0


def decide(scores, baseline, rule):
    return decide_all([(scores, baseline)], rule)[0]


def decide_gains(pairs, rule):
    return decide_all([gain.over(base) for gain, base in pairs], rule)


def shifted(by, scale=1.0):
    return list(by + scale * EIGHT)


@pytest.mark.parametrize("lower, better, worse", [(False, BETTER, WORSE), (True, WORSE, BETTER)])
def test_the_direction_of_the_metric_turns_the_verdict(lower, better, worse):
    rule = DecisionRule(0.5, lower_is_better=lower)
    above, below = decide(shifted(5), shifted(0), rule), decide(shifted(-5), shifted(0), rule)
    assert (above.verdict, below.verdict) == (better, worse)
    assert (above.difference, below.difference) == (pytest.approx(5), pytest.approx(-5))
    assert above.is_large and below.is_large
    assert (above.text, below.text) == (better, worse)


def test_a_significant_difference_may_be_negligible_or_of_unsettled_size():
    difference = decide(shifted(0.3, 0.1), shifted(0, 0.1), DecisionRule(1.0))
    assert difference.verdict == BETTER and difference.is_negligible
    assert "less than matters" in difference.text and "perhaps" not in difference.text
    unsettled = decide(shifted(-0.3, 0.1), shifted(0, 0.1), DecisionRule(0.3))
    assert unsettled.verdict == WORSE and not (unsettled.is_negligible or unsettled.is_large)
    assert "perhaps" in unsettled.text


def test_equivalent_is_an_interval_within_the_smallest_effect():
    x, y = np.array(shifted(0.1)), np.array(shifted(0))
    low, high = interval(x, y, level=0.05)
    reach = max(-low, high)
    assert decide(x, y, DecisionRule(reach * 1.01)).verdict == EQUIVALENT
    assert decide(x, y, DecisionRule(reach * 0.99)).verdict == UNDECIDED
    # A stricter level has a wider interval.
    assert decide(x, y, DecisionRule(reach * 1.01, level=0.01)).verdict == UNDECIDED


def test_holm_counts_every_comparison_and_those_that_are_missing():
    rng = np.random.default_rng(2)
    baseline = rng.normal(size=5)
    pairs = [(baseline + shift, baseline) for shift in (10.0, 11.0, 12.0)]
    separated = 1 / 126
    for decision, factor in zip(decide_all(pairs, DecisionRule(1.0)), (3, 3, 3)):
        assert decision.corrected == pytest.approx(factor * separated)
        assert decision.rule.comparisons == 3
    pair = pairs[0]
    assert decide(*pair, DecisionRule(1.0, comparisons=6)).verdict == BETTER
    assert decide(*pair, DecisionRule(1.0, comparisons=7)).verdict == UNDECIDED
    mixed = decide_all([pair, (baseline, baseline + 0.01)], DecisionRule(1.0, comparisons=7))
    assert mixed[0].corrected == pytest.approx(7 * separated)
    assert mixed[0].p == pytest.approx(separated)


def test_too_few_seeds_never_decide_and_say_how_many_would():
    three = decide([10, 11, 12], [1, 2, 3], DecisionRule(1.0))
    assert three.verdict == UNDECIDED
    assert three.p == pytest.approx(0.1)
    assert three.text.startswith("undecided: 4 seeds")
    # However small the difference that matters is: the spread allows no verdict on that one.
    assert decide([10, 11, 12], [1, 2, 3], DecisionRule(0.01)).seeds == 4
    assert decide([10, 11, 12, 13], [1, 2, 3, 4], DecisionRule(1.0)).verdict == BETTER
    four = decide([10, 11, 12, 13], [1, 2, 3, 4], DecisionRule(1.0, comparisons=2))
    assert four.verdict == UNDECIDED


@pytest.mark.parametrize("more, is_enough", [((0, 0), True), ((0, 9), True), ((-1, 9), False)])
def test_seeds_that_should_have_decided_are_no_remedy(more, is_enough):
    row = decide([10, 11, 12], [1, 2, 3], DecisionRule(1.0))
    sizes = tuple(row.seeds + n for n in more)
    assert ("did not" in replace(row, sizes=sizes).remedy) == is_enough


def test_single_seeds_have_no_interval():
    alone = decide([0.9], [0.5], DecisionRule(0.1))
    assert (alone.verdict, alone.interval, alone.sd, alone.seeds) == (UNDECIDED, None, None, None)
    assert "no spread" in alone.text
    one = decide([0.9], [0.5, 0.51, 0.52], DecisionRule(0.1))
    assert one.verdict == UNDECIDED and one.interval is None and one.seeds >= 4


def test_scores_without_spread():
    same = decide([1.0] * 8, [1.0] * 8, DecisionRule(0.02))
    assert (same.verdict, same.p, same.interval) == (EQUIVALENT, 1.0, (0.0, 0.0))
    other = decide([1.0] * 8, [0.5] * 8, DecisionRule(0.02))
    assert other.verdict == BETTER and other.interval == (0.5, 0.5)
    few = decide([1.0] * 3, [0.5] * 3, DecisionRule(0.02))
    assert few.verdict == UNDECIDED and few.seeds == 4
    one_side = decide([1.0] * 8, shifted(0.5, 0.1), DecisionRule(0.02))
    assert one_side.verdict == BETTER and one_side.interval[0] < 0.5 < one_side.interval[1]


def test_different_sizes():
    decision = decide(shifted(0) * 2, [9.0, 10.0, 11.0], DecisionRule(1.0))
    assert decision.verdict == WORSE and decision.sizes == (16, 3)
    squares = 2 * (EIGHT**2).sum() + 2
    assert decision.sd == pytest.approx(math.sqrt(squares / 17))


@pytest.mark.parametrize("scores", [[], [0.5, math.nan], [math.inf, 1.0]])
def test_scores_that_are_no_numbers_are_refused(scores):
    with pytest.raises(ValueError, match="finite"):
        decide(scores, [0.5, 0.6], DecisionRule(0.1))


@pytest.mark.parametrize(
    "wrong, word",
    [
        ({"smallest_effect": 0.0}, "smallest_effect"),
        ({"smallest_effect": math.inf}, "smallest_effect"),
        ({"smallest_effect": 1.0, "level": 0.5}, "level"),
        ({"smallest_effect": 1.0, "comparisons": 0}, "comparisons"),
    ],
)
def test_rules_outside_their_range_are_refused(wrong, word):
    with pytest.raises(ValueError, match=word):
        DecisionRule(**wrong)


# ---------------------------------------------------------------- gains

RNG = np.random.default_rng(3)


def gain(level, untrained, scale=1.0, controls=8):
    return Gain(level + scale * EIGHT, untrained + scale * EIGHT[:controls])


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


def test_a_head_start_is_no_gain():
    """The row is better before training and gains as much: its score is better, its gain is not."""
    ahead, base = gain(20, 10), gain(12, 2)
    assert decide(ahead.scores, base.scores, DecisionRule(2.0)).verdict == BETTER
    (decision,) = decide_gains([(ahead, base)], DecisionRule(2.0))
    assert decision.verdict == EQUIVALENT and decision.difference == pytest.approx(0)


@pytest.mark.parametrize("lower, better, worse", [(False, BETTER, WORSE), (True, WORSE, BETTER)])
def test_the_direction_turns_the_verdict_on_a_gain(lower, better, worse):
    rule = DecisionRule(0.5, lower_is_better=lower)
    pairs = [(gain(20, 1), gain(10, 0)), (gain(10, 1), gain(20, 0))]
    assert [d.verdict for d in decide_gains(pairs, rule)] == [better, worse]


def test_the_same_untrained_models_leave_the_test_of_the_scores():
    """They are one sample: as two their spread would be counted twice, and it cancels."""
    scores, base, untrained = EIGHT + 5, EIGHT * 0.5, EIGHT * 20
    (decision,) = decide_gains(
        [(Gain(scores, untrained), Gain(base, untrained))], DecisionRule(1.0)
    )
    assert vars(decision) == vars(decide(scores, base, DecisionRule(1.0)))
    apart = Gain(base, untrained + 0.001)
    assert (
        decide_gains([(Gain(scores, untrained), apart)], DecisionRule(1.0))[0].verdict == UNDECIDED
    )


def test_controls_without_spread_leave_the_test_of_the_scores():
    scores, base = EIGHT + 5, EIGHT * 0.5
    item = contrast((scores, base, [1.0, 1.0], [2.0, 2.0, 2.0]), 0.05)
    expected = decide(scores, base + -1.0, DecisionRule(1.0))
    assert item.difference == pytest.approx(expected.difference)
    assert item.p == pytest.approx(expected.p)
    # Controls without spread have no degrees of freedom.
    assert item.interval == pytest.approx(expected.interval)


def test_single_untrained_models_decide_nothing():
    one = Gain(EIGHT + 50, [0.0])
    (decision,) = decide_gains([(one, gain(0, 0))], DecisionRule(1.0))
    assert (decision.verdict, decision.p, decision.interval) == (UNDECIDED, 1.0, None)


def test_gains_are_corrected_for_the_comparisons_of_the_plan():
    pairs = [(gain(9, 0), gain(0, 1)), (gain(0, 0), gain(0, 1))]
    first = decide_gains(pairs, DecisionRule(0.1, comparisons=7))[0]
    assert first.corrected == pytest.approx(7 * first.p) and first.verdict == BETTER


@pytest.mark.parametrize("scores, untrained", [([], [0.5]), ([0.5], []), ([0.5], [math.nan])])
def test_gains_need_finite_scores(scores, untrained):
    with pytest.raises(ValueError, match="finite"):
        Gain(scores, untrained)
