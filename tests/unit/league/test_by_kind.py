"""Standings by kind of labels: the screen, its marks, verdicts of kinds, the sentence of --with."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from league_plans import plan_with
from outcomes import expect_facts

from metaseq_lm.league.columns import value_of
from metaseq_lm.league.describe import describe_answer
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.gates import GATES
from metaseq_lm.league.page import _other_tables, standings_table, write_page
from metaseq_lm.league.plan_files import BALANCED, parse_plan, read_plan
from metaseq_lm.league.standings import FLAG, VOID, GateFinding
from metaseq_lm.league.terminal import SIZE, terminal_text
from metaseq_lm.league.verdict import DecisionRule, decide_all
from metaseq_lm.reporting.formats import to_csv
from metaseq_lm.reporting.numbers import Metric

NOISE = [-0.02, -0.01, -0.005, 0.0, 0.0, 0.005, 0.01, 0.02]
KINDS = ("left", "right", "both", "at_end", "either", "adapted")
BASE = dict.fromkeys(KINDS, 0.5)
MINE = BASE | {"right": 0.9, "adapted": 0.6, "left": 0.2, "both": 0.53}


def row(name, values, budget=1e12, findings=()):
    scores = {kind: [value + x for x in NOISE] for kind, value in values.items()}
    scores["balanced"] = [sum(values.values()) / len(values) + x for x in NOISE]
    return StandingsEntry(name, budget, scores, findings=findings)


def league(*entries):
    percent = {"percent": True, "lower_is_better": False}
    kinds = [Metric(kind, **percent) for kind in KINDS]
    metrics = [Metric("balanced", **percent), *kinds]
    rule = DecisionRule(0.03, comparisons=2)
    return Standings("x, plan 01", metrics, "causal", rule, entries, kinds=kinds).decided()


def sign(standings, entry, kind):
    """The mark of the verdict on a kind."""
    return value_of("score", standings.about(kind), entry).sign


def test_kinds_are_the_innermost_means_below_the_primary_one_then_the_secondary_ones() -> None:
    assert read_plan(BALANCED)[0].comparison.kinds == KINDS
    flat = {"a": ["x.share"], "b": ["y.share"]}
    for means, metric, kinds in (
        (flat, "a", ()),
        (flat | {"m": ["a", "b"]}, "m", ("a", "b")),
        (flat | {"m": ["a", "x.share"], "n": ["m", "a"]}, "n", ("a", "x.share", "b")),
    ):
        comparison = {"comparison__metric": metric, "comparison__means": means}
        plan = parse_plan(plan_with(**comparison, comparison__secondary=["b"]))
        assert plan.comparison.kinds == kinds


def test_each_kind_has_verdicts_of_its_own_corrected_among_themselves() -> None:
    weak = row("weak", BASE | {"left": 0.52})
    standings = league(row("causal", BASE), row("mine", MINE), weak)
    causal, mine, other = standings.entries
    assert not causal.of_kinds and set(mine.of_kinds) == set(KINDS)
    pairs = [(entry.scores["left"], causal.scores["left"]) for entry in (mine, other)]
    alone = decide_all(pairs, standings.rule)
    assert [entry.of_kinds["left"].corrected for entry in (mine, other)] == [
        decision.corrected for decision in alone
    ]
    by_kind = {kind.name: sign(standings, mine, kind) for kind in standings.kinds}
    assert by_kind == dict(zip(KINDS, ("-", "+", "+", "=", "=", "+")))


def test_a_baseline_that_cannot_see_what_a_label_needs_is_beaten() -> None:
    """While a row at the level of no training is neither better nor equivalent."""
    assert "untrained" in GATES.entries  # what its findings lack is known
    blind = GateFinding("untrained", FLAG, "x", "right")
    standings = league(
        row("causal", BASE, findings=[blind]),
        row("mine", MINE),
        row("flat", BASE, findings=[blind]),
        row("void", MINE, findings=[GateFinding("ceiling", VOID, "x", "right")]),
    )
    right = standings.kinds[1]
    marks = {entry.objective: sign(standings, entry, right) for entry in standings.entries}
    assert marks == {"causal": "?", "mine": "+", "flat": "?", "void": ""}
    lines = {line.split()[0]: line for line in terminal_text(standings).splitlines()}
    assert "90 ±1 +" in lines["mine"] and "50 ±1  ?" in lines["causal"].replace("? ", " ?")


def test_the_answer_on_one_objective_leaves_out_the_others() -> None:
    flagged = row("mine", MINE, findings=[GateFinding("untrained", FLAG, "x", "at_end")])
    two = league(row("causal", BASE), flagged, row("low", BASE | {"left": 0.4}))
    answer = describe_answer(two, "mine")
    expect_facts(answer, "mine leads causal in balanced", "causal leads in left")
    assert answer.endswith("at end and either.") and "low" not in answer
    assert describe_answer(two, "other").startswith("Nothing is decided")
    small = league(*two.entries, row("causal", BASE, 1e10), row("mine", BASE, 1e10))
    expect_facts(describe_answer(small, "mine"), "At 1.0e12 FLOPs", "the largest of 2")


def test_the_answer_names_who_leads_in_which_kind() -> None:
    league_of_two = league(row("causal", BASE), row("mine", MINE), row("low", BASE | {"left": 0.4}))
    answer = describe_answer(league_of_two)
    overall, _, kinds = answer.partition("by kind of end task")
    expect_facts(overall, "mine leads causal", "p 0.", "points")
    assert re.search(r"mine leads in right \(\+40\.0, p .*\) and adapted \(\+10\.0", kinds)
    expect_facts(kinds, "causal leads in left")
    expect_facts(kinds.rpartition("none")[2], "end", "either")


@pytest.mark.parametrize("count, budgets", [(10, 2), (10, 3), (14, 2), (40, 1)])
def test_the_screen_fits_or_shows_the_largest_budget(count: int, budgets: int) -> None:
    names = ["causal", *(f"objective_with_a_long_name_{i}" for i in range(1, count))]
    flag = [
        GateFinding("untrained", FLAG, "x", "balanced"),
        GateFinding("untrained", FLAG, "x", "left"),
    ]
    sizes = [10.0 ** (10 + i) for i in range(budgets)]
    entries = [row(n, MINE, b, flag if n == names[3] else ()) for b in sizes for n in names]
    lines = terminal_text(league(*entries), [Path("L/report/standings.txt")]).splitlines()
    assert max(map(len, lines)) <= SIZE[1]
    shown = [line for line in lines if line.startswith(("causal", "objective_"))]
    whole = count * budgets <= 20
    assert len(shown) == (count * budgets if whole else count)
    assert len(lines) <= SIZE[0] or count > SIZE[0]
    assert whole or budgets == 1 or lines[-1].startswith("1.0e10")
    assert any("L/report" in line for line in lines)


def test_tables_have_the_verdict_of_each_kind() -> None:
    standings = league(row("causal", BASE), row("mine", MINE))
    table = _other_tables(standings)[0]
    assert len(table.rows) == 2 * len(KINDS)
    verdicts = {(r[1].text, r[2].text): r[-1].text for r in table.rows}
    assert verdicts["mine", "left"].startswith("worse") and verdicts["causal", "left"] == "baseline"
    lines = list(csv.DictReader(io.StringIO(to_csv(standings_table(standings)))))
    (mine,) = [line for line in lines if line["objective"] == "mine"]
    assert mine["right_verdict"] == "better" and float(mine["right_difference"]) > 0.3
    plain = replace(standings, kinds=()).decided()
    assert not _other_tables(replace(plain, metrics=plain.metrics[:1]))
    assert "right_verdict" not in to_csv(standings_table(plain))


def test_the_page_has_a_figure_of_the_kinds_with_their_values(tmp_path: Path) -> None:
    untrained = {kind: [0.1, 0.12] for kind in KINDS}
    void = GateFinding("ceiling", VOID, "x", "left")
    mine = replace(row("mine", MINE, findings=[void]), untrained=untrained)
    files = write_page(league(row("causal", BASE), mine), tmp_path)
    assert tmp_path / "kinds.png" in files and (tmp_path / "kinds.png").read_bytes()[1:4] == b"PNG"
    page = (tmp_path / "standings.html").read_text()
    assert "mine: 90.00 ± 1.22 at right" in page
    assert "mine: 11.00 ± 1.41 at left, untrained" in page
    assert "mine: 20.00 ± 1.22 at left" not in page  # a void number
    # Without kinds there is none, and that of an earlier page is gone.
    flat = replace(league(row("causal", BASE), row("mine", MINE)), kinds=[])
    write_page(flat, tmp_path)
    assert not (tmp_path / "kinds.png").exists()
