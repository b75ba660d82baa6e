"""Tables of pairs: which of two settings is better, for all pairs and without a baseline."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.numbers import Metric, p_text
from metaseq_lm.reporting.settings import Row
from metaseq_lm.reporting.significance import UNIT, SettingComparison, compare_pair, describe_test
from metaseq_lm.reporting.stats import FEWEST, LEVEL, Test, holm
from metaseq_lm.reporting.table import Cell, Table, notes


def pair_table(settings: Sequence[Row], metric: Metric, key: str, test: Test) -> Table:
    """Return a row for each pair of settings that differ only in `key` among the shown keys.

    p is corrected for all pairs; the smallest comes first. Raises UsageError for a one-sided test,
    and if no pair has FEWEST scored seeds on both sides.
    """
    if test.sides == 1:
        raise UsageError("--pairs asks which of two settings is ahead: leave --sides 1 out")
    pairs = sorted(_tested(settings, metric, key, test), key=lambda pair: pair[0])
    if not pairs:
        raise UsageError(
            f"--pairs {key}: no two settings differ in '{key}' alone and have {FEWEST} scored "
            "seeds each"
        )
    rows, records, significant = [], [], 0
    for (p, pair), corrected in zip(pairs, holm([p for p, _ in pairs])):
        assert pair.baseline is not None and pair.difference is not None
        significant += corrected < LEVEL
        names, gap = [pair.setting.name, pair.baseline.name], abs(pair.difference)
        if not pair.is_ahead:
            names.reverse()
        texts = [metric.text(gap, metric.decimals(gap)), p_text(p), p_text(corrected)]
        rows.append([*(Cell(name, number=False) for name in names), *map(Cell, texts)])
        line: dict[str, Any] = dict(zip(("setting", "ahead_of"), names))
        line |= {"difference": gap, "p": p, "p_holm": corrected}
        records.append({"metric": metric.name, **line})
    note = (
        f"p: {describe_test(test)}; the unit is {UNIT}; p (Holm): corrected for the {len(pairs)} "
        f"pairs, of which {significant} are significant at {LEVEL}."
    )
    head = ["setting", "ahead of", "by", "p", "p (Holm)"]
    title = f"{metric.title}: differences of {test.centre}s"
    return Table(title, head, rows, [note, *notes(settings, metric)], records)


def _tested(
    settings: Sequence[Row], metric: Metric, key: str, test: Test
) -> Iterator[tuple[float, SettingComparison]]:
    """Yield p and the comparison of each testable pair that differs only in `key`."""
    for one, other in combinations(settings, 2):
        others = [name for name in one.shown if name != key]
        # The same runs under two labels are one setting.
        if one.identity(others) != other.identity(others) or one.content == other.content:
            continue
        comparison = compare_pair(one, other, metric, test)
        if comparison.p is not None:
            yield comparison.p, comparison
