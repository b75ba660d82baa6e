"""Tests of scores over seeds, one score a seed: p, intervals, power, seeds that decide.

`report`, the league and its gates use these functions. DEFAULT_TEST takes the larger p of a
permutation test, which needs equal spreads but no normal distribution, and Welch's t test, which
needs no equal spreads. Where a row scatters more than its baseline, a permutation test alone errs
twice as often as it should (docs/results/league.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from typing import Any

import numpy as np

LEVEL = 0.05
POWER = 0.8  # probability of finding a detectable difference
FEWEST = 3  # seeds; with fewer no p can be small
TESTS = ("permutation and welch", "permutation", "welch", "bootstrap", "mann-whitney", "t")
OF_MEANS = ("permutation and welch", "welch", "t")
RESAMPLES = 10_000  # of a bootstrap
# Assignments of scores are enumerated up to this number (10 seeds against 10 have 184,756).
ASSIGNMENTS = 200_000
MOST_SEEDS = 200  # upper end of the search for a number of seeds
_SIMULATIONS = 2000  # simulations for a power
_PERMUTED = math.comb(16, 8)  # assignments up to which simulations include the permutation test
# Asymptotic efficiency of tests of ranks or medians against Student's t, for normal scores.
_EFFICIENCY = {"mann-whitney": 3 / math.pi, "median": 2 / math.pi}
_AVERAGES: dict[str, Any] = {"mean": np.mean, "median": np.median}
# Signs of the means of samples: a row, its baseline, and the controls of both.
_SIGNS = (1.0, -1.0, -1.0, 1.0)
Tails = tuple[float, float]  # one-sided p of "larger" and of "smaller"


@dataclass(frozen=True)
class Error:
    """A variance of a difference in addition to seeds, for example from the choice of settings.

    Attributes:
        variance: In squared units of the metric.
        freedom: Its degrees of freedom; infinite if the variance is known.
    """

    variance: float
    freedom: float = math.inf


Errors = Sequence[Error]


@dataclass(frozen=True)
class Test:
    """A test of independent samples of scores.

    Attributes:
        name: One of TESTS; "permutation and welch" takes the larger p of both.
        sides: 2, or 1 if "larger than the baseline" was the only question before the runs.
        centre: "mean" or "median"; tests in OF_MEANS have means.
    """

    name: str = TESTS[0]
    sides: int = 2
    centre: str = "mean"

    def p(self, *samples: np.ndarray, errors: Errors = ()) -> float:
        """Return p of a sample and its baseline; two-sided p is twice the smaller one-sided p.

        If the controls of both follow, Welch's test contrasts four means. No permutation of four
        samples is an exact test of equal gains: labels "trained" permuted within each side test
        that training adds nothing to either. We permute the scores minus the mean of their
        controls, which is exact if these means are known; otherwise p is too small, and only guards
        against seeds that agree by chance. `errors` are those of Welch's test.
        """
        values = []
        for name in self.name.split(" and "):
            tails = _tails(name, samples, errors, self.centre)
            values.append(tails[0] if self.sides == 1 else min(1.0, 2 * min(tails)))
        return max(values)

    def smallest_p(self, n: int, m: int) -> float:
        """Return the smallest p that `n` against `m` seeds can have, 0 for t tests."""
        least = 1 / math.comb(n + m, n)
        if "permutation" in self.name:
            least = max(least, 1 / (1 + ASSIGNMENTS))
        elif self.name != "mann-whitney":
            least = 1 / (1 + RESAMPLES) if self.name == "bootstrap" else 0.0
        return min(1.0, self.sides * least)

    def power(
        self,
        sizes: tuple[int, int],
        effect: float,
        sd: float = 1.0,
        level: float = LEVEL,
        comparisons: int = 1,
    ) -> float:
        """Return the probability that seeds of these sizes show a true difference of `effect`.

        They have to show it in its direction, at `level` / `comparisons` (Holm's first step, hence
        for one true difference among `comparisons`). Scores are normal with equal spreads. Welch's
        test is simulated, with an error of about 1 point, and the permutation test with it for up
        to 8 seeds against 8; leaving that out makes the power up to 5 points too high for up to 28
        comparisons. Student's t is exact. Other tests are taken as a t test at the largest level
        that they attain, with the efficiency of their statistic; simulated permutation tests of 3
        to 7 scores have a detectable difference within 4 %.
        """
        from scipy.stats import nct

        tail = level / (self.sides * comparisons)
        ratio = effect / sd if sd else math.copysign(math.inf, effect or -1.0)
        if "welch" in self.name:
            limits = _significant_from(*sizes, tail, self.name != "welch")
            return float(((limits <= ratio) & np.isfinite(limits)).mean())
        critical, error = self._noncentral(sizes, tail)
        if not critical or math.isinf(ratio):
            return float(critical > 0 and ratio > 0)
        return float(nct.sf(critical, sum(sizes) - 2, ratio / error))

    def detectable(
        self, sizes: tuple[int, int], sd: float = 1.0, level: float = LEVEL, comparisons: int = 1
    ) -> float | None:
        """Return the true difference for which `power` is POWER; None if none is enough."""
        from scipy.optimize import brentq

        tail = level / (self.sides * comparisons)
        if "welch" in self.name:
            limits = _significant_from(*sizes, tail, self.name != "welch")
            effect = float(np.quantile(limits, POWER, method="higher"))
            return effect * sd if math.isfinite(effect) else None
        critical, error = self._noncentral(sizes, tail)
        if not critical:
            return None

        def excess(effect: float) -> float:
            return self.power(sizes, effect, 1.0, level, comparisons) - POWER

        return float(brentq(excess, 0.0, (2 * critical + 10) * error)) * sd

    def _noncentral(self, sizes: tuple[int, int], tail: float) -> tuple[float, float]:
        """Return the critical t (0 if no p is below `tail`) and the error of an sd of 1."""
        from scipy.stats import t as student_t

        is_ranks, count = self.name == "mann-whitney", math.comb(sum(sizes), sizes[0])
        if (is_ranks or self.name == "permutation") and count <= ASSIGNMENTS:
            # Without ties each assignment has a statistic of its own, but for sums of ranks.
            ranks = assignments(*sizes) @ np.arange(sum(sizes)) if is_ranks else np.arange(count)
            levels = np.cumsum(np.unique(ranks, return_counts=True)[1]) / count
            tail = max(levels[levels < tail], default=0.0)
        efficiency = _EFFICIENCY.get(self.name, _EFFICIENCY.get(self.centre, 1.0))
        error = math.sqrt(sum(1 / n for n in sizes) / efficiency)
        if not tail:
            return 0.0, error
        return float(student_t.isf(tail, sum(sizes) - 2)), error

    def seeds_that_decide(
        self, effect: float, sd: float, level: float, comparisons: int, equivalence: bool = True
    ) -> int | None:
        """Return the least number of seeds each that show a true difference with power POWER.

        With `equivalence`, equal rows are also called equivalent within ± `effect` with this
        probability. None if more than MOST_SEEDS are needed.
        """
        low, high = 1, MOST_SEEDS + 1  # low is not enough, high is
        n = MOST_SEEDS
        while high - low > 1:
            power = self.power((n, n), effect, sd, level, comparisons)
            if equivalence:
                power = min(power, _equivalence_power(n, effect, sd, level))
            low, high = (low, n) if power >= POWER else (n, high)
            n = (low + high) // 2
        return high if high <= MOST_SEEDS else None


DEFAULT_TEST = Test()


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm-Bonferroni, which is valid for any dependence."""
    # scipy corrects false discovery rates only.
    order = np.argsort(p, kind="stable")
    raw = np.minimum(1.0, np.arange(len(p), 0, -1) * np.asarray(p, float)[order])
    return [float(x) for x in np.maximum.accumulate(raw)[np.argsort(order)]]


