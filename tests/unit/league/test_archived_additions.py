"""Objectives that were added to a plan, in its archive."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from league_plans import SMALL, plan_with

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.league.assembly import (
    LeagueRuns,
    read_archived,
    read_league_runs,
    repeat,
    with_archived,
    write_archive,
)
from metaseq_lm.league.folder import Added, Contents, LeagueFolder
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import Run

OPTIONS = {"options": ["criterion=twice", "task.mask_prob=0.3"], "control": "dense"}


def run(name: str, seed: int, score: float = 1.0) -> Run:
    """Return a finished run that is compared."""
    values = {"label": name, "trainer.max_flops": SMALL, "seed": seed}
    results = {"status": "finished", "metrics": {"valid": {"mlm": score}}, "losses": ["mlm"]}
    return Run(Path(f"final/{name}/seed={seed}"), values, [], results)


def runs(*names: str, score: float = 1.0) -> tuple[Run, ...]:
    return tuple(run(name, seed, score + seed / 10) for name in names for seed in (1, 2))


def archived(tmp_path: Path, *added: Added) -> Contents:
    """Archive the runs of a plan and of what was added to it; return what a plan beside it has."""
    content = plan_with()
    file = tmp_path / "plan.jsonl.gz"
    contents = Contents(parse_plan(content), content, added, prices={"masked": 3.0, "twice": 5.0})
    names = ["masked", "dense", *(item.name for item in added)]
    write_archive(file, LeagueRuns(contents, runs(*names)))
    return Contents(contents.plan, content, archive=str(file))


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Added:
    """An objective whose plug-in lies in the working directory, which need not be there later."""
    monkeypatch.chdir(tmp_path)
    return Added("twice", OPTIONS, str(tmp_path / "user_dir" / "twice.py"))


def test_an_archive_keeps_what_was_added_and_where_its_plug_in_was(
    tmp_path: Path, twice: Added
) -> None:
    league = read_archived(archived(tmp_path, twice))
    assert league.contents.archived == (replace(twice, user_dir="user_dir/twice.py"),)
    assert str(tmp_path) not in str(archive.read_about(tmp_path / "plan.jsonl.gz"))
    assert league.contents.prices == {"masked": 3.0, "twice": 5.0}
    row = next(row for row in league.rows() if row.objective == "twice")
    assert (len(row.runs), row.shipped, row.added, row.control_name) == (2, True, True, "dense")
    assert row.control and row.control.objective == "dense"
    standings = league.standings()
    assert standings.title == f"small, plan {league.contents.plan.hash} + twice"
    # Three objectives at two budgets: each row but the baseline's is a comparison.
    assert league.contents.plan.comparisons == 2 and standings.rule.comparisons == 4
    ((_, commands), *_) = repeat(league, "").texts
    assert commands.splitlines()[1] == (
        "metaseq-lm league --out L --with criterion=twice task.mask_prob=0.3 --name twice "
        "--control dense --user-dir user_dir/twice.py"
    )


def test_a_plug_in_outside_of_the_working_directory_is_archived_by_its_name(
    tmp_path: Path, twice: Added, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert twice.portable.user_dir == "twice.py"
    assert replace(twice, user_dir="my_module").portable.user_dir == "my_module"
    assert replace(twice, user_dir=None).portable.user_dir is None


def test_an_archive_without_additions_is_as_before(tmp_path: Path) -> None:
    league = read_archived(archived(tmp_path))
    assert "added" not in archive.read_about(tmp_path / "plan.jsonl.gz")
    assert league.contents.additions == () and "+" not in league.contents.title


@pytest.mark.parametrize("name", ["twice", "Twice"])
def test_an_objective_that_is_added_here_hides_the_archived_one_of_its_name(
    tmp_path: Path, twice: Added, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its archived runs, too, whether or not it has some here: it may be another objective."""
    contents = archived(tmp_path, twice)
    here = replace(contents, added=(Added(name, {"options": ["task.mask_prob=0.2"]}),))
    league = read_archived(here)
    assert [item.name for item in league.contents.additions] == [name]
    assert league.plan.objective(name).options == ("task.mask_prob=0.2",)
    assert {row.objective for row in league.rows()} == {"masked", "dense"}
    assert league.contents.prices == {"masked": 3.0}
    local = runs(name, score=2.0)
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: list(local))
    rows = read_league_runs(LeagueFolder(tmp_path / "L"), here).rows()
    assert {row.objective: row.shipped for row in rows} == {
        "masked": True,
        "dense": True,
        name: False,
    }


def test_an_archive_written_anew_keeps_the_rows_of_the_former_beside_new_ones(
    tmp_path: Path, twice: Added, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = archived(tmp_path, twice)
    thrice = Added("thrice", {"options": ["task.mask_prob=0.5"], "control": "twice"})
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: list(runs("thrice")))
    folder = LeagueFolder(tmp_path / "L")
    league = read_league_runs(folder, replace(contents, added=(thrice,)))
    write_archive(tmp_path / "new.jsonl.gz", league)
    again = read_archived(replace(contents, archive=str(tmp_path / "new.jsonl.gz")))
    assert [item.name for item in again.contents.archived] == ["twice", "thrice"]
    assert {row.objective for row in again.rows()} == {"masked", "dense", "twice", "thrice"}


def test_a_control_may_be_archived_and_is_looked_for_among_all(
    tmp_path: Path, twice: Added
) -> None:
    contents = with_archived(archived(tmp_path, twice))
    mine = Added("mine", {"options": [], "control": "twice"})
    assert replace(contents, added=(mine,)).extended.objective("mine").control == "twice"
    for control in ("other", "mine"):
        added = (replace(mine, content={"options": [], "control": control}),)
        with pytest.raises(UsageError, match=f"--control {control}.*masked, dense, twice"):
            replace(contents, added=added).extended


def test_added_runs_that_are_begun_here_need_all_seeds(
    tmp_path: Path, twice: Added, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the plan do: runs of an archived objective, left in a folder that lost its own
    record of it, are no row until they are over.
    """
    contents = archived(tmp_path, twice)
    monkeypatch.setattr(LeagueFolder, "runs", lambda folder: [run("twice", 1)])
    league = read_league_runs(LeagueFolder(tmp_path / "L"), contents)
    assert all(row.shipped and len(row.runs) == 2 for row in league.rows())


def test_the_archive_of_another_plan_adds_nothing(tmp_path: Path, twice: Added) -> None:
    contents = archived(tmp_path, twice)
    content = plan_with(seeds=[1, 2, 3])
    other = Contents(parse_plan(content), content, archive=contents.archive)
    assert with_archived(other).additions == read_archived(other).contents.additions == ()
    (tmp_path / "plan.jsonl.gz").unlink()
    assert with_archived(contents) == contents


@pytest.mark.parametrize(
    "records, message",
    [("[", "not readable"), ("{}", "no list"), ('[{"name": "twice", "content": {}}]', "options")],
)
def test_a_damaged_record_of_what_was_added_is_said(
    tmp_path: Path, twice: Added, records: Any, message: str
) -> None:
    contents = archived(tmp_path, twice)
    file = tmp_path / "plan.jsonl.gz"
    about = archive.read_about(file)
    assert json.loads(about["added"])[0]["name"] == "twice"
    archive.write(file, archive.read(file), about | {"added": records})
    for read in (with_archived, read_archived):
        with pytest.raises(MetaseqError, match=rf"plan.jsonl.gz: damaged \(.*{message}"):
            read(contents)
