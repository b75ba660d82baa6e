"""examples/bam/strategies.py: table 3.1 of runs of one set and of several."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from imported import imported
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.reporting import stats

SCRIPT = Path(__file__).resolve().parents[4] / "examples" / "bam" / "strategies.py"


@pytest.fixture
def strategies() -> ModuleType:
    return imported(SCRIPT)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Single runs of two sets, of which one seed lacks a set, and students of both."""
    for seed, scores in (
        (1, {"RTE": 0.5, "CoLA": 0.1}),
        (2, {"RTE": 0.6, "CoLA": 0.3}),
        (3, {"RTE": 0.7}),
    ):
        for name, value in scores.items():
            metrics = {"valid": {"score": value, f"{name}_score": value, f"{name}_loss": 1.0}}
            folder = tmp_path / f"single-{name}" / f"seed={seed}"
            make_run(folder, seed=seed, label="Single", results={"metrics": metrics})
    for seed in (1, 2):
        both = {"RTE_score": 0.8, "CoLA_score": seed / 10, "score": 0.4 + seed / 20}
        folder = tmp_path / "multi" / f"seed={seed}"
        make_run(folder, seed=seed, label="Multi", results={"metrics": {"valid": both}})
    return tmp_path


def test_the_table(strategies, runs, capsys):
    """Medians over seeds of each set; the average of a seed's sets, where it has all."""
    make_run(runs / "single-RTE" / "died", seed=4, label="Single", score=None)
    strategies.main([str(runs / "single-CoLA"), str(runs / "single-RTE"), str(runs / "multi")])
    lines = capsys.readouterr().out.splitlines()
    wanted = [
        "| most frequent class | 0.0 | 52.7 |  |",
        "| Single | 20.0 [10.0, 30.0] (2) | 60.0 [50.0, 70.0] (3) | 37.5 [30.0, 45.0] (2) |",
        "| Multi | 15.0 [10.0, 20.0] (2) | 80.0 [80.0, 80.0] (2) | 47.5 [45.0, 50.0] (2) |",
    ]
    assert lines[2].startswith("| | CoLA | RTE |") and lines[4:7] == wanted
    assert "died" in lines[-1] and "not finished" in lines[-1]


def test_the_table_of_an_archive(strategies, runs, tmp_path, capsys):
    strategies.main([str(runs)])
    before = capsys.readouterr().out
    file = tmp_path / "runs.jsonl"
    assert main(["report", str(runs), "--metric", "valid.score", "--archive", str(file)]) == 0
    capsys.readouterr()
    strategies.main([str(file)])
    assert capsys.readouterr().out == before


def test_differences_and_what_could_be_seen(strategies):
    """Of pairs with three seeds each; three against three can show nothing by permutation."""
    column = "average of RTE"
    scores = [0.0, 0.01, 0.02, 0.03, 0.04]
    cells = {
        "Single": {"RTE": scores[:3], column: scores},
        "Multi": {"RTE": [score + 0.2 for score in scores[:3]], column: [s + 0.1 for s in scores]},
        "Single->Multi": {"RTE": [], column: scores[:2]},
    }
    _, _, *lines = strategies.claims(cells)
    sd = float(np.std(scores, ddof=1))
    least = 100 * (stats.Test("permutation", sides=1).detectable((5, 5), sd) or 0.0)
    assert 0.5 < least < 3.5
    assert lines == [
        f"| Multi | Single | average | +10.0 | {least:.1f} |",
        "| Multi | Single | RTE | +20.0 | never |",
    ]


def test_further_sets_leave_the_average_alone(strategies, runs, capsys):
    """A teacher of a set that no student has, and a student of one set only."""
    for label, name in (("Single", "QQP"), ("RTE with QQP", "RTE")):
        found = {"metrics": {"valid": {f"{name}_score": 0.9}}}
        make_run(runs / f"z-{label}" / "seed=1", seed=1, label=label, results=found)
    strategies.main([str(runs)])
    table = capsys.readouterr().out
    assert "average of" in table and "| 37.5 [30.0, 45.0] (2) |" in table
    assert "| 47.5 [45.0, 50.0] (2) |" in table and "RTE with QQP" in table


def test_strategies_count_sets_better_than_both_baselines(strategies, tmp_path, capsys):
    """p is the larger of two, against Single and Multi, corrected for the cells."""
    scores = {"Single": 0.5, "Multi": 0.6, "Single->Multi": 0.7, "Multi->Multi": 0.55}
    for label, value in scores.items():
        for seed in range(5):
            found = {"valid": {"RTE_score": value + seed / 1000, "CoLA_score": seed / 10}}
            folder = tmp_path / label / f"seed={seed}"
            make_run(folder, seed=seed, label=label, results={"metrics": found})
    cells = strategies.cells_of(strategies.collect(strategies.find_runs([str(tmp_path)])))
    p = strategies.tested(cells)
    average = "average of CoLA, RTE"
    columns = ("CoLA", "RTE", average)
    assert set(p) == {(label, c) for label in ("Multi->Multi", "Single->Multi") for c in columns}
    # Above both in every seed: 1 of 10,001 resamples at the most, of six cells.
    assert p["Single->Multi", "RTE"] == pytest.approx(6 / 10_001)
    # Above Single in every seed, below Multi.
    assert p["Multi->Multi", "RTE"] == 1.0
    assert p["Single->Multi", "CoLA"] > 0.5
    strategies.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "| 70.2 [70.0, 70.4] (5) p 0.0006 |" in out and "6 cells" in out
    assert "| 60.2 [60.0, 60.4] (5) |" in out


def test_sets_below_the_most_frequent_class_rank_nothing(strategies, tmp_path, capsys):
    """RTE, where no median reaches 52.7, is shown, but neither averaged, tested nor claimed."""
    for label, value in {"Single": 0.45, "Multi": 0.5, "Single->Multi": 0.52}.items():
        for seed in range(5):
            found = {"valid": {"RTE_score": value + seed / 1000, "CoLA_score": value}}
            folder = tmp_path / label / f"seed={seed}"
            make_run(folder, seed=seed, label=label, results={"metrics": found})
    strategies.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "average of CoLA |" in out and "| 50.2 [50.0, 50.4] (5) |" in out
    assert "2 cells" in out and "\nRTE: no median" in out
    assert "| on |" in out and "| RTE | +" not in out


def test_a_score_that_is_there_twice(strategies, runs):
    make_run(
        runs / "again", seed=1, label="Multi", results={"metrics": {"valid": {"RTE_score": 0.9}}}
    )
    with pytest.raises(strategies.MetaseqError, match="Multi has RTE.*1"):
        strategies.main([str(runs)])