# ---------------------------------------------------------------- differences of means


def difference_of(*samples: np.ndarray) -> float:
    """Return the difference of the means of two samples, minus that of two further samples."""
    return float(sum(sign * x.mean() for sign, x in zip(_SIGNS, samples)))


def pooled_sd(*samples: np.ndarray) -> float | None:
    """Return the sd pooled over two sides, None without a degree of freedom.

    With the controls of both sides as further samples, it is the sd of a score minus a control.
    """
    variance = 0.0
    for x, y in zip(samples[::2], samples[1::2]):
        if not (freedom := len(x) + len(y) - 2):
            return None
        variance += float(sum(((side - side.mean()) ** 2).sum() for side in (x, y))) / freedom
    return math.sqrt(variance)


def _welch_error(*samples: np.ndarray, errors: Errors = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard error of sums or differences of means, and its degrees of freedom.

    The degrees of freedom are Welch's for two samples, and Satterthwaite's (1946, Biometrics
    Bulletin 2) for more samples and for added `errors`. Each sample is (..., n) with its own n > 1.
    At least one sample has a spread, or there is an error.
    """
    # scipy's ttest_ind is the case of two samples without further errors, see the tests.
    sizes = [x.shape[-1] for x in samples]
    variances = [x.var(axis=-1, ddof=1) / n for x, n in zip(samples, sizes)]
    total = sum(variances) + sum(error.variance for error in errors)
    parts = sum(part**2 / (n - 1) for part, n in zip(variances, sizes))
    parts = parts + sum(error.variance**2 / error.freedom for error in errors)
    with np.errstate(divide="ignore"):  # known errors alone have infinite degrees of freedom
        return np.sqrt(total), total**2 / parts


def mean_error(
    *samples: np.ndarray, errors: Errors = (), pooled: bool = False
) -> tuple[float, float]:
    """Return `_welch_error` as numbers, or that of Student's t test of two samples if `pooled`.

    It is 0 with infinite degrees of freedom for samples without spread.
    """
    if not errors and sum(map(np.ptp, samples)) <= _rounding(samples):
        return 0.0, math.inf
    if pooled:
        sizes = [len(x) for x in samples]
        sd = pooled_sd(*samples) or 0.0
        return sd * math.sqrt(sum(1 / n for n in sizes)), sum(sizes) - 2.0
    error, freedom = _welch_error(*samples, errors=errors)
    return float(error), float(freedom)


def half_width(error: float, freedom: float, level: float) -> float:
    """Return half of the width of the 1 - 2 `level` interval of a difference."""
    return _quantile(level, freedom) * error


@lru_cache(4096)  # scipy takes a millisecond, and a page asks for the same ones again and again
def _quantile(level: float, freedom: float) -> float:
    """Return the value that Student's t exceeds with probability `level`."""
    from scipy.stats import t as student_t

    return float(student_t.isf(level, freedom))


def interval(*samples: np.ndarray, level: float, errors: Errors = ()) -> tuple[float, float] | None:
    """Return Welch's 1 - 2 `level` interval of a difference of means, see `difference_of`.

    Return None if a sample has only one score. Samples without spread have an interval of width
    zero, which does not account for a seed that would differ.
    """
    if min(map(len, samples)) < 2:
        return None
    difference = difference_of(*samples)
    width = half_width(*mean_error(*samples, errors=errors), level)
    return difference - width, difference + width


def _rounding(samples: Sequence[np.ndarray]) -> float:
    """Return the difference that averages of the same scores may have in other orders of sums."""
    return float(1e-12 * max(np.abs(x).max() for x in samples))


# ---------------------------------------------------------------- one-sided p of single tests


def _tails(name: str, samples: Sequence[np.ndarray], errors: Errors, centre: str) -> Tails:
    if name in ("welch", "t"):
        return _t_tails(samples, errors, pooled=name == "t")
    x, y, *controls = samples
    if controls:
        x, y = (side - control.mean() for side, control in zip((x, y), controls))
    if name == "mann-whitney":
        return _rank_tails(x, y)
    return (_permutation if name == "permutation" else _bootstrap)(x, y, centre)


def _t_tails(samples: Sequence[np.ndarray], errors: Errors, pooled: bool) -> Tails:
    """Return the tails of Student's or Welch's t test of a difference, see `difference_of`."""
    from scipy.stats import t as student_t

    difference = difference_of(*samples)
    if abs(difference) <= _rounding(samples):
        difference = 0.0
    error, freedom = 0.0, math.inf
    if min(map(len, samples)) > 1:
        error, freedom = mean_error(*samples, errors=errors, pooled=pooled)
    # Neither one score nor means without spread speak against a difference.
    if not error:
        return float(difference <= 0), float(difference >= 0)
    upper, lower = student_t.sf([difference / error, -difference / error], freedom)
    return float(upper), float(lower)


def _permutation(x: np.ndarray, y: np.ndarray, centre: str) -> Tails:
    """Return the tails of the difference of centres over the `assignments` of the scores."""
    # scipy's permutation_test has the same p, but calls the statistic for batches of assignments
    # that it makes anew for each test; a cached matrix takes a hundredth of the time.
    pooled, ways = np.concatenate([x, y]), assignments(len(x), len(y))
    if centre == "mean":
        # The total is fixed, so the sum of the first side determines the difference of means.
        tolerance = len(pooled) * _rounding((x, y))
        return _shares(ways @ pooled, float(x.sum()), tolerance)
    scores, drawn = np.broadcast_to(pooled, ways.shape), ways > 0
    first = np.median(scores[drawn].reshape(-1, len(x)), axis=1)
    others = np.median(scores[~drawn].reshape(-1, len(y)), axis=1)
    return _shares(first - others, float(np.median(x) - np.median(y)), _rounding((x, y)))


def _bootstrap(x: np.ndarray, y: np.ndarray, centre: str) -> Tails:
    """Return the tails of the difference of centres over resamples shifted to one centre."""
    average = _AVERAGES[centre]
    common, rng = average(np.concatenate([x, y])), np.random.default_rng(0)
    centres = []
    for scores in (x, y):
        shifted = scores - average(scores) + common
        centres.append(average(rng.choice(shifted, size=(RESAMPLES, len(scores))), axis=1))
    observed = float(average(x) - average(y))
    # p is (1 + #{>=}) / (1 + RESAMPLES), never 0. scipy's bootstrap has intervals only.
    return _shares(centres[0] - centres[1], observed, _rounding((x, y)), added=1)


def _shares(values: np.ndarray, observed: float, tolerance: float, added: int = 0) -> Tails:
    """Return the shares of values that are at least, and at most, the observed one."""
    at_least = np.count_nonzero(values >= observed - tolerance)
    at_most = np.count_nonzero(values <= observed + tolerance)
    total = len(values) + added
    return (at_least + added) / total, (at_most + added) / total


def _rank_tails(x: np.ndarray, y: np.ndarray) -> Tails:
    """Return the tails of the U test: exact for few scores, else the normal approximation."""
    from scipy.stats import mannwhitneyu, rankdata

    pooled = np.concatenate([x, y])
    # The approximation is too bold for few scores, and scipy's exact p does not allow ties: in that
    # case we permute the ranks, which is the same test.
    if min(len(x), len(y)) <= 8 and len(np.unique(pooled)) < len(pooled):
        ranks = rankdata(pooled)
        return _permutation(ranks[: len(x)], ranks[len(x) :], "mean")
    greater, less = (mannwhitneyu(x, y, alternative=side).pvalue for side in ("greater", "less"))
    return float(greater), float(less)


@lru_cache(maxsize=8)
def assignments(n: int, m: int) -> np.ndarray:
    """Return ways to draw the first `n` of `n` + `m` scores, (ways, n + m) of 0 and 1.

    These are all ways, or ASSIGNMENTS random ones after the observed one, which comes first.
    """
    count = math.comb(n + m, n)
    if count <= ASSIGNMENTS:
        flat = chain.from_iterable(combinations(range(n + m), n))
        drawn = np.fromiter(flat, dtype=np.intp, count=count * n).reshape(count, n)
    else:
        order = np.random.default_rng(0).random((ASSIGNMENTS, n + m)).argsort(axis=1)
        drawn = np.concatenate([np.arange(n)[None], order[:, :n]])
    ways = np.zeros((len(drawn), n + m))
    np.put_along_axis(ways, drawn, 1.0, axis=1)
    return ways


# ---------------------------------------------------------------- power


@lru_cache(maxsize=256)
def _significant_from(n: int, m: int, tail: float, permutes: bool) -> np.ndarray:
    """Return, for simulated scores, the smallest significant true difference in sd, or infinity."""
    # We test one-sided at `tail`: by Welch's t test, and by permutation if `permutes`.
    count = math.comb(n + m, n)
    rank = math.ceil(tail * count) - 1  # number of extreme assignments
    if min(n, m) < 2 or (permutes and rank < 1):
        return np.full(_SIMULATIONS, np.inf)
    half = np.random.default_rng(0).standard_normal((_SIMULATIONS // 2, n + m))
    scores = np.concatenate([half, -half])  # makes their mean difference exactly 0
    x, y = scores[:, :n], scores[:, n:]
    from scipy.stats import t as student_t

    error, freedom = _welch_error(x, y)
    limits: np.ndarray = student_t.isf(tail, freedom) * error - x.mean(axis=1) + y.mean(axis=1)
    if permutes and count <= _PERMUTED:
        ways = assignments(n, m)[1:]
        swapped = n - ways[:, :n].sum(axis=1)
        for rows in np.array_split(np.arange(_SIMULATIONS), 10):
            # A difference d lifts the observed sum by n d and others by (n - swapped) d.
            sums = scores[rows] @ ways.T - x[rows].sum(axis=1, keepdims=True)
            lifts = np.partition(sums / swapped, -rank, axis=1)[:, -rank]
            limits[rows] = np.maximum(limits[rows], lifts)
    return limits


def _equivalence_power(n: int, effect: float, sd: float, level: float = LEVEL) -> float:
    """Return the probability that equal objectives with `n` seeds each are called equivalent.

    It is the probability that the 1 - 2 `level` interval (Student's, for normal scores) lies within
    ± `effect`.
    """
    from scipy.stats import chi2, norm

    if n < 2:
        return 0.0
    if sd == 0:
        return float(effect > 0)
    freedom, error = 2 * n - 2, sd * math.sqrt(2 / n)
    # The mean over quantiles of the distribution of the estimated error.
    quantiles = chi2.ppf((np.arange(1000) + 0.5) / 1000, freedom)
    width = half_width(error, freedom, level) * np.sqrt(quantiles / freedom)
    return float(np.clip(2 * norm.cdf((effect - width) / error) - 1, 0, None).mean())
