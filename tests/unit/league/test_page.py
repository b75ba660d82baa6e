import csv
import html
import inspect
import io
import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from metaseq_lm.league import control_gates, gates, loss_gates, parity_gates, score_gates
from metaseq_lm.league.assembly import LeagueRuns, repeat
from metaseq_lm.league.describe import describe_answer, describe_verdicts
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.figures import _VERDICT_COLOURS, _draw_panel, _rows_at
from metaseq_lm.league.folder import Added, Contents
from metaseq_lm.league.gate import said_of
from metaseq_lm.league.page import (
    _finding_tables,
    _other_tables,
    standings_table,
    write_page,
)
from metaseq_lm.league.plan_files import LAPTOP, read_plan
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, GateFinding
from metaseq_lm.league.terminal import terminal_text
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, WORSE, DecisionRule
from metaseq_lm.reporting.formats import to_csv, to_text
from metaseq_lm.reporting.numbers import Metric

PAIRS, PROBE = "pairs.accuracy", "probe.accuracy"
NOISE = [-0.02, -0.01, -0.005, 0.0, 0.0, 0.005, 0.01, 0.02]
UNTRAINED = {PAIRS: [0.5, 0.52], PROBE: [0.4, 0.41]}


def entry(name, pairs, probe=0.5, budget=1e10, findings=()):
    scores = {PAIRS: [pairs + x for x in NOISE], PROBE: [probe + x for x in NOISE]}
    return StandingsEntry(name, budget, scores, UNTRAINED, findings=findings)


def standings(*entries):
    return Standings(
        "Small league, plan 0123",
        [Metric.of(PAIRS, [0.5]), Metric.of(PROBE, [0.5])],
        "masked",
        DecisionRule(0.04),
        entries,
        {PAIRS: {"chance": 0.5, "perfect model": 1.0}},
    ).decided()


PLATEAU = GateFinding("unigram plateau", VOID, "valid loss 4.08 is not below 4.08")
EDGE = GateFinding("rate at the edge", FLAG, "lr=0.1 is the largest of its grid")
TRANSITION = GateFinding("in transition", NOTE, "2 of 8 seeds solve the task", PAIRS)
BELOW = GateFinding("untrained", FLAG, "50.0 is below the untrained 55.0", PROBE)
WORLD = GateFinding("parity", REFUSE, "another world")


@pytest.fixture
def mixed():
    return standings(
        entry("masked", 0.6),
        entry("causal", 0.9, findings=[TRANSITION, BELOW]),
        entry("hybrid", 0.61, probe=0.7),
        entry("rtd", 0.95, findings=[EDGE]),
        entry("electric", 0.123, probe=0.789, findings=[PLATEAU]),
        entry("other", 0.456, findings=[WORLD]),
        entry("causal", 0.95, budget=2e10),
    )


def column(table, title):
    at = table.head.index(title)
    return {(row[0].text, row[1].text): row[at] for row in table.rows}


def test_rows_are_ranked_then_flagged_then_void(mixed):
    table = standings_table(mixed)
    names = [row[1].text for row in table.rows]
    assert names == ["causal", "hybrid", "masked", "rtd", "electric", "other", "causal"]
    scores = column(table, "pairs.accuracy (%)")
    assert scores["1.0e10", "causal"].text == "90.00 ± 1.22" and scores["1.0e10", "causal"].best
    assert scores["1.0e10", "rtd"].text == "95.00 ± 1.22 a" and not scores["1.0e10", "rtd"].best
    assert [cell.best for cell in scores.values()].count(True) == 1
    assert column(table, "untrained")["1.0e10", "rtd"].text == "51.00 ± 1.41"


def test_verdicts_are_of_ranked_rows_beside_the_baseline(mixed):
    verdicts = {key: cell.text for key, cell in column(standings_table(mixed), "verdict").items()}
    assert verdicts["1.0e10", "causal"] == BETTER
    assert verdicts["1.0e10", "hybrid"] == EQUIVALENT
    assert verdicts["1.0e10", "masked"] == "baseline"
    assert verdicts["1.0e10", "rtd"] == "not ranked: rate at the edge"
    assert verdicts["1.0e10", "electric"] == "void: unigram plateau"
    assert "no baseline" in verdicts["2.0e10", "causal"]
    decisions = [e.decision for e in mixed.entries if e.decision]
    assert [d.rule.comparisons for d in decisions] == [2, 2]


