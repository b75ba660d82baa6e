"""Rows of a league from its runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from league_plans import LARGE, SMALL, plan_with

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.assembly import (
    LeagueRuns,
    read_archived,
    read_league_runs,
    write_archive,
)
from metaseq_lm.league.folder import Contents, LeagueFolder
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.league.prices import possible
from metaseq_lm.reporting.runs import Run


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
    assert remarks[-1] == "Of the plan there are no runs yet of other, 6.0e7 FLOPs."


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
    archive = tmp_path / "plan.jsonl.gz"
    write_archive(archive, LeagueRuns(Contents(plan, content), tuple(shipped)))
    contents = Contents(plan, content, archive=str(archive))
    local = [replace(run("masked", SMALL, 1), results=over), run("masked", SMALL, 2)]
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: local)
    league = read_league_runs(LeagueFolder(tmp_path / "L"), contents)
    assert all(row.shipped and len(row.scored) == 2 for row in league.rows())
    assert "the rows that ship stand: masked at 3.0e7." in " ".join(league.remarks())
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
    archive = tmp_path / "plan.jsonl.gz"
    contents = Contents(plan, content, archive=str(archive))
    write_archive(archive, LeagueRuns(contents, tuple(runs)))
    assert [item.plan for item in read_archived(contents).runs] == [plan.hash, ""]
    archive.unlink()
    runs[1] = replace(runs[1], plan="f" * 16)
    write_archive(archive, LeagueRuns(contents, tuple(runs)))
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
