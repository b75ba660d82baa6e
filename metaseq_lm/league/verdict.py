"""Verdicts: is an objective better than the baseline, equivalent, worse, or is it undecided?

All functions are pure functions of scores, one for each seed. A difference has to pass two tests: a
permutation test, which needs equal spreads but no normal distribution, and Welch's t test, which
needs no equal spreads. A row in the middle of a transition scatters more than a baseline at chance:
there the permutation test alone is wrong twice as often as it should be (docs/results/league.md has
the simulation). Equivalence is decided by Welch's interval of the difference (two one-sided tests:
Schuirmann 1987, doi:10.1007/BF01068419).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations

import numpy as np

from metaseq_lm.reporting.significance import LEVEL, POWER, holm, rounding_error

BETTER, EQUIVALENT, WORSE, UNDECIDED = "better", "equivalent", "worse", "undecided"
VERDICTS = (BETTER, EQUIVALENT, WORSE, UNDECIDED)
# Signs of the means of samples: a row, its baseline, and the controls of both.
_SIGNS = (1.0, -1.0, -1.0, 1.0)
# Assignments of scores are enumerated up to this number (10 seeds against 10 have 184,756).
ASSIGNMENTS = 200_000
_MOST_SEEDS = 200  # upper end of the search for a number of seeds
_SIMULATIONS = 2000  # simulations for a power
_PERMUTED_SEEDS = 8  # up to here a simulation of power includes the permutation test


@dataclass(frozen=True)
class Rule:
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
            raise ValueError(f"comparisons={self.comparisons}: there must be one at least")


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
class Contrast:
    """A difference of means and its error, before any correction.

    Attributes:
        difference: Mean of the scores minus mean of the baseline, whatever the direction; for
            gains, see `gains`, the difference of gains.
        interval: The 1 - 2 level interval of the difference; None if a sample has only one score.
        p: Two-sided p, the larger one of the permutation test and Welch's t test.
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
class Decision(Contrast):
    """The verdict on one row, with its numbers.

    Attributes:
        verdict: One of VERDICTS.
        corrected: `p` after Holm's correction.
        rule: The rule that decided.
    """

    verdict: str
    corrected: float
    rule: Rule

    @property
    def is_negligible(self) -> bool:
        """Whether the whole interval lies within the smallest effect that matters."""
        return within(self.interval, self.rule.smallest_effect)

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

    @property
    def seeds(self) -> int | None:
        """The seeds of each side that would decide, see `seeds_to_decide`.

        If a large difference only lacks seeds, the number that shows it, see `_seeds_to_show`. None
        for a decided row, without a spread, or if MOST_SEEDS would not be enough.
        """
        if self.verdict != UNDECIDED or self.sd is None:
            return None
        if self.is_large:
            return _seeds_to_show(self.difference, self.sd, self.rule)
        return seeds_to_decide(self.sd, self.rule)

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
            return "one seed of each has no spread"
        seeds = self.seeds
        if self.errors and not self.is_within_reach:
            return "more seeds alone would not decide, for the errors of tuning and items"
        if seeds is None:
            return f"more than {_MOST_SEEDS} seeds each would be needed"
        if seeds <= min(self.sizes):
            return f"{seeds} seeds each decide in 4 of 5 cases, here they did not"
        if self.is_large:
            return f"{seeds} seeds each would show a difference as large as this"
        return f"{seeds} seeds each would decide"


def decide_all(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    rule: Rule,
    errors: Sequence[Errors] = (),
) -> list[Decision]:
    """Return the verdict on each pair (scores of a row, scores of its baseline).

    `errors` are additional errors of each pair.

    *better* and *worse*: p, see `difference_p`, is below the level after Holm's correction for all
    pairs. *equivalent*: neither, and the 1 - 2 level interval of the difference lies within the
    smallest effect. Otherwise *undecided*. If the rule has more comparisons than there are pairs,
    the correction uses the rule's number.

    Raises ValueError if a side has no scores or a score that is not finite.
    """
    contrasts = []
    for (scores, baseline), further in zip(pairs, errors or [()] * len(pairs)):
        contrasts.append(contrast(checked(scores), checked(baseline), rule.level, further))
    return judge(contrasts, rule)


def judge(contrasts: Sequence[Contrast], rule: Rule) -> list[Decision]:
    """Return the verdicts on contrasts that are corrected together, see `decide_all`."""
    rule = replace(rule, comparisons=max(rule.comparisons, len(contrasts)))
    missing = [1.0] * (rule.comparisons - len(contrasts))
    decisions = []
    for item, corrected in zip(contrasts, holm([*(item.p for item in contrasts), *missing])):
        verdict = UNDECIDED
        if corrected < rule.level:
            verdict = WORSE if (item.difference > 0) == rule.lower_is_better else BETTER
        elif within(item.interval, rule.smallest_effect):
            verdict = EQUIVALENT
        decisions.append(Decision(**vars(item), verdict=verdict, corrected=corrected, rule=rule))
    return decisions


