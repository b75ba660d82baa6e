import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy import integrate, stats

from metaseq_lm.league import verdict
from metaseq_lm.league.verdict import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    Rule,
    decide,
    decide_all,
    detectable,
    difference_p,
    equivalence_power,
    permutation_p,
    power,
    seeds_to_decide,
    welch_interval,
    welch_p,
)
from metaseq_lm.reporting.significance import POWER, permutation

EIGHT = np.linspace(-1, 1, 8)  # mean 0


def shifted(by, scale=1.0):
    return list(by + scale * EIGHT)


@pytest.mark.parametrize("n, m", [(4, 4), (5, 5), (3, 5), (8, 8)])
def test_p_is_that_of_all_assignments(n, m):
    rng = np.random.default_rng(n)
    x, y = rng.normal(0.8, size=n), rng.normal(size=m)
    expected = stats.permutation_test(
        (x, y), lambda a, b: a.mean() - b.mean(), n_resamples=math.inf, alternative="two-sided"
    ).pvalue
    assert permutation_p(x, y) == pytest.approx(expected, rel=1e-12)
    assert permutation_p(y, x) == pytest.approx(expected, rel=1e-12)


def test_p_of_equal_sizes_is_the_share_of_differences_as_large():
    x, y = np.array([3.0, 1.0, 4.0, 1.5]), np.array([0.5, 2.0, 2.5, 0.0])
    pooled, differences = np.concatenate([x, y]), []
    for drawn in combinations(range(8), 4):
        rest = [i for i in range(8) if i not in drawn]
        differences.append(abs(pooled[list(drawn)].mean() - pooled[rest].mean()))
    share = np.mean(np.array(differences) >= abs(x.mean() - y.mean()) - 1e-12)
    assert permutation_p(x, y) == pytest.approx(share)


def test_p_of_many_scores_is_sampled_and_agrees_with_the_one_sided_test():
    rng = np.random.default_rng(5)
    x, y = rng.normal(0.5, size=12), rng.normal(size=14)
    assert math.comb(26, 12) > verdict.ASSIGNMENTS
    assert permutation_p(x, y) == pytest.approx(2 * permutation(x, y), rel=0.15)
    assert permutation_p(x + 100, y) == 2 / (verdict.ASSIGNMENTS + 1)


@pytest.mark.parametrize("n, least", [(3, 1 / 10), (4, 1 / 35), (5, 1 / 126), (8, 1 / 6435)])
def test_separated_scores_have_the_least_p(n, least):
    p = permutation_p(np.arange(n) + 100.0, np.arange(float(n)))
    assert p == pytest.approx(least, rel=1e-12)


def test_a_difference_passes_the_permutation_test_and_welch():
    rng = np.random.default_rng(9)
    narrow, wide = rng.normal(scale=0.1, size=8), rng.normal(size=8)
    for shift in (0.3, 1.0, 2.0):
        x = wide + shift
        by_welch = stats.ttest_ind(x, narrow, equal_var=False).pvalue
        assert welch_p(x, narrow) == pytest.approx(by_welch)
        both = permutation_p(x, narrow), by_welch
        assert difference_p(x, narrow) == pytest.approx(max(both))
        assert decide(x, narrow, Rule(0.1)).p == pytest.approx(max(both))
    assert both[1] > both[0]  # without Welch's test p would be too small
    assert difference_p(np.ones(8), np.zeros(8)) == pytest.approx(1 / 6435)


def test_equal_scores_are_no_evidence_in_spite_of_rounding():
    assert permutation_p(np.array([0.1, 0.2, 0.3]), np.array([0.3, 0.2, 0.1])) == 1.0
    assert permutation_p(np.full(8, 0.7), np.full(8, 0.7)) == 1.0


