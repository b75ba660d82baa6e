"""The error of test items: binomial, or paired in blocks of the items that rows share."""

from dataclasses import replace

import league_rows as make
import numpy as np
import pytest
from league_rows import BRACKETS, TOPIC
from league_standings import of_a_mean

from metaseq_lm.evaluation.suites import BLOCKS, hits_of
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.score_errors import Items, item_errors, items_of
from metaseq_lm.league.verdict import DecisionRule
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.stats import Error
from metaseq_lm.runs.suite_results import OVERALL

SIDE = [0.6, 0.61, 0.62, 0.63, 0.6, 0.61, 0.62, 0.63]
OTHER = [0.7, 0.71, 0.72, 0.73, 0.7, 0.71, 0.72, 0.73]
SHARE = "topic.share"
UNKNOWN = np.array([])


def variance_of(runs, metric):
    items = items_of(runs, metric)
    return None if items is None else sum(item.variance for item in items)


def test_the_variance_is_binomial_and_that_of_a_mean_of_its_parts() -> None:
    row = make.make_row("mine", 0.9)
    p, q = (sum(row.scores(metric)) / 8 for metric in (BRACKETS, TOPIC))
    first, second = p * (1 - p) / 500, q * (1 - q) / 500
    assert variance_of(row.runs, BRACKETS) == pytest.approx(first)
    (both,) = of_a_mean(row)
    assert variance_of(both.runs, "both") == pytest.approx((first + second) / 4)
    # A mean of a mean has the weights of its parts.
    nested = [replace(run, means={**run.means, "m": ["both", TOPIC]}) for run in both.runs]
    assert variance_of(nested, "m") == pytest.approx((first + second) / 16 + second / 4)
    unknown = [replace(run, means={"m": [TOPIC, "valid.mlm"]}) for run in row.runs]
    for runs, metric in (
        (row.runs, "valid.mlm"),
        (row.runs, "topic.valid_accuracy"),
        (unknown, "m"),
        ((), BRACKETS),
    ):
        assert items_of(runs, metric) is None


def test_a_share_has_the_items_of_its_accuracy_in_another_unit() -> None:
    row = make.make_row("mine", 0.9)
    p = sum(row.scores(TOPIC)) / 8
    known = [make.with_references(word=0.4, bayes=0.9)(run) for run in row.runs]
    assert variance_of(known, SHARE) == pytest.approx(p * (1 - p) / 500 / 0.5**2)
    assert items_of(row.runs, SHARE) is None  # nobody says what can be known
    assert items_of(known, "topic.valid_share") is None


def with_hits(run: Run, right: np.ndarray) -> Run:
    """Return a run whose suite topic has these right answers."""
    suites = []
    for suite in run.suites:
        if suite.name == "topic":
            metrics = {"accuracy": float(right.mean())}
            group = {"n": len(right), "metrics": metrics, "hits": list(hits_of(right))}
            suite = replace(suite, groups={OVERALL: group})
        suites.append(suite)
    return replace(run, suites=tuple(suites))


def test_blocks_have_the_accuracies_of_their_items() -> None:
    row = make.make_row("mine", 0.9)
    rng = np.random.default_rng(0)
    rights = [rng.random(1000) < 0.7 for _ in row.runs]
    runs = [with_hits(run, right) for run, right in zip(row.runs, rights)]
    (items,) = items_of(runs, "topic.accuracy") or ()
    blocks = np.array_split(np.mean(rights, axis=0), BLOCKS)
    assert items.blocks == pytest.approx([block.mean() for block in blocks])
    known = [make.with_references(word=0.4, bayes=0.9)(run) for run in runs]
    (share,) = items_of(known, SHARE) or ()
    assert share.blocks == pytest.approx(items.blocks / 0.5)
    # A run without them, or too few items, leaves the binomial.
    (none,) = items_of([*runs[1:], row.runs[0]], "topic.accuracy") or ()
    assert not len(none.blocks) and hits_of(np.ones(2 * BLOCKS - 1, dtype=bool)) == ()
    assert sum(hits_of(rights[0])) == rights[0].sum()


@pytest.mark.parametrize("shared, expected", [(0.0, 1.0), (0.9, 0.3)])
def test_rows_that_miss_the_same_items_differ_by_less(shared: float, expected: float) -> None:
    """The error of the blocks is that of repeated test sets; the binomial knows no pairing."""
    rng = np.random.default_rng(1)
    count, differences, estimates, binomial = 2000, [], [], 0.0
    for _ in range(300):
        same = rng.random(count) < shared
        one, two = (rng.random(count) < 0.7 for _ in range(2))
        two = np.where(same, one, two)
        sides = []
        for right in (one, two):
            blocks = np.array([block.mean() for block in np.array_split(right, BLOCKS)])
            sides.append(Items(0.21 / count, blocks))
        (error,) = item_errors((1, sides[:1]), (-1, sides[1:]))
        assert error.freedom == BLOCKS - 1
        estimates.append(error.variance)
        differences.append(one.mean() - two.mean())
        binomial = sum(
            e.variance for e in item_errors((1, [Items(0.21 / count, UNKNOWN)]), (-1, sides[1:]))
        )
    true = np.var(differences)
    assert np.mean(estimates) == pytest.approx(true, rel=0.2)
    assert np.sqrt(true / binomial) == pytest.approx(expected, abs=0.06)


def test_a_gain_is_paired_with_both_untrained_models() -> None:
    blocks = np.arange(4.0)
    items = [Items(1e-4, blocks)]
    none = item_errors((1, items), (-1, items), (-1, items), (1, items))
    assert none == [Error(0.0, 3)]
    (error,) = item_errors((1, items), (-1, [Items(1e-4, -blocks)]))
    assert error.variance == pytest.approx(np.var(2 * blocks, ddof=1) / 4)
    # Sides without items of their own, or with other parts, have the binomial of the others.
    assert item_errors((1, items), (-1, ())) == [Error(1e-4)]
    assert item_errors((1, ()), (-1, ())) == []


def test_the_error_of_items_is_in_the_interval_of_both_sides() -> None:
    def items(variance: float) -> list[Items]:
        return [Items(variance, UNKNOWN)]

    entries = [
        StandingsEntry(
            name,
            1e10,
            {"a.accuracy": scores, "b": scores},
            {"a.accuracy": scores[:4]},
            items={"a.accuracy": items(variance), "b": items(10 * variance)},
            untrained_items={"a.accuracy": items(3e-4)},
        )
        for name, scores, variance in (("row0", SIDE, 1e-4), ("row1", OTHER, 2e-4))
    ]
    metric, kind = Metric.of("a.accuracy", [0.5]), Metric.of("b", [0.5])
    standings = Standings(
        "t", [metric], "row0", DecisionRule(0.02), entries, kinds=[kind]
    ).decided()
    (_, entry) = standings.entries
    assert entry.decision and entry.gain_decision
    assert entry.decision.errors == (Error(2e-4), Error(1e-4))
    assert sum(error.variance for error in entry.gain_decision.errors) == pytest.approx(9e-4)
    assert entry.of_kinds["b"].errors == (Error(2e-3), Error(1e-3))
