"""Gates on what rows have in common: what is no fault, and which row of two has it."""

from dataclasses import replace

import league_rows as make
from league_rows import BRACKETS, RATES
from league_standings import is_ranked, only, standing

from metaseq_lm.league.gates import examine
from metaseq_lm.league.standings import NOTE, Choice, Row


def test_identical_runs_under_two_labels_count_once(baseline: Row, row: Row) -> None:
    again = replace(make.change(row, make.with_values(label="again")), objective="again")
    first, second = examine(make.make_context(baseline, row, again))[1:]
    assert is_ranked(first, BRACKETS) and not is_ranked(second, BRACKETS)
    assert "8 of its 8 runs are identical with those of mine" in second.findings[0].reason


def test_pretrainings_of_their_own_are_not_shared(baseline: Row, row: Row) -> None:
    row = make.change(row, make.with_results(pretraining={"flops": 0, "seconds": 0}))
    seeds = [{**run.values, "pretraining.seed": run.values["seed"]} for run in row.runs]
    runs = [replace(run, values=values) for run, values in zip(row.runs, seeds)]
    assert standing(baseline, replace(row, runs=tuple(runs))).findings == ()


def test_without_tuning_anywhere_it_is_a_note(baseline: Row, row: Row) -> None:
    rows = [replace(r, tuning=None) for r in (baseline, row)]
    for result in examine(make.make_context(*rows)):
        assert only(result.findings, "tuning").action == NOTE


def test_names_have_no_edge(baseline: Row, row: Row) -> None:
    tuning = Choice(
        {"task.noise": ["mlm", "unigram"], "optimizer.lr": RATES}, {"task.noise": "mlm"}
    )
    row = make.change(replace(row, tuning=tuning), make.with_values(task__noise="mlm"))
    assert standing(baseline, row).findings == ()


def test_options_that_objectives_set_or_that_follow_the_budget_are_no_defaults(
    baseline: Row, row: Row
) -> None:
    """Nor those of other classes, and those that a run of an earlier version does not record."""
    own = {"model": "modern_tiny", "task__rate": 1, "optimizer__eps": 2.0, "seed": 5}
    own |= {"schedule__end": 280, "trainer__max_update": 280, "engine__workers": 2}
    own |= {"model__width": 8, "task___name": "other", "criterion__new": 1}
    changed = make.change(row, lambda run: make.with_values(**{**own, "seed": run.seed})(run))
    base = {"model": "modern", "task__rate": 2, "optimizer__eps": 1.0, "task___name": "lm"}
    base |= {"schedule__end": 300, "trainer__max_update": 300, "model__width": 4}
    rows = make.change(baseline, make.with_values(**base)), changed
    options = {row.objective: frozenset({"model", "optimizer.eps"})}
    gates = {finding.gate for finding in standing(*rows, options=options).findings}
    assert "defaults" not in gates
    finding = only(standing(*rows).findings, "defaults")
    assert "optimizer.eps 1, 2" in finding.reason and "model.width 4, 8" in finding.reason
    for key in ("task.rate", "schedule.end", "max_update", "criterion.new", "workers"):
        assert key not in finding.reason
