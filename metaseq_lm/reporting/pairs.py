"""Tables of pairs: which of two settings is better, for all pairs and without a baseline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.numbers import Metric, p_text
from metaseq_lm.reporting.settings import Setting
from metaseq_lm.reporting.significance import (
    FEWEST,
    LEVEL,
    RESAMPLES,
    compare_pair,
    holm,
)
from metaseq_lm.reporting.table import Cell, Table, notes


@dataclass(frozen=True)
class Pair:
    """Two settings, the one ahead first, their difference, and the two-sided p."""

    ahead: Setting
    behind: Setting
    difference: float
    p: float


def pair_table(
    settings: Sequence[Setting], metric: Metric, key: str, test: str, spread: str
) -> Table:
    """Return a row for each pair of settings that differ only in `key` among the shown keys.

    p is two-sided, twice the smaller one-sided p of `test`, and corrected for all pairs; the
    smallest comes first. Medians are compared for the spread "range", else means. Raises UsageError
    if no pair has FEWEST scored seeds on both sides.
    """
    centre = "median" if spread == "range" and test != "t" else "mean"
    pairs = sorted(_tested(settings, metric, key, test, centre), key=lambda pair: pair.p)
    if not pairs:
        raise UsageError(
            f"--pairs {key}: no two settings differ in '{key}' alone and have {FEWEST} scored "
            "seeds each"
        )
    rows, records, significant = [], [], 0
    for pair, corrected in zip(pairs, holm([pair.p for pair in pairs])):
        significant += corrected < LEVEL
        difference = metric.text(pair.difference, metric.decimals(pair.difference))
        names = [pair.ahead.name, pair.behind.name]
        texts = [difference, p_text(pair.p), p_text(corrected)]
        rows.append([*(Cell(name, number=False) for name in names), *map(Cell, texts)])
        line: dict[str, Any] = dict(zip(("setting", "ahead_of"), names))
        line |= {"difference": pair.difference, "p": pair.p, "p_holm": corrected}
        records.append({"metric": metric.name, **line})
    of_test = f", of {RESAMPLES:,} assignments at most" if test == "permutation" else ""
    note = (
        f"p: {test} test of {centre}s, unpaired, two-sided{of_test}; p (Holm): corrected for the "
        f"{len(pairs)} pairs, of which {significant} are significant at {LEVEL}."
    )
    head = ["setting", "ahead of", "by", "p", "p (Holm)"]
    title = f"{metric.title}: differences of {centre}s"
    return Table(title, head, rows, [note, *notes(settings, metric)], records)


def _tested(
    settings: Sequence[Setting], metric: Metric, key: str, test: str, centre: str
) -> Iterator[Pair]:
    """Yield the testable pairs that differ only in `key`."""
    for one, other in combinations(settings, 2):
        others = [name for name in one.shown if name != key]
        # The same runs under two labels are one setting.
        if one.identity(others) != other.identity(others) or one.content == other.content:
            continue
        above = compare_pair(one, other, metric, test, centre)
        below = compare_pair(other, one, metric, test, centre)
        if above.p is None or below.p is None or above.difference is None:
            continue
        is_better = (above.difference <= 0) if metric.lower_is_better else (above.difference >= 0)
        sides = (one, other) if is_better else (other, one)
        yield Pair(*sides, abs(above.difference), min(1.0, 2 * min(above.p, below.p)))
