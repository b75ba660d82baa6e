"""Gates on what rows have in common: each planted fault is caught by name."""

from collections.abc import Callable
from dataclasses import replace

import league_rows as make
import pytest
from league_rows import BRACKETS, BUDGET, RATES
from league_standings import gates_of, is_ranked, only, standing

from metaseq_lm.league import parity_gates
from metaseq_lm.league.gate import Gate
from metaseq_lm.league.gates import examine
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Choice, Row

# Each fault: an edit of a row, the gate that sees it, what it does, a part of the reason.
FAULTS: dict[str, tuple[Callable[[Row], Row], str, str, str]] = {
    "more seeds than planned": (
        lambda row: replace(
            row, runs=(*row.runs, make.with_values(seed=99)(make.make_run(99, make.losses(99))))
        ),
        *("missing", FLAG, "9 seeds, where the plan has 8"),
    ),
    "a failed trial": (
        lambda row: replace(
            row,
            tuning=replace(
                row.tuning,
                runs=(make.with_results(status="failed")(row.tuning.runs[0]), *row.tuning.runs[1:]),
            ),
        ),
        *("tuning", FLAG, "1 of 3 trials did not finish"),
    ),
    "an untrained control on other data": (
        lambda row: replace(
            row, untrained=tuple(map(make.with_results(corpus="k2"), row.untrained))
        ),
        *("controls", FLAG, "the untrained control has other data"),
    ),
    "a shuffled control by another suite": (
        lambda row: replace(
            row,
            shuffled=tuple(
                make.with_suite("pairs", "brackets", data="d2", accuracy=0.5, ties=0)(run)
                for run in row.shuffled
            ),
        ),
        *("controls", FLAG, "the shuffled control is scored by other suites"),
    ),
    "half the budget": (
        lambda row: make.change(row, make.with_results(flops=BUDGET / 2)),
        *("budget", REFUSE, "8 of 8 runs took other FLOPs than the budget of 6.0e10: 3.0e10"),
    ),
    "one run of other FLOPs": (
        lambda row: make.change(row, make.with_results(flops=BUDGET * 1.03), [2]),
        *("budget", REFUSE, "1 of 8 runs"),
    ),
    "the cost of pre-training on top of the budget": (
        lambda row: make.change(
            row, make.with_results(pretraining={"flops": BUDGET, "seconds": 1})
        ),
        *("budget", REFUSE, "1.2e11"),
    ),
    "no FLOPs": (
        lambda row: make.change(row, make.with_results(flops=None), [0]),
        *("budget", REFUSE, "1 of 8 runs"),
    ),
    "not tuned": (
        lambda row: replace(row, tuning=None),
        *("tuning", FLAG, "not tuned, those of 1 rows were"),
    ),
    "tuned with a single value": (
        lambda row: replace(row, tuning=Choice({"optimizer.lr": [2e-3]}, {"optimizer.lr": 2e-3})),
        *("tuning", FLAG, "not tuned"),
    ),
    "the largest rate": (
        lambda row: make.change(
            replace(row, tuning=replace(row.tuning, chosen={"optimizer.lr": 4e-3})),
            make.with_values(optimizer__lr=4e-3),
        ),
        *("edge of the grid", FLAG, "optimizer.lr=0.004 is at the edge"),
    ),
    "the smallest rate": (
        lambda row: make.change(
            replace(row, tuning=replace(row.tuning, chosen={"optimizer.lr": 1e-3})),
            make.with_values(optimizer__lr=1e-3),
        ),
        *("edge of the grid", FLAG, "(0.001, 0.002, 0.004)"),
    ),
    "trained with another rate than that chosen": (
        lambda row: make.change(row, make.with_values(optimizer__lr=3e-3)),
        *("tuning", FLAG, "optimizer.lr=0.002 was chosen, but 0.003 trained"),
    ),
    "a final seed tuned the rate": (
        lambda row: replace(row, tuning=replace(row.tuning, runs=make.trials(8))),
        *("tuning", FLAG, "seed 8"),
    ),
    "tuned at another budget": (
        lambda row: replace(row, tuning=replace(row.tuning, budget=2e10)),
        *("tuning", NOTE, "tuned at 2.0e10 FLOPs"),
    ),
    "more tuning than the baseline": (
        lambda row: replace(row, tuning=replace(row.tuning, runs=row.tuning.runs * 2)),
        *("tuning", NOTE, "2 times those of the baseline"),
    ),
    "another world": (
        lambda row: make.change(
            make.change(row, make.with_values(data_hash="h2")), make.with_results(corpus="k2")
        ),
        *("data", REFUSE, "data_hash h1, h2"),
    ),
    "a labelled set beside the corpus": (
        lambda row: make.change(row, make.with_values(data_hash="h2")),
        *("data", NOTE, "labelled sets"),
    ),
    "an encoder of another world": (
        lambda row: make.change(row, make.with_values(pretraining__data_hash="h2"), [0]),
        *("data", REFUSE, "pretraining.data_hash"),
    ),
    "other code": (
        lambda row: make.change(row, make.with_results(code="c2")),
        *("code", REFUSE, "c1, c2"),
    ),
    "other code of an added objective": (
        lambda row: make.change(replace(row, added=True), make.with_results(code="c2")),
        *("code", NOTE, "c1, c2"),
    ),
    "other code than that of a shipped baseline": (
        lambda row: make.change(replace(row, shipped=True), make.with_results(code="c2")),
        *("code", NOTE, "c1, c2"),
    ),
    "another default than that of a shipped baseline": (
        lambda row: make.change(
            replace(row, shipped=True), make.with_values(task__batch_size=16), [3]
        ),
        *("defaults", REFUSE, "task.batch_size 8, 16): a default has changed"),
    ),
    "other items": (
        lambda row: make.change(
            row, make.with_suite("pairs", "brackets", data="d2", accuracy=0.9), [3]
        ),
        *("suites", REFUSE, "pairs.data"),
    ),
    "scored by other code": (
        lambda row: make.change(row, make.with_scoring_code("c2"), [3]),
        *("suites", NOTE, "suites.pairs.code: c1, c2"),
    ),
    "a stage that ignores the seeds": (
        lambda row: replace(
            row, runs=tuple(make.with_values(seed=i)(row.runs[0]) for i in range(8))
        ),
        *("identical runs", VOID, "seeds 0, 1, 2, 3, 4, 5, 6, 7 are identical"),
    ),
    "seeds that share an encoder": (
        lambda row: make.change(
            make.change(row, make.with_results(pretraining={"flops": 0, "seconds": 0})),
            make.with_values(pretraining__seed=1),
        ),
        *("shared encoder", FLAG, "8 seeds start from 1 pre-trained encoder:"),
    ),
    "a shuffled control that was not shuffled": (
        lambda row: replace(row, shuffled=row.runs[:4]),
        *("identical runs", FLAG, "4 of its 8 runs are identical with those of its shuffled"),
    ),
    "an untrained control of another size": (
        lambda row: replace(
            row, untrained=tuple(map(make.with_results(parameters={"all": 9}), row.untrained))
        ),
        *("controls", FLAG, "untrained control has other parameters"),
    ),
    "a shuffled control at another budget": (
        lambda row: replace(
            row, shuffled=tuple(map(make.with_results(flops=BUDGET / 3), row.shuffled))
        ),
        *("controls", FLAG, "2.0e10"),
    ),
    "too few seeds": (
        lambda row: replace(row, runs=row.runs[:6]),
        *("missing", FLAG, "6 of 8 seeds"),
    ),
    "a failed run": (
        lambda row: make.change(row, make.with_results(status="diverged"), [1]),
        *("missing", FLAG, "diverged after 280 updates"),
    ),
    "a failed run too many": (
        lambda row: replace(
            row, runs=(*row.runs, make.with_results(status="failed")(make.runs(1, 0.9, 9)[0]))
        ),
        *("missing", FLAG, "runs without a score"),
    ),
    "one seed twice": (
        lambda row: replace(row, runs=(*row.runs, make.runs(1, 0.9, 8, end=2.3)[0])),
        *("missing", FLAG, "several runs of seed 8"),
    ),
    "no run": (
        lambda row: replace(row, runs=()),
        *("missing", VOID, "no run has a score"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_parity_are_caught(fault: str, baseline: Row, row: Row) -> None:
    plant, gate, action, reason = FAULTS[fault]
    result = standing(baseline, plant(row))
    finding = only(result.findings, gate)
    assert finding.action == action and reason in finding.reason
    assert is_ranked(result, BRACKETS) == (action == NOTE)


@pytest.mark.parametrize("gate", gates_of(parity_gates), ids=lambda gate: gate.__name__)
def test_every_gate_of_parity_gates_sees_a_fault_above(gate: Gate, baseline: Row, row: Row) -> None:
    faulty = [fault[0](row) for fault in (*FAULTS.values(),)]
    assert any(list(gate(row, make.make_context(baseline, row))) for row in faulty)


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
