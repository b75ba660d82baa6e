"""Cheats that are planted in the rows that ship, or as a plug-in: each is caught by name."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from league_plans import in_process, write_plan
from registrations import forgotten

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.league.assembly import LeagueRuns, read_league, write_archive
from metaseq_lm.league.gates import _findings_of
from metaseq_lm.league.plan_files import OBJECTIVES
from metaseq_lm.league.standings import GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.runs.suite_results import SuiteResults

CHEAT, BUDGET = "masked_40", 2.5e11
LEAK = """
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.language_modeling import CausalLM

@register_criterion("leak")
class Leak(CausalLM):
    tasks = ("causal_lm",)

    def logits(self, model, batch):
        return model(batch.tokens, batch.layout)
"""
UNNORMALISED = """
import torch
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@register_criterion("unnormalised")
class Unnormalised(MaskedLM):
    tasks = ("masked_lm",)

    def token_log_probs(self, model, batch):
        return super().token_log_probs(model, batch) / 2
"""


@pytest.fixture(scope="module")
def shipped() -> LeagueRuns:
    """The rows of a plan that ships, which the cheats begin with."""
    return read_league(OBJECTIVES)


def edited(league: LeagueRuns, edit: Callable[[Run], Run]) -> LeagueRuns:
    """Return a league whose final runs of one row are edited."""
    row = next(row for row in league.rows() if (row.objective, row.budget) == (CHEAT, BUDGET))
    chosen = {id(run) for run in row.runs}
    runs = tuple(edit(run) if id(run) in chosen else run for run in league.runs)
    return replace(league, runs=runs)


def with_suite(run: Run, name: str, edit: Callable[[SuiteResults], SuiteResults]) -> Run:
    """Return a run with the results of a suite edited."""
    suites = [edit(suite) if suite.name == name else suite for suite in run.suites]
    return replace(run, suites=tuple(suites))


def raised(run: Run) -> Run:
    """Return a run whose accuracy on the states of the chain is more than can be known."""

    def edit(suite: SuiteResults) -> SuiteResults:
        groups = json.loads(json.dumps(suite.groups))
        groups["overall"]["metrics"]["accuracy"] = 0.928
        return replace(suite, groups=groups)

    return with_suite(run, "state", edit)


def with_items(run: Run) -> Run:
    """Return a run that was scored on other items of one suite."""
    return with_suite(run, "state", lambda suite: replace(suite, data="0" * 32))


def with_fewer_items(run: Run) -> Run:
    """Return a run that was scored on the easier half of the items."""

    def edit(suite: SuiteResults) -> SuiteResults:
        groups = {k: {**group, "n": group["n"] // 2} for k, group in suite.groups.items()}
        return replace(suite, groups=groups)

    return with_suite(run, "state", edit)


def of_half_the_budget(run: Run) -> Run:
    """Return a run that took half of its budget."""
    return replace(run, results={**(run.results or {}), "flops": BUDGET / 2})


def of_another_seed(run: Run) -> Run:
    """Return a run of one of the seeds that were tried beside those of the plan."""
    return replace(run, values={**run.values, "seed": run.values["seed"] + 20})


@pytest.mark.parametrize(
    "cheat, gate, action",
    [
        (raised, "bound", "void"),
        (with_items, "suites", "refuse"),
        (with_fewer_items, "left out", "flag"),
        (of_half_the_budget, "budget", "refuse"),
        (of_another_seed, "missing", "flag"),
    ],
)
def test_an_edited_row_is_caught(
    shipped: LeagueRuns, cheat: Callable[[Run], Run], gate: str, action: str
) -> None:
    def of_row(league: LeagueRuns) -> list[GateFinding]:
        context = league.context()
        return [*_findings_of(context.by_name[CHEAT, BUDGET], context)]

    caught = {(f.gate, f.action) for f in of_row(edited(shipped, cheat))}
    assert (gate, action) in caught - {(f.gate, f.action) for f in of_row(shipped)}


@pytest.fixture
def place(shipped: LeagueRuns, tmp_path: Path) -> Path:
    """The path of a copy of the plan, beside which an archive may be written."""
    return Path(shutil.copy(OBJECTIVES, tmp_path / "plan.yaml"))


def test_raised_accuracies_with_a_fresh_checksum_are_void(
    shipped: LeagueRuns, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_archive(place.with_suffix(".jsonl.gz"), edited(shipped, raised))
    out = place.with_name("page")
    assert main(["league", "report", str(place), "--out", str(out), "--budgets", "2.5e11"]) == 0
    assert "warning" not in capsys.readouterr().err  # the checksum is right
    with open(out / "standings.csv", newline="") as file:
        findings = {row["objective"]: row["findings"] for row in csv.DictReader(file)}
    assert [name for name, text in findings.items() if "void bound" in text] == [CHEAT]


def test_an_edited_plan_does_not_get_the_runs_of_the_old_one(
    shipped: LeagueRuns, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = place.with_suffix(".jsonl.gz")
    write_archive(archive, shipped)
    place.write_text(place.read_text().replace("smallest_effect: 0.02", "smallest_effect: 0.3"))
    assert main(["league", "report", str(place)]) == 2
    assert "another plan" in capsys.readouterr().err
    # The archive may say that it is of the edited plan: each run has the hash of its own.
    forged = replace(shipped, contents=replace(shipped.contents, plan=read_league(place).plan))
    archive.unlink()
    write_archive(archive, forged)
    with pytest.raises(MetaseqError, match="plan"):
        read_league(place)


@pytest.mark.parametrize(
    "code, name, task, reason",
    [
        (LEAK, "leak", "causal_lm", "depends on that token itself"),
        (UNNORMALISED, "unnormalised", "masked_lm", "sum to"),
    ],
)
def test_a_criterion_that_cheats_gets_no_row(
    moons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    name: str,
    task: str,
    reason: str,
) -> None:
    trained = in_process(monkeypatch)
    (tmp_path / f"{name}.py").write_text(code)
    plan = write_plan(tmp_path / "plan.yaml", moons)
    options = [f"task={task}", f"criterion={name}", "--name", name]
    with forgotten():
        words = ["league", str(plan), "--out", str(tmp_path / "L"), "--with", *options]
        assert main([*words, "--user-dir", str(tmp_path / f"{name}.py")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"objective {name}: criterion {name} is refused" in message and reason in message
    assert not trained and not (tmp_path / "L").exists()
