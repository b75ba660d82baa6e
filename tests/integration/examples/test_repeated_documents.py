"""examples/league/repeated.py: what differs between two leagues, row by row."""

import re
from pathlib import Path
from typing import Any

import pytest
from imported import imported
from league_plans import SMALL, plan_with
from markdown_blocks import ROOT

from metaseq_lm.league.assembly import LeagueRuns
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.runs import Run

METRIC = "depth.accuracy"
SECONDARY = {"comparison__metric": METRIC, "comparison__secondary": ["topic.accuracy"]}


@pytest.fixture(scope="module")
def module() -> Any:
    return imported(ROOT / "examples" / "league" / "repeated.py")


def league(scores: dict[str, list[float]], first_seed: int = 1) -> LeagueRuns:
    """Return a league whose second metric and loss are functions of the first one."""
    runs = []
    for name, values in scores.items():
        for seed, value in enumerate(values, first_seed):
            config = {"label": name, "trainer.max_flops": SMALL, "seed": seed}
            metrics = {"depth": {"accuracy": value}, "topic": {"accuracy": 1 - value}}
            results = {"status": "finished", "losses": ["loss"]}
            results["metrics"] = metrics | {"valid": {"loss": 3 - value}}
            runs.append(Run(Path(f"{name}/{seed}"), config, [], results))
    content = plan_with(**SECONDARY)
    return LeagueRuns(Contents(parse_plan(content), content), tuple(runs))


def spread(mean: float, seeds: int) -> list[float]:
    return [mean + (i - (seeds - 1) / 2) / 100 for i in range(seeds)]


def test_only_rows_of_both_leagues_are_compared_and_seeds_are_those_in_common(module: Any) -> None:
    new = league({"masked": spread(0.5, 8), "dense": spread(0.6, 8)})
    repeated = league({"masked": spread(0.7, 6)}, first_seed=3)
    (pair,) = module.pairs_of(new, repeated)
    assert pair.new.objective == pair.repeated.objective == "masked"
    again, once = pair.of_seeds(METRIC)
    assert (len(again), once) == (6, new.rows()[0].scores(METRIC)[2:])
    assert [len(side) for side in pair.scores(METRIC)] == [6, 8]


def test_a_change_of_a_row_is_tested_and_has_its_sign(module: Any) -> None:
    new = league({"masked": spread(0.5, 8), "dense": spread(0.6, 8)})
    repeated = league({"masked": spread(0.7, 6), "dense": spread(0.59, 6)})
    pairs = module.pairs_of(new, repeated)
    text = to_text(module.primary_table(pairs, repeated, "title"))
    row = next(line for line in text.splitlines() if line.startswith("masked"))
    assert re.search(r"50\.00 ± 2\.45 +70\.00.±.1\.87 +20\.0.\(", row) and row.endswith("better")
    assert "6 of 6" in row
    row = next(line for line in text.splitlines() if line.startswith("dense"))
    assert "-1.0 (" in row and "0 of 6" in row and row.endswith("equivalent")
    # Seeds of both leagues have their scores in the same order, so they agree.
    assert "leagues: 1.00" in text
    changes = to_text(module.changes_table(pairs, repeated))
    rows = [line.split() for line in changes.splitlines() if line.startswith(("masked", "dense"))]
    assert rows == [["masked", "-20.0*", "-0.200*"], ["dense", "1.0", "0.010"]]
