"""Gates on scores: accuracies of several kinds, and findings on all rows at once."""

from collections.abc import Callable
from dataclasses import replace

import league_rows as make
from league_rows import BRACKETS, TOPIC
from league_standings import all_of, of_a_mean, only, said, standing
from outcomes import expect_facts

from metaseq_lm.league.gates import examine
from metaseq_lm.league.standings import NOTE, VOID, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row

EWOK = "ewok.social.context_accuracy"
BOXES = "boxes.accuracy_macro"


def choices(**metrics: float) -> Callable[[Run], Run]:
    """Return an edit that adds results with two kinds of accuracies, and of five options."""
    values = {"context_accuracy": 0.9, "soft_context_accuracy": 0.8, "context_ties": 2}
    values |= {"target_accuracy": 0.6, "soft_target_accuracy": 0.55, "target_ties": 30}
    values |= {"accuracy": 0.6, "accuracy_macro": 0.6, "soft_accuracy": 0.5, "ties": 1}
    of_ewok = make.suite("ewok", "social", n=500, **values | metrics)
    of_boxes = make.suite("boxes", "regular", n=500, **values | metrics)
    of_boxes = replace(of_boxes, references={"soft_accuracy": {"chance": 0.2}})
    return lambda run: replace(run, suites=(*run.suites, of_ewok, of_boxes))


def gates_of_choices(
    baseline: Row, row: Row, metric: str, **metrics: float
) -> dict[str, GateFinding]:
    rows = (make.change(each, choices(**metrics)) for each in (baseline, row))
    return said(*rows, metrics=(metric,))


def test_ties_and_constant_outputs_of_one_of_several_accuracies(baseline: Row, row: Row) -> None:
    gates = gates_of_choices(baseline, row, EWOK)
    assert "ties" not in gates and "constant" not in gates
    gates = gates_of_choices(baseline, row, EWOK, context_ties=20)
    expect_facts(gates["ties"].reason, "4% of the items", EWOK, "ties")
    assert "ties" in gates_of_choices(baseline, row, "ewok.target_accuracy_macro")
    gates = gates_of_choices(baseline, row, EWOK, soft_context_accuracy=0.5 - 1e-8)
    assert gates["constant"].action == VOID


def test_constant_outputs_are_told_by_chance_of_any_number_of_options(
    baseline: Row, row: Row
) -> None:
    assert "constant" not in gates_of_choices(baseline, row, BOXES, soft_accuracy=0.5)
    gates = gates_of_choices(baseline, row, BOXES, soft_accuracy=0.2 + 1e-8)
    assert gates["constant"].action == VOID


def test_a_change_of_phase_is_told_with_the_seeds_that_solve_it(baseline: Row, row: Row) -> None:
    def score(values: list[float]) -> Row:
        suites = [make.with_suite("pairs", "brackets", accuracy=x, ties=0) for x in values]
        edited = [edit(run) for edit, run in zip(suites, row.runs)]
        return replace(row, runs=tuple(edited), control=None)

    spread = said(baseline, score([0.55, 0.6, 0.97, 0.98, 0.58, 0.99, 0.95, 0.62]))
    finding = spread["in transition"]
    assert finding.action == NOTE and finding.metric == BRACKETS
    expect_facts(finding.reason, "0.55", "0.99", "4 of 8 seeds")
    steady = said(baseline, score([0.95, 0.96, 0.97, 0.98, 0.97, 0.99, 0.95, 0.96]))
    assert "in transition" not in steady
    # sd .0663 and .062 of the .65 from chance to the best.
    for away, is_told in ((0.062, True), (0.058, False)):
        spread = said(baseline, score([0.8 - away, 0.8 + away] * 4))
        assert ("in transition" in spread) == is_told


def read_from(row: Row, *layers: int) -> Row:
    """Return a row whose seeds have probes of topics that chose these layers."""
    suites = [make.with_suite("topic", "last", accuracy=0.6, layer=layer) for layer in layers]
    return replace(row, runs=tuple(edit(run) for edit, run in zip(suites, row.runs)))