def contrast(x: np.ndarray, y: np.ndarray, level: float, errors: Errors = ()) -> Contrast:
    """Return the difference of the means of two samples with its 1 - 2 `level` interval."""
    errors = present(errors)
    return Contrast(
        difference_of(x, y),
        welch_interval(x, y, level=level, errors=errors),
        difference_p(x, y, errors),
        pooled_sd(x, y),
        (len(x), len(y)),
        errors=errors,
    )


def present(errors: Errors) -> Errors:
    """Return the errors with a variance above 0."""
    return tuple(error for error in errors if error.variance > 0)


def decide(scores: Sequence[float], baseline: Sequence[float], rule: Rule) -> Decision:
    """Return the verdict on one row, see `decide_all`; p is multiplied by `rule.comparisons`."""
    return decide_all([(scores, baseline)], rule)[0]


def checked(scores: Sequence[float]) -> np.ndarray:
    """Return scores as an array; raises ValueError if it is empty or has a nonfinite score."""
    x = np.asarray(scores, dtype=float)
    if not x.size or not np.isfinite(x).all():
        raise ValueError(f"a verdict needs finite scores, not {list(scores)}")
    return x


def within(interval: tuple[float, float] | None, effect: float) -> bool:
    """Return whether an interval lies strictly between -effect and effect."""
    return interval is not None and -effect < interval[0] and interval[1] < effect


def difference_of(*samples: np.ndarray) -> float:
    """Return the difference of the means of two samples, minus that of two further samples."""
    return float(sum(sign * x.mean() for sign, x in zip(_SIGNS, samples)))


def pooled_sd(*samples: np.ndarray) -> float | None:
    """Return the sd pooled over two sides, None without a degree of freedom.

    With the controls of both sides as further samples, it is the sd of a score minus a control.
    """
    variance = 0.0
    for x, y in zip(samples[::2], samples[1::2]):
        freedom = len(x) + len(y) - 2
        if not freedom:
            return None
        squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (x, y))
        variance += squares / freedom
    return math.sqrt(variance)


# ---------------------------------------------------------------- tests and interval


def difference_p(x: np.ndarray, y: np.ndarray, errors: Errors = ()) -> float:
    """Return the two-sided p of the difference of means, the larger p of the two tests."""
    return max(permutation_p(x, y), welch_p(x, y, errors=errors))


def permutation_p(x: np.ndarray, y: np.ndarray) -> float:
    """Return the two-sided p of the difference of means over the assignments of the scores.

    It is twice the smaller one-sided p, at most 1. Up to ASSIGNMENTS assignments it is over all of
    them and therefore exact, else over ASSIGNMENTS random ones and the observed one.
    """
    pooled = np.concatenate([x, y])
    # The total is fixed, so the sum of the first side determines the difference of means.
    sums = assignments(len(x), len(y)) @ pooled
    observed, tolerance = x.sum(), len(pooled) * rounding_error(x, y)
    at_least = np.count_nonzero(sums >= observed - tolerance)
    at_most = np.count_nonzero(sums <= observed + tolerance)
    return min(1.0, 2 * float(min(at_least, at_most)) / len(sums))


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


