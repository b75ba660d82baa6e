"""Rows of a league from its runs."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from league_plans import LARGE, SMALL, plan_with
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.assembly import (
    LeagueRuns,
    read_archived,
    read_league,
    read_league_runs,
    write_archive,
)
from metaseq_lm.league.expansion import possible
from metaseq_lm.league.folder import Contents, LeagueFolder
from metaseq_lm.league.plan_files import BALANCED, LAPTOP, archive_beside, parse_plan
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.numbers import summarise
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import differing_functions, metric_of
from metaseq_lm.runs.records import write_plan


def run(label: str, budget: float, seed: int) -> Run:
    """Return a run that has not ended."""
    values = {"label": label, "trainer.max_flops": budget, "seed": seed}
    return Run(Path(f"{label}/{budget:g}/{seed}"), values, [], None)


def test_two_objectives_may_be_the_matched_control_of_each_other() -> None:
    objectives = {"masked": {"control": "dense"}, "dense": {"control": "masked"}, "other": {}}
    content = plan_with(objectives=objectives)
    runs = tuple(run(name, SMALL, seed) for name in ("masked", "dense", "other") for seed in (1, 2))
    rows = LeagueRuns(
        Contents(parse_plan(content), content), (*runs, run("dense", LARGE, 1))
    ).rows()
    controls = {(r.objective, r.budget): r.control and r.control.objective for r in rows}
    assert controls == {
        ("masked", SMALL): "dense",
        ("dense", SMALL): "masked",
        ("dense", LARGE): None,
        ("other", SMALL): None,
    }
    assert all(row.control is None or len(row.control.runs) == 2 for row in rows)


def test_what_has_no_runs_is_missing_unless_it_cannot_run() -> None:
    """Updates of dense leave a sixth of each budget, one of wide costs more than both."""
    content = plan_with(
        objectives={"masked": {}, "dense": {"grid": {}}, "wide": {}, "other": {}},
        tuning__budgets=[LARGE],
    )
    prices = {"masked": SMALL / 100, "dense": SMALL / 1.2, "wide": 2 * LARGE}
    contents = Contents(parse_plan(content), content, prices=prices)
    remarks = LeagueRuns(contents, (run("masked", SMALL, 1),)).remarks()
    assert [remark.partition(", wh")[0] for remark in remarks[:-1]] == [
        "Not at 3.0e7 FLOPs: dense, wide",
        "Not at 6.0e7 FLOPs: dense, wide",
    ]
    expect_facts(remarks[-1], "no runs yet", " other, 6.0e7 FLOPs")


def test_a_row_that_is_begun_here_takes_the_place_of_a_shipped_one_with_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = plan_with()  # seeds 1 and 2
    plan = parse_plan(content)
    over = {"status": "finished", "metrics": {"valid": {"mlm": 1.0}}, "losses": ["mlm"]}
    shipped = [
        replace(run(name, SMALL, seed), results=over)
        for name in ("masked", "dense")
        for seed in (1, 2)
    ]
    file = tmp_path / "plan.jsonl.gz"
    write_archive(file, LeagueRuns(Contents(plan, content), tuple(shipped)))
    contents = Contents(plan, content, archive=str(file))
    local = [replace(run("masked", SMALL, 1), results=over), run("masked", SMALL, 2)]
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: local)
    league = read_league_runs(LeagueFolder(tmp_path / "L"), contents)
    assert all(row.shipped and len(row.scored) == 2 for row in league.rows())
    expect_facts(" ".join(league.remarks()), "rows that ship", "masked at 3.0e7.")
    local[1] = replace(local[1], results=over)
    league = read_league_runs(LeagueFolder(tmp_path / "L"), contents)
    assert {row.objective: row.shipped for row in league.rows()} == {"masked": False, "dense": True}
    assert "stand" not in " ".join(league.remarks())


def test_archived_runs_of_another_plan_are_refused_by_name(tmp_path: Path) -> None:
    """Runs that were made before runs recorded their plan are those of the archive's."""
    content = plan_with()
    plan = parse_plan(content)
    made = {"masked": plan.hash, "dense": ""}
    runs = [replace(run(name, SMALL, 1), plan=of) for name, of in made.items()]
    file = tmp_path / "plan.jsonl.gz"
    contents = Contents(plan, content, archive=str(file))
    write_archive(file, LeagueRuns(contents, tuple(runs)))
    assert [item.plan for item in read_archived(contents).runs] == [plan.hash, ""]
    file.unlink()
    runs[1] = replace(runs[1], plan="f" * 16)
    write_archive(file, LeagueRuns(contents, tuple(runs)))
    with pytest.raises(UsageError, match=f"dense/.*another plan .*f{{16}}.*{plan.hash}"):
        read_archived(contents)