def test_a_row_without_a_gain_can_be_worse_but_nothing_else():
    """A low score must not protect from the verdict, nor a flag be lost."""
    flat = GateFinding("untrained", FLAG, "at the level of the untrained model", PAIRS)
    league = standings(
        entry("masked", 0.6),
        entry("low", 0.4, findings=[flat]),
        entry("high", 0.9, findings=[flat]),
        entry("same", 0.6, findings=[flat]),
        entry("edge", 0.4, findings=[flat, EDGE]),
        entry("part", 0.4, findings=[GateFinding("part below chance", FLAG, "x", PAIRS)]),
    )
    cells = column(standings_table(league), "verdict")
    verdicts = {name: cell.text for (_, name), cell in cells.items()}
    assert verdicts["low"] == f"{WORSE}: untrained"
    assert verdicts["part"] == f"{WORSE}: part below chance"
    for name in ("high", "same"):
        assert verdicts[name] == "not ranked: untrained"
    assert verdicts["edge"] == "not ranked: untrained, rate at the edge"
    (sentence,) = describe_verdicts(league)
    assert "worse: low, part; not ranked:" in sentence and "better" not in sentence


def test_what_a_plan_has_no_runs_of_is_named(mixed):
    sentence = "Of the plan there are no runs yet of span, 1.0e12 FLOPs."
    partial = replace(mixed, remarks=[sentence])
    assert sentence in " ".join(standings_table(partial).notes)
    assert sentence in " ".join(terminal_text(partial).split())
    assert "no runs yet" not in terminal_text(mixed)


def test_a_baseline_that_is_not_ranked_decides_nothing():
    league = standings(entry("masked", 0.6, findings=[EDGE]), entry("causal", 0.9))
    assert [e.decision for e in league.entries] == [None, None]


@pytest.mark.parametrize(
    "scores, findings, words",
    [
        ((0.9, 0.3), (), ("one leads", "+30.0 points", "90 % interval", "1 better, 1 worse")),
        ((0.5, 0.3), (), ("masked leads", "the nearest, one, differs by -10.0", "2 worse")),
        ((0.61, 0.6), (), ("none is shown to be better", "2 equivalent")),
        ((0.6, 0.6), (), ("nothing is decided", "2 undecided")),
        ((0.9, 0.3), (EDGE,), ("Nothing is decided", "masked")),
    ],
)
def test_the_answer_is_computed_from_the_verdicts(scores, findings, words):
    rows = [entry(name, score) for name, score in zip(("one", "two"), scores)]
    league = standings(entry("masked", 0.6, findings=findings), *rows)
    answer = describe_answer(league if "undecided" not in words[1] else wide(league))
    for word in words:
        assert word in answer


def wide(league):
    """The same league with a smallest effect that nothing reaches."""
    return replace(league, rule=DecisionRule(0.001)).decided()


def test_the_page_has_the_answer_first_and_twelve_rows(tmp_path):
    rows = [entry(f"o{i}", 0.5 + i / 50) for i in range(14)]
    write_page(replace(standings(entry("masked", 0.6), *rows), plan=("small", "h1")), tmp_path)
    text = (tmp_path / "standings.html").read_text()
    assert re.search(r"<h1>small</h1>\s*<p.*\s*<p class=\"lead\">At 1.0e10 FLOPs", text)
    assert text.index('class="lead"') < text.index("plan 0123") < text.index("<svg")
    body = text[text.index('id="table-1-1"') :].partition("</table>")[0]
    assert body.count("<tr>") == 13 and body.count('<tr class="more">') == 3
    open_part, *folded = re.split(r'<details id="part-', text)
    assert len(re.findall("<h2", open_part)) == 2 and len(folded) == 4


def test_no_format_has_the_number_of_a_void_or_refused_row(mixed, tmp_path):
    paths = write_page(mixed, tmp_path / "page")
    assert {p.name for p in paths} == {
        *(f"standings.{ending}" for ending in ("txt", "md", "csv", "html", "png")),
        "ladder.png",
    }
    for path in paths:
        if path.suffix != ".png":
            text = re.sub(r'="[^"]*"', "", path.read_text())  # coordinates, which are no scores
            assert "unigram plateau" in text and "90.00" in text.replace("0.9", "90.00")
            for hidden in ("12.3", "0.123", "45.6", "0.456", "78.9", "0.789"):
                assert hidden not in text, path