def welch_error(*samples: np.ndarray, errors: Errors = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard error of sums or differences of means, and its degrees of freedom.

    The degrees of freedom are Welch's for two samples, and Satterthwaite's (1946, Biometrics
    Bulletin 2) for more samples and for added `errors`. Each sample is (..., n) with its own n > 1.
    At least one sample has a spread, or there is an error.
    """
    sizes = [x.shape[-1] for x in samples]
    variances = [x.var(axis=-1, ddof=1) / n for x, n in zip(samples, sizes)]
    total = sum(variances) + sum(error.variance for error in errors)
    parts = sum(part**2 / (n - 1) for part, n in zip(variances, sizes))
    parts = parts + sum(error.variance**2 / error.freedom for error in errors)
    with np.errstate(divide="ignore"):  # known errors alone have infinite degrees of freedom
        return np.sqrt(total), total**2 / parts


def welch_p(*samples: np.ndarray, errors: Errors = ()) -> float:
    """Return the two-sided p of Welch's t test of a difference, see `difference_of`.

    Return 0 if the test cannot speak against a difference: for a sample of one score, and for
    different means without spread.
    """
    from scipy.stats import t as student_t

    difference, tolerance = abs(difference_of(*samples)), rounding(samples)
    if difference <= tolerance:
        return 1.0
    if min(map(len, samples)) < 2 or (not errors and sum(map(np.ptp, samples)) <= tolerance):
        return 0.0
    error, freedom = welch_error(*samples, errors=errors)
    return float(2 * student_t.sf(difference / error, freedom))


def welch_interval(
    *samples: np.ndarray, level: float, errors: Errors = ()
) -> tuple[float, float] | None:
    """Return Welch's 1 - 2 `level` interval of a difference of means, see `difference_of`.

    Return None if a sample has only one score. Samples without spread have an interval of width
    zero, which does not account for a seed that would differ.
    """
    from scipy.stats import t as student_t

    if min(map(len, samples)) < 2:
        return None
    difference = difference_of(*samples)
    if not errors and sum(map(np.ptp, samples)) <= rounding(samples):
        return difference, difference
    error, freedom = welch_error(*samples, errors=errors)
    half_width = float(student_t.isf(level, freedom) * error)
    return difference - half_width, difference + half_width


def rounding(samples: Sequence[np.ndarray]) -> float:
    """Return the rounding error of a difference of means of the same scores."""
    return rounding_error(samples[0], np.concatenate(samples[1:]))


# ---------------------------------------------------------------- plans


def power(n: int, effect: float, sd: float, level: float = LEVEL, comparisons: int = 1) -> float:
    """Return the probability that `n` seeds each show a true difference of `effect`.

    They have to show it in its direction, at `level` / `comparisons` (Holm's first step, hence for
    one true difference among `comparisons`). Scores are simulated as normal with equal spreads; the
    result has an error of about 1 point. For more than PERMUTED_SEEDS seeds the permutation test is
    left out, which makes the power up to 5 points too high for up to 28 comparisons.
    """
    limits = _significant_from(n, level / (2 * comparisons))
    if sd == 0:
        return float(effect > 0 and np.isfinite(limits[0]))
    return float((limits <= effect / sd).mean())


def detectable(n: int, sd: float, level: float = LEVEL, comparisons: int = 1) -> float | None:
    """Return the true difference for which `power` is POWER; None if no difference is enough."""
    limits = _significant_from(n, level / (2 * comparisons))
    effect = float(np.quantile(limits, POWER, method="higher"))
    return effect * sd if math.isfinite(effect) else None


@lru_cache(maxsize=256)
def _significant_from(n: int, level: float) -> np.ndarray:
    """Return, for simulated scores, the smallest significant true difference in sd.

    We simulate two samples of `n` standard normal scores SIMULATIONS times and test one-sided at
    `level`. Values are infinite if `n` against `n` scores can never be significant.
    """
    from scipy.stats import t as student_t

    rank = math.ceil(level * math.comb(2 * n, n)) - 1  # number of extreme assignments
    if n < 2 or rank < 1:
        return np.full(_SIMULATIONS, np.inf)
    half = np.random.default_rng(0).standard_normal((_SIMULATIONS // 2, 2 * n))
    scores = np.concatenate([half, -half])  # makes their mean difference exactly 0
    x, y = scores[:, :n], scores[:, n:]
    error, freedom = welch_error(x, y)
    limits: np.ndarray = student_t.isf(level, freedom) * error - x.mean(axis=1) + y.mean(axis=1)
    if n <= _PERMUTED_SEEDS:
        ways = assignments(n, n)[1:]
        swapped = n - ways[:, :n].sum(axis=1)
        for rows in np.array_split(np.arange(_SIMULATIONS), 10):
            # A difference d lifts the observed sum by n d and others by (n - swapped) d.
            sums = scores[rows] @ ways.T - x[rows].sum(axis=1, keepdims=True)
            lifts = np.partition(sums / swapped, -rank, axis=1)[:, -rank]
            limits[rows] = np.maximum(limits[rows], lifts)
    return limits


def equivalence_power(n: int, effect: float, sd: float, level: float = LEVEL) -> float:
    """Return the probability that equal objectives with `n` seeds each are called equivalent.

    It is the probability that the 1 - 2 `level` interval (Student's, for normal scores) lies within
    ± `effect`.
    """
    from scipy.stats import chi2, norm
    from scipy.stats import t as student_t

    if n < 2:
        return 0.0
    if sd == 0:
        return float(effect > 0)
    freedom, error = 2 * n - 2, sd * math.sqrt(2 / n)
    # The mean over quantiles of the distribution of the estimated error.
    quantiles = chi2.ppf((np.arange(1000) + 0.5) / 1000, freedom)
    half_width = student_t.isf(level, freedom) * error * np.sqrt(quantiles / freedom)
    return float(np.clip(2 * norm.cdf((effect - half_width) / error) - 1, 0, None).mean())


def seeds_to_decide(sd: float, rule: Rule) -> int | None:
    """Return the least number of seeds each with which cases of interest are decided.

    With a probability of POWER each, a difference of the smallest effect is shown, and equal
    objectives are called equivalent. None if more than MOST_SEEDS are needed.
    """

    def is_enough(n: int) -> bool:
        shown = power(n, rule.smallest_effect, sd, rule.level, rule.comparisons)
        return min(shown, equivalence_power(n, rule.smallest_effect, sd, rule.level)) >= POWER

    return _least_seeds(is_enough)


def _seeds_to_show(difference: float, sd: float, rule: Rule) -> int | None:
    """Return the least number of seeds each that show a true difference with a power of POWER.

    None if more than MOST_SEEDS are needed.
    """
    return _least_seeds(
        lambda n: power(n, abs(difference), sd, rule.level, rule.comparisons) >= POWER
    )


def _least_seeds(is_enough: Callable[[int], bool]) -> int | None:
    """Return the least sufficient number of seeds; None if MOST_SEEDS are not enough."""
    if not is_enough(_MOST_SEEDS):
        return None
    low, high = 1, _MOST_SEEDS  # low is not enough, high is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
