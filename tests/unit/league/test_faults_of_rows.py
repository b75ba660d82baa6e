"""Faults planted in a row without findings: each is caught by name, and each gate sees one."""

from collections.abc import Callable
from dataclasses import replace

import league_rows as make
import pytest
from league_rows import BRACKETS, BUDGET, TOPIC
from league_standings import is_ranked, only, standing

from metaseq_lm.league.gate import GATES
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, TuningRecord

Edit = Callable[[Run], Run]
Plant = Callable[[Row], Row]
RISING = [4.2, 2.6, 2.45, 2.4, 2.45, 3.0, 3.1]  # losses of a run that diverges
PAIRS = ("pairs", "brackets")


def runs(*edits: Edit, which: range | list[int] = range(8)) -> Plant:
    """Return a plant that edits some of the final runs."""

    def plant(row: Row) -> Row:
        for edit in edits:
            row = make.change(row, edit, which)
        return row

    return plant


def fields(**of: object) -> Plant:
    """Return a plant that replaces fields of a row; a function is given the row."""
    return lambda row: replace(row, **{k: x(row) if callable(x) else x for k, x in of.items()})


def control(name: str, edit: Edit) -> Plant:
    """Return a plant that edits the runs of a control."""
    return lambda row: replace(row, **{name: tuple(map(edit, getattr(row, name)))})


def tuning(trained: float | None = None, **changes: object) -> Plant:
    """Return a plant that replaces fields of the tuning, and the rate of the runs."""
    edit = make.with_values(optimizer__lr=trained) if trained else lambda run: run
    return lambda row: make.change(replace(row, tuning=replace(row.tuning, **changes)), edit)


def falling(end: float, start: float = 4.2) -> Edit:
    """Return an edit to losses that fall to `end`."""
    return make.with_losses(lambda seed: make.losses(seed, end, start))


def untrained(mean: float, topic: float = 0.4) -> Plant:
    """Return a plant of untrained models with these scores."""
    return fields(untrained=make.runs(4, mean, 500, end=4.6, topic=topic))


def extra(run: Run) -> Plant:
    """Return a plant of a further run."""
    return fields(runs=lambda row: (*row.runs, run))


failed = make.with_results(status="failed")
pretrained = make.with_results(pretraining={"flops": 0, "seconds": 0})
detector = make.with_logged(discriminator=0.43, fakes=0.15)

