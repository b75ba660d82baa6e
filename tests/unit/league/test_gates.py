"""Gates: each planted fault is caught by name; a healthy league has none."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import league_rows as make
import numpy as np
import pytest
from league_rows import BRACKETS, BUDGET, RATES, TOPIC
from scipy import stats

from metaseq_lm.league.gates import GATES, Gate, examine
from metaseq_lm.league.loss_gates import (
    base_rate,
    best_detection,
    diverged,
    still_falling,
    undetected,
)
from metaseq_lm.league.standings import (
    ACTIONS,
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


def all_of(gate: str, *rows: Row) -> list[Finding]:
    """Return the findings of a gate in all rows."""
    standings = examine(make.make_context(*rows))
    return [finding for result in standings for finding in result.findings if finding.gate == gate]


def action_of(result: Standing, metric: str) -> str:
    """Return the strongest action of the findings about a metric, "" if there is none."""
    actions = {finding.action for finding in result.findings if finding.metric in ("", metric)}
    return next((action for action in ACTIONS if action in actions), "")


def is_ranked(result: Standing, metric: str) -> bool:
    """Return whether a row has a score and nothing forbids to rank it."""
    return action_of(result, metric) in (NOTE, "") and bool(result.row.scores(metric))


def test_a_healthy_league_has_no_finding(baseline: Row, row: Row) -> None:
    for result in examine(make.make_context(baseline, row)):
        assert result.findings == ()
        assert is_ranked(result, BRACKETS) and is_ranked(result, TOPIC)


RISING = [4.2, 2.6, 2.45, 2.4, 2.45, 3.0, 3.1]  # losses of a run that diverges

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
    "an objective of a mixture by word frequencies alone": (
        lambda row: make.change(
            make.change(row, make.with_logged(**{"easy.mlm": 3.75, "causal_lm.next_token": 2})),
            make.with_values(task__objectives=["causal_lm weight=[1,0]", "masked_lm name=easy"]),
        ),
        *("plateau", FLAG, "valid.easy.mlm is 3.75 nats at best; word frequencies and the copying"),
    ),
    "the share of fakes alone": (
        lambda row: make.change(row, make.with_logged(discriminator=0.43, fakes=0.15)),
        *("plateau", FLAG, "valid.discriminator is 0.43 nats at best; the share of fakes alone"),
    ),
    "some seeds that detect nothing": (
        lambda row: make.change(
            make.change(row, make.with_logged(discriminator=0.3, fakes=0.15)),
            make.with_logged(discriminator=0.43),
            [1, 2],
        ),
        *("plateau", NOTE, "(2 of 8 runs)"),
    ),
    "losses that rise again": (
        lambda row: make.change(row, make.with_losses(lambda _: RISING)),
        *("diverged", FLAG, "worse than the best one by 0.7"),
    ),
    "one loss that rises again": (
        lambda row: make.change(row, make.with_losses(lambda _: RISING), [3]),
        *("diverged", NOTE, "(1 of 8 runs)"),
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
    assert is_ranked(result, BRACKETS) == (action == NOTE)


FULL, MASKED = 0.75 * np.log(4 / 3) + 0.25 * np.log(4), np.log(2)


@pytest.mark.parametrize(
    "losses",
    [
        [4.2, 2.5, 2.4, 2.42, 2.41, 2.6, 2.62],  # an eighth of the gain
        [4.2, 4.1, 4.15, 4.05, 4.1, 4.2],  # all of the gain, within the steps
    ],
)
def test_noise_at_the_end_is_no_divergence(row: Row, losses: list[float]) -> None:
    row = make.change(row, make.with_losses(lambda _: losses))
    assert not list(diverged(row, make.make_context(row)))


def falling(first: list[float], last: list[float], schedule: dict[str, object]) -> Callable:
    """Return an edit: losses that fall until the rate decays, and after that, by a schedule."""
    values = make.with_values(**{f"schedule__{key}": value for key, value in schedule.items()})
    losses = make.with_losses(lambda s: [x + s / 1e3 for x in [*first, *last]])
    return lambda run: values(losses(run))


FALLS, FLAT = [4.0, 3.5, 3.0, 2.5, 2.0], [2.0] * 5  # validations at updates 40, 80, ..., 200
WSD = {"_name": "wsd", "total_updates": 280, "decay_ratio": 0.25, "end": 0.0}


@pytest.mark.parametrize(
    ("first", "last", "schedule", "said"),
    [
        (FLAT, [1.5, 1.0], {}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {"_name": "constant"}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {**WSD, "end": 1.0}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], {**WSD, "decay_ratio": 0.0}, "the last quarter of the updates"),
        (FLAT, [1.5, 1.0], WSD, ""),
        (FALLS, [1.5, 1.0], WSD, "the last quarter of the updates before the rate decays"),
        # Three validations before the decay.
        (FALLS, [1.5, 1.0], {**WSD, "decay_ratio": 0.5}, ""),
        (FALLS, [1.5, 1.0], {"_name": "linear", "total_updates": 280}, ""),
        (FALLS, [1.5, 1.0], {"_name": "polynomial", "total_updates": 280, "end": 0.0}, ""),
    ],
)
def test_a_loss_that_falls_while_the_rate_decays_is_no_limit_of_the_budget(
    row: Row, first: list[float], last: list[float], schedule: dict[str, object], said: str
) -> None:
    row = make.change(row, falling(first, last, schedule))
    reasons = [finding.reason for finding in still_falling(row, make.make_context(row))]
    assert len(reasons) == bool(said)
    if reasons:
        assert reasons[0].endswith(said)


@pytest.mark.parametrize(
    ("criterion", "level"),
    [
        # 20 of 100 tokens are fake, 80 may be; the others are known and cost nothing.
        ({"criterion.disc_positions": "all"}, 0.8 * FULL),
        ({"criterion.disc_positions": "masked"}, MASKED),
        ({"criterion.legacy_specials": False}, FULL),
        ({"criterion.legacy_specials": True}, 0.8 * FULL),
    ],
)
def test_the_level_of_a_discriminator_is_the_entropy_of_the_share_of_fakes(
    row: Row, criterion: dict[str, object], level: float
) -> None:
    logged = {"fakes": 0.2, "candidates": 0.8, "sample_accuracy": 0.5}
    run = replace(row.runs[0], values={**row.runs[0].values, **criterion})
    assert base_rate(run, {"kind": "valid", **logged}) == pytest.approx(level)
    for loss, count in ((0.979 * level, 0), (0.981 * level, 8)):
        rows = [replace(r, values={**r.values, **criterion}) for r in row.runs]
        edit = make.with_logged(discriminator=loss, **logged)
        findings = list(
            undetected(replace(row, runs=tuple(map(edit, rows))), make.make_context(row))
        )
        assert len(findings) == bool(count)


def test_a_discriminator_is_judged_where_it_is_the_best(row: Row) -> None:
    """A generator that gets better makes the task harder, and fakes rarer."""
    run = row.runs[0]
    for line, loss, share in zip(run.log, [0.6, 0.3, 0.35], [0.2, 0.2, 0.1]):
        line |= {"discriminator": loss, "fakes": share}
    loss, level = best_detection(run)
    assert loss == 0.3 and level == pytest.approx(0.8 * np.log(1 / 0.8) + 0.2 * np.log(5))


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
    assert is_ranked(result, metric) == (action == NOTE)
    assert is_ranked(result, TOPIC if metric == BRACKETS else BRACKETS)


def test_rows_with_the_same_untrained_models_have_one_control(baseline: Row, row: Row) -> None:
    """It is said once, of all budgets and objectives; causal models are read otherwise."""
    other = make.make_row("other", 0.8, untrained=row.untrained)
    larger = replace(row, budget=2.5e11)
    (finding,) = all_of("shared control", baseline, row, other, larger)
    assert finding.action == NOTE
    assert "the untrained models of mine and other are the same" in finding.reason


def test_losses_of_controls_are_told_beside_scores(baseline: Row, row: Row) -> None:
    """Of terms that both have."""
    shuffled = make.runs(4, 0.9, 600, end=3.6, topic=0.5)
    twin = make.make_row("twin", 0.95)
    result = standing(baseline, replace(row, shuffled=shuffled, control=twin))
    for gate, other in (("shuffled", r"3\.\d+"), ("control", r"2\.\d+")):
        reason = only(result.findings, gate).reason
        assert re.search(rf"; valid\.mlm is 2\.3\d at best against {other}$", reason)
    twin = make.change(twin, make.with_results(losses=["next_token"]))
    result = standing(baseline, replace(row, control=twin))
    assert "at best against" not in only(result.findings, "control").reason


SEEN_BELOW = (
    *("loss_without_score", "transition", "embedding_layer"),
    *("part_below_chance", "shared_untrained"),
)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_every_gate_sees_a_fault_above(gate: Gate, baseline: Row, row: Row) -> None:
    if gate.__name__ in SEEN_BELOW:
        return
    plants = [fault[0] for fault in (*RUN_FAULTS.values(), *SCORE_FAULTS.values())]
    faulty = [plant(row) for plant in plants]
    assert any(list(gate(row, make.make_context(baseline, row))) for row in faulty)


def test_a_score_that_nothing_was_learnt_for_has_no_note_on_order(baseline: Row, row: Row) -> None:
    row = replace(row, shuffled=make.runs(4, 0.5, 600), untrained=make.runs(4, 0.5, 500, end=4.6))
    assert "shuffled" not in {finding.gate for finding in standing(baseline, row).findings}


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


def test_a_level_is_exceeded_by_the_spread_over_seeds(baseline: Row, row: Row) -> None:
    scores = row.scores(TOPIC)
    mean, error = np.mean(scores), stats.sem(scores)
    edge = stats.t.ppf(0.975, len(scores) - 1) * error

    def findings(level: float, untrained: float = 0.4) -> dict[str, Finding]:
        changed = make.change(row, make.with_references(chance=level))
        controls = make.runs(4, 0.5, 500, end=4.6, topic=untrained)
        changed = replace(changed, untrained=controls)
        return {f.gate: f for f in standing(baseline, changed, metrics=(TOPIC,)).findings}

    assert "guessing" not in findings(mean - 1.01 * edge)
    for level in (mean - 0.99 * edge, mean, mean + 1.01 * edge):
        assert "standard error" in findings(level)["guessing"].reason
    # Below an untrained model: below chance, too, only beyond the spread.
    for factor, is_below in ((0.99, False), (1.01, True)):
        reason = findings(mean + factor * edge, untrained=0.8)["below untrained"].reason
        assert ("contradict" in reason) == is_below


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
    assert action_of(result, BRACKETS) == action
    if action:
        assert "baseline causal" in only(result.findings, "baseline").reason


def test_a_row_without_a_baseline_says_so(baseline: Row, row: Row) -> None:
    finding = only(standing(replace(baseline, budget=2e10), row).findings, "baseline")
    assert finding.action == NOTE and "causal" in finding.reason


@pytest.mark.parametrize(
    "entry", ["masked_lm weight=[0,0]", "masked_lm task.leave_unmasked_prob=0.2 weight=[0,1]"]
)
def test_objectives_that_are_only_validated_have_no_ceiling(
    entry: str, baseline: Row, row: Row
) -> None:
    row = make.change(row, make.with_logged(**{"masked_lm.mlm": 5.0}))
    row = make.change(row, make.with_values(task__objectives=["causal_lm", entry]))
    gates = {finding.gate for finding in standing(baseline, row).findings}
    assert ("ceiling" in gates) == ("[0,1]" in entry)


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
}


@pytest.mark.parametrize("fault", MEAN_FAULTS)
def test_faults_of_a_part_are_those_of_the_mean(fault: str, baseline: Row, row: Row) -> None:
    healthy = standing(*of_a_mean(baseline, row), metrics=("both",))
    assert healthy.findings == () and is_ranked(healthy, "both")
    edit, gate, action = MEAN_FAULTS[fault]
    bad = standing(*of_a_mean(baseline, make.change(row, edit)), metrics=("both",))
    finding = only(bad.findings, gate)
    assert (finding.action, finding.metric) == (action, "both")


def test_a_mean_is_beside_the_mean_of_chance(baseline: Row, row: Row) -> None:
    bad = make.change(row, make.with_references(chance=0.99))
    gates = {f.gate for f in standing(*of_a_mean(baseline, bad), metrics=("both",)).findings}
    assert "guessing" in gates


def test_a_part_below_chance_is_told_of_the_mean(baseline: Row, row: Row) -> None:
    """The mean, 0.75, is above that of chance, 0.65; topic, 0.6, is below it."""
    bad = make.change(row, make.with_references(chance=0.65))
    result = standing(*of_a_mean(baseline, bad), metrics=("both", TOPIC, BRACKETS))
    finding = only(result.findings, "part below chance")
    assert (finding.metric, finding.action) == ("both", FLAG)
    assert TOPIC in finding.reason and "below chance, 0.65" in finding.reason
    assert not is_ranked(result, "both") and is_ranked(result, BRACKETS)
    # At chance up to the spread over seeds is not below it.
    bad = make.change(row, make.with_references(chance=0.6))
    result = standing(*of_a_mean(baseline, bad), metrics=("both",))
    assert "part below chance" not in {f.gate for f in result.findings}


def read_from(row: Row, *layers: int) -> Row:
    """Return a row whose seeds have probes of topics that chose these layers."""
    suites = [make.with_suite("topic", "last", accuracy=0.6, layer=layer) for layer in layers]
    return replace(row, runs=tuple(edit(run) for edit, run in zip(suites, row.runs)))


def test_a_probe_of_the_embedding_layer_is_told_once(baseline: Row, row: Row) -> None:
    rows = read_from(baseline, *[0] * 7, 2), read_from(row, 0, 0, 0, 1, 1, 2, 2, 2)
    (finding,) = all_of("embedding layer", *rows)
    assert (finding.action, finding.metric) == (NOTE, TOPIC)
    assert "62% of the runs of all rows" in finding.reason
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


def transitions(*rows: Row, metrics: tuple[str, ...]) -> list[Finding]:
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
