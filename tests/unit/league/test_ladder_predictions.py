"""Predictions of a league: what is predicted, kept in a file, refused, and scored."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from documents import document_in
from league_plans import LARGE, SMALL, plan_with
from matplotlib.figure import Figure
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import to_json, with_checksum
from metaseq_lm.league import assembly
from metaseq_lm.league.assembly import (
    LeagueRuns,
    predict_rungs,
    read_archived,
    read_league_runs,
    write_archive,
)
from metaseq_lm.league.curves import SATURATION
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.figures import draw_ladder
from metaseq_lm.league.folder import Contents, LeagueFolder
from metaseq_lm.league.ladder_tables import (
    _crossover_table,
    _curves_table,
    _decision_table,
    describe_crossovers,
    equal_score_table,
    ladder_tables,
    predictions_table,
)
from metaseq_lm.league.page import write_page
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.league.predictions import (
    FILE,
    OPEN,
    Outcome,
    Prediction,
    add_predictions,
    parse_lines,
    read_predictions,
)
from metaseq_lm.league.rungs import curve_intervals, decision_accuracies, predict
from metaseq_lm.league.standings import FLAG, REFUSE, GateFinding
from metaseq_lm.league.terminal import terminal_text
from metaseq_lm.league.verdict import DecisionRule
from metaseq_lm.reporting.archive import read, read_about, write
from metaseq_lm.reporting.canvas import collect
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run

PROBE = "probe.accuracy"
NOISE = 0.01 * np.array([-1.2, -0.7, -0.3, 0.0, 0.1, 0.4, 0.6, 1.1])
BUDGETS = (1e10, 4e10, 1.6e11, 6.4e11)
FIFTH = 2.56e12
STEEP, FLAT = (0.50, 0.60, 0.70, 0.78), (0.60, 0.62, 0.64, 0.66)
BENT = (0.50, 0.60, 0.65, 0.675, 0.688)  # half the step with each budget
UNTRAINED = GateFinding("untrained", FLAG, "not above the untrained model", PROBE)
EDGE = GateFinding("edge of the grid", FLAG, "the largest value")
SUITES = GateFinding("suites", REFUSE, "other items")


def entries(name, means, findings=(), **changes):
    findings, changes = dict(findings), {"ceilings": {PROBE: 1.0}} | changes
    rows = []
    for budget, mean in zip((*BUDGETS, FIFTH), means):
        scores, of_row = {PROBE: list(mean + NOISE)}, findings.get(budget, ())
        rows.append(StandingsEntry(name, budget, scores, findings=of_row, **changes))
    return rows


def standings(*rows, **changes):
    flat = [entry for row in rows for entry in row]
    made = Standings(
        "Ladder, plan 0123",
        [Metric.of(PROBE, [0.5])],
        "flat",
        DecisionRule(0.02, comparisons=4),
        flat,
    ).decided()
    return replace(made, **changes)


def registered(**values):
    defaults = {"time": "2026-11-28T03:00:00+00:00", "plan": "0123", "code": "c1"}
    defaults |= {"objective": "steep", "budget": 6.4e11, "metric": PROBE, "form": "a curve"}
    defaults |= {"rungs": BUDGETS[:3], "value": 0.8, "interval": (0.75, 0.85)}
    return Prediction(**defaults | {"naive": {"last": 0.7, "line": 0.9}} | values)


def cells(table, column):
    at = table.head.index(column)
    return [row[at].text for row in table.rows]


# ---------------------------------------------------------------- what is predicted


def test_a_budget_is_predicted_from_smaller_ones_only():
    league = standings(entries("flat", FLAT), entries("steep", (*STEEP, 0.99)))
    prediction = predict(league, "steep", FIFTH)
    assert prediction.rungs == BUDGETS
    low, high = prediction.interval
    assert low < prediction.value < high and prediction.value == pytest.approx(0.847, abs=0.01)
    assert prediction.naive == pytest.approx(
        {"last": 0.78 + NOISE.mean(), "line": 0.86 + NOISE.mean()}
    )


def test_an_interval_knows_the_errors_of_three_other_objectives():
    """Their last budgets, held out: those above the untrained model, at any budget."""
    others = [entries(f"flat {i}", FLAT) for i in range(3)]
    widths = []
    for count in (2, 3):
        made = predict(standings(entries("steep", STEEP), *others[:count]), "steep", FIFTH)
        assert made.held_out == (0 if count < 3 else 3)
        widths.append(made.interval[1] - made.interval[0])
    assert widths[1] > widths[0]
    others[2][2] = replace(others[2][2], findings=(UNTRAINED,))
    league = standings(entries("steep", STEEP), *others)
    assert predict(league, "steep", FIFTH).held_out == 0
    table = predictions_table(replace(league, predictions=[Outcome(registered(), OPEN)]))
    assert cells(table, "held out") == ["-"]


def test_without_a_ceiling_the_asymptote_is_fitted():
    rows = entries("steep", BENT, ceilings={})
    assert predict(standings(rows), "steep", 1e13).form == SATURATION.name


@pytest.mark.parametrize(
    "means, finding, changes, reason",
    [
        (BENT[:4], EDGE, {"ceilings": {}}, "3 budgets.*needs 5$"),
        (BENT[:4], None, {"ceilings": {}}, "4 budgets.*needs 5$"),
        (STEEP, UNTRAINED, {}, "^3 budgets.*needs 4 .at 1.0e10 nothing was learnt"),
        (STEEP, EDGE, {}, "^3 budgets.*needs 4$"),
        ((0.5, 0.5, 0.5, 0.9), None, {}, "do not lie on"),
    ],
)
def test_what_is_not_predicted(means, finding, changes, reason):
    """Untested rows and those not above the untrained model are left out."""
    findings = {BUDGETS[0]: (finding,)} if finding else {}
    league = standings(entries("flat", FLAT), entries("steep", means, findings, **changes))
    with pytest.raises(UsageError, match=reason):
        predict(league, "steep", FIFTH)
    metrics = [Metric(PROBE, percent=False, lower_is_better=False)]
    with pytest.raises(UsageError, match="no form"):
        predict(replace(league, metrics=metrics), "steep", FIFTH)


def test_rows_that_are_left_out_are_no_rungs():
    rows = entries("steep", (*STEEP, 0.84), {BUDGETS[0]: (UNTRAINED,)})
    assert predict(standings(rows), "steep", 1e13).rungs == (*BUDGETS[1:], FIFTH)


# ---------------------------------------------------------------- the file


def test_predictions_are_read_as_they_were_written(tmp_path):
    assert read_predictions(tmp_path) == []
    one, two = registered(), registered(budget=2e12)
    add_predictions(tmp_path, [one])
    add_predictions(tmp_path, [two])
    assert read_predictions(tmp_path) == [one, two]
    # Earlier versions knew no errors of others.
    line = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    earlier = {key: line[key] for key in line if key not in ("held_out", "checksum")}
    assert parse_lines(to_json(with_checksum(earlier)), "archive") == [one]


@pytest.mark.parametrize(
    "edit, reason",
    [
        (lambda line: line | {"value": 0.81}, "changed after it was written"),
        (lambda line: {k: v for k, v in line.items() if k != "checksum"}, "lacks 'checksum'"),
        (lambda line: line | {"rungs": "all"}, "rungs is no list"),
    ],
)
def test_a_prediction_that_was_changed_is_refused(tmp_path, edit, reason):
    add_predictions(tmp_path, [registered()])
    file = tmp_path / FILE
    file.write_text(json.dumps(edit(json.loads(file.read_text()))) + "\n")
    with pytest.raises(MetaseqError, match=f":1: .*{reason}"):
        read_predictions(tmp_path)


# ---------------------------------------------------------------- when it was made


def run(label: str, budget: float, seed: int, started: str | None) -> Run:
    """Return a finished run."""
    values = {"label": label, "trainer.max_flops": budget, "seed": seed}
    results = {"status": "finished", "metrics": {"valid": {"mlm": 1.0}}, "losses": ["mlm"]}
    results |= {"started": started} if started else {}
    return Run(Path(f"{label}/{budget:g}/{seed}"), values, [], results)


@pytest.mark.parametrize(
    "starts, expected",
    [
        ([], OPEN),
        (["2026-11-28T03:00:01+00:00", "2026-11-28T04:00:00+00:00"], ""),
        (["2026-11-28T02:59:59+00:00", "2026-11-28T04:00:00+00:00"], "after"),
        (["2026-11-28T04:00:01+02:00"], "after"),
        (["2026-11-28T04:00:00+00:00", None], "when"),
    ],
)
def test_a_prediction_counts_if_every_run_began_after_it(starts, expected):
    runs = [run("steep", 6.4e11, i, start) for i, start in enumerate(starts)]
    reason = Outcome.of(registered(), runs).unscored
    assert expected in reason and bool(reason) == bool(expected)


def league_of(*runs: Run) -> LeagueRuns:
    """Return a league of the small plan."""
    content = plan_with()
    return LeagueRuns(Contents(parse_plan(content), content), runs)


def test_rows_have_the_ceilings_that_are_known(monkeypatch):
    known = {"valid.mlm": 0.9}
    monkeypatch.setattr(assembly, "ceiling", lambda runs, metric: known.get(metric))
    (entry,) = league_of(run("masked", SMALL, 1, None)).standings().entries
    assert entry.ceilings == {"valid.mlm": 0.9}


@pytest.mark.parametrize("phase", ["{}", "{}, tuning", "{}, shuffled"])
def test_what_has_runs_is_not_predicted(phase):
    league = league_of(run("masked", SMALL, 1, None), run(phase.format("masked"), LARGE, 101, None))
    made, reasons = predict_rungs(league, ["masked"], [LARGE])
    assert made == [] and [reason[:16] for reason in reasons] == ["masked at 6.0e7:"]
    (reason,) = predict_rungs(league, ["masked"])[1]
    assert reason.startswith("masked: all budgets")
    # Another objective has none there, but too few budgets below.
    assert "dense at 3.0e7: 0 budgets" in predict_rungs(league, ["dense"])[1][0]


def test_predictions_of_another_plan_are_refused(tmp_path):
    content = plan_with()
    plan = parse_plan(content)
    folder = LeagueFolder(tmp_path)
    add_predictions(tmp_path, [replace(registered(objective="masked"), plan=plan.hash)])
    league = read_league_runs(folder, Contents(plan, content))
    assert league.predictions and league.outcomes()[0].unscored == OPEN
    add_predictions(tmp_path, [registered(objective="masked")])
    with pytest.raises(UsageError, match="line 2: .*plan .0123"):
        read_league_runs(folder, Contents(plan, content))


def archived(tmp_path: Path, *predictions: Prediction) -> tuple[Contents, Path]:
    """Archive a league with a run and predictions; return what a plan with this archive has."""
    content = plan_with()
    contents = Contents(parse_plan(content), content, archive=str(tmp_path / "plan.jsonl.gz"))
    file = tmp_path / "plan.jsonl.gz"
    runs = (run("masked", SMALL, 1, "2026-11-28T02:00:00+00:00"),)
    write_archive(file, LeagueRuns(contents, runs, predictions=predictions))
    return contents, file


def of_plan(**values) -> Prediction:
    plan = parse_plan(plan_with())
    return replace(registered(objective="masked", **values), plan=plan.hash)


def test_an_archive_keeps_what_was_predicted(tmp_path):
    """Not of added objectives, whose runs it does not keep either."""
    one, two = of_plan(), replace(of_plan(budget=LARGE), time="2026-11-28T05:00:00+00:00")
    contents, _ = archived(tmp_path, one, two, registered())
    league = read_archived(contents)
    assert league.predictions == (one, two)
    assert [outcome.prediction for outcome in league.outcomes()] == [one, two]
    # A folder adds its own; one that is in both counts once.
    folder = LeagueFolder(tmp_path / "L")
    folder.path.mkdir()
    third = replace(one, time="2026-11-28T04:00:00+00:00")
    add_predictions(folder.path, [one, third])
    assert read_league_runs(folder, contents).predictions == (one, third, two)
    # An archive without predictions is as before.
    contents, file = archived(tmp_path)
    assert read_archived(contents).predictions == () and "predictions" not in read_about(file)


def test_predictions_of_an_archive_are_scored_by_runs_of_the_folder(tmp_path, monkeypatch):
    contents, _ = archived(tmp_path, of_plan(budget=LARGE))
    assert read_archived(contents).outcomes()[0].unscored == OPEN
    later = [run("masked", LARGE, seed, "2026-11-28T04:00:00+00:00") for seed in (1, 2)]
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: later)
    (outcome,) = read_league_runs(LeagueFolder(tmp_path / "L"), contents).outcomes()
    assert outcome.unscored == ""


def test_archived_predictions_that_were_changed_or_are_of_another_plan_are_refused(tmp_path):
    contents, file = archived(tmp_path, of_plan())
    about = read_about(file)
    assert '"value": 0.8,' in about["predictions"]
    changed = about | {
        "predictions": about["predictions"].replace('"value": 0.8,', '"value": 0.7,')
    }
    write(file, read(file), changed)
    with pytest.raises(MetaseqError, match="predictions, line 1.*changed"):
        read_archived(contents)
    contents, _ = archived(tmp_path, registered(objective="masked"))
    with pytest.raises(UsageError, match="line 1: .*plan .0123"):
        read_archived(contents)


LADDER = [1e7 * 4**i for i in range(6)]


def test_the_command_predicts_before_the_runs_and_the_report_scores_it_after(
    tmp_path, monkeypatch, capsys
):
    """Losses of the power law 1 + C^-.5, with C in 1e7 FLOPs, of five budgets, then of six."""
    lines = {"masked": {"options": ["task.mask_prob=0.15"], "grid": {}}}
    content = plan_with(objectives=lines, budgets=LADDER, usual_budgets=LADDER, seeds=[1, 2, 3])
    content["tuning"]["budgets"], content["controls"] = LADDER[:1], {"untrained": False}
    plan, folder = parse_plan(content), LeagueFolder(tmp_path / "L")
    folder.write(Contents(plan, content))
    runs = []
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: runs)

    def measure(i: int, started: str | None) -> None:
        for seed in (1, 2, 3):
            made = run("masked", LADDER[i], seed, started)
            loss = 1 + 2.0**-i + 0.001 * (seed - 2)
            metrics = {"valid": {"mlm": loss}}
            results = {**made.results, "metrics": metrics, "flops": LADDER[i], "updates": 100}
            runs.append(replace(made, results=results))

    for i in range(4):
        measure(i, None)
    assert main(["league", "predict", str(folder.path)]) == 2
    expect_facts(capsys.readouterr().err, "4 budgets", "needs 5")
    assert not (folder.path / FILE).exists()
    measure(4, None)
    assert main(["league", "predict", str(folder.path), "--name", "x"]) == 2
    assert main(["league", "predict"]) == 2
    assert main(["league", "predict", str(folder.path), "--budgets", f"{LADDER[4]:g}"]) == 2
    expect_facts(capsys.readouterr().err, "runs already")
    assert main(["league", "predict", str(folder.path), "--json"]) == 0
    (row,) = document_in(capsys.readouterr().out, "league-predictions")["predictions"]
    assert row["unscored"] == "open"
    (made,) = read_predictions(folder.path)
    assert (made.plan, len(made.code)) == (plan.hash, 16)
    assert made.value == pytest.approx(1 + 2.0**-5, abs=0.002)
    # A further seed below changes the prediction; the rung is predicted once, all the same.
    for further in (False, True):
        if further:
            runs.append(replace(runs[0], values={**runs[0].values, "seed": 4}))
        assert main(["league", "predict", str(folder.path)]) == 2
        message = f"predicted already, 1.031 at {made.time}; the first one counts"
        assert message in capsys.readouterr().err
    del runs[-1]
    assert read_predictions(folder.path) == [made]
    measure(5, "2126-11-28T03:00:00+00:00")
    assert main(["league", "report", str(folder.path)]) == 0
    expect_facts(capsys.readouterr().out, "Of 1 prediction ", "runs, 1 has")
    text = (folder.path / "report" / "standings.txt").read_text()
    assert "Predictions: valid.mlm" in text and "open" not in text
    # The archive beside a plan gives the same page.
    archive = tmp_path / "plan.jsonl.gz"
    assert main(["league", "report", str(folder.path), "--archive", str(archive)]) == 0
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    out = tmp_path / "page"
    assert main(["league", "report", str(tmp_path / "plan.yaml"), "--out", str(out)]) == 0
    for name in ("predictions.csv", "standings.csv"):
        assert (out / name).read_text() == (folder.path / "report" / name).read_text()
    (row,) = csv.DictReader((out / "predictions.csv").read_text().splitlines())
    assert float(row["predicted"]) == made.value
    assert (row["objective"], row["made"], row["inside"]) == ("masked", made.time, "True")
    assert float(row["mean"]) == pytest.approx(1 + 2.0**-5) and row["unscored"] == ""


# ---------------------------------------------------------------- the page


def test_predictions_are_scored_beside_the_naive_ones():
    league = standings(entries("flat", FLAT), entries("steep", STEEP))
    outcomes = [
        Outcome(registered()),
        Outcome(registered(value=0.9, interval=(0.88, 0.93))),
        Outcome(registered(), "made late"),
        Outcome(registered(budget=2e12), OPEN),
    ]
    table = predictions_table(replace(league, predictions=outcomes))
    assert cells(table, "mean") == ["78.00", "78.00", "made late", "open"]
    assert cells(table, "inside") == ["yes", "no", "", ""]
    assert cells(table, "error") == ["+2.00", "+12.00", "", ""]
    assert cells(table, "error of the last budget")[:2] == ["-8.00"] * 2
    assert cells(table, "error of the line")[:2] == ["+12.00"] * 2
    text = " ".join(table.notes)
    expect_facts(text, "Of 2 predictions", "1 has the mean")
    expect_facts(text, "error: 7.00", "last budget 8.00")
    expect_facts(text, "have no runs")
    untested = entries("steep", STEEP, {BUDGETS[3]: (EDGE,)})
    league = standings(entries("flat", FLAT), untested, predictions=outcomes[:1])
    assert cells(predictions_table(league), "mean") == ["not ranked: edge of the grid"]


def test_a_crossover_is_established_and_named():
    league = standings(entries("flat", FLAT), entries("steep", STEEP))
    table = _crossover_table(league)
    (row,) = [[cell.text for cell in line] for line in table.rows]
    assert row[:3] == ["flat", "steep", "1.0e10 to 6.4e11"]
    # .1 behind at the first rung, .02 at the second, .06 ahead at the third: a quarter behind it.
    assert float(row[3]) == pytest.approx(4e10 * 4**0.25, rel=0.05)
    assert row[5] == "0.00" and row[7] == "established"
    (sentence,) = describe_crossovers(league)
    assert sentence.startswith("steep passes flat at 5.7e10 FLOPs (")
    assert sentence in terminal_text(league).replace("\n", " ")


def test_a_lower_loss_is_ahead():
    metric = Metric(PROBE, percent=False, lower_is_better=True)
    league = standings(entries("flat", FLAT), entries("steep", STEEP))
    rule = DecisionRule(0.02, lower_is_better=True)
    table = _crossover_table(replace(league, metrics=[metric], rule=rule))
    assert [cell.text for cell in table.rows[0]][:2] == ["steep", "flat"]


def test_rows_that_are_not_tested_are_no_part_of_crossovers():
    rows = entries("steep", STEEP, dict.fromkeys(BUDGETS[2:], (EDGE,)))
    league = standings(entries("flat", FLAT), rows)
    assert cells(_crossover_table(league), "crossover") == ["none"]
    assert cells(_crossover_table(league), "budgets") == ["1.0e10 to 4.0e10"]
    assert "70.00" in cells(_curves_table(league), "1.6e11")[1]  # a number, all the same
    refused = entries("steep", STEEP, dict.fromkeys(BUDGETS[1:], (SUITES,)))
    league = standings(entries("flat", FLAT), refused)
    assert _crossover_table(league).rows == []
    assert cells(_curves_table(league), "1.6e11")[1] == "-"


def test_flops_at_equal_score_are_those_of_the_ladder():
    """steep has .62, the score of flat at 4e10, a fifth of the way from 4e10 to 1.6e11."""
    table = equal_score_table(standings(entries("flat", FLAT), entries("steep", STEEP)))
    rows = {(row[0].text, row[1].text): [cell.text for cell in row[2:]] for row in table.rows}
    expected = {"1.0e10": 1 / 4, "4.0e10": 1 / 4**0.2, "1.6e11": 4 / 4**0.4}
    for budget, ratio in expected.items():
        assert float(rows[budget, "flat"][2]) == pytest.approx(ratio, abs=0.01)
    low, high = (float(x) for x in rows["1.6e11", "flat"][3].split(" to "))
    assert low < expected["1.6e11"] < high
    assert rows["4.0e10", "steep"][1:] == ["flat", "at least 4.00", "-"]
    assert ("6.4e11", "steep") not in rows  # flat never has .78, nor .70
    assert "2 further scores" in " ".join(table.notes)


def test_an_interval_that_ends_at_the_first_budget_is_a_bound():
    """steep has .50, .01 below the first score of flat: some draws have it there already."""
    flat = entries("flat", (0.505, 0.6))
    table = equal_score_table(standings(flat, entries("steep", STEEP)))
    rows = {(row[0].text, row[1].text): row[5].text for row in table.rows}
    assert rows["1.0e10", "flat"].endswith(" to 1.00 or more")
    # The score of a row that has not learnt is not looked up.
    unlearnt = [replace(flat[0], findings=(UNTRAINED,)), flat[1]]
    table = equal_score_table(standings(unlearnt, entries("steep", STEEP)))
    assert ("1.0e10", "flat") not in {(row[0].text, row[1].text) for row in table.rows}


def test_a_crossover_needs_a_leader_that_has_learnt():
    """Budgets at which neither has learnt are left out; else a head start would be overtaken."""
    nothing = {BUDGETS[0]: (UNTRAINED,)}
    for of_steep, first, order in (
        (nothing, "4.0e10", "established"),
        ({}, "1.0e10", "not established"),
    ):
        league = standings(entries("flat", FLAT, nothing), entries("steep", STEEP, of_steep))
        table = _crossover_table(league)
        assert cells(table, "budgets") == [f"{first} to 6.4e11"]
        assert cells(table, "the order changes") == [order]


def test_intervals_of_means_lie_within_the_scale():
    near_one = (0.93, 0.99, 0.999, 0.95, 0.999)
    rows = [StandingsEntry("steep", budget, {PROBE: list(near_one)}) for budget in BUDGETS]
    league = standings(entries("flat", FLAT), rows)
    low, high = curve_intervals(league, "steep")[BUDGETS[0]]
    assert 0.9 < low < 0.95 and high == 1.0
    assert "to 100.00)" in cells(_curves_table(league), "1.0e10")[1]
    # A score that is no fraction, and a loss below zero, as of cosines, have no such bounds.
    for metric in (Metric(PROBE, False, False), Metric(PROBE, False, True)):
        scores = near_one if metric.lower_is_better is False else [-x / 100 for x in near_one]
        rows = [StandingsEntry("steep", budget, {PROBE: list(scores)}) for budget in BUDGETS]
        low, high = curve_intervals(replace(standings(rows), metrics=[metric]), "steep")[1e10]
        assert high > 1.0 or low < high < 0
    rows = [StandingsEntry("steep", budget, {PROBE: [0.001, 0.05, 0.002]}) for budget in BUDGETS]
    league = replace(standings(rows), metrics=[Metric(PROBE, False, True)])
    assert curve_intervals(league, "steep")[1e10][0] == 0.0


def test_decision_accuracy_counts_pairs_that_differ_at_the_largest_budget():
    """At 6.4e11 steep is ahead of flat and of low, flat ahead of low, near is level with flat."""
    league = standings(
        entries("flat", FLAT),
        entries("steep", STEEP),
        entries("low", (0.61, 0.55, 0.55, 0.55)),
        entries("near", (0.70, 0.70, 0.70, 0.661), {BUDGETS[1]: (SUITES,)}),
    )
    # Of six pairs all but flat and near differ; near is refused at 4e10.
    expected = {BUDGETS[0]: (1, 5), BUDGETS[1]: (2, 3), BUDGETS[2]: (4, 5)}
    assert decision_accuracies(league) == expected
    table = _decision_table(league)
    assert cells(table, "same order") == ["1 of 5", "2 of 3", "4 of 5"]
    assert cells(table, "%") == ["20", "67", "80"] and "6.4e11" in table.title
    sentence = "in the same order: 1.0e10 has 1 of 5, 4.0e10 has 2 of 3, 1.6e11 has 4 of 5."
    assert sentence in terminal_text(league).replace("\n", " ")
    # Rows that are not tested at the largest budget, and levels, decide nothing.
    rows = entries("steep", STEEP, {BUDGETS[3]: (EDGE,)})
    assert decision_accuracies(standings(entries("flat", FLAT), rows)) == {}
    assert decision_accuracies(standings(entries("flat", FLAT[:1]))) == {}
    assert _decision_table(standings(entries("flat", FLAT), rows)).rows == []


def test_the_page_has_ladders_in_all_forms(tmp_path):
    outcomes = [Outcome(registered(budget=2e12), OPEN)]
    league = standings(entries("flat", FLAT), entries("steep", STEEP), predictions=outcomes)
    write_page(league, tmp_path)
    for ending in ("txt", "md", "html"):
        text = (tmp_path / f"standings.{ending}").read_text()
        for title in ("Ladders", "FLOPs at equal score", "Crossovers", "Predictions"):
            assert title in text
    (row,) = csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines())
    assert (row["flops"], row["mean"], row["unscored"]) == ("2000000000000.0", "", "open")
    assert (row["low"], row["high"], row["predicted_last"]) == ("0.75", "0.85", "0.7")
    write_page(replace(league, predictions=()), tmp_path)
    assert not (tmp_path / "predictions.csv").exists()
    # Without a second budget and predictions there are no ladders.
    league = standings(entries("flat", FLAT[:1]), entries("steep", STEEP[:1]))
    assert ladder_tables(league) == []


def test_the_ladder_has_intervals_crossovers_and_open_predictions(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    outcomes = [Outcome(registered(budget=2e12), OPEN)]
    league = standings(entries("flat", FLAT), entries("steep", STEEP), predictions=outcomes)
    draw_ladder(league, tmp_path / "ladder.png")
    axes = figures[0].axes[0]
    lines = [(list(line.get_xdata()), list(line.get_ydata()), line) for line in axes.lines]
    opened = [line for xs, ys, line in lines if ys == [80.0]]
    assert [line.get_markerfacecolor() for line in opened] == ["none"]
    segments = [part[:, 1].tolist() for bars in axes.collections for part in bars.get_segments()]
    assert [75.0, 85.0] in segments
    bars = [(xs, ys) for xs, ys, _ in lines if len(xs) == 2 and xs[0] < 5.7e10 < xs[1]]
    assert len(bars) == 1 and bars[0][1] == pytest.approx([62.5] * 2, abs=0.3)
    assert axes.get_xlim()[1] > 2e12


def test_the_ladder_has_its_trained_scores_in_its_alternative_text(tmp_path):
    """Of each objective that of the largest budget, whatever was drawn after it."""
    untrained = {PROBE: list(0.45 + NOISE)}
    rows = [replace(e, untrained=untrained) for e in entries("steep", STEEP)]
    outcomes = [
        Outcome(registered(budget=2e12), OPEN),
        Outcome(registered(value=0.7, budget=1.6e11)),
    ]
    league = standings(entries("flat", FLAT), rows, predictions=outcomes)
    with collect() as drawings:
        draw_ladder(league, tmp_path / "ladder.png")
    (drawing,) = drawings
    text = drawing.alternative
    assert "steep: 78.00 ± 0.73 at 6.4e11 FLOPs" in text
    assert "steep, predicted: 80 at 2.0e12 FLOPs" in text and "no training" not in text
    # Arrow keys go through the marks of a series, with what is predicted of it, as they stand.
    steep = [m for m in drawing.marks if m.legend == "steep" and m.axes is drawing.marks[0].axes]
    assert [(m.series, m.at) for m in steep] == [
        ("steep", "no training"),
        *(("steep", f"{at} FLOPs") for at in ("1.0e10", "4.0e10", "1.6e11")),
        ("steep, predicted", "1.6e11 FLOPs"),
        ("steep", "6.4e11 FLOPs"),
        ("steep, predicted", "2.0e12 FLOPs"),
    ]
    for m in steep:
        assert f"<title>{m.text}</title>" in drawing.svg
    key = drawing.keys["steep"]
    assert drawing.svg.count(f'data-panel="0" data-series="{key}"') == len(steep)


def test_numbers_of_ladders_and_predictions_are_columns_of_numbers():
    """Also where a prediction has no mean yet, and where two objectives do not cross."""
    league = standings(entries("flat", FLAT), entries("steep", STEEP), entries("low", [0.5] * 4))
    outcomes = [Outcome(registered()), Outcome(registered(budget=2e12), OPEN)]
    tables = ladder_tables(replace(league, predictions=outcomes))
    texts = [[title for title, number in zip(t.head, t.right) if not number] for t in tables]
    assert texts == [
        ["objective"],
        ["objective", "reached by"],
        ["ahead at first", "the other", "the order changes"],
        [],  # decision accuracy
        ["objective", "made", "from", "curve", "inside"],
    ]
