"""Reports of runs that a search tuned: what it cost, values at an edge, trials beside them."""

import json
from pathlib import Path

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.reporting.runs import read_run
from metaseq_lm.runs.records import TUNING_FILE, read_tuning, write_trial, write_tuning

TUNING = {
    "flops": 4e12,
    "trials": 9,
    "metric": "valid.loss",
    "values": {"optimizer.lr": 0.02},
    "edges": {"optimizer.lr": "upper"},
}
TRIAL = {
    "setting": "all",
    "number": 0,
    "values": {"optimizer.lr": 0.02},
    "state": "pruned",
    "flops": 1e12,
    "share": 0.25,
    "score": 0.3,
    "metric": "valid.loss",
    "lower_is_better": True,
    "independent": False,
}


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tuned runs, and a trial that was stopped."""
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        write_tuning(make_run(Path("S") / f"seed={seed}", seed=seed, label="tuned"), TUNING)
    paused = {"stopped_by": "pause_flops", "updates": 100, "max_update": 400}
    write_trial(make_run(Path("S/search/all/0000"), results=paused, seed=101), TRIAL)
    return Path("S")


def report(capsys: pytest.CaptureFixture, *words: str) -> dict:
    assert main(["report", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_cost_of_tuning_is_a_column(searched: Path, capsys: pytest.CaptureFixture) -> None:
    document = report(capsys, "S")
    (row,) = document["rows"]
    assert row["label"] == "tuned" and row["runs"] == 2
    assert row["tuning_flops"] == 4e12 and row["flops"] == 1e12
    assert main(["report", "S"]) == 0
    shown = capsys.readouterr().out
    assert "tuning FLOPs" in shown and "4.0e12" in shown


def test_a_value_at_the_edge_is_no_verdict(searched: Path, capsys: pytest.CaptureFixture) -> None:
    notes = report(capsys, "S")["notes"]
    assert [n for n in notes if "optimizer.lr" in n and "upper end" in n]
    assert [n for n in notes if "1 trial" in n]


def test_an_archive_keeps_it(searched: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", "S", "--archive", "kept.jsonl"]) == 0
    capsys.readouterr()
    assert report(capsys, "kept.jsonl")["rows"] == report(capsys, "S")["rows"]
    assert "upper end" in str(report(capsys, "kept.jsonl")["notes"])


def test_a_stopped_trial_has_no_score(searched: Path) -> None:
    trial = read_run(searched / "search/all/0000")
    assert trial.trial["state"] == "pruned"
    expect_facts(str(trial.why_unscored("test.accuracy")), "rung", "100 of 400")


def test_damage_is_named(searched: Path) -> None:
    file = searched / "seed=1" / TUNING_FILE
    file.write_text(file.read_text().replace("4000000000000.0", "1.0"))
    with pytest.raises(MetaseqError, match="changed since"):
        read_tuning(file.parent)
