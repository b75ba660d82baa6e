"""Gates together: a healthy league has no finding, a bad baseline refuses its rows."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import league_rows as make
import pytest
from league_rows import BRACKETS, BUDGET, RATES, TOPIC
from league_standings import action_of, is_ranked, of_a_mean, only, said, standing
from outcomes import expect_facts

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.gate import _findings, gate, registered_gates
from metaseq_lm.league.gates import _KINDS, examine
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Context
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row


def test_a_healthy_league_has_no_finding(baseline: Row, row: Row) -> None:
    for result in examine(make.make_context(baseline, row)):
        assert result.findings == ()
        assert is_ranked(result, BRACKETS) and is_ranked(result, TOPIC)


def test_gates_come_by_stage() -> None:
    modules = [gate.__module__.rpartition(".")[2] for gate in registered_gates()]
    kinds = ["parity", "data", "bound", "loss", "collapse", "score", "control", "score"]
    assert [name for name, _ in groupby(modules)] == [f"{kind}_gates" for kind in kinds]
    assert {kind.__name__.rpartition(".")[2] for kind in _KINDS} == {*modules}


PLUGIN = """
from metaseq_lm.league.gate import GAIN, SCORES, gate
from metaseq_lm.league.standings import FLAG, GateFinding

@gate(SCORES, {"my gate": "a rate of electric"}, GAIN)
def my_gate(row, context):
    \"\"\"Electric is flagged.\"\"\"
    if row.objective == "electric":
        yield GateFinding("my gate", FLAG, "it is electric", context.primary)
"""


def test_a_gate_of_a_plug_in_is_listed_and_judges_rows(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    program = ["-c", "import sys; from metaseq_lm.cli import main; sys.exit(main(sys.argv[1:]))"]

    def output(*words: str) -> str:
        command = [sys.executable, *program, *words, "--user-dir", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert re.search(r"my gate +Electric is flagged\. +\[mine\]", output("list", "gates"))
    table = output("league", "report", "balanced", "--budgets", "2.5e11", "--out", f"{tmp_path}/R")
    assert re.search(r"my gate", table)
    with pytest.raises(UsageError, match="nowhere"):
        gate("nowhere")


def test_all_findings_of_gates_are_in_the_reference() -> None:
    page = Path(__file__).parents[3].joinpath("docs/reference/gates.md").read_text()
    named = set(re.findall(r"^\| ([a-z ]+?) \|", page, re.MULTILINE))
    assert set(_findings) - {"baseline"} <= named


def one_run(row: Row) -> Row:
    """Return a row whose seeds are one run."""
    return replace(row, runs=tuple(make.with_values(seed=i)(row.runs[0]) for i in range(8)))


def plateau(row: Row) -> Row:
    """Return a row whose losses are those of word frequencies."""
    return make.change(row, make.with_losses(lambda seed: make.losses(seed, 4.07)))


@pytest.mark.parametrize(
    ("plant", "action"),
    [
        (lambda row: make.change(row, make.with_results(flops=BUDGET / 2)), REFUSE),
        (one_run, REFUSE),
        (plateau, NOTE),
        (lambda row: replace(row, control=None), ""),
    ],
    ids=["half the budget", "one run", "word frequencies", "no control"],
)
def test_rows_of_a_bad_baseline_are_refused(
    plant: Callable[[Row], Row], action: str, baseline: Row, row: Row
) -> None:
    bad = plant(replace(baseline, control=row.control))
    result = standing(bad, row)
    assert action_of(result, BRACKETS) == action
    if action:
        assert "baseline causal" in only(result.findings, "baseline").reason


def test_a_row_without_a_baseline_says_so(baseline: Row, row: Row) -> None:
    finding = only(standing(replace(baseline, budget=2e10), row).findings, "baseline")
    assert finding.action == NOTE and "causal" in finding.reason


def test_runs_of_an_archive_are_judged_alike(baseline: Row, row: Row, tmp_path: Path) -> None:
    row = make.change(plateau(row), make.with_results(code="c2"))
    tuning = replace(row.tuning, chosen={"optimizer.lr": RATES[-1]})
    row = make.change(replace(row, tuning=tuning), make.with_values(optimizer__lr=RATES[-1]))
    archive.write(tmp_path / "row.jsonl", row.runs)
    read = replace(row, runs=tuple(archive.read(tmp_path / "row.jsonl")))
    context: Context = make.make_context(baseline, row)
    expected = examine(context)[1].findings
    assert {f.gate for f in expected} >= {"code", "edge of the grid", "plateau"}
    assert examine(replace(context, rows=(baseline, read)))[1].findings == expected


MEAN_FAULTS: dict[str, tuple[Callable[[Run], Run], str, str]] = {
    "other items of a part": (
        make.with_suite("topic", "last", data="d2", accuracy=0.6),
        *("suites", REFUSE),
    ),
    "ties of a part": (
        make.with_suite("pairs", "brackets", accuracy=0.9, ties=50),
        *("ties", FLAG),
    ),
    "items of a part left out": (
        make.with_suite("topic", "last", n=400, accuracy=0.6),
        *("left out", FLAG),
    ),
    "constant scores of a part": (
        make.with_suite("pairs", "brackets", accuracy=0.9, soft_accuracy=0.5),
        *("constant", VOID),
    ),
}


@pytest.mark.parametrize("fault", MEAN_FAULTS)
def test_faults_of_a_part_are_those_of_the_mean(fault: str, baseline: Row, row: Row) -> None:
    healthy = standing(*of_a_mean(baseline, row), metrics=("both",))
    assert healthy.findings == () and is_ranked(healthy, "both")
    edit, gate, action = MEAN_FAULTS[fault]
    bad = standing(*of_a_mean(baseline, make.change(row, edit)), metrics=("both",))
    finding = only(bad.findings, gate)
    assert (finding.action, finding.metric) == (action, "both")


def test_a_term_of_the_loss_is_the_better_the_smaller(baseline: Row, row: Row) -> None:
    """Its name, valid.mlm, does not say so."""
    context = make.make_context(baseline, row, metrics=("valid.mlm", BRACKETS))
    assert context.lower_is_better("valid.mlm") and not context.lower_is_better(BRACKETS)
    assert "below untrained" not in said(baseline, row, metrics=("valid.mlm",))
    worse = make.change(row, make.with_results(metrics={"valid": {"loss": 5.0, "mlm": 5.0}}))
    finding = said(baseline, worse, metrics=("valid.mlm",))["below untrained"]
    expect_facts(finding.reason, "valid.mlm is above")