def test_the_html_page_begins_with_verdicts_and_gates_and_ends_with_the_plan(mixed, tmp_path):
    contents = Contents(*read_plan(LAPTOP), (Added("mine", {"options": ["task.mask_prob=0.3"]}),))
    last = repeat(LeagueRuns(contents, ()), "metaseq-lm league report L")
    write_page(mixed, tmp_path, last, reload=7)
    text = html.unescape((tmp_path / "standings.html").read_text())
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert headings[:3] == ["Standings", "Why rows are not ranked", "How sure this is"]
    assert headings[-1] == "To repeat it" and 'data-watch="7"' in text
    end = text[text.rindex("To repeat it") :]
    for words in (contents.plan.hash, "name: laptop division", "metaseq-lm league report L"):
        assert words in end
    assert "metaseq-lm league --out L --with task.mask_prob=0.3 --name mine" in end
    assert "rtd: 95.00 ± 1.22 a (8 seeds), not ranked: rate at the edge" in text


def test_tables_of_the_html_page(mixed):
    barring, others, notes = _finding_tables(mixed)
    assert [[row[0].text, *(cell.text for cell in row[2:4])] for row in barring.rows] == [
        ["electric", "unigram plateau", "void"],
        ["other", "parity", "refused"],
        ["rtd", "rate at the edge", "not ranked (a)"],
    ]
    assert [row[4].text for row in others.rows] == [PROBE]
    assert TRANSITION.reason in [row[-1].text for row in notes.rows]


def test_findings_are_explained_below_the_table(mixed):
    text = "\n".join(standings_table(mixed).notes)
    assert "a (rate at the edge): rtd at 1.0e10: lr=0.1" in text
    assert "causal at 1.0e10: 2 of 8 seeds" in text
    assert "electric at 1.0e10, void (unigram plateau): valid loss" in text
    assert BELOW.reason not in text  # it is about the other metric
    assert "chance 50.00, perfect model 100.00" in text
    assert "better: causal; equivalent: hybrid; not ranked: rtd, electric, other." in text


def test_other_metrics_have_their_own_findings_and_no_verdicts(mixed):
    table = _other_tables(mixed)[-1]
    probe = column(table, "probe.accuracy (%)")
    assert probe["1.0e10", "causal"].text.endswith(" a")
    assert probe["1.0e10", "rtd"].text.endswith(" b")
    assert probe["1.0e10", "electric"].text == "void"
    assert probe["1.0e10", "hybrid"].best
    assert any(BELOW.reason in note for note in table.notes)
    assert not any(EDGE.reason in note for note in table.notes)


def test_csv_has_unrounded_numbers(mixed):
    lines = list(csv.DictReader(io.StringIO(to_csv(standings_table(mixed)))))
    causal = lines[0]
    assert float(causal["mean"]) == pytest.approx(0.9)
    assert float(causal["difference"]) == pytest.approx(0.3)
    assert float(causal["p_holm"]) == pytest.approx(2 * float(causal["p"]))
    assert causal["verdict"] == BETTER and float(causal["untrained_mean"]) == pytest.approx(0.51)
    assert "in transition" in causal["findings"]


def test_lower_losses_are_ranked_first():
    entries = [entry("masked", 0.6), entry("causal", 0.9), entry("hybrid", 0.3)]
    metric = Metric("loss", percent=False, lower_is_better=True)
    losses = [replace(e, scores={"loss": e.scores[PAIRS]}) for e in entries]
    league = Standings(
        "x", [metric], "masked", DecisionRule(0.04, lower_is_better=True), losses
    ).decided()
    assert [e.objective for e in league.at(1e10)] == ["hybrid", "masked", "causal"]
    assert [e.decision.verdict for e in league.entries if e.decision] == ["worse", "better"]


