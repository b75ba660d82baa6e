"""Significance tests: is a setting better than the baseline, beyond the noise of seeds?

Tests are one-sided and unpaired: the alternative is that the setting is better, in the direction of
the metric. Resampling p-values are (1 + #{>=}) / (1 + N), which is never 0 and valid for every N.
If there are few assignments of the scores, all are enumerated and p is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.numbers import Metric, p_text
from metaseq_lm.reporting.settings import Setting, describe, scored_functions, show, where

RESAMPLES = 10_000
LEVEL = 0.05
FEWEST = 3  # seeds; with fewer no p-value can be small
TESTS = ("permutation", "bootstrap", "mann-whitney", "t")
POWER = 0.8  # probability of finding a detectable difference
# Asymptotic efficiency of tests of ranks or medians against Student's t, for normal scores.
_EFFICIENCY = {"mann-whitney": 3 / math.pi, "median": 2 / math.pi}
DETECTABLE = f"detectable ({POWER:.0%} power)".replace("%", " %")
_AVERAGES: dict[str, Any] = {"mean": np.mean, "median": np.median}


@dataclass(frozen=True, eq=False)
class Comparison:
    """The test of a setting against its baseline: p, also after Holm; None if not tested.

    `sizes` are the numbers of seeds of both, `difference` is the difference of their centres, and
    `detectable` is the true difference that the test finds with a probability of POWER, see
    `detectable`. `baseline` is None if no baseline equals the setting in the other keys, and the
    setting itself for a baseline. `other_function` is the reason why their scores have different
    functions, "" if they have one function.
    """

    setting: Setting
    baseline: Setting | None
    sizes: tuple[int, int] = (0, 0)
    p: float | None = None
    holm: float | None = None
    difference: float | None = None
    detectable: float | None = None
    other_function: str = ""

    @property
    def is_baseline(self) -> bool:
        """Whether the setting is a baseline, or the same runs under another label."""
        return self.baseline is not None and self.setting.content == self.baseline.content

    @property
    def hypothesis(self) -> tuple[Any, Any]:
        """A key of the tested hypothesis, equal for the same runs under two labels."""
        return self.setting.content, self.baseline and self.baseline.content

    @property
    def texts(self) -> tuple[str, str]:
        """The texts of the cells p and p (Holm)."""
        if self.p is not None:
            return p_text(self.p), p_text(self.holm)
        if self.is_baseline:
            return "", "baseline" if self.setting is self.baseline else "same runs"
        return ("-", "-") if self.baseline is None or self.other_function else (f"n<{FEWEST}",) * 2

    def detectable_texts(self, metric: Metric) -> tuple[str, str]:
        """The texts of the cells difference and detectable; "never" if no difference is enough."""
        if self.p is None or self.difference is None:
            return ("", "") if self.is_baseline else ("-", "-")
        digits = metric.decimals(max(abs(self.difference), self.detectable or 0.0))
        reach = "never" if self.detectable is None else metric.text(self.detectable, digits)
        return f"{'+' * (self.difference >= 0)}{metric.text(self.difference, digits)}", reach


@dataclass(frozen=True)
class Significance:
    """All comparisons of a table, in the order of its settings, with their method."""

    comparisons: list[Comparison]
    baseline: str
    test: str
    centre: str
    keys: tuple[str, ...]
    with_detectable: bool = False
    seeds: int | None = None  # of each setting, for `detectable`; None: the existing ones

    def notes(self) -> list[str]:
        """Return notes on the test, its result, the smallest possible p, and omissions."""
        tested = [c for c in self.comparisons if c.p is not None]
        lines = [self.describe(len({c.hypothesis for c in tested}), len(tested))]
        if tested:
            better = []
            for c in tested:
                if c.holm is not None and c.holm < LEVEL:
                    better.append(f"{c.setting.name} (p = {p_text(c.holm)})")
            lines.append(f"Significant at {LEVEL} after Holm: {'; '.join(better) or 'none'}.")
            if self.test != "t":
                lines.append(self.describe_smallest_p(tested))
            if self.with_detectable:
                lines.append(self.describe_detectable())
        if len({id(c.baseline) for c in self.comparisons if c.baseline}) > 1:
            lines.append("The best is marked among the settings that share a baseline.")
        reasons = map(self.why_untested, self.comparisons)
        lines += [f"Not compared: {reason}." for reason in reasons if reason]
        return lines

    def why_untested(self, comparison: Comparison) -> str:
        """Return why a setting was not compared, "" for a compared setting or a baseline."""
        name, baseline = comparison.setting.name, comparison.baseline
        if baseline is None:
            equal = ", ".join(f"{key}={show(comparison.setting.values[key])}" for key in self.keys)
            return f"{name}: no baseline has {equal}"
        if comparison.other_function:
            return f"{name} with {baseline.name}: {comparison.other_function}"
        if comparison.p is None and not comparison.is_baseline:
            return (
                f"{name} ({comparison.sizes[0]} scored seeds) with {baseline.name} "
                f"({comparison.sizes[1]}): a test needs {FEWEST} of each"
            )
        return ""

    def describe(self, count: int, shown: int) -> str:
        """Return the test, the alternative, the baseline and the correction in one sentence."""
        test = {
            "permutation": f"permutation test of {self.centre}s, all assignments of the scores, or "
            f"{RESAMPLES:,} random ones where there are more",
            "bootstrap": f"bootstrap test of {self.centre}s, {RESAMPLES:,} resamples "
            "(lenient for few seeds)",
            "mann-whitney": "Mann-Whitney U test",
            "t": "Student's t test of means, deviations pooled",
        }[self.test]
        within = f" with equal {', '.join(self.keys)}" if self.keys else ""
        once = ", the same runs under several labels counted once" * (count < shown)
        return (
            f"p: {test}, unpaired, one-sided (better than the baseline {self.baseline}{within}); "
            f"p (Holm): corrected by Holm-Bonferroni for the {count} comparisons of this "
            f"table{once}."
        )

    def describe_detectable(self) -> str:
        """Return a note on the column of detectable differences and its computation."""
        of_seeds = f" of {self.seeds} seeds each" if self.seeds else ""
        method = "exact (noncentral t)"
        if self.test != "t":
            method = "approximated by the noncentral t at the level that the test attains"
        return (
            f"{DETECTABLE}: the true difference of {self.centre}s{of_seeds} for which p, one-sided "
            f"and before Holm, falls below {LEVEL} with a probability of {POWER}, if scores are "
            f"normal with the pooled sd of the two: {method}."
        )

    def describe_smallest_p(self, tested: Sequence[Comparison]) -> str:
        """Return a note on the smallest p that the numbers of seeds allow, and a remedy."""
        count = len({c.hypothesis for c in tested})
        smallest = {c.sizes: smallest_p(self.test, *c.sizes) for c in tested}
        bounds = [f"{p:.2g} for {n} seeds against {m}" for (n, m), p in smallest.items()]
        line = f"p cannot fall below about {'; '.join(bounds)}."
        if min(smallest.values()) * count < LEVEL:
            return line
        times = f"Times {count} comparisons that is" if count > 1 else "That is"
        enough = [n for n in range(FEWEST, 20) if smallest_p(self.test, n, n) * count < LEVEL]
        remedy = f"{enough[0]} seeds a setting" if enough else "fewer comparisons"
        return f"{line} {times} not below {LEVEL}: nothing can be significant; {remedy} would do."


def compare(
    settings: Sequence[Setting],
    metric: Metric,
    baseline: Sequence[str],
    test: str = "permutation",
    spread: str = "sd",
    with_detectable: bool = False,
    seeds: int | None = None,
) -> Significance:
    """Compare each setting with the baseline that is equal in all other shown keys.

    `baseline` are KEY=VALUE conditions; a word alone is a label. Medians are compared for the
    spread "range", else means. With `with_detectable` each comparison has the difference that its
    seeds could show, or that `seeds` seeds of each setting with the same scatter could show. Raises
    UsageError for an unknown key or value, and if nothing is left to compare.
    """
    conditions = [word if "=" in word else f"label={word}" for word in baseline]
    named = {condition.partition("=")[0] for condition in conditions}
    shown = settings[0].shown if settings else ()
    keys = tuple(key for key in shown if key not in named)
    centre = "median" if spread == "range" and test != "t" else "mean"
    comparisons = []
    for setting, base in _pair_up(settings, conditions, keys):
        comparison = Comparison(setting, base)
        if base is not None and base.content != setting.content:
            comparison = compare_pair(setting, base, metric, test, centre)
            if with_detectable and comparison.p is not None:
                scores, base_scores = (
                    list(item.seed_means(metric.name).values()) for item in (setting, base)
                )
                reach = detectable(scores, base_scores, test, centre, seeds)
                comparison = replace(comparison, detectable=reach)
        comparisons.append(comparison)
    # The same runs under two labels are one hypothesis.
    p_values = {c.hypothesis: c.p for c in comparisons if c.p is not None}
    corrected = dict(zip(p_values, holm(list(p_values.values()))))
    comparisons = [replace(c, holm=corrected.get(c.hypothesis)) for c in comparisons]
    return Significance(
        comparisons, ", ".join(conditions), test, centre, keys, with_detectable, seeds
    )


def compare_pair(
    setting: Setting, base: Setting, metric: Metric, test: str, centre: str
) -> Comparison:
    """Return the comparison of a setting with its baseline, before Holm's correction."""
    scores = list(setting.seed_means(metric.name).values())
    base_scores = list(base.seed_means(metric.name).values())
    sizes = len(scores), len(base_scores)
    if differing := scored_functions(metric.name, [setting, base]):
        return Comparison(setting, base, sizes, other_function=describe(metric.name, differing))
    if min(sizes) < FEWEST:
        return Comparison(setting, base, sizes)
    return Comparison(
        setting,
        base,
        sizes,
        p=p_value(scores, base_scores, metric.lower_is_better, test, centre),
        difference=float(_AVERAGES[centre](scores) - _AVERAGES[centre](base_scores)),
    )


