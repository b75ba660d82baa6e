"""Gates on what rows have in common: what is no fault, and which row of two has it."""

from dataclasses import replace

import league_rows as make
import pytest
from league_rows import BRACKETS, RATES
from league_standings import is_ranked, only, said
from outcomes import expect_facts

from metaseq_lm.league.gates import examine
from metaseq_lm.league.parity_gates import tuned
from metaseq_lm.league.standings import NOTE
from metaseq_lm.reporting.settings import Row, TuningRecord


def test_identical_runs_under_two_labels_count_once(baseline: Row, row: Row) -> None:
    again = replace(make.change(row, make.with_values(label="again")), values={"label": "again"})
    first, second = examine(make.make_context(baseline, row, again))[1:]
    assert is_ranked(first, BRACKETS) and not is_ranked(second, BRACKETS)
    expect_facts(second.findings[0].reason, "8 of its 8 runs", "of mine")


def test_pretrainings_of_their_own_are_not_shared(baseline: Row, row: Row) -> None:
    row = make.change(row, make.with_results(pretraining={"flops": 0, "seconds": 0}))
    seeds = [{**run.values, "pretraining.seed": run.values["seed"]} for run in row.runs]
    runs = [replace(run, values=values) for run, values in zip(row.runs, seeds)]
    assert not said(baseline, replace(row, runs=tuple(runs)))


def test_without_tuning_anywhere_it_is_a_note(baseline: Row, row: Row) -> None:
    rows = [replace(r, tuning=None) for r in (baseline, row)]
    for result in examine(make.make_context(*rows)):
        assert only(result.findings, "tuning").action == NOTE


@pytest.mark.parametrize("noise", [["mlm", "unigram"], [["mlm"], ["unigram"]]])
def test_names_and_lists_have_no_edge(noise: list[object], baseline: Row, row: Row) -> None:
    tuning = TuningRecord({"task.noise": noise, "optimizer.lr": RATES}, {"task.noise": noise[0]})
    row = make.change(replace(row, tuning=tuning), make.with_values(task__noise=noise[0]))
    assert not said(baseline, row)


def test_tuning_costs_what_its_trials_spent_themselves(row: Row) -> None:
    pretrained = make.with_results(pretraining={"flops": 1e12})
    assert row.tuning is not None and row.tuning.flops == len(RATES) * make.BUDGET
    assert replace(row.tuning, runs=tuple(map(pretrained, make.trials()))).flops == row.tuning.flops


def test_a_further_plausible_setting_at_the_edge_is_a_note(row: Row) -> None:
    shares = tuple(({"optimizer.lr": rate}, 0.5) for rate in RATES[1:])
    row = replace(row, tuning=replace(row.tuning, shares=shares))
    row = make.change(row, make.with_values(optimizer__lr=RATES[2]), range(4))
    (finding,) = tuned(row, make.make_context(row))
    assert (finding.gate, finding.action) == ("edge of the grid", NOTE)


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
    assert "defaults" not in said(*rows, options=options)
    finding = said(*rows)["defaults"]
    assert "optimizer.eps 1, 2" in finding.reason and "model.width 4, 8" in finding.reason
    for key in ("task.rate", "schedule.end", "max_update", "criterion.new", "workers"):
        assert key not in finding.reason