def test_the_figure_has_hollow_dots_letters_and_verdicts(mixed):
    axes = Figure().subplots()
    _draw_panel(axes, mixed, _rows_at(mixed, 1e10))
    assert [t.get_text() for t in axes.get_yticklabels()][3:5] == ["rtd", "electric"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    faces = [line.get_markerfacecolor() for line in dots]
    assert faces[0] == _VERDICT_COLOURS[BETTER] and faces[4:] == ["none", "none"]
    means = [line for line in axes.lines if line.get_marker() == "|"]
    assert len(means) == 4
    references = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]
    assert 50.0 in references and 100.0 in references


def test_a_row_of_the_figure_is_as_high_as_its_text(mixed):
    gates = ("edge of the grid", "below untrained", "shuffled", "control")
    findings = [GateFinding(gate, FLAG, "x") for gate in gates]
    rows = [entry("masked", 0.6), entry("rtd", 0.95, findings=findings)]
    heights = {row.objective: height for row, *_, height in _rows_at(standings(*rows), 1e10)}
    low, high = heights["masked"], heights["rtd"]
    assert high > low and high >= 3 * 0.15


@pytest.fixture
def large():
    """Nine objectives at three budgets, all gates and verdicts, eight other metrics."""
    names = [f"objective_{i}" for i in range(8)]
    kinds = ("depth", "head_number", "state", "topic", "pairs.brackets", "pairs.copy")
    kinds = [f"{kind}.accuracy" for kind in (*kinds, "pairs.agreement_plain", "pairs.attractor")]
    findings = [(), (TRANSITION,), (EDGE, TRANSITION), (PLATEAU,), (WORLD,)]
    rows = []
    for budget in (2e10, 6e10, 2.5e11):
        for i, name in enumerate(["masked", *names]):
            row = entry(name, 0.5 + 0.03 * i, budget=budget, findings=findings[i % 5 if i else 0])
            others = {kind: [x / 2 for x in row.scores[PAIRS]] for kind in kinds}
            shuffled = {PAIRS: [0.5, 0.51]} if budget == 6e10 else {}
            rows.append(replace(row, scores=row.scores | others, shuffled=shuffled))
    metrics = [Metric.of(name, [0.5]) for name in (PAIRS, *kinds)]
    references = {name: {"chance": 0.25, "bayes": 0.9} for name in kinds}
    references["topic.accuracy"] = references["topic.accuracy"] | {"bag_of_words": 0.6}
    return replace(standings(*rows), metrics=metrics, references=references)


def test_the_terminal_shows_a_screen_of_nine_objectives_at_three_budgets(large, tmp_path):
    text = terminal_text(large, [tmp_path / "standings.txt", tmp_path / "standings.png"])
    lines = text.splitlines()
    assert len(lines) <= 68 and max(map(len, lines[:-2])) <= 120
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("Better, worse"))]
    assert sum(line.startswith("objective_1 ") for line in table) == 3
    assert lines[-2].endswith(f"in {tmp_path}:") and lines[-1] == "standings.txt, standings.png"


def test_the_terminal_has_the_references_that_most_metrics_have(large):
    """One without them has an empty cell, and its own references have no line."""
    references = dict(large.references)
    references["state.accuracy"] = {"majority": 0.77}
    text = terminal_text(replace(large, references=references))
    levels = [line.split() for line in text.splitlines() if line.startswith(("chance ", "bayes "))]
    assert sorted(line for line in levels) == [["bayes", *["90"] * 7], ["chance", *["25"] * 7]]
    assert "majority" not in text and "77" not in text


def test_the_terminal_has_verdicts_and_letters_and_no_reasons(mixed):
    text = terminal_text(mixed)
    assert "1.0e10 FLOPs, beside masked: better: causal; equivalent: hybrid; not ranked" in text
    assert re.search(r"^causal +8 +90\.0 ± 1\.2 +\+30\.0 \(.*\) +better ", text, re.M)
    assert re.search(r"^rtd +8 +95\.0 ± 1\.2 .* not ranked: a +\+44\.0 ± 1\.9$", text, re.M)
    assert re.search(r"^electric +8 +void +void: unigram plateau$", text, re.M)
    assert re.search(r"^a +rate at the edge: ", text, re.M)
    assert re.search(r"^refused +parity: ", text, re.M)
    assert "in transition 1" in text and "For comparison: chance 50.0, perfect model 100.0." in text
    for finding in (EDGE, TRANSITION, BELOW, PLATEAU):
        assert finding.reason not in text
    for hidden in ("12.3", "45.6", "79"):
        assert hidden not in text