def _pair_up(
    settings: Sequence[Setting], conditions: Sequence[str], keys: Sequence[str]
) -> list[tuple[Setting, Setting | None]]:
    """Return each setting with the baseline of equal values of `keys` (maybe itself), or None.

    Raises UsageError if two baselines are equal in `keys`, or no setting has another baseline.
    """
    option = f"--baseline {' '.join(conditions)}"
    runs = []
    for setting in settings:
        runs += setting.runs
    matching = where(runs, conditions, "--baseline")
    baselines: dict[tuple[object, ...], Setting] = {}
    for setting in settings:
        if setting.runs[0] in matching:
            other = baselines.setdefault(setting.identity(keys), setting)
            if other is not setting:
                raise UsageError(
                    f"{option} picks both {other.name} and {setting.name}; "
                    "say one of them with KEY=VALUE."
                )
    pairs = [(setting, baselines.get(setting.identity(keys))) for setting in settings]
    if all(base is None or base is setting for setting, base in pairs):
        within = f" with equal {', '.join(keys)}" if keys else ""
        raise UsageError(
            f"{option}: there is no other setting{within} to compare with it. "
            "Name a key in --baseline to compare across its values."
        )
    return pairs


def _oriented(scores: Sequence[float], lower_is_better: bool) -> np.ndarray:
    """Return scores as an array in which larger is better."""
    return (-1.0 if lower_is_better else 1.0) * np.asarray(scores, dtype=float)