@pytest.mark.parametrize(
    "price, budget, tuned, fits",
    [
        (1.0, 50.0, 100.0, True),
        (1.01, 50.0, 100.0, True),  # 49 updates leave 1 %
        (12.2, 50.0, 100.0, False),  # 4 updates leave 2.4 %
        (60.0, 50.0, 100.0, False),
        (40.0, 40.0, 30.0, False),  # a trial has no update
    ],
)
def test_a_budget_is_possible_if_whole_updates_spend_it(
    price: float, budget: float, tuned: float, fits: bool
) -> None:
    budgets = {"budgets": [budget], "usual_budgets": [budget], "tuning__budgets": [tuned]}
    plan = parse_plan(plan_with(**budgets, controls__shuffled=[]))
    assert (possible(plan, plan.objectives[0], {"masked": price}, [budget]) == [budget]) == fits
    assert possible(plan, plan.objectives[0], {}, [budget]) == [budget]


@pytest.mark.parametrize("part", ["valid.forward", "pair"])
def test_the_parts_of_a_primary_mean_have_scores_though_they_are_no_metrics_of_the_plan(
    part: str,
) -> None:
    means = {"terms": ["valid.mlm", part], "pair": ["valid.mlm", "valid.forward"]}
    others = {"valid.forward": [3.0, 4.0], "pair": [2.5, 3.5]}[part]
    content = plan_with(comparison__metric="terms", comparison__means=means)
    runs = []
    for name in ("masked", "dense"):
        for seed, loss in ((1, 2.0), (2, 3.0)):
            metrics = {"valid": {"mlm": loss, "forward": loss + 1}}
            results = {"status": "finished", "metrics": metrics, "losses": ["mlm", "forward"]}
            made = replace(run(name, SMALL, seed), results=results)
            runs.append(replace(made, means=means))
    standings = LeagueRuns(Contents(parse_plan(content), content), tuple(runs)).standings()
    assert [part.name for part in standings.parts] == means["terms"]
    assert all(part.lower_is_better for part in standings.parts)
    assert standings.entries[0].scores == {
        # Of a mean the value counts, not its parts: that would be 2.5.
        "terms": [(2.0 + others[0]) / 2, (3.0 + others[1]) / 2],
        "valid.mlm": [2.0, 3.0],
        part: others,
    }


@pytest.mark.parametrize("plan", [LAPTOP, BALANCED])
def test_report_has_the_league_s_numbers_for_a_mean(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    league = read_league(plan)
    name, file = league.plan.comparison.metric, archive_beside(plan)
    entries = [e for e in league.standings().entries if e.objective == "masked_15"]
    budgets = [f"trainer.max_flops={entry.budget}" for entry in entries]
    command = ["report", str(file), "--metric", name, "--columns", "trainer.max_flops"]
    assert main([*command, "--where", "label=masked_15", *budgets, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    summaries = [summarise(entry.scores[name]) for entry in entries]
    assert [float(row["mean"]) for row in rows] == pytest.approx([s.centre for s in summaries if s])
    (metric,) = {metric_of(name, runs) for runs in (league.runs, find_runs([str(file)]))}
    assert metric.percent and not metric.lower_is_better


def test_runs_in_the_folder_of_a_league_have_its_means(tmp_path: Path) -> None:
    content = plan_with(comparison__means={"inner": ["test.accuracy"], "both": ["inner", "m.x"]})
    contents = Contents(parse_plan(content), content)
    folder = make_run(tmp_path / "L" / "final" / "masked" / "seed=1", score=0.5)
    write_plan(folder, contents.plan.hash)
    assert "inner" not in find_runs([folder])[0].metrics, "there is no league.json"
    LeagueFolder(tmp_path / "L").write(contents)
    (found,) = find_runs([tmp_path / "L"])
    assert found.metrics["inner"] == 0.5 and "both" not in found.metrics
    archive.write(tmp_path / "a.jsonl", [found, replace(found, path=Path("other"), means={})])
    means = [item.means for item in archive.read(tmp_path / "a.jsonl")]
    assert means == [content["comparison"]["means"], {}]
    write_plan(folder, "0" * 16)
    assert not find_runs([folder])[0].means, "a run of another plan"
    file = tmp_path / "L" / "league.json"
    file.write_text(file.read_text().replace("inner", "outer"))
    write_plan(folder, contents.plan.hash)
    assert not find_runs([folder])[0].means, "a changed file"


def test_means_of_other_parts_are_other_functions_and_a_circle_has_no_value() -> None:
    results = {"status": "finished", "metrics": {"test": {"a": 1.0, "b": 3.0}}}
    means = {"m": ["test.a", "n"], "n": ["test.a", "test.b"], "c": ["d", "n"], "d": ["c"]}
    one = replace(run("one", SMALL, 1), results=results, means=means)
    assert [one.metrics.get(name) for name in "mncd"] == [1.5, 2.0, None, None]
    other = replace(one, means={**means, "n": ["test.b"]})
    assert list(differing_functions("n", [one, other])) == ["means.n"]
    assert not differing_functions("test.a", [one, other])
