"""Gates: each planted fault is caught by name; a healthy league has none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import league_rows as make
import numpy as np
import pytest
from league_rows import BRACKETS, BUDGET, RATES, TOPIC
from scipy import stats

from metaseq_lm.league.control_gates import compare
from metaseq_lm.league.gates import GATES, Gate, examine
from metaseq_lm.league.standings import (
    FLAG,
    NOTE,
    REFUSE,
    VOID,
    Choice,
    Context,
    Finding,
    Row,
    Standing,
)
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import Run


@pytest.fixture
def baseline() -> Row:
    return make.make_row("causal", 0.8)


@pytest.fixture
def row() -> Row:
    return make.make_row("mine", 0.9, control=make.make_row("twin", 0.7))


def standing(*rows: Row, **context: object) -> Standing:
    """Return the standing of the last row."""
    return examine(make.make_context(*rows, **context))[-1]


def only(findings: tuple[Finding, ...], gate: str) -> Finding:
    """Return the finding of a gate, of which there is one."""
    (finding,) = [finding for finding in findings if finding.gate == gate]
    return finding


def test_a_healthy_league_has_no_finding(baseline: Row, row: Row) -> None:
    for result in examine(make.make_context(baseline, row)):
        assert result.findings == ()
        assert result.is_ranked(BRACKETS) and result.is_ranked(TOPIC)


# Each fault: an edit of a row, the gate that sees it, what it does, a part of the reason.
RUN_FAULTS: dict[str, tuple[Callable[[Row], Row], str, str, str]] = {
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
    "a control that wins": (
        lambda row: replace(row, control=make.make_row("twin", 0.95)),
        *("control", FLAG, "its control twin has the better"),
    ),
    "a control that draws": (
        lambda row: replace(row, control=make.make_row("twin", 0.9)),
        *("control", NOTE, "one of systems"),
    ),
    "no control": (
        lambda row: replace(row, control=None),
        *("control", NOTE, "no matched control"),
    ),
    "a control that was not run": (
        lambda row: replace(row, control=None, control_name="twin"),
        *("control", NOTE, "control twin was not run"),
    ),
    "a control without scores": (
        lambda row: replace(row, control=replace(row.control, runs=())),
        *("control", NOTE, "twin has no score"),
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
    "other items": (
        lambda row: make.change(
            row, make.with_suite("pairs", "brackets", data="d2", accuracy=0.9), [3]
        ),
        *("suites", REFUSE, "pairs.data"),
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
    "a uniform guess": (
        lambda row: make.change(row, make.with_losses(lambda s: make.losses(s, 4.8, 5.1))),
        *("ceiling", VOID, "a uniform guess among 106 symbols (8 of 8 runs)"),
    ),
    "some uniform guesses": (
        lambda row: make.change(row, make.with_losses(lambda s: make.losses(s, 4.8, 5.1)), [0, 1]),
        *("ceiling", FLAG, "(2 of 8 runs)"),
    ),
    "word frequencies alone": (
        lambda row: make.change(row, make.with_losses(lambda s: make.losses(s, 4.07))),
        *("plateau", FLAG, "word frequencies reach 4.08 (8 of 8 runs)"),
    ),
    "some seeds on the plateau": (
        lambda row: make.change(row, make.with_losses(lambda s: make.losses(s, 4.07)), [5]),
        *("plateau", NOTE, "(1 of 8 runs)"),
    ),
    "word frequencies and copies": (
        lambda row: make.change(
            make.change(row, make.with_losses(lambda s: make.losses(s, 3.75))),
            make.with_values(task__leave_unmasked_prob=0.1),
        ),
        *("plateau", FLAG, "copying of unmasked targets reach 3.67"),
    ),
    "diverging": (
        lambda row: make.change(row, make.with_losses(lambda s: make.losses(s, 3.5, 3.0))),
        *("first best", FLAG, "undertrained, or diverging (8 of 8 runs)"),
    ),
    "still falling": (
        lambda row: make.change(
            row, make.with_losses(lambda s: [*make.losses(s)[:5], 2.2 + s / 1e3, 2.0])
        ),
        *("still falling", NOTE, "limited by the budget"),
    ),
    "a single validation": (
        lambda row: make.change(row, lambda run: replace(run, log=run.log[-1:])),
        *("validations", NOTE, "validate_interval_updates"),
    ),
    "collapsed states": (
        lambda row: make.change(row, make.with_suite("state", "last", effective_rank=0.02)),
        *("collapse", FLAG, "2.0% of the most possible"),
    ),
    "one seed with collapsed states": (
        lambda row: make.change(
            make.change(row, make.with_suite("state", "last", effective_rank=0.3)),
            make.with_suite("state", "last", effective_rank=0.02),
            [4],
        ),
        *("collapse", NOTE, "(1 of 8 runs)"),
    ),
}


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_faults_of_runs_are_caught(fault: str, baseline: Row, row: Row) -> None:
    plant, gate, action, reason = RUN_FAULTS[fault]
    result = standing(baseline, plant(row))
    finding = only(result.findings, gate)
    assert finding.action == action and reason in finding.reason
    assert result.is_ranked(BRACKETS) == (action == NOTE)


# Faults of one metric: an edit of the row, the metric, gate, action and a part of the reason.
SCORE_FAULTS: dict[str, tuple[Callable[[Row], Row], str, str, str, str]] = {
    "no better than untrained": (
        lambda row: replace(row, untrained=make.runs(4, 0.9, 500, end=4.6, topic=0.4)),
        *(BRACKETS, "untrained", FLAG, "at the level of the untrained model (0.899 against 0.9"),
    ),
    "below untrained": (
        lambda row: replace(row, untrained=make.runs(4, 0.95, 500, end=4.6, topic=0.4)),
        *(BRACKETS, "below untrained", FLAG, "below the untrained model"),
    ),
    "a probe below untrained": (
        lambda row: replace(row, untrained=make.runs(4, 0.5, 500, end=4.6, topic=0.7)),
        *(TOPIC, "below untrained", FLAG, "topic.accuracy is below"),
    ),
    "no order learnt": (
        lambda row: replace(row, shuffled=make.runs(4, 0.9, 600, topic=0.5)),
        *(BRACKETS, "shuffled", FLAG, "it shows no order of words"),
    ),
    "no order needed": (
        lambda row: replace(row, shuffled=make.runs(4, 0.5, 600)),
        *(TOPIC, "shuffled", NOTE, "it needs no order of words"),
    ),
    "ties": (
        lambda row: make.change(
            row, make.with_suite("pairs", "brackets", accuracy=0.9, soft_accuracy=0.8, ties=40)
        ),
        *(BRACKETS, "ties", FLAG, "8% of the items"),
    ),
    "constant energies": (
        lambda row: make.change(
            row,
            make.with_suite("pairs", "brackets", accuracy=0.52, soft_accuracy=0.5 + 1e-8, ties=90),
        ),
        *(BRACKETS, "constant", VOID, "the outputs are constant"),
    ),
    "below the most frequent class": (
        lambda row: make.change(row, make.with_references(chance=0.2, majority=0.7)),
        *(TOPIC, "guessing", FLAG, "topic.accuracy is 0.599, not above majority (0.7)"),
    ),
    "a bag of words is as good": (
        lambda row: make.change(row, make.with_references(chance=0.2, bag_of_words=0.6)),
        *(TOPIC, "guessing", NOTE, "not above bag_of_words (0.6)"),
    ),
    "below chance": (
        lambda row: replace(
            make.change(row, make.with_references(chance=0.7)),
            untrained=make.runs(4, 0.5, 500, end=4.6, topic=0.7),
        ),
        *(TOPIC, "below untrained", FLAG, "a rule that these items contradict"),
    ),
    "items left out": (
        lambda row: make.change(
            row, make.with_suite("pairs", "brackets", n=480, accuracy=0.9, soft_accuracy=0.8)
        ),
        *(BRACKETS, "left out", FLAG, "480 of 500 items"),
    ),
}


@pytest.mark.parametrize("fault", SCORE_FAULTS)
def test_faults_of_scores_are_caught(fault: str, baseline: Row, row: Row) -> None:
    plant, metric, gate, action, reason = SCORE_FAULTS[fault]
    result = standing(baseline, plant(row))
    finding = only(result.findings, gate)
    assert (finding.metric, finding.action) == (metric, action) and reason in finding.reason
    assert result.is_ranked(metric) == (action == NOTE)
    assert result.is_ranked(TOPIC if metric == BRACKETS else BRACKETS)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_every_gate_sees_a_fault_above(gate: Gate, baseline: Row, row: Row) -> None:
    if gate.__name__ in ("loss_without_score", "transition"):
        return  # below
    plants = [fault[0] for fault in (*RUN_FAULTS.values(), *SCORE_FAULTS.values())]
    faulty = [plant(row) for plant in plants]
    assert any(list(gate(row, make.make_context(baseline, row))) for row in faulty)


def test_a_score_that_nothing_was_learnt_for_has_no_note_on_order(baseline: Row, row: Row) -> None:
    row = replace(row, shuffled=make.runs(4, 0.5, 600), untrained=make.runs(4, 0.5, 500, end=4.6))
    assert "shuffled" not in {finding.gate for finding in standing(baseline, row).findings}


def test_identical_runs_under_two_labels_count_once(baseline: Row, row: Row) -> None:
    again = replace(make.change(row, make.with_values(label="again")), objective="again")
    first, second = examine(make.make_context(baseline, row, again))[1:]
    assert first.is_ranked(BRACKETS) and not second.is_ranked(BRACKETS)
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


def test_a_loss_that_improves_while_a_probe_falls(baseline: Row, row: Row) -> None:
    untrained = make.runs(4, 0.5, 500, end=4.6, topic=0.7)
    finding = only(
        standing(baseline, replace(row, untrained=untrained)).findings, "loss without score"
    )
    assert finding.action == NOTE and TOPIC in finding.reason and BRACKETS not in finding.reason
    untrained = make.runs(4, 0.5, 500, end=2.0, topic=0.7)
    assert "loss without score" not in {
        f.gate for f in standing(baseline, replace(row, untrained=untrained)).findings
    }


def test_a_change_of_phase_is_told_with_the_seeds_that_solve_it(baseline: Row, row: Row) -> None:
    def score(values: list[float]) -> Row:
        suites = [make.with_suite("pairs", "brackets", accuracy=x, ties=0) for x in values]
        edited = [edit(run) for edit, run in zip(suites, row.runs)]
        return replace(row, runs=tuple(edited), control=None)

    result = standing(baseline, score([0.55, 0.6, 0.97, 0.98, 0.58, 0.99, 0.95, 0.62]))
    finding = only(result.findings, "in transition")
    assert finding.action == NOTE and finding.metric == BRACKETS
    assert "from 0.55 to 0.99" in finding.reason and "4 of 8 seeds reach 0.9" in finding.reason
    steady = standing(baseline, score([0.95, 0.96, 0.97, 0.98, 0.97, 0.99, 0.95, 0.96]))
    assert "in transition" not in {f.gate for f in steady.findings}


def test_one_run_of_a_control_has_the_spread_of_the_row(baseline: Row, row: Row) -> None:
    row = replace(row, untrained=row.untrained[:1])
    assert standing(baseline, row).findings == ()
    alone = replace(row, runs=row.runs[:1])
    finding = only(standing(baseline, alone, metrics=(BRACKETS,)).findings, "untrained")
    assert "no spread" in finding.reason


@pytest.mark.parametrize(("seeds", "rate"), [((8, 8), 0.033), ((8, 3), 0.055)])
def test_the_screen_errs_as_often_as_documented(seeds: tuple[int, int], rate: float) -> None:
    """Rows without an effect, normal scores: above or below by more than 2 standard errors."""
    rng = np.random.default_rng(0)
    signs = []
    for _ in range(4000):
        scores, others = (rng.normal(size=n) for n in seeds)
        result = compare(scores, others, lower_is_better=False)
        assert result is not None
        signs.append(result.sign)
    for sign in (1, -1):
        assert stats.binomtest(signs.count(sign), len(signs), rate).pvalue > 1e-3


def test_a_planned_control_on_shuffled_text_that_is_missing_is_said(
    baseline: Row, row: Row
) -> None:
    row = replace(row, shuffled=())
    assert standing(baseline, row).findings == ()
    finding = only(standing(baseline, row, shuffled=(BUDGET,)).findings, "shuffled")
    assert finding.action == NOTE and "planned" in finding.reason


def test_no_untrained_control_is_said(baseline: Row, row: Row) -> None:
    finding = only(standing(baseline, replace(row, untrained=())).findings, "untrained")
    assert finding.action == NOTE and not finding.metric


@pytest.mark.parametrize(
    ("plant", "action"),
    [
        *(("half the budget", REFUSE), ("a stage that ignores the seeds", REFUSE)),
        *(("word frequencies alone", NOTE), ("no control", "")),
    ],
)
def test_rows_of_a_bad_baseline_are_refused(
    plant: str, action: str, baseline: Row, row: Row
) -> None:
    bad = RUN_FAULTS[plant][0](replace(baseline, control=row.control))
    result = standing(bad, row)
    assert result.action(BRACKETS) == action
    if action:
        assert "baseline causal" in only(result.findings, "baseline").reason


def test_a_row_without_a_baseline_says_so(baseline: Row, row: Row) -> None:
    finding = only(standing(replace(baseline, budget=2e10), row).findings, "baseline")
    assert finding.action == NOTE and "causal" in finding.reason


def test_data_that_are_not_known_have_no_ceiling(baseline: Row, row: Row) -> None:
    row = make.change(row, make.with_losses(lambda s: make.losses(s, 4.8, 5.1)))
    gates = {f.gate for f in standing(baseline, row, vocabulary=0, unigram=None).findings}
    assert not gates & {"ceiling", "plateau"}


def test_runs_of_an_archive_are_judged_alike(baseline: Row, row: Row, tmp_path: Path) -> None:
    row = RUN_FAULTS["word frequencies alone"][0](row)
    row = RUN_FAULTS["the largest rate"][0](make.change(row, make.with_results(code="c2")))
    archive.write(tmp_path / "row.jsonl", row.runs)
    read = replace(row, runs=tuple(archive.read(tmp_path / "row.jsonl")))
    context: Context = make.make_context(baseline, row)
    expected = examine(context)[1].findings
    assert {f.gate for f in expected} >= {"code", "edge of the grid", "plateau"}
    assert examine(replace(context, rows=(baseline, read)))[1].findings == expected


def of_a_mean(*rows: Row) -> tuple[Row, ...]:
    """Return rows whose runs have the metric "both", the mean of the two others."""
    means = {"both": (BRACKETS, TOPIC)}

    def edit(run: Run) -> Run:
        return replace(run, means=means)

    changed = []
    for row in rows:
        control = of_a_mean(row.control)[0] if row.control else None
        untrained = tuple(map(edit, row.untrained))
        shuffled = tuple(map(edit, row.shuffled))
        row = replace(row, control=control, untrained=untrained, shuffled=shuffled)
        changed.append(make.change(row, edit))
    return tuple(changed)


MEAN_FAULTS: dict[str, tuple[Callable[[Run], Run], str, str]] = {
    "other items of a part": (
        make.with_suite("topic", "last", data="d2", accuracy=0.6),
        *("suites", REFUSE),
    ),
    "ties of a part": (
        make.with_suite("pairs", "brackets", accuracy=0.9, ties=50),
        *("ties", FLAG),
    ),
    "items of a part left out": (
        make.with_suite("topic", "last", n=400, accuracy=0.6),
        *("left out", FLAG),
    ),
    "constant scores of a part": (
        make.with_suite("pairs", "brackets", accuracy=0.9, soft_accuracy=0.5),
        *("constant", VOID),
    ),
    "the mean of chance": (make.with_references(chance=0.99), *("guessing", FLAG)),
}


@pytest.mark.parametrize("fault", MEAN_FAULTS)
def test_faults_of_a_part_are_those_of_the_mean(fault: str, baseline: Row, row: Row) -> None:
    healthy = standing(*of_a_mean(baseline, row), metrics=("both",))
    assert healthy.findings == () and healthy.is_ranked("both")
    edit, gate, action = MEAN_FAULTS[fault]
    bad = standing(*of_a_mean(baseline, make.change(row, edit)), metrics=("both",))
    finding = only(bad.findings, gate)
    assert (finding.action, finding.metric) == (action, "both")


def test_a_mean_in_transition_is_seen(baseline: Row, row: Row) -> None:
    runs = []
    for run, score in zip(row.runs, [0.5, 0.55, 0.99, 0.98, 0.52, 0.99, 0.98, 0.56]):
        for name, group in (("pairs", "brackets"), ("topic", "last")):
            run = make.with_suite(name, group, accuracy=score)(run)
        runs.append(run)
    rows = of_a_mean(baseline, replace(row, runs=tuple(runs), control=None))
    assert "in transition" in {f.gate for f in standing(*rows, metrics=("both",)).findings}


def test_a_term_of_the_loss_is_the_better_the_smaller(baseline: Row, row: Row) -> None:
    """Its name, valid.mlm, does not say so."""
    context = make.make_context(baseline, row, metrics=("valid.mlm", BRACKETS))
    assert context.lower_is_better("valid.mlm") and not context.lower_is_better(BRACKETS)
    better = {f.gate for f in standing(baseline, row, metrics=("valid.mlm",)).findings}
    assert "below untrained" not in better
    worse = make.change(row, make.with_results(metrics={"valid": {"loss": 5.0, "mlm": 5.0}}))
    gates = {f.gate for f in standing(baseline, worse, metrics=("valid.mlm",)).findings}
    assert "below untrained" in gates
    reason = only(
        standing(baseline, worse, metrics=("valid.mlm",)).findings, "below untrained"
    ).reason
    assert "valid.mlm is above the untrained model" in reason


def test_a_control_without_a_score_is_said(baseline: Row, row: Row) -> None:
    failed = tuple(make.with_results(status="failed")(run) for run in row.untrained)
    finding = only(
        standing(baseline, replace(row, untrained=failed), metrics=(BRACKETS,)).findings,
        "untrained",
    )
    assert finding.action == NOTE and "no score" in finding.reason
    finding = only(
        standing(baseline, replace(row, shuffled=failed), metrics=(BRACKETS,)).findings, "shuffled"
    )
    assert finding.action == NOTE and "no score" in finding.reason