@pytest.mark.parametrize("sizes", [(8, 8), (4, 9)])
def test_the_interval_is_that_of_welch(sizes):
    rng = np.random.default_rng(1)
    x, y = rng.normal(3, 2, size=sizes[0]), rng.normal(size=sizes[1])
    expected = stats.ttest_ind(x, y, equal_var=False).confidence_interval(0.9)
    assert welch_interval(x, y, level=0.05) == pytest.approx(tuple(expected))


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("lower, better, worse", [(False, BETTER, WORSE), (True, WORSE, BETTER)])
def test_the_direction_of_the_metric_turns_the_verdict(lower, better, worse):
    rule = Rule(0.5, lower_is_better=lower)
    above, below = decide(shifted(5), shifted(0), rule), decide(shifted(-5), shifted(0), rule)
    assert (above.verdict, below.verdict) == (better, worse)
    assert (above.difference, below.difference) == (pytest.approx(5), pytest.approx(-5))
    assert above.is_large and below.is_large
    assert (above.text, below.text) == (better, worse)


def test_a_significant_difference_may_be_negligible_or_of_unsettled_size():
    difference = decide(shifted(0.3, 0.1), shifted(0, 0.1), Rule(1.0))
    assert difference.verdict == BETTER and difference.is_negligible
    assert "less than matters" in difference.text and "perhaps" not in difference.text
    unsettled = decide(shifted(-0.3, 0.1), shifted(0, 0.1), Rule(0.3))
    assert unsettled.verdict == WORSE and not (unsettled.is_negligible or unsettled.is_large)
    assert "perhaps" in unsettled.text


def test_equivalent_is_an_interval_within_the_smallest_effect():
    x, y = np.array(shifted(0.1)), np.array(shifted(0))
    low, high = welch_interval(x, y, level=0.05)
    reach = max(-low, high)
    assert decide(x, y, Rule(reach * 1.01)).verdict == EQUIVALENT
    assert decide(x, y, Rule(reach * 0.99)).verdict == UNDECIDED
    # A stricter level has a wider interval.
    assert decide(x, y, Rule(reach * 1.01, level=0.01)).verdict == UNDECIDED


def test_holm_counts_every_comparison_and_those_that_are_missing():
    rng = np.random.default_rng(2)
    baseline = rng.normal(size=5)
    pairs = [(baseline + shift, baseline) for shift in (10.0, 11.0, 12.0)]
    separated = 1 / 126
    for decision, factor in zip(decide_all(pairs, Rule(1.0)), (3, 3, 3)):
        assert decision.corrected == pytest.approx(factor * separated)
        assert decision.rule.comparisons == 3
    pair = pairs[0]
    assert decide(*pair, Rule(1.0, comparisons=6)).verdict == BETTER
    assert decide(*pair, Rule(1.0, comparisons=7)).verdict == UNDECIDED
    mixed = decide_all([pair, (baseline, baseline + 0.01)], Rule(1.0, comparisons=7))
    assert mixed[0].corrected == pytest.approx(7 * separated)
    assert mixed[0].p == pytest.approx(separated)


def test_too_few_seeds_never_decide_and_say_how_many_would():
    three = decide([10, 11, 12], [1, 2, 3], Rule(1.0))
    assert three.verdict == UNDECIDED
    assert three.p == pytest.approx(0.1)
    assert three.text == "undecided: 4 seeds each would show a difference as large as this"
    # However small the difference that matters is: the spread allows no verdict on that one.
    assert decide([10, 11, 12], [1, 2, 3], Rule(0.01)).seeds == 4
    assert seeds_to_decide(1.0, Rule(0.01)) is None
    assert decide([10, 11, 12, 13], [1, 2, 3, 4], Rule(1.0)).verdict == BETTER
    four = decide([10, 11, 12, 13], [1, 2, 3, 4], Rule(1.0, comparisons=2))
    assert four.verdict == UNDECIDED


@pytest.mark.parametrize("more, is_enough", [((0, 0), True), ((0, 9), True), ((-1, 9), False)])
def test_seeds_that_should_have_decided_are_no_remedy(more, is_enough):
    row = decide([10, 11, 12], [1, 2, 3], Rule(1.0))
    sizes = tuple(row.seeds + n for n in more)
    assert ("did not" in replace(row, sizes=sizes).remedy) == is_enough


