"""Gates on controls: levels of references, spreads, and what is no fault."""

import re
from dataclasses import replace

import league_rows as make
import numpy as np
import pytest
from league_rows import BRACKETS, BUDGET, TOPIC
from league_standings import all_of, is_ranked, of_a_mean, only, said, standing
from outcomes import expect_facts
from scipy import stats

from metaseq_lm.league.control_gates import ceiling, references
from metaseq_lm.league.standings import FLAG, NOTE, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row
from metaseq_lm.runs.suite_results import SuiteResults


@pytest.mark.parametrize("mean", [0.5, 0.9])
def test_a_control_that_is_the_baseline_is_left_to_the_verdict(
    mean: float, baseline: Row, row: Row
) -> None:
    """Whether it wins or draws; a flag would keep an equal row from being called so."""
    worse = replace(make.make_row("mine", mean), control=baseline)
    assert "control" not in said(baseline, worse)
    assert "control" in said(baseline, replace(worse, control=make.make_row("twin", 0.95)))


def test_rows_with_the_same_untrained_models_have_one_control(baseline: Row, row: Row) -> None:
    """It is said once, of all budgets and objectives; causal models are read otherwise."""
    other = make.make_row("other", 0.8, untrained=row.untrained)
    larger = replace(row, budget=2.5e11)
    (finding,) = all_of("shared control", baseline, row, other, larger)
    assert finding.action == NOTE
    expect_facts(finding.reason, "untrained models", "mine and other")


def test_losses_of_controls_are_told_beside_scores(baseline: Row, row: Row) -> None:
    """Of terms that both have."""
    shuffled = make.runs(4, 0.9, 600, end=3.6, topic=0.5)
    twin = make.make_row("twin", 0.95)
    gates = said(baseline, replace(row, shuffled=shuffled, control=twin))
    for gate, other in (("shuffled", r"3\.\d+"), ("control", r"2\.\d+")):
        beside = rf"; valid\.mlm is 2\.3\d at best against {other}$"
        assert re.search(beside, gates[gate].reason)
    # Some runs of earlier versions do not record which numbers are losses.
    runs = replace(make.change(row, make.with_results(losses=[]), range(7)), control=twin)
    assert said(baseline, runs)["control"] == gates["control"]
    twin = make.change(twin, make.with_results(losses=["next_token"]))
    reason = said(baseline, replace(row, control=twin))["control"].reason
    assert "at best against" not in reason


def test_a_score_that_nothing_was_learnt_for_has_no_note_on_order(baseline: Row, row: Row) -> None:
    row = replace(row, shuffled=make.runs(4, 0.5, 600), untrained=make.runs(4, 0.5, 500, end=4.6))
    assert "shuffled" not in said(baseline, row)


# The last two: a loss that is no better, and a score that is no worse.
@pytest.mark.parametrize(
    "end, topic, falls", [(4.6, 0.7, True), (2, 0.7, False), (4.6, 0.6, False)]
)
def test_a_loss_that_improves_while_a_probe_falls(
    end: float, topic: float, falls: bool, baseline: Row, row: Row
) -> None:
    row = replace(row, untrained=make.runs(4, 0.5, 500, end=end, topic=topic))
    finding = said(baseline, row).get("loss without score")
    assert bool(finding) == falls
    if finding:
        assert finding.action == NOTE
        assert TOPIC in finding.reason and BRACKETS not in finding.reason


def test_one_run_of_a_control_has_the_spread_of_the_row(baseline: Row, row: Row) -> None:
    row = replace(row, untrained=row.untrained[:1])
    assert not said(baseline, row)
    alone = said(baseline, replace(row, runs=row.runs[:1]), metrics=(BRACKETS,))
    assert "no spread" in alone["untrained"].reason


def test_a_level_is_exceeded_by_the_spread_over_seeds(baseline: Row, row: Row) -> None:
    scores = row.scores(TOPIC)
    mean, error = np.mean(scores), stats.sem(scores)
    edge = stats.t.ppf(0.975, len(scores) - 1) * error

    def findings(level: float, untrained: float = 0.4) -> dict[str, GateFinding]:
        changed = make.change(row, make.with_references(chance=level))
        controls = make.runs(4, 0.5, 500, end=4.6, topic=untrained)
        changed = replace(changed, untrained=controls)
        return said(baseline, changed, metrics=(TOPIC,))

    assert "guessing" not in findings(mean - 1.01 * edge)
    for level in (mean - 0.99 * edge, mean, mean + 1.01 * edge):
        assert "standard error" in findings(level)["guessing"].reason
    # Below an untrained model: below chance, too, only beyond the spread.
    for factor, is_below in ((0.99, False), (1.01, True)):
        reason = findings(mean + factor * edge, untrained=0.8)["below untrained"].reason
        assert ("contradict" in reason) == is_below


def test_a_control_that_is_missing_or_has_no_score_is_said(baseline: Row, row: Row) -> None:
    missing = replace(row, shuffled=())
    assert not said(baseline, missing)
    assert "planned" in said(baseline, missing, shuffled=(BUDGET,))["shuffled"].reason
    failed = tuple(make.with_results(status="failed")(run) for run in row.untrained)
    for control in ("untrained", "shuffled"):
        finding = said(baseline, replace(row, **{control: failed}))[control]
        assert (finding.action, finding.metric) == (NOTE, TOPIC) and "no score" in finding.reason


def test_a_mean_is_beside_the_mean_of_chance(baseline: Row, row: Row) -> None:
    bad = make.change(row, make.with_references(chance=0.99))
    assert "guessing" in said(*of_a_mean(baseline, bad), metrics=("both",))