def test_the_terminal_marks_flagged_numbers_of_other_metrics(mixed):
    lines = terminal_text(mixed).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Other metrics (%)"))
    other = {line.split()[0]: line.split()[1:] for line in lines[at + 1 :] if line}
    assert other["causal"] == ["50?", "50"]  # at 1e10 it is flagged, at 2e10 it is not
    assert other["hybrid"] == ["70", "-"] and other["electric"] == ["-", "-"]


def test_every_gate_that_hides_or_flags_has_a_meaning():
    named = set()
    for module in (control_gates, gates, loss_gates, parity_gates, score_gates):
        source = inspect.getsource(module)
        named |= set(re.findall(r'(?:Finding\(|by_share\(\w+,)\s*"([a-z ]+)"', source))
    notes = {"validations", "still falling", "loss without score", "in transition"}
    notes |= {"shared control", "embedding layer", "reach"}
    assert len(named) > 20
    assert {name for name in named if said_of(name) == "see the reasons"} <= notes


def test_rows_that_ship_with_the_plan_are_named(mixed):
    shipped = [replace(e, shipped=e.objective != "rtd") for e in mixed.entries]
    for text in (
        to_text(standings_table(replace(mixed, entries=shipped))),
        terminal_text(replace(mixed, entries=shipped)),
    ):
        assert "Run here: rtd at 1.0e10; all other rows ship with the plan." in text
    assert "ship" not in terminal_text(mixed)


def with_parts(*rows):
    """Return standings whose primary metric, "mean", is that of three parts of each row."""
    entries, parts = [], [Metric.of(f"{name}.accuracy", [0.5]) for name in ("a_b", "c", "d")]
    for name, budget, values, findings in rows:
        scores = {part.name: [v + x for x in NOISE] for part, v in zip(parts, values)}
        scores["mean"] = [sum(values) / 3 + x for x in NOISE]
        entries.append(StandingsEntry(name, budget, scores, findings=findings))
    mean = Metric("mean", percent=True, lower_is_better=False)
    league = Standings("x", [mean], "masked", DecisionRule(0.04), entries, parts=parts)
    return league.decided()


def test_the_parts_of_a_mean_stand_beside_it():
    """Those of a void row have no number; the mark of a gate is behind the number."""
    doubt = GateFinding("untrained", FLAG, "x", "a_b.accuracy")
    hidden = GateFinding("ceiling", VOID, "x", "mean")
    league = with_parts(
        ("masked", 1e10, (0.62, 0.36, 0.63), [doubt]),
        ("causal", 1e10, (0.9, 0.36, 0.72), []),
        ("rtd", 1e10, (0.11, 0.12, 0.13), [hidden]),
    )
    text = terminal_text(league)
    assert re.search(r"^masked .* ± \S+ +62\? 36  63 ", text, re.M)
    assert re.search(r"^causal .* ± \S+ +90  36  72 ", text, re.M)
    assert re.search(r"^rtd +8 +void +- +- +- +void: ceiling$", text, re.M)
    assert "a b, c, d" in text.splitlines()[2]
    assert "? behind a part" in " ".join(text.split())
    table = standings_table(league)
    assert [cell.text for cell in column(table, "a b").values()] == ["90", "62?", "-"]
    (line, *_) = csv.DictReader(io.StringIO(to_csv(table)))
    assert float(line["d.accuracy"]) == pytest.approx(0.72)
    assert "behind a part" not in terminal_text(with_parts(("masked", 1e10, (0.6, 0.3, 0.6), [])))


