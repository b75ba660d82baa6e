"""Columns of standings: their widths, columns of plug-ins in all back ends, the JSON document."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from documents import document_in

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.columns import _RECORD, COLUMNS, SCREEN, Value, column, value_of
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.page import standings_table
from metaseq_lm.league.standings import VOID, GateFinding
from metaseq_lm.league.verdict import DecisionRule
from metaseq_lm.reporting.numbers import Metric

DOCS = Path(__file__).parents[3] / "docs" / "reference"
SHARE = Metric("share", percent=True, lower_is_better=False)
LOSS = Metric("loss", percent=False, lower_is_better=True)
VOIDED = GateFinding("ceiling", VOID, "x")
ENDS = (-0.101, -0.062)


@pytest.mark.parametrize(
    ("value", "wide", "narrow", "brief", "brief_spread", "sign"),
    [
        (
            Value({}, SHARE, 0.7065, 0.023, marks=["a"], verdict="worse"),
            *("70.65 ± 2.30 a", "70.7 ± 2.3", "71?", "71 ±2", "-?"),
        ),
        (Value({}, LOSS, 2.345678), "2.346", "2.346", "2.346", "2.346", ""),
        (
            Value({}, SHARE, -0.081, interval=ENDS, is_signed=True),
            *("-8.10", "-8.1 (-10.1 to -6.2)", "-8", "-8", ""),
        ),
        (
            Value({}, SHARE, interval=ENDS, is_signed=True),
            *("-10.10 to -6.20", "-10.1 to -6.2", "-", "-", ""),
        ),
        (Value(hidden="void", marks=["a"], verdict="better"), "void", "void", "-", "-", ""),
        (Value(), "-", "-", "-", "-", ""),
        (
            Value(text="worse: plateau", short="worse: a"),
            "worse: plateau",
            "worse: a",
            "-",
            "-",
            "",
        ),
    ],
)
def test_a_value_at_each_width(value, wide, narrow, brief, brief_spread, sign):
    widths = (value.wide, value.narrow, value.brief, value.brief_spread, value.sign)
    assert widths == (wide, narrow, brief, brief_spread, sign)


def league() -> Standings:
    entries = [
        StandingsEntry(name, 1e10, {"share": [x, x + 0.01]}) for name, x in (("a", 0.5), ("b", 0.9))
    ]
    return Standings("x", [SHARE], "a", DecisionRule(0.03), entries, plan=("x", "01")).decided()


def test_every_column_of_a_list_is_registered() -> None:
    assert {*_RECORD, *SCREEN} <= COLUMNS.entries.keys()


@pytest.mark.parametrize(
    "options", [{}, {"title": "x", "width": 3}, {"title": "{score}"}, {"title": "{0}"}]
)
def test_a_wrong_declaration_is_refused(options) -> None:
    with pytest.raises(UsageError, match="'mine'"):
        column("mine", **options)


@pytest.fixture
def no_columns_left():
    known = dict(COLUMNS.entries)
    yield
    COLUMNS.entries.clear()
    COLUMNS.entries.update(known)


@pytest.mark.usefixtures("no_columns_left")
def test_a_plug_in_column_applies_to_metrics_and_returns_a_value() -> None:
    column("n", title="n of {name}", over=lambda s: s.metrics)(lambda s, e: Value(text=e.objective))
    column("never", title="never", applies=lambda s: False)(lambda s, e: Value())
    table = standings_table(league())
    assert table.head[-1] == "n of share" and table.rows[0][-1].text == "b"
    assert table.records[0]["n of share"] == "b" and "never" not in table.records[0]
    first, second = league().entries
    void = replace(league(), entries=[first, replace(second, findings=[VOIDED])])
    column("mean", title="mean")(lambda s, e: Value({"of_row": 1}, SHARE, 0.5))
    table = standings_table(void)
    assert [row[-1].text for row in table.rows] == ["50.00", "void"]
    assert [record["of_row"] for record in table.records] == [1, None]
    column("bad", title="bad")(lambda s, e: 3)
    with pytest.raises(UsageError, match="'bad'"):
        value_of("bad", league(), league().entries[0])


@pytest.mark.usefixtures("no_columns_left")
def test_the_example_of_the_reference_is_in_all_files(tmp_path: Path, capsys) -> None:
    page = (DOCS / "columns.md").read_text()
    plugin = tmp_path / "worst_seed.py"
    plugin.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    words = ["--user-dir", str(plugin)]
    assert main(["league", "report", "balanced", "--out", str(tmp_path / "R"), *words]) == 0
    for ending in ("txt", "md", "html"):
        assert "worst seed of balanced" in (tmp_path / f"R/standings.{ending}").read_text()
    line = next(csv.DictReader((tmp_path / "R/standings.csv").open()))
    assert 0 < float(line["worst seed"]) < float(line["mean"])
    capsys.readouterr()
    assert main(["list", "columns", *words]) == 0
    assert re.search(r"worst seed +worst seed of \{name\}: .*worst_seed", capsys.readouterr().out)
    assert main(["league", "report", "balanced", "--json", *words]) == 0
    document = document_in(capsys.readouterr().out, "standings")
    assert document["rows"][0]["worst seed"] == pytest.approx(float(line["worst seed"]))
    findings = [finding for row in document["rows"] for finding in row["findings"]]
    assert {f["action"] for f in findings} > {"note"} and {len(f) for f in findings} == {4}
    assert main(["league", "report", "balanced", "--json", "--watch"]) == 2
