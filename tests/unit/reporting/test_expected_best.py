"""The expected best of n trials, against enumeration, and curves of searches."""

import itertools
from pathlib import Path
from statistics import mean

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.choice import (
    draw_tuning,
    expected_best,
    tuning_curves,
    tuning_table,
)
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run

SCORES = (0.60, 0.70, 0.62, 0.71, 0.65)


@pytest.mark.parametrize("n", range(1, 6))
def test_it_is_the_mean_over_all_subsets(n: int) -> None:
    subsets = list(itertools.combinations(SCORES, n))
    assert expected_best(SCORES, n) == pytest.approx(mean(map(max, subsets)), abs=1e-12)
    lower = expected_best(SCORES, n, lower_is_better=True)
    assert lower == pytest.approx(mean(map(min, subsets)), abs=1e-12)


@pytest.mark.parametrize("n, value", [(1, 0.656), (2, 0.686), (3, 0.701), (5, 0.71)])
def test_values_computed_by_hand(n: int, value: float) -> None:
    assert expected_best(SCORES, n) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("n", [0, 6])
def test_more_trials_than_there_are_cannot_be_drawn(n: int) -> None:
    with pytest.raises(ValueError):
        expected_best(SCORES, n)


def trial(number: int, score: float | None, independent: bool, **changes: object) -> Run:
    record = {
        "setting": "a",
        "number": number,
        "values": {},
        "state": "finished" if score is not None else "failed",
        "flops": 100.0,
        "score": score,
        "metric": "valid.loss",
        "lower_is_better": True,
        "independent": independent,
        **changes,
    }
    return Run(Path(f"{number}"), {"label": "a"}, [], None, trial=record)


def test_independent_trials_have_an_expectation_that_pays_for_failures() -> None:
    runs = [trial(0, 3.0, True), trial(1, None, True, flops=50.0), trial(2, 1.0, True)]
    (curve,), metric = tuning_curves(runs)
    assert metric == "valid.loss" and curve.is_expectation
    assert curve.points == [(1, 125, 2), (2, 250, 1)]


def test_stopped_trials_have_the_best_so_far(tmp_path: Path) -> None:
    runs = [
        trial(2, 1.0, False),
        trial(0, 3.0, False),
        trial(1, 0.5, False, state="pruned", flops=25.0),
        trial(3, 2.0, False),
    ]
    (curve,), name = tuning_curves(runs)
    assert not curve.is_expectation
    assert curve.points == [(1, 100, 3), (2, 125, 3), (3, 225, 1), (4, 325, 1)]
    metric = Metric.of(name, [score for *_, score in curve.points])
    table = tuning_table([curve], metric)
    assert table.rows[2][3].text == "1.000" and "one search" in table.notes[0]
    draw_tuning([curve], metric, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(UsageError, match="trial of a search"):
        tuning_curves([Run(Path("x"), {}, [], None)])
    with pytest.raises(UsageError, match="different metrics"):
        tuning_curves([trial(0, 1.0, True), trial(1, 1.0, True, metric="valid.accuracy")])
