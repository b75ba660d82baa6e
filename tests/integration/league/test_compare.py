"""The command `compare`: what it makes of a text and a table, and what it leaves to the league."""

from pathlib import Path
from typing import Any

import pytest
from outcomes import expect_error

from metaseq_lm.cli import league, main
from metaseq_lm.league import forecast
from metaseq_lm.league.folder import LeagueFolder
from metaseq_lm.league.forecast import Update, _Times
from metaseq_lm.league.plan_files import read_plan
from metaseq_lm.league.runner import Runner


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command on two texts and a table; nothing is measured for long, nor examined."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"the {name} sees line {number}\n" for number in range(80))
        )
    rows = ["a cat,good\n", "line 4,bad\n"] * 20
    (tmp_path / "labels.csv").write_text("".join(["text,label\n", *rows]))
    monkeypatch.chdir(tmp_path)

    for check in ("check_all", "examine_all"):
        monkeypatch.setattr(Runner, check, lambda runner: None)

    def measured(runner: Runner) -> _Times:
        updates = forecast.measure_updates(runner)
        slow = {name: Update(update.estimate, 0.1) for name, update in updates.items()}
        return _Times(slow, start=1.0, scoring=1.0)

    monkeypatch.setattr(forecast, "measure_times", measured)
    return ["compare", "a.txt", "b.txt", "--task", "labels.csv", "--out", "L"]


def test_a_text_and_a_table_become_a_league_that_goes_on(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(Runner, "run", lambda runner: ran.append(runner) or True)
    monkeypatch.setattr(league, "report", lambda *arguments, **options: 0)
    assert main([*command, "--minutes", "5"]) == 0
    folder = LeagueFolder(Path("L"))
    contents = folder.read()
    plan, _ = read_plan(Path("L/plan.yaml"))
    assert plan.hash == contents.plan.hash == ran[0].plan_hash
    assert contents.prices.keys() == {"causal", "masked_40"}
    (budget,) = plan.ladder.budgets
    assert f"{budget:.1e}".replace("e+", "e") in capsys.readouterr().out
    assert len(plan.ladder.seeds) == 4
    # The time counted when the budget was chosen.
    assert main([*command, "--minutes", "50"]) == 0
    assert [runner.request.budgets for runner in ran] == [(budget,)] * 2
    code = main([*command, "--seeds", "3"])
    expect_error(capsys, code, 2, plan.hash, "--out")


def test_a_dry_run_writes_nothing_and_too_little_time_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--dry-run", "--minutes", "9"]) == 0
    assert "--minutes 9" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--minutes", "0.5"]) == 2
    assert "--minutes" in capsys.readouterr().err
    code = main([*command, "--dry-run", "--seeds", "0"])  # not the default
    expect_error(capsys, code, 2, "--seeds", "at least 1")
    (tmp_path / "labels.csv").write_text("review,label\na,b\n" * 9)
    assert main([*command, "--dry-run"]) == 1
    message = capsys.readouterr().err
    assert "'text'" in message and "--text-column" in message
    assert "--label-columns" not in message  # which compare has not
    assert not (tmp_path / "L").exists()