@pytest.mark.parametrize(
    "facts, task, level",
    [
        ({"reach": "both"}, "causal_lm", 0.8),
        ({"reach": "causal"}, "mixture", 0.7),
        ({}, "masked_lm", 0.8),  # earlier versions
        ({}, "causal_lm", 0.7),
    ],
)
def test_the_ceiling_is_the_exact_reader_of_what_states_see(row, facts, task, level):
    """Of a mean that of its parts, if all have one: one part here knows no reader of the left."""

    def edit(run: Run) -> Run:
        levels = {TOPIC: {"bayes": 0.8, "bayes_left": 0.7}, BRACKETS: {"bayes": 0.9}}
        suites = []
        for suite in run.suites:
            known = {x: levels.get(f"{suite.name}.{x}", {}) for x in suite.references}
            suites.append(replace(suite, references=known, facts=facts))
        means = {"both": (TOPIC, BRACKETS)}
        values = run.values | {"task._name": task}
        return replace(run, suites=tuple(suites), means=means, values=values)

    runs = make.change(row, edit).runs
    assert ceiling(runs, TOPIC) == level
    assert ceiling(runs, "both") == pytest.approx((level + 0.9) / 2)
    without = replace(row.runs[0], means={"both": (TOPIC, BRACKETS)})
    assert ceiling([without], TOPIC) is ceiling([without], "both") is None


def test_the_references_of_a_mean_of_means_are_the_means_of_theirs(row: Row) -> None:
    means = {"inner": (BRACKETS, MACRO), "outer": ("inner", BRACKETS, "inner")}
    row = make.change(with_macro(row, 0.5, chance=0.55), lambda run: replace(run, means=means))
    inner = (0.35 + 0.55) / 2
    for metric, level in (("inner", inner), ("outer", (2 * inner + 0.35) / 3)):
        assert references(row.runs, metric) == {"chance": pytest.approx(level)}
    run = row.runs[0]
    assert list(row.parts("outer")) == [BRACKETS, MACRO]
    value = (2 * run.metrics["inner"] + run.metrics[BRACKETS]) / 3
    assert run.metrics["outer"] == pytest.approx(value)


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
    assert "part below chance" not in said(*of_a_mean(baseline, bad), metrics=("both",))


MACRO = "blimp.accuracy_macro"


def with_macro(row: Row, value: float, suite: str = "blimp", **recorded: float) -> Row:
    """Return a row whose metric MACRO is about `value`, of a suite with two wide groups.

    The first one has two groups in it. `recorded` are references of the mean.
    """
    names = ("wide/one", "wide/two", "other")
    levels = {"wide/one": 0.2, "wide/two": 0.4, "wide": 0.3, "other": 0.6}

    def edit(run: Run) -> Run:
        noise = 0.01 * (run.values["seed"] % 3 - 1)
        metrics = {"accuracy": value + noise, "accuracy_macro": value + noise}
        groups = {name: {"n": 9, "metrics": metrics} for name in ("overall", "wide", *names)}
        references = {f"{name}.accuracy": {"chance": level} for name, level in levels.items()}
        if recorded:
            references["accuracy_macro"] = recorded
        new = SuiteResults("blimp", suite, 280, "w", "d", {}, groups, {}, references)
        return replace(run, suites=(*run.suites, new))

    edited = make.change(row, edit)
    return replace(edited, untrained=tuple(map(edit, row.untrained)), control=None)


@pytest.mark.parametrize(
    "suite, recorded, chance",
    [
        ("blimp", {"chance": 0.55}, 0.55),
        # Archives of earlier versions record none: means over the narrowest groups, or the suites.
        ("blimp", {}, 0.4),
        ("syntaxgym", {}, 0.45),
    ],
)
def test_a_mean_over_groups_is_beside_chance(
    suite: str, recorded: dict[str, float], chance: float, baseline: Row, row: Row
) -> None:
    def gates(value: float) -> dict[str, GateFinding]:
        rows = [with_macro(each, value, suite, **recorded) for each in (baseline, row)]
        return said(*rows, metrics=(MACRO,))

    expect_facts(gates(chance)["guessing"].reason, f"chance ({chance:g})")
    assert "guessing" not in gates(chance + 0.04)
    of_row = with_macro(row, chance, suite, **recorded)
    assert references(of_row.runs, MACRO) == {"chance": pytest.approx(chance)}


def test_a_mean_over_groups_below_chance_is_told_of_a_mean_with_it(baseline: Row, row: Row) -> None:
    def both(row: Row) -> Row:
        row = with_macro(row, 0.3)
        return make.change(row, lambda run: replace(run, means={"both": (MACRO, BRACKETS)}))

    finding = said(both(baseline), both(row), metrics=("both",))["part below chance"]
    expect_facts(finding.reason, f"{MACRO} is 0.301", "chance, 0.4")


def test_a_change_of_phase_of_a_mean_over_groups_is_measured_from_chance(
    baseline: Row, row: Row
) -> None:
    """From the untrained models, at 0.1, the sd of 0.064 would be 7 % of the way."""
    runs = []
    for i, run in enumerate(with_macro(row, 0.5).runs):
        *others, macro = run.suites
        metrics = {"accuracy_macro": 0.5 + 0.12 * (i % 2)}
        groups = {**macro.groups, "overall": {"n": 9, "metrics": metrics}}
        runs.append(replace(run, suites=(*others, replace(macro, groups=groups))))
    spread = replace(with_macro(row, 0.1), runs=tuple(runs))
    gates = said(with_macro(baseline, 0.5), spread, metrics=(MACRO,))
    expect_facts(gates["in transition"].reason, "sd 11%", "chance")