def test_a_probe_of_the_embedding_layer_is_told_once(baseline: Row, row: Row) -> None:
    rows = read_from(baseline, *[0] * 7, 2), read_from(row, 0, 0, 0, 1, 1, 2, 2, 2)
    (finding,) = all_of("embedding layer", *rows)
    assert (finding.action, finding.metric) == (NOTE, TOPIC)
    expect_facts(finding.reason, "62% of the runs")
    # Half of the runs are not most.
    rows = read_from(baseline, 0, 0, 0, 0, 1, 1, 1, 1), read_from(row, 0, 0, 0, 0, 1, 1, 1, 1)
    assert not all_of("embedding layer", *rows)
    # Of a part that is no metric of its own it is told of the mean.
    rows = of_a_mean(read_from(baseline, *[0] * 8), row)
    first = examine(make.make_context(*rows, metrics=("both",)))[0]
    assert only(first.findings, "embedding layer").metric == "both"


def solved(row: Row, *suites: tuple[str, str]) -> Row:
    """Return a row half of whose seeds solve the tasks of suites."""
    runs = []
    for run, score in zip(row.runs, [0.5, 0.55, 0.99, 0.98, 0.52, 0.99, 0.98, 0.56]):
        for name, group in suites:
            run = make.with_suite(name, group, accuracy=score)(run)
        runs.append(run)
    return replace(row, runs=tuple(runs), control=None)


def transitions(*rows: Row, metrics: tuple[str, ...]) -> list[GateFinding]:
    findings = standing(*of_a_mean(*rows), metrics=metrics).findings
    return [finding for finding in findings if finding.gate == "in transition"]


def test_a_mean_in_transition_is_seen(baseline: Row, row: Row) -> None:
    row = solved(row, ("pairs", "brackets"), ("topic", "last"))
    findings = transitions(baseline, row, metrics=("both",))
    assert [f.metric for f in findings] == ["both"] * 3
    for finding, name in zip(findings, ("both", BRACKETS, TOPIC)):
        assert f"{name} spreads" in finding.reason


def test_a_part_in_transition_is_told_of_a_primary_mean(baseline: Row, row: Row) -> None:
    """In a mean of many parts it would be diluted."""
    row = solved(row, ("topic", "last"))
    _, finding = transitions(baseline, row, metrics=("both",))
    assert finding.metric == "both" and f"{TOPIC} spreads" in finding.reason
    (finding,) = transitions(baseline, row, metrics=(BRACKETS, "both"))
    assert "both spreads" in finding.reason


def with_formulas(row: Row, name: str = "syntaxgym", **facts: str) -> Row:
    """Return a row with results of formulas over surprisals, with these facts."""
    results = replace(make.suite("formulas", "npz", accuracy=0.5), suite=name, facts=facts)
    return make.change(row, lambda run: replace(run, suites=(*run.suites, results)))


def test_surprisals_of_two_kinds_are_told_once(baseline: Row, row: Row) -> None:
    def findings(*rows: Row) -> list[GateFinding]:
        context = make.make_context(*rows, metrics=("formulas.accuracy",))
        return [f for result in examine(context) for f in result.findings if f.gate == "reach"]

    before = with_formulas(baseline, reach="causal")
    (finding,) = findings(before, with_formulas(row, reach="both"))
    assert (finding.action, finding.metric) == (NOTE, "formulas.accuracy")
    expect_facts(finding.reason, "before a region", "rows of causal, and", "those of mine:")
    # Rows of one kind, results that do not tell, and a suite that compares whole sentences.
    assert not findings(before, with_formulas(row, reach="causal"))
    assert not findings(before, with_formulas(row))
    assert not findings(
        with_formulas(baseline, "pairs", reach="causal"), with_formulas(row, "pairs", reach="both")
    )
