"""Faults of a comparison, planted in whole leagues: each is caught, and the same league without it
is not."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from league_plans import in_process, write_plan
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.sweeps.folder import SweepFolder

BUDGET = 2e8  # of at least 50 updates
OBJECTIVES = ("masked", "dense")

Faults = dict[str, str]


def lines_of(seed: int, count: int, first: int = 0) -> list[str]:
    """Return lines of 12 words, of the 20 from w`first` on."""
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{first + i}" for i in draw.integers(0, 20, 12)) for _ in range(count)]


def make_data(folder: Path, valid: list[str] | None = None, tokenizer: str = "word") -> Path:
    """Binarise a corpus of 400 lines and a valid split, by default of the same words."""
    folder.mkdir(exist_ok=True)
    splits = {"train": lines_of(0, 400), "valid": valid or lines_of(1, 120)}
    for split, lines in splits.items():
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    texts = [f"--{split}pref={folder / split}.txt" for split in splits]
    command = ["preprocess", *texts, "--tokenizer", tokenizer, "--overwrite"]
    assert main([*command, "--destdir", str(folder / "data")]) == 0
    return folder / "data"


def plan_on(data: Path, folder: Path) -> Path:
    """Write a plan of two objectives, two seeds and nothing else on data."""
    return write_plan(
        folder / "plan.yaml",
        data,
        budgets=[BUDGET],
        usual_budgets=[BUDGET],
        tuning={"grid": {}, "seeds": [101]},
        controls={"untrained": False, "shuffled": False, "seeds": [1]},
    )


def findings_of(league: Path) -> Faults:
    """Report on a league and return what its gates say of each objective."""
    assert main(["league", "report", str(league)]) == 0
    with open(league / "report" / "standings.csv", newline="") as file:
        return {row["objective"]: row["findings"] for row in csv.DictReader(file)}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Faults]:
    """A function that runs objectives on data and returns the findings."""
    in_process(monkeypatch)

    def run(data: Path, *objectives: str) -> Faults:
        plan, names = plan_on(data, tmp_path), ",".join(objectives or OBJECTIVES)
        arguments = ["league", str(plan), "--out", str(tmp_path / "L"), "--objectives", names]
        assert main(arguments) == 0
        return findings_of(tmp_path / "L")

    return run


def test_a_league_without_a_fault_has_no_such_finding(
    play: Callable[..., Faults], tmp_path: Path
) -> None:
    findings = play(make_data(tmp_path / "text"))
    assert list(findings) == list(OBJECTIVES)
    for text in findings.values():
        assert not any(fault in text for fault in ("leak", "domain", "budget", "data:"))


def rewrapped(lines: list[str], words: int) -> list[str]:
    """Return the same text in lines of another length."""
    text = " ".join(lines).split()
    return [" ".join(text[i : i + words]) for i in range(0, len(text), words)]


@pytest.mark.parametrize(
    "words, reason",
    [
        (12, "flag leak: tokens of valid also stand in train: 100.0 % in documents and 100.0 % in"),
        (13, "flag leak: tokens of valid also stand in train: 100.0 % in passages of 50 tokens"),
    ],
)
def test_a_valid_split_of_training_text_is_a_leak(
    play: Callable[..., Faults], tmp_path: Path, words: int, reason: str
) -> None:
    valid = rewrapped(lines_of(0, 400)[-120:], words)
    findings = play(make_data(tmp_path / "text", valid=valid))
    assert all(reason in text for text in findings.values())


def test_a_valid_split_of_another_domain_stops_the_league(
    play: Callable[..., Faults], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "text", valid=lines_of(1, 120, first=15))
    assert main(["league", str(plan_on(data, tmp_path)), "--out", str(tmp_path / "L")]) == 2
    expect_facts(capsys.readouterr().err, "valid", "another domain than train")
    assert not list(tmp_path.glob("L/final"))


def test_half_the_budget_is_refused(play: Callable[..., Faults], tmp_path: Path) -> None:
    play(make_data(tmp_path / "text"))
    sweep = SweepFolder(tmp_path / "L" / "final" / "dense")
    for run in sweep.runs():
        folder, (stage,) = sweep.path / run.folder, run.stages
        updates = json.loads((folder / "results.json").read_text())["updates"]
        shutil.rmtree(folder)
        assert main(["train", *stage.arguments, f"trainer.max_update={updates // 2}"]) == 0
    findings = findings_of(tmp_path / "L")
    assert "budget" not in findings["masked"]
    expect_facts(findings["dense"], "budget", "2 of 2 runs", "2.0e8")


def test_another_tokenizer_is_refused(play: Callable[..., Faults], tmp_path: Path) -> None:
    data = make_data(tmp_path / "text")
    play(data, "masked")
    assert make_data(tmp_path / "text", tokenizer="char") == data
    findings = play(data, "dense")
    assert "the data differ" in findings["dense"]
    assert {run.values["label"] for run in LeagueFolder(tmp_path / "L").runs()} == set(OBJECTIVES)
