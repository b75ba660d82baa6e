"""Seeds that collapsed: in planted rows, and in the archives that ship."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import league_rows as make
import pytest

from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.collapse_gates import collapse
from metaseq_lm.league.plan_files import EPOCHS, LAPTOP, OBJECTIVES
from metaseq_lm.league.standings import FLAG
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row
from metaseq_lm.runs.suite_results import SuiteResults

ROOT = Path(__file__).resolve().parents[3]


def probe(name: str, layers: Sequence[float], reader: str = "word", rank: float = 0.5) -> object:
    """Return an edit that adds a probe of 10,000 items with the accuracy of each layer."""
    accuracies = {f"layer_{i}": {"accuracy": value} for i, value in enumerate(layers)}
    accuracies |= {"overall": {"accuracy": max(layers)}}
    accuracies |= {"last": {"accuracy": layers[-1], "effective_rank": rank}}
    groups = {group: {"n": 10_000, "metrics": values} for group, values in accuracies.items()}
    results = SuiteResults(
        name, "probe", 280, "w", "d1", {}, groups, {"code": "c1"}, {"accuracy": {reader: 0.5}}
    )
    return lambda run: replace(run, suites=(*run.suites, results))


def with_probes(row: Row, layers: Callable[[int], Sequence[float]], reader: str = "word") -> Row:
    """Return a row whose seeds have a probe with the layers of their place, and untrained ones."""
    runs = [probe("upos", layers(i), reader)(run) for i, run in enumerate(row.runs)]
    untrained = [probe("upos", [0.5, 0.5], reader)(run) for run in row.untrained]
    return replace(row, runs=tuple(runs), untrained=tuple(untrained))


def seeds_of(row: Row) -> list[str] | None:
    """Return the seeds that the gate names, by their places; None if it says nothing."""
    findings = list(collapse(row, make.make_context(row)))
    if not findings:
        return None
    (finding,) = findings
    assert finding.action == FLAG
    named = finding.reason.partition("(seed ")[2].partition(")")[0].split(", ")
    places = {str(run.seed): str(place) for place, run in enumerate(row.runs)}
    return [places[seed] for seed in named]


@pytest.mark.parametrize(
    "layers, reader, places",
    [
        (lambda i: [0.7, 0.75], "word", None),
        (lambda i: [0.7, 0.69], "word", None),  # less than the error of the items
        (lambda i: [0.7, 0.65 if i == 2 else 0.75], "word", ["2"]),
        # The second one counts because the first one is clear.
        (lambda i: [0.7, {2: 0.65, 5: 0.688}.get(i, 0.75)], "word", ["2", "5"]),
        (lambda i: [0.51, 0.45], "word", None),  # it has learnt nothing
        (lambda i: [0.7, 0.5], "bag_of_words", None),  # labels of texts
    ],
)
def test_a_last_layer_that_tells_less_than_the_embedding(layers, reader, places) -> None:
    assert seeds_of(with_probes(make.make_row("a", 0.8), layers, reader)) == places


@pytest.mark.parametrize("count", [1, 3])
def test_several_seeds_are_the_share_of_a_setting(count: int) -> None:
    row = with_probes(make.make_row("a", 0.8), lambda i: [0.7, 0.6 if i < count else 0.75])
    (finding,) = collapse(row, make.make_context(row))
    assert f"{count} of 8 seeds" in finding.reason and "10.0 points" in finding.reason
    assert ("of this setting" in finding.reason) == (count > 1)


@pytest.mark.parametrize(
    "ends, places",
    [
        ({}, None),
        ({3: 3.6}, ["3"]),
        ({3: 2.8}, None),  # a phase that others have passed: less than half of what was gained
        ({3: 1.0}, None),  # better
        ({1: 3.6, 3: 4.4}, ["1", "3"]),
    ],
)
def test_a_last_loss_far_above_that_of_the_siblings(ends, places) -> None:
    row = make.make_row("a", 0.8)
    for place, end in ends.items():
        row = make.change(row, make.with_losses(lambda s, end=end: make.losses(s, end)), [place])
    assert seeds_of(row) == places


@pytest.mark.parametrize("places", [[], [4], range(8)])
def test_states_that_vary_in_few_directions(places: Sequence[int]) -> None:
    row = make.change(make.make_row("a", 0.8), probe("topic", [0.5, 0.6], "bag_of_words"))

    def narrow(run: Run) -> Run:
        return probe("state", [0.5, 0.6], rank=0.02)(replace(run, suites=run.suites[:2]))

    assert seeds_of(make.change(row, narrow, places)) == ([str(i) for i in places] or None)


@pytest.mark.parametrize(
    "plan, expected",
    [
        (
            LAPTOP,
            {
                ("replaced", 2e10): "1 of 8",
                ("soft", 6e10): "1 of 8",
                ("soft", 1e12): "2 of 8",
                ("hard", 1e12): "1 of 8",
            },
        ),
        (OBJECTIVES, {}),
        (EPOCHS, {}),
        (
            ROOT / "examples" / "league" / "english.yaml",
            {
                ("masked_40", 1.6e13): "3 of 6",
                ("masked_15", 1.6e13): "2 of 6",
                ("rtd", 4e12): "4 of 6",
                ("rtd", 1.6e13): "4 of 6",
            },
        ),
        (ROOT / "examples" / "league" / "text_ladder.yaml", {}),
    ],
)
def test_collapsed_seeds_of_the_archives_that_ship(plan: Path, expected: dict) -> None:
    context = read_league(plan).context()
    found = {}
    for row in context.rows:
        for finding in collapse(row, context):
            found[row.objective, row.budget] = finding.reason.split(": ")[1][:6]
    assert found == expected
