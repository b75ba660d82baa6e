"""Rows of a league from its runs."""

from dataclasses import replace
from pathlib import Path

from league_plans import LARGE, SMALL, plan_with

from metaseq_lm.league.assembly import LeagueRuns
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import parse_plan
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


def test_the_parts_of_a_primary_mean_have_scores_though_they_are_no_metrics_of_the_plan() -> None:
    means = {"terms": ["valid.mlm", "valid.forward"]}
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
        "terms": [2.5, 3.5],
        "valid.mlm": [2.0, 3.0],
        "valid.forward": [3.0, 4.0],
    }