# By fault: what plants it, the gate that sees it, its action, a part of the reason, the metric.
FAULTS: dict[str, tuple[Plant, str, str, str, str]] = {
    # Runs and what they share.
    "too few seeds": (fields(runs=lambda r: r.runs[:6]), "missing", FLAG, "6 of 8 seeds", ""),
    "more seeds than planned": (
        extra(make.make_run(99, make.losses(99))),
        "missing",
        FLAG,
        "9",
        "",
    ),
    "one seed twice": (extra(make.runs(1, 0.9, 8, end=2.3)[0]), "missing", FLAG, "seed 8", ""),
    "a failed run": (
        runs(make.with_results(status="diverged"), which=[1]),
        *("missing", FLAG, "diverged after 280 updates", ""),
    ),
    "a failed run too many": (
        extra(failed(make.runs(1, 0.9, 9)[0])),
        *("missing", FLAG, "without a score", ""),
    ),
    "no run": (fields(runs=()), "missing", VOID, BRACKETS, ""),
    "half the budget": (
        runs(make.with_results(flops=BUDGET / 2)),
        *("budget", REFUSE, "8 of 8 runs took other FLOPs than the budget of 6.0e10: 3.0e10", ""),
    ),
    "one run of other FLOPs": (
        runs(make.with_results(flops=BUDGET * 1.03), which=[2]),
        *("budget", REFUSE, "1 of 8 runs", ""),
    ),
    "pre-training on top of the budget": (
        runs(make.with_results(pretraining={"flops": BUDGET, "seconds": 1})),
        *("budget", REFUSE, "1.2e11", ""),
    ),
    "no FLOPs": (
        runs(make.with_results(flops=None), which=[0]),
        *("budget", REFUSE, "1 of 8 runs", ""),
    ),
    "another world": (
        runs(make.with_values(data_hash="h2"), make.with_results(corpus="k2")),
        *("data", REFUSE, "data_hash h1, h2", ""),
    ),
    "a labelled set beside the corpus": (
        runs(make.with_values(data_hash="h2")),
        *("data", NOTE, "labelled sets", ""),
    ),
    "an encoder of another world": (
        runs(make.with_values(pretraining__data_hash="h2"), which=[0]),
        *("data", REFUSE, "pretraining.data_hash", ""),
    ),
    "other items": (
        runs(make.with_suite(*PAIRS, data="d2", accuracy=0.9), which=[3]),
        *("suites", REFUSE, "pairs.data", BRACKETS),
    ),
    "scored by other code": (
        runs(make.with_scoring_code("c2"), which=[3]),
        *("suites", NOTE, "suites.pairs.code: c1, c2", ""),
    ),
    "other code": (runs(make.with_results(code="c2")), "code", REFUSE, "c1, c2", ""),
    "other code of an added objective": (
        lambda row: runs(make.with_results(code="c2"))(replace(row, added=True)),
        *("code", NOTE, "c1, c2", ""),
    ),
    "other code than that of a shipped baseline": (
        lambda row: runs(make.with_results(code="c2"))(replace(row, shipped=True)),
        *("code", NOTE, "c1, c2", ""),
    ),
    "another default than that of a shipped baseline": (
        lambda row: runs(make.with_values(task__batch_size=16))(replace(row, shipped=True)),
        *("defaults", REFUSE, "task.batch_size 8, 16)", ""),
    ),
    "an untrained control of another size": (
        control("untrained", make.with_results(parameters={"all": 9})),
        *("controls", FLAG, "untrained control has other parameters", ""),
    ),
    "an untrained control on other data": (
        control("untrained", make.with_results(corpus="k2")),
        *("controls", FLAG, "untrained control has other data", ""),
    ),
    "a shuffled control at another budget": (
        control("shuffled", make.with_results(flops=BUDGET / 3)),
        *("controls", FLAG, "2.0e10", ""),
    ),
    "a shuffled control by another suite": (
        control("shuffled", make.with_suite(*PAIRS, data="d2", accuracy=0.5, ties=0)),
        *("controls", FLAG, "shuffled control is scored by other suites", BRACKETS),
    ),
    "a stage that ignores the seeds": (
        fields(runs=lambda r: tuple(make.with_values(seed=i)(r.runs[0]) for i in range(8))),
        *("identical runs", VOID, "seeds 0, 1, 2, 3, 4, 5, 6, 7", ""),
    ),
    "a shuffled control that was not shuffled": (
        fields(shuffled=lambda row: row.runs[:4]),
        *("identical runs", FLAG, "4 of its 8 runs", ""),
    ),
    "seeds that share an encoder": (
        runs(pretrained, make.with_values(pretraining__seed=1)),
        *("shared encoder", FLAG, "8 seeds start from 1 pre-trained encoder:", ""),
    ),
    "not tuned": (fields(tuning=None), "tuning", FLAG, "those of 1 rows were", ""),
    "tuned with a single value": (
        fields(tuning=TuningRecord({"optimizer.lr": [2e-3]}, {"optimizer.lr": 2e-3})),
        *("tuning", FLAG, "not tuned", ""),
    ),
    "trained with another rate than that chosen": (
        tuning(3e-3),
        *("tuning", FLAG, "optimizer.lr=0.002 was chosen, but 0.003 trained", ""),
    ),
    "a final seed tuned the rate": (tuning(runs=make.trials(8)), "tuning", FLAG, "seed 8", ""),
    "a failed trial": (
        tuning(runs=(failed(make.trials()[0]), *make.trials()[1:])),
        *("tuning", FLAG, "1 of 3 trials", ""),
    ),
    "tuned at another budget": (tuning(budget=2e10), "tuning", NOTE, "2.0e10 FLOPs", ""),
    "more tuning than the baseline": (
        tuning(runs=make.trials() * 2),
        *("tuning", NOTE, "2 times those of the baseline", ""),
    ),
    "the largest rate": (
        tuning(4e-3, chosen={"optimizer.lr": 4e-3}),
        *("edge of the grid", FLAG, "optimizer.lr=0.004", ""),
    ),
    "the smallest rate": (
        tuning(1e-3, chosen={"optimizer.lr": 1e-3}),
        *("edge of the grid", FLAG, "(0.001, 0.002, 0.004)", ""),
    ),
    # Losses.
    "a uniform guess": (runs(falling(4.8, 5.1)), "ceiling", VOID, "106 symbols (8 of 8 runs)", ""),
    "some uniform guesses": (
        runs(falling(4.8, 5.1), which=[0, 1]),
        *("ceiling", FLAG, "(2 of 8 runs)", ""),
    ),
    "word frequencies alone": (
        runs(falling(4.07)),
        *("plateau", FLAG, "word frequencies reach 4.08 (8 of 8 runs)", ""),
    ),
    "some seeds on the plateau": (
        runs(falling(4.07), which=range(4)),
        *("plateau", NOTE, "(4 of 8 runs)", ""),
    ),
    "word frequencies and copies": (
        runs(falling(3.75), make.with_values(task__leave_unmasked_prob=0.1)),
        *("plateau", FLAG, "unmasked targets reach 3.67", ""),
    ),
    "an objective of a mixture by word frequencies alone": (
        runs(
            make.with_logged(**{"easy.mlm": 3.75, "causal_lm.next_token": 2}),
            make.with_values(task__objectives=["causal_lm weight=[1,0]", "masked_lm name=easy"]),
        ),
        *("plateau", FLAG, "valid.easy.mlm is 3.75 nats", ""),
    ),
    "no better than trigrams": (
        runs(make.with_logged(next_token=2.7)),
        *("trigrams", NOTE, "trigrams of the same text reach 2.6", ""),
    ),
    "the share of fakes alone": (
        runs(detector),
        *(
            "plateau",
            FLAG,
            "valid.discriminator is 0.43 nats at best; the share of fakes alone",
            "",
        ),
    ),
    "some seeds that detect nothing": (
        lambda row: runs(detector, which=[1, 2])(
            runs(make.with_logged(discriminator=0.3, fakes=0.15))(row)
        ),
        *("plateau", NOTE, "(2 of 8 runs)", ""),
    ),
    "losses that rise again": (
        runs(make.with_losses(lambda _: RISING)),
        *("diverged", FLAG, "by 0.7", ""),
    ),
    "one loss that rises again": (
        runs(make.with_losses(lambda _: RISING), which=[3]),
        *("diverged", NOTE, "(1 of 8 runs)", ""),
    ),
    "diverging": (runs(falling(3.5, 3.0)), "first best", FLAG, "(8 of 8 runs)", ""),
    "a single validation": (
        runs(lambda run: replace(run, log=run.log[-1:])),
        *("validations", NOTE, "validate_interval_updates", ""),
    ),
    "still falling": (
        runs(make.with_losses(lambda s: [*make.losses(s)[:5], 2.2 + s / 1e3, 2.0])),
        *("still falling", NOTE, "the last quarter", ""),
    ),
    # Scores.
    "ties": (
        runs(make.with_suite(*PAIRS, accuracy=0.9, soft_accuracy=0.8, ties=40)),
        *("ties", FLAG, "8% of the items", BRACKETS),
    ),
    "constant energies": (
        runs(make.with_suite(*PAIRS, accuracy=0.52, soft_accuracy=0.5 + 1e-8, ties=90)),
        *("constant", VOID, "(8 of 8 runs)", BRACKETS),
    ),
    "items left out": (
        runs(make.with_suite(*PAIRS, n=480, accuracy=0.9, soft_accuracy=0.8)),
        *("left out", FLAG, "480 of 500 items", BRACKETS),
    ),
    # Controls.
    "no better than untrained": (
        untrained(0.9),
        *("untrained", FLAG, "at the level of the untrained model (0.899 against 0.9", BRACKETS),
    ),
    "below untrained": (untrained(0.95), "below untrained", FLAG, "below the untrained", BRACKETS),
    "a probe below untrained": (untrained(0.5, 0.7), "below untrained", FLAG, TOPIC, TOPIC),
    "below chance": (
        lambda row: runs(make.with_references(chance=0.7))(untrained(0.5, 0.7)(row)),
        *("below untrained", FLAG, "below chance, 0.7", TOPIC),
    ),
    "no untrained control": (fields(untrained=()), "untrained", NOTE, "no untrained control", ""),
    "no order learnt": (
        fields(shuffled=make.runs(4, 0.9, 600, topic=0.5)),
        *("shuffled", FLAG, "it shows no order of words", BRACKETS),
    ),
    "no order needed": (
        fields(shuffled=make.runs(4, 0.5, 600)),
        *("shuffled", NOTE, "it needs no order of words", TOPIC),
    ),
    "a control that wins": (
        fields(control=make.make_row("twin", 0.95)),
        *("control", FLAG, "twin has the better", BRACKETS),
    ),
    "a control that draws": (
        fields(control=make.make_row("twin", 0.9)),
        *("control", NOTE, "one of systems", BRACKETS),
    ),
    "a control without scores": (
        fields(control=replace(make.make_row("twin", 0.7), runs=())),
        *("control", NOTE, "twin has no score", BRACKETS),
    ),
    "no control": (fields(control=None), "control", NOTE, "no matched control", ""),
    "a control that was not run": (
        fields(control=None, control_name="twin"),
        *("control", NOTE, "twin was not run", ""),
    ),
    "below the most frequent class": (
        runs(make.with_references(chance=0.2, majority=0.7)),
        *("guessing", FLAG, "topic.accuracy is 0.599, not above majority (0.7)", TOPIC),
    ),
    "a bag of words is as good": (
        runs(make.with_references(chance=0.2, bag_of_words=0.6)),
        *("guessing", NOTE, "not above bag_of_words (0.6)", TOPIC),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_name(fault: str, baseline: Row, row: Row) -> None:
    plant, gate, action, reason, metric = FAULTS[fault]
    result = standing(baseline, plant(row))
    finding = only(result.findings, gate)
    assert (finding.action, finding.metric) == (action, metric) and reason in finding.reason
    assert is_ranked(result, metric or BRACKETS) == (action == NOTE)
    assert not metric or is_ranked(result, TOPIC if metric == BRACKETS else BRACKETS)


# These compare all rows, or have tests of their own: bounds, data, means, readings.
ELSEWHERE = {
    *("above reader", "below entropy", "beyond plan", "domain", "leak", "epochs", "conditions"),
    *("not judged", "shared untrained", "part below chance", "transition"),
    *("embedding layer", "reach"),
}


def test_every_other_gate_sees_a_fault(baseline: Row, row: Row) -> None:
    rows = [plant(row) for plant, *_ in FAULTS.values()]
    contexts = [make.make_context(baseline, faulty) for faulty in rows]
    silent = set()
    for name, entry in GATES.entries.items():
        if not any(list(entry.value(x, context)) for x, context in zip(rows, contexts)):
            silent.add(name)
    assert silent == ELSEWHERE
