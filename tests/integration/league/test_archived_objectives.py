"""A plan whose archive has an objective that was added to it, with a plug-in that is gone."""

import re
from pathlib import Path

import pytest
from league_plans import in_process, write_plan
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.core.registry import ALL
from metaseq_lm.league.folder import LeagueFolder

PLUG_IN = '''
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@register_criterion("{name}")
class Named(MaskedLM):
    """Masked LM under another name."""
'''
GRID = ["--grid", "optimizer.lr=1e-3,1e-4"]


def league(*arguments: object) -> int:
    return main(["league", *map(str, arguments)])


@pytest.fixture(scope="module")
def shipped(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, `plan.yaml`, beside an archive that has a row of a plug-in."""
    folder = tmp_path_factory.mktemp("shipped")
    plan = write_plan(folder / "plan.yaml", moons)
    (folder / "fourfold.py").write_text(PLUG_IN.format(name="fourfold"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        in_process(monkeypatch)
        assert league(plan, "--out", "L") == 0
        mine = ["--with", "criterion=fourfold", "--name", "fourfold", "--control", "masked", *GRID]
        assert league("--out", "L", *mine, "--user-dir", "fourfold.py") == 0
        assert league("report", "L", "--archive", "plan.jsonl.gz") == 0
    (folder / "fourfold.py").unlink()
    return folder


def rows_of(shown: str) -> list[str]:
    """Return the rows of standings with two seeds."""
    return re.findall(r"^(\w+) +2 ", shown, re.M)


def test_a_report_has_the_added_row_without_its_plug_in(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert league("report", shipped / "plan.yaml", "--out", tmp_path / "page") == 0
    shown = capsys.readouterr().out
    assert sorted(rows_of(shown)) == ["dense", "fourfold", "masked"]
    assert re.search(r"\b\w{16} \+ fourfold", shown)
    expect_facts(shown, "All rows ship", "for 4 comparisons")  # of three objectives at two budgets
    page = (tmp_path / "page" / "standings.html").read_text()
    assert "--with criterion=fourfold --name fourfold --grid" in page
    assert "--user-dir fourfold.py" in page and str(shipped / "fourfold.py") not in page


def test_a_folder_of_the_plan_has_the_added_row_and_runs_it_only_if_asked(
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = in_process(monkeypatch)
    mine = ["--with", "task.mask_prob=0.4", "--name", "mine", "--control", "fourfold", *GRID]
    assert league(shipped / "plan.yaml", "--out", "L", *mine) == 0
    shown = capsys.readouterr().out
    assert {name.split("/")[1] for name in trained} == {"mine"}
    assert sorted(rows_of(shown)) == ["dense", "fourfold", "masked", "mine"]
    assert re.search(r"\b\w{16} \+ fourfold \+ mine", shown)
    assert [item.name for item in LeagueFolder(Path("L")).read().added] == ["mine"]
    # Its plug-in is where the command line says.
    again = ["--out", "L", "--objectives", "fourfold"]
    assert league(*again) == 2
    assert "'fourfold.py'" in capsys.readouterr().err
    Path("mine.py").write_text(PLUG_IN.format(name="fourfold"))
    monkeypatch.delitem(ALL["criterion"].entries, "fourfold")  # as in another process
    assert league(*again, "--user-dir", "mine.py") == 0
    shown = capsys.readouterr().out
    assert {name.split("/")[1] for name in trained} == {"mine", "fourfold"}
    assert sorted(rows_of(shown)) == ["dense", "fourfold", "masked", "mine"]
    here = re.search(r"Run here: (.*) at 3.0e7; all other rows ship", shown)
    assert here and set(here[1].split(", ")) == {"mine", "fourfold"}
    added = {item.name: item.user_dir for item in LeagueFolder(Path("L")).read().added}
    assert added == {"mine": None, "fourfold": str(tmp_path / "mine.py")}