def test_single_seeds_have_no_interval():
    alone = decide([0.9], [0.5], Rule(0.1))
    assert (alone.verdict, alone.interval, alone.sd, alone.seeds) == (UNDECIDED, None, None, None)
    assert "no spread" in alone.text
    one = decide([0.9], [0.5, 0.51, 0.52], Rule(0.1))
    assert one.verdict == UNDECIDED and one.interval is None and one.seeds >= 4


def test_scores_without_spread():
    same = decide([1.0] * 8, [1.0] * 8, Rule(0.02))
    assert (same.verdict, same.p, same.interval) == (EQUIVALENT, 1.0, (0.0, 0.0))
    other = decide([1.0] * 8, [0.5] * 8, Rule(0.02))
    assert other.verdict == BETTER and other.interval == (0.5, 0.5)
    few = decide([1.0] * 3, [0.5] * 3, Rule(0.02))
    assert few.verdict == UNDECIDED and few.seeds == 4
    one_side = decide([1.0] * 8, shifted(0.5, 0.1), Rule(0.02))
    assert one_side.verdict == BETTER and one_side.interval[0] < 0.5 < one_side.interval[1]


def test_different_sizes():
    decision = decide(shifted(0) * 2, [9.0, 10.0, 11.0], Rule(1.0))
    assert decision.verdict == WORSE and decision.sizes == (16, 3)
    squares = 2 * (EIGHT**2).sum() + 2
    assert decision.sd == pytest.approx(math.sqrt(squares / 17))


@pytest.mark.parametrize("scores", [[], [0.5, math.nan], [math.inf, 1.0]])
def test_scores_that_are_no_numbers_are_refused(scores):
    with pytest.raises(ValueError, match="finite"):
        decide(scores, [0.5, 0.6], Rule(0.1))


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
        Rule(**wrong)


# ---------------------------------------------------------------- plans


def test_power_is_the_inverse_of_what_is_detectable():
    for n, comparisons in [(4, 1), (5, 3), (8, 7), (10, 28)]:
        effect = detectable(n, 0.3, comparisons=comparisons)
        assert power(n, effect, 0.3, comparisons=comparisons) == pytest.approx(POWER, abs=1e-3)
        assert effect == pytest.approx(0.3 * detectable(n, 1.0, comparisons=comparisons))
    assert detectable(4, 1.0, comparisons=2) is None
    assert power(4, 100.0, 1.0, comparisons=2) == power(1, 100.0, 1.0) == 0.0
    assert power(8, 1.0, 0.0) == 1.0


def test_power_of_the_least_p_is_the_probability_of_separation():
    def density(y, n=4, effect=2.5):
        return n * stats.norm.pdf(y) * stats.norm.cdf(y) ** (n - 1) * stats.norm.sf(y - effect) ** n

    separated = integrate.quad(density, -8, 8)[0]
    assert power(4, 2.5, 1.0) == pytest.approx(separated, abs=0.02)


def test_power_approaches_that_of_the_normal_distribution():
    n, effect = 400, 0.25
    shift = effect / math.sqrt(2 / n)
    assert power(n, effect, 1.0) == pytest.approx(stats.norm.sf(1.96 - shift), abs=0.01)
    reach = effect / math.sqrt(2 / n) - 1.645
    assert equivalence_power(n, effect, 1.0) == pytest.approx(
        2 * stats.norm.cdf(reach) - 1, abs=5e-3
    )


def test_seeds_to_decide_are_the_least_that_do_both():
    rule = Rule(0.02, comparisons=7)
    n = seeds_to_decide(0.015, rule)
    both = [
        min(power(k, 0.02, 0.015, comparisons=7), equivalence_power(k, 0.02, 0.015))
        for k in (n - 1, n)
    ]
    assert both[0] < POWER <= both[1]
    assert seeds_to_decide(5.0, rule) is None
    assert [equivalence_power(3, effect, 0.0) for effect in (0.0, 0.1)] == [0.0, 1.0]
    assert seeds_to_decide(0.0, rule) == 6  # the least with 2 / C(2n, n) < .05 / 7
