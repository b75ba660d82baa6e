"""A league whose tuning is a part of the experiment: plausible settings from trials to the page."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
from league_plans import LARGE, SMALL, in_process, write_plan
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.sweeps import trials

SEEDS = [101, 102, 103]


def league(*arguments: object) -> int:
    return main(["league", *map(str, arguments)])


def test_final_seeds_run_at_each_plausible_setting_and_the_page_has_their_sd(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draws are said to choose two of three rates, in 6 and 3 of 10 of them."""
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        tuning__grid={"optimizer.lr": [0.0001, 0.0005, 0.001]},
        tuning__seeds=SEEDS,
        tuning__plausible=0.1,
        tuning__widen=0,
        controls__shuffled=[SMALL],
        comparison__smallest_effect=5.0,
    )
    trained = in_process(monkeypatch)
    monkeypatch.setattr(trials, "shares_of_best", lambda scores, lower: np.array([0.09, 0.6, 0.3]))
    assert league(plan, "--out", tmp_path / "L") == 0
    rates = {}
    for name in trained:
        phase, objective, run = name.split("/")
        if objective == "dense" and (rate := re.search(r"lr=([\d.e-]+)-", run)):
            rates.setdefault(phase, []).append(rate[1])
    assert {phase: sorted(of_phase) for phase, of_phase in rates.items()} == {
        "tune": ["0.0001"] * 3 + ["0.0005"] * 3 + ["0.001"] * 3,
        "final": ["0.0005"] * 2 + ["0.001"] * 2,
        "shuffled": ["0.0005"],
    }
    runs = [r for r in LeagueFolder(tmp_path / "L").runs() if r.values["label"] == "dense"]
    losses = {(r.values["optimizer.lr"], r.seed): r.metrics["valid.mlm"] for r in runs}
    means = [(losses[rate, 1] + losses[rate, 2]) / 2 for rate in (0.0005, 0.001)]
    with (tmp_path / "L/report/standings.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if row["objective"] == "dense"]
    assert float(row["mean"]) == pytest.approx((2 * means[0] + means[1]) / 3)
    spread = abs(means[0] - means[1]) * math.sqrt(2) / 3
    assert float(row["sd_of_choice"]) == pytest.approx(spread)
    assert row["n"] == "2" and "missing" not in row["findings"] and "tuning:" not in row["findings"]
    page = (tmp_path / "L/report/standings.txt").read_text()
    assert "sd of choice" in page and "optimizer.lr=0.0005 (67 %)" in page
    for file in ("standings.md", "standings.html"):
        assert "sd of choice" in (tmp_path / "L/report" / file).read_text()
    assert "choice" in capsys.readouterr().out
    # The same command has nothing to run, and an archive says the same.
    before = len(trained)
    assert league(plan, "--out", tmp_path / "L") == 0 and len(trained) == before
    assert league("report", tmp_path / "L", "--archive", tmp_path / "plan.jsonl.gz") == 0
    (archived,) = [row for row in read_league(plan).rows() if row.objective == "dense"]
    assert archived.sd_of_choice("valid.mlm") == pytest.approx(spread)


@pytest.mark.parametrize(
    "changes, code, needed",
    [
        ({}, 0, None),
        ({"tuning__noise": 0.05}, 2, "7"),
        ({"tuning__noise": 0.02}, 0, None),
        ({"comparison__level": 0.001}, 2, "4"),
    ],
)
def test_a_plan_whose_tuning_is_too_thin_is_refused_before_anything_runs(
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, float],
    code: int,
    needed: str | None,
) -> None:
    """The smallest effect is 0.05; a noise that is not known is half of it."""
    trained = in_process(monkeypatch)
    thick = {"tuning__seeds": SEEDS, "tuning__plausible": 0.1}
    plan = write_plan(tmp_path / "plan.yaml", moons, **thick, **changes)
    assert league(plan, "--out", tmp_path / "L", "--dry-run") == code
    if needed:
        message = capsys.readouterr().err
        assert "tuning.seeds: 3" in message and f"{needed} would be enough" in message
        assert league(plan, "--out", tmp_path / "L") == code
        more = [*range(101, 101 + int(needed))]
        plan = write_plan(
            tmp_path / "plan.yaml", moons, **thick | changes | {"tuning__seeds": more}
        )
        assert league(plan, "--out", tmp_path / "L", "--dry-run") == 0
    assert not trained and not (tmp_path / "L").exists()


def test_a_plan_with_rows_says_that_its_tuning_is_thin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured cannot be planned anew; what it shows of noise is more than was guessed."""
    small = ["--budgets", 2.5e11, "--objectives", "causal"]
    assert league("balanced", "--out", tmp_path / "L", *small, "--dry-run") == 0
    said = " ".join(capsys.readouterr().err.split())
    expect_facts(said, "tuning.seeds: 4 are", "(the archive)", "the plan has rows")


def test_an_option_that_is_tuned_once_is_that_of_the_middle_budget(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two budgets the larger one is the middle; it is tuned though it is not asked for."""
    plan = write_plan(
        tmp_path / "plan.yaml",
        moons,
        objectives={"masked": {"options": ["task.mask_prob=0.15"]}},
        tuning__grid={"optimizer.lr": [0.001, 0.01], "model.dropout": [0.0, 0.9]},
        tuning__budgets=[SMALL, LARGE],
        tuning__once=["model.dropout"],
        tuning__widen=0,
        controls__untrained=False,
        controls__shuffled=False,
    )
    trained = in_process(monkeypatch)
    assert league(plan, "--out", tmp_path / "L", "--budgets", "3e7") == 0
    trials = [run for run in LeagueFolder(tmp_path / "L").runs() if "tuning" in run.values["label"]]
    middle = [run for run in trials if run.values["trainer.max_flops"] == LARGE]
    best = min(middle, key=lambda run: run.metrics["valid.loss"]).values["model.dropout"]
    assert len(middle) == 4 and len(trials) == 6
    assert "max_flops=6e7" in trained[0] and "max_flops=3e7" in trained[4]
    assert {run.values["model.dropout"] for run in trials if run not in middle} == {best}
    finals = [run for run in LeagueFolder(tmp_path / "L").runs() if run.values["label"] == "masked"]
    assert {run.values["model.dropout"] for run in finals} == {best}
