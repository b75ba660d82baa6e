"""Significance of settings against a baseline: comparisons of a table and notes on their test."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import count_text
from metaseq_lm.reporting.numbers import Metric, p_text
from metaseq_lm.reporting.settings import Row, describe, runs_of, scored_functions, show, where
from metaseq_lm.reporting.stats import (
    ASSIGNMENTS,
    DEFAULT_TEST,
    FEWEST,
    LEVEL,
    OF_MEANS,
    POWER,
    RESAMPLES,
    Test,
    holm,
    pooled_sd,
)

DETECTABLE = f"detectable ({POWER:.0%} power)".replace("%", " %")
UNIT = "a seed, which counts as an independent pre-training"


def choose_test(name: str, sides: int, spread: str) -> Test:
    """Return a test of medians for the spread "range", if it can be one, else of means."""
    is_median = spread == "range" and name not in OF_MEANS
    return Test(name, sides, "median" if is_median else "mean")


def describe_test(test: Test) -> str:
    """Return the test and its sides in words."""
    drawn = f"all assignments of the scores, or {ASSIGNMENTS:,} random ones where there are more"
    names = {
        "permutation": f"permutation test of {test.centre}s, {drawn}",
        "bootstrap": f"bootstrap test of {test.centre}s, {RESAMPLES:,} resamples (lenient for few "
        "seeds)",
        "mann-whitney": "Mann-Whitney U test",
        "welch": "Welch's t test of means",
        "t": "Student's t test of means, deviations pooled",
    }
    names["permutation and welch"] = f"larger p of Welch's t test and a {names['permutation']}"
    return f"{names[test.name]}, unpaired, {('one', 'two')[test.sides - 1]}-sided"


@dataclass(frozen=True, eq=False)
class SettingComparison:
    """The test of a setting against its baseline: p, also after Holm; None if not tested.

    `sizes` are the numbers of seeds of both, `difference` is that of their centres, `is_ahead` says
    whether the setting is at least as good by it, and `detectable` is the true difference that the
    test finds with a probability of POWER. `baseline` is None if no baseline equals the setting in
    the other keys, and the setting itself for a baseline. `other_function` says why their scores
    are not comparable.
    """

    setting: Row
    baseline: Row | None
    sizes: tuple[int, int] = (0, 0)
    p: float | None = None
    holm: float | None = None
    difference: float | None = None
    is_ahead: bool = False
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
        if self.baseline is None or self.other_function:
            return "-", "-"
        return f"n<{FEWEST}", f"n<{FEWEST}"

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

    comparisons: list[SettingComparison]
    baseline: str
    test: Test
    keys: tuple[str, ...]
    with_detectable: bool = False
    seeds: int | None = None  # of each setting, for `detectable`; None: the existing ones

    @property
    def tested(self) -> list[SettingComparison]:
        """The comparisons with a p."""
        return [c for c in self.comparisons if c.p is not None]

    @property
    def family(self) -> list[str]:
        """The names of the settings whose p Holm corrects together; equal runs count once."""
        return list({c.hypothesis: c.setting.name for c in reversed(self.tested)}.values())[::-1]

    def verdict(self, comparison: SettingComparison) -> str:
        """Return "better" or "worse" if p is below LEVEL after Holm, else that it is neither."""
        is_shown = comparison.holm is not None and comparison.holm < LEVEL
        if not is_shown:
            return "not shown to be better" if self.test.sides == 1 else "no difference shown"
        return "better" if comparison.is_ahead or self.test.sides == 1 else "worse"

    def notes(self) -> list[str]:
        """Return notes on the test, its result, the smallest possible p, and omissions."""
        lines = [self.describe()]
        if tested := self.tested:
            shown = []
            for c in tested:
                if c.holm is not None and c.holm < LEVEL:
                    word = f"{self.verdict(c)}, " * (self.test.sides == 2)
                    shown.append(f"{c.setting.name} ({word}p = {p_text(c.holm)})")
            lines.append(f"Significant at {LEVEL} after Holm: {'; '.join(shown) or 'none'}.")
            if self.test.smallest_p(*tested[0].sizes):
                lines.append(self.describe_smallest_p())
            if self.with_detectable:
                lines.append(self.describe_detectable())
        if len({id(c.baseline) for c in self.comparisons if c.baseline}) > 1:
            lines.append("The best is marked among the settings that share a baseline.")
        reasons = map(self.why_untested, self.comparisons)
        lines += [f"Not compared: {reason}." for reason in reasons if reason]
        return lines

    def why_untested(self, comparison: SettingComparison) -> str:
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

    def describe(self) -> str:
        """Return the test, its sides and unit, the baseline and the family of the correction."""
        within = f" with equal {', '.join(self.keys)}" if self.keys else ""
        alternative = "better than" if self.test.sides == 1 else "better or worse than"
        count = len(self.family)
        once = ", the same runs under several labels counted once" * (count < len(self.tested))
        return (
            f"p: {describe_test(self.test)} ({alternative} the baseline {self.baseline}{within}); "
            f"the unit is {UNIT}; p (Holm): corrected by Holm-Bonferroni for the "
            f"{count_text(count, 'comparison')} of this table{once}."
        )

    def describe_detectable(self) -> str:
        """Return a note on the column of detectable differences and its computation."""
        of_seeds = f" of {self.seeds} seeds each" if self.seeds else ""
        method = "approximated by the noncentral t at the level that the test attains"
        if self.test.name == "t":
            method = "exact (noncentral t)"
        elif "welch" in self.test.name:
            method = "simulated"
        return (
            f"{DETECTABLE}: the true difference of {self.test.centre}s{of_seeds} for which p, "
            f"before Holm, falls below {LEVEL} with a probability of {POWER}, if scores are normal "
            f"with the pooled sd of the two: {method}."
        )

    def describe_smallest_p(self) -> str:
        """Return a note on the smallest p that the numbers of seeds allow, and a remedy."""
        count, smallest_p = len(self.family), self.test.smallest_p
        smallest = {c.sizes: smallest_p(*c.sizes) for c in self.tested}
        bounds = [f"{p:.2g} for {n} seeds against {m}" for (n, m), p in smallest.items()]
        line = f"p cannot fall below about {'; '.join(bounds)}."
        if min(smallest.values()) * count < LEVEL:
            return line
        times = f"Times {count} comparisons that is" if count > 1 else "That is"
        enough = (n for n in range(FEWEST, 20) if smallest_p(n, n) * count < LEVEL)
        remedy = next((f"{n} seeds a setting" for n in enough), "fewer comparisons")
        return f"{line} {times} not below {LEVEL}: nothing can be significant; {remedy} would do."


def compare(
    settings: Sequence[Row],
    metric: Metric,
    baseline: Sequence[str],
    test: Test = DEFAULT_TEST,
    with_detectable: bool = False,
    seeds: int | None = None,
) -> Significance:
    """Compare each setting with the baseline that is equal in all other shown keys.

    `baseline` are KEY=VALUE conditions; a word alone is a label. With `with_detectable` each
    comparison has the difference that its seeds could show, or that `seeds` seeds of each setting
    with the same scatter could show. Raises UsageError for an unknown key or value, and if nothing
    is left to compare.
    """
    conditions = [word if "=" in word else f"label={word}" for word in baseline]
    named = {condition.partition("=")[0] for condition in conditions}
    keys = tuple(key for key in (settings[0].shown if settings else ()) if key not in named)
    comparisons = []
    for setting, base in _pair_up(settings, conditions, keys):
        comparison = SettingComparison(setting, base)
        if base is not None and not comparison.is_baseline:
            comparison = compare_pair(setting, base, metric, test)
            if with_detectable and comparison.p is not None:
                sd = pooled_sd(*(np.array(x.scores(metric.name)) for x in (setting, base))) or 0.0
                sizes = (seeds, seeds) if seeds else comparison.sizes
                comparison = replace(comparison, detectable=test.detectable(sizes, sd))
        comparisons.append(comparison)
    # The same runs under two labels are one hypothesis.
    p_values = {c.hypothesis: c.p for c in comparisons if c.p is not None}
    corrected = dict(zip(p_values, holm(list(p_values.values()))))
    comparisons = [replace(c, holm=corrected.get(c.hypothesis)) for c in comparisons]
    return Significance(comparisons, ", ".join(conditions), test, keys, with_detectable, seeds)


def compare_pair(setting: Row, base: Row, metric: Metric, test: Test) -> SettingComparison:
    """Return the comparison of a setting with its baseline, before Holm's correction."""
    x, y = (np.array(row.scores(metric.name)) for row in (setting, base))
    comparison = SettingComparison(setting, base, (len(x), len(y)))
    if differing := scored_functions(metric.name, [setting, base]):
        return replace(comparison, other_function=describe(metric.name, differing))
    if min(comparison.sizes) < FEWEST:
        return comparison
    sign, average = (-1.0 if metric.lower_is_better else 1.0), getattr(np, test.centre)
    difference = float(average(x) - average(y))
    p, is_ahead = test.p(sign * x, sign * y), sign * difference >= 0
    return replace(comparison, p=p, difference=difference, is_ahead=is_ahead)


def _pair_up(
    settings: Sequence[Row], conditions: Sequence[str], keys: Sequence[str]
) -> list[tuple[Row, Row | None]]:
    """Return each setting with the baseline of equal values of `keys` (maybe itself), or None.

    Raises UsageError if two baselines are equal in `keys`, or no setting has another baseline.
    """
    option = f"--baseline {' '.join(conditions)}"
    matching = where(runs_of(settings), conditions, "--baseline")
    baselines: dict[tuple[object, ...], Row] = {}
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
