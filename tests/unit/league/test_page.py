import csv
import io
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.figures import VERDICT_COLOURS, draw_panel
from metaseq_lm.league.page import secondary_table, standings_table, write_page
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Finding
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, Rule
from metaseq_lm.reporting.formats import to_csv
from metaseq_lm.reporting.numbers import Metric

PAIRS, PROBE = "pairs.accuracy", "probe.accuracy"
NOISE = [-0.02, -0.01, -0.005, 0.0, 0.0, 0.005, 0.01, 0.02]
UNTRAINED = {PAIRS: [0.5, 0.52], PROBE: [0.4, 0.41]}


def entry(name, pairs, probe=0.5, budget=1e10, findings=()):
    scores = {PAIRS: [pairs + x for x in NOISE], PROBE: [probe + x for x in NOISE]}
    return Entry(name, budget, scores, UNTRAINED, findings=findings)


def standings(*entries):
    return Standings(
        "Small league, plan 0123",
        [Metric.of(PAIRS, [0.5]), Metric.of(PROBE, [0.5])],
        "masked",
        Rule(0.04),
        entries,
        {PAIRS: {"chance": 0.5, "perfect model": 1.0}},
    ).decided()


PLATEAU = Finding("unigram plateau", VOID, "valid loss 4.08 is not below 4.08")
EDGE = Finding("rate at the edge", FLAG, "lr=0.1 is the largest of its grid")
TRANSITION = Finding("in transition", NOTE, "2 of 8 seeds solve the task", PAIRS)
BELOW = Finding("untrained", FLAG, "50.0 is below the untrained 55.0", PROBE)
WORLD = Finding("parity", REFUSE, "another world")


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


def test_a_baseline_that_is_not_ranked_decides_nothing():
    league = standings(entry("masked", 0.6, findings=[EDGE]), entry("causal", 0.9))
    assert [e.decision for e in league.entries] == [None, None]


def test_no_format_has_the_number_of_a_void_or_refused_row(mixed, tmp_path):
    paths = write_page(mixed, tmp_path / "page")
    assert {p.name for p in paths} == {
        *(f"standings.{ending}" for ending in ("txt", "md", "csv", "html", "png")),
        "ladder.png",
    }
    for path in paths:
        if path.suffix != ".png":
            text = path.read_text()
            assert "unigram plateau" in text and "90.00" in text.replace("0.9", "90.00")
            for hidden in ("12.3", "0.123", "45.6", "0.456", "78.9", "0.789"):
                assert hidden not in text, path


def test_findings_are_explained_below_the_table(mixed):
    text = "\n".join(standings_table(mixed).notes)
    assert "a (rate at the edge): rtd at 1.0e10: lr=0.1" in text
    assert "causal at 1.0e10: 2 of 8 seeds" in text
    assert "electric at 1.0e10, void (unigram plateau): valid loss" in text
    assert BELOW.reason not in text  # it is about the other metric
    assert "chance 50.00, perfect model 100.00" in text
    assert "better: causal; equivalent: hybrid; not ranked: rtd, electric, other." in text


def test_other_metrics_have_their_own_findings_and_no_verdicts(mixed):
    table = secondary_table(mixed)
    probe = column(table, "probe.accuracy (%)")
    assert probe["1.0e10", "causal"].text.endswith(" a")
    assert probe["1.0e10", "rtd"].text.endswith(" b")
    assert probe["1.0e10", "electric"].text == "void"
    assert probe["1.0e10", "hybrid"].best
    assert any(BELOW.reason in note for note in table.notes)
    assert not any(EDGE.reason in note for note in table.notes)
    assert secondary_table(replace(mixed, metrics=mixed.metrics[:1])) is None


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
    league = Standings("x", [metric], "masked", Rule(0.04, lower_is_better=True), losses).decided()
    assert [e.objective for e in league.at(1e10, metric)] == ["hybrid", "masked", "causal"]
    assert [e.decision.verdict for e in league.entries if e.decision] == ["worse", "better"]


def test_the_figure_has_hollow_dots_letters_and_verdicts(mixed):
    axes = Figure().subplots()
    draw_panel(axes, mixed, mixed.at(1e10, mixed.primary))
    assert [t.get_text() for t in axes.get_yticklabels()][3:5] == ["rtd a", "electric"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    faces = [line.get_markerfacecolor() for line in dots]
    assert faces[0] == VERDICT_COLOURS[BETTER] and faces[4:] == ["none", "none"]
    means = [line for line in axes.lines if line.get_marker() == "|"]
    assert len(means) == 4
    references = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0]
    assert 50.0 in references and 100.0 in references