def test_parts_that_do_not_tell_rows_apart_are_named():
    """A void row does not count, and a single row tells nothing."""
    void = GateFinding("ceiling", VOID, "x", "d.accuracy")
    league = with_parts(
        ("masked", 1e10, (0.6, 0.3, 0.5), []),
        ("causal", 1e10, (0.9, 0.301, 0.5), []),
        ("rtd", 1e10, (0.9, 0.3, 0.9), [void]),
        ("masked", 2e10, (0.6, 0.3, 0.5), []),
        ("causal", 2e10, (0.9, 0.3, 0.9), []),
        ("masked", 3e10, (0.6, 0.3, 0.5), []),
    )
    sentence = (
        "Of the parts of mean, c tells the rows apart at none of the budgets; d does not tell the "
        "rows apart at 1.0e10 FLOPs (by Student's t, no two rows differ)."
    )
    assert sentence in standings_table(league).notes
    assert sentence in " ".join(terminal_text(league).split())
    apart = with_parts(("masked", 1e10, (0.6, 0.3, 0.5), []), ("causal", 1e10, (0.9, 0.4, 0.6), []))
    assert "of the parts" not in terminal_text(apart).lower()


# ---------------------------------------------------------------- gains


@pytest.fixture
def ahead():
    """A row that is better by its head start alone, one that gains more, one at its start."""
    starts = {"masked": 0.3, "causal": 0.6, "hybrid": 0.3, "rtd": 0.52}
    flat = GateFinding("untrained", FLAG, "at the level of the untrained model", PAIRS)
    rows = []
    for name, score in (("masked", 0.5), ("causal", 0.8), ("hybrid", 0.7), ("rtd", 0.52)):
        row = entry(name, score, findings=[flat] * (name == "rtd"))
        rows.append(replace(row, untrained={PAIRS: [starts[name] + x for x in NOISE]}))
    return standings(*rows)


def test_a_head_start_is_better_by_the_score_and_not_by_the_gain(ahead):
    table = standings_table(ahead)
    scores = {name: cell.text for (_, name), cell in column(table, "verdict").items()}
    gains = {name: cell.text for (_, name), cell in column(table, "verdict on the gain").items()}
    assert scores["causal"] == scores["hybrid"] == BETTER
    assert gains == {"causal": EQUIVALENT, "hybrid": BETTER, "masked": "", "rtd": WORSE}
    # The gain of one that is not ranked may be worse, as its score may be.
    assert scores["rtd"] == "not ranked: untrained"
    by_name = {name: cell.text for (_, name), cell in column(table, "gain").items()}
    assert by_name["causal"] == "+20.00 ± 1.73" and by_name["rtd"] == "+0.00 ± 1.73"
    text = terminal_text(ahead)
    assert re.search(r" better +\+20\.0 ± 1\.7 +equivalent$", text, re.M)
    assert "secondary" in " ".join(text.split())
    words = {row.objective: right for row, _, right, _ in _rows_at(ahead, 1e10)}
    assert words["causal"].splitlines() == [BETTER, f"gain: {EQUIVALENT}"]


def test_gains_have_intervals_and_their_own_correction(ahead):
    table = _other_tables(ahead)[0]
    head, row = table.head, next(row for row in table.rows if row[1].text == "hybrid")
    cells = {title: cell.text for title, cell in zip(head, row)}
    assert cells["untrained"] == "30.00 ± 1.22" and cells["difference"] == "+20.00"
    (line,) = [
        line
        for line in csv.DictReader(io.StringIO(to_csv(standings_table(ahead))))
        if line["objective"] == "hybrid"
    ]
    low, gain, high = (float(line[key]) for key in ("gain_low", "gain", "gain_high"))
    assert low < 0.4 < high and gain == pytest.approx(0.4)
    assert float(line["gain_p_holm"]) == pytest.approx(3 * float(line["gain_p"]))
    assert line["gain_verdict"] == BETTER
    assert "3 comparisons" in table.notes[0]


def test_rows_without_a_number_have_no_gain(mixed):
    names = {row[1].text for row in _other_tables(mixed)[0].rows}
    assert names == {"masked", "causal", "hybrid", "rtd"}
    bare = replace(mixed, entries=[replace(e, untrained={}) for e in mixed.entries])
    assert not any(table.title.startswith("Gains") for table in _other_tables(bare))
    assert "gain" not in standings_table(bare).head
    assert "gain" not in terminal_text(bare).lower()


def test_the_updates_of_runs_stand_beside_their_number(mixed):
    entries = [replace(e, updates=1234.4) for e in mixed.entries]
    table = standings_table(replace(mixed, entries=entries))
    assert column(table, "updates")["1.0e10", "causal"].text == "1,234"
    assert "updates" not in standings_table(mixed).head