def p_value(
    a: Sequence[float], b: Sequence[float], lower_is_better: bool, test: str, centre: str = "mean"
) -> float:
    """Return p of "the scores `a` are not better than `b`", reproducibly.

    `test` is one of TESTS, `centre` is "mean" or "median" (not used by mann-whitney).
    """
    x, y = (_oriented(scores, lower_is_better) for scores in (a, b))
    if test == "bootstrap":
        return bootstrap(x, y, centre)
    if test == "t":
        return student(x, y)
    return _mann_whitney(x, y) if test == "mann-whitney" else permutation(x, y, centre)


def detectable(
    a: Sequence[float],
    b: Sequence[float],
    test: str,
    centre: str = "mean",
    seeds: int | None = None,
) -> float | None:
    """Return the true difference that a test of the scores finds with a probability of POWER.

    With `seeds`, each side has this number of scores, with the same scatter. The test finds a
    difference if p is below LEVEL, one-sided. Scores are taken as normal with the pooled deviation
    of `a` and `b`. The result is exact for "t". Other tests use Student's t at the largest level
    that they attain, divided by the root of their efficiency: simulated permutation tests of means
    of 3 to 7 scores differ by at most 4 %. Return None if no difference is enough, as for 3 seeds
    against 3 in a permutation test.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct
    from scipy.stats import t as student_t

    variance = np.average([np.var(a, ddof=1), np.var(b, ddof=1)], weights=[len(a) - 1, len(b) - 1])
    sizes = (seeds, seeds) if seeds else (len(a), len(b))
    level, freedom = attainable_level(test, *sizes), sum(sizes) - 2
    if not level:
        return None
    critical = student_t.isf(level, freedom)
    shift = brentq(lambda x: nct.sf(critical, freedom, x) - POWER, 0.0, 2 * critical + 10)
    efficiency = _EFFICIENCY.get(test, _EFFICIENCY.get(centre, 1.0)) if test != "t" else 1.0
    error = math.sqrt(variance * sum(1 / n for n in sizes) / efficiency)
    return float(shift * error)


def attainable_level(test: str, n: int, m: int) -> float:
    """Return the largest p below LEVEL that `n` against `m` scores can have, 0 without one."""
    count = math.comb(n + m, n)
    if test in ("t", "bootstrap") or count > RESAMPLES:
        return LEVEL
    statistics: Any = range(count)  # without ties every assignment has a different statistic
    if test == "mann-whitney":
        statistics = [sum(ranks) for ranks in combinations(range(n + m), n)]
    _, counts = np.unique(statistics, return_counts=True)
    levels = np.cumsum(counts[::-1]) / count
    return float(max(levels[levels < LEVEL], default=0.0))


def permutation(x: np.ndarray, y: np.ndarray, centre: str = "mean") -> float:
    """Return p of the difference of centres over the assignments of the pooled scores.

    Up to RESAMPLES assignments are all enumerated, so p is exact; else we draw random ones.
    """
    from scipy.stats import permutation_test

    average = _AVERAGES[centre]
    observed = average(x) - average(y)
    tolerance = rounding_error(x, y)

    def difference(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
        differences: np.ndarray = average(first, axis=axis) - average(second, axis=axis)
        return np.where(abs(differences - observed) <= tolerance, observed, differences)

    rng = np.random.default_rng(0)
    test = permutation_test(
        (x, y), difference, n_resamples=RESAMPLES, alternative="greater", rng=rng
    )
    return float(test.pvalue)


def bootstrap(x: np.ndarray, y: np.ndarray, centre: str = "mean") -> float:
    """Return p of the difference of centres over resamples of both, shifted to one centre."""
    average = _AVERAGES[centre]
    common = average(np.concatenate([x, y]))
    rng = np.random.default_rng(0)
    resamples = []
    for scores in (x, y):
        shifted = scores - average(scores) + common
        resamples.append(rng.choice(shifted, size=(RESAMPLES, len(scores))))
    differences = average(resamples[0], axis=1) - average(resamples[1], axis=1)
    observed = average(x) - average(y)
    exceeding = int((differences >= observed - rounding_error(x, y)).sum())
    return (1 + exceeding) / (1 + RESAMPLES)


def rounding_error(x: np.ndarray, y: np.ndarray) -> float:
    """Return the difference that averages of the same scores may have in other orders of sums."""
    return float(1e-12 * max(np.abs(x).max(), np.abs(y).max()))


def _mann_whitney(x: np.ndarray, y: np.ndarray) -> float:
    """Return p of the Mann-Whitney U test: exact for few scores, else the normal approximation.

    The approximation is too bold for few scores, and scipy's exact p does not allow ties: in that
    case we permute the ranks, which is the same test.
    """
    from scipy.stats import mannwhitneyu, rankdata

    pooled = np.concatenate([x, y])
    if min(len(x), len(y)) <= 8 and len(np.unique(pooled)) < len(pooled):
        ranks = rankdata(pooled)
        return permutation(ranks[: len(x)], ranks[len(x) :])
    return float(mannwhitneyu(x, y, alternative="greater").pvalue)


def student(x: np.ndarray, y: np.ndarray) -> float:
    """Return p of the one-sided Student's t test with pooled deviations."""
    from scipy.stats import ttest_ind

    tolerance = rounding_error(x, y)
    if np.ptp(x) + np.ptp(y) <= tolerance:  # without scatter, scores differ or are equal
        return float(x.mean() - y.mean() <= tolerance)
    return float(ttest_ind(x, y, alternative="greater").pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm-Bonferroni, which is valid for any dependence."""
    order = np.argsort(p, kind="stable")
    raw = np.minimum(1.0, np.arange(len(p), 0, -1) * np.asarray(p, float)[order])
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(raw)
    return [float(value) for value in corrected]


def smallest_p(test: str, n: int, m: int) -> float:
    """Return the smallest p that `n` against `m` seeds can have; a t test has none."""
    exact, sampled = 1 / math.comb(n + m, n), 1 / (1 + RESAMPLES)
    if test == "mann-whitney":
        return exact
    return sampled if test == "bootstrap" else max(exact, sampled)
