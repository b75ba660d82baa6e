import csv
import io
import math
import re

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import escape_markdown, seconds_text
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.formats import (
    _escape_tex,
    _to_tex,
    to_csv,
    to_markdown,
    to_text,
)
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.table import choose_metric, pivot_table, setting_table


def table_of(tmp_path, spread="sd", metric=None, better=None):
    runs = find_runs([tmp_path])
    return setting_table(group(runs), choose_metric(runs, metric, better), spread)


def cells(table, head):
    return [row[table.head.index(head)].text for row in table.rows]


def test_mean_and_sample_sd_are_exact(tmp_path):
    for seed, score in enumerate([0.84, 0.85, 0.86], start=1):
        make_run(tmp_path / f"{seed}", score, seed=seed, label="soft")
    make_run(tmp_path / "one", 0.7, label="hard")
    table = table_of(tmp_path)
    assert cells(table, "label") == ["hard", "soft"]
    assert cells(table, "test.accuracy (%)") == ["70.00", "85.00 ± 1.00"]
    assert cells(table, "seeds") == ["1", "3"]
    hard, soft = csv.DictReader(io.StringIO(to_csv(table)))
    assert hard["sd"] == "" and float(hard["mean"]) == 0.7
    assert math.isclose(float(soft["sd"]), 0.01) and math.isclose(float(soft["mean"]), 0.85)


def test_median_and_range(tmp_path):
    for seed, score in enumerate([0.5, 0.6, 0.9], start=1):
        make_run(tmp_path / f"{seed}", score, seed=seed)
    table = table_of(tmp_path, "range")
    assert cells(table, "test.accuracy (%)") == ["60.00 [50.00, 90.00]"]
    assert [table.records[0][k] for k in ("median", "min", "max")] == [0.6, 0.5, 0.9]


@pytest.mark.parametrize(
    "metric, better, best",
    [
        ("test.accuracy", None, "b"),
        ("valid.loss", None, "b"),
        ("test.accuracy", "lower", "a"),
        ("valid.loss", "higher", "a"),
    ],
)
def test_the_best_is_marked_by_the_direction_of_the_metric(tmp_path, metric, better, best):
    make_run(tmp_path / "a", 0.5, label="a")
    make_run(tmp_path / "b", 0.6, label="b")
    table = table_of(tmp_path, metric=metric, better=better)
    assert [row[0].text for row in table.rows if any(cell.best for cell in row)] == [best]


@pytest.mark.parametrize("maximize, best", [(False, "a"), (True, "b")])
def test_without_a_name_the_metric_of_the_best_checkpoint_counts(tmp_path, maximize, best):
    """A masked LM: its first metric, mlm, is a loss, whatever its name sounds like."""
    options = {"best_checkpoint_metric": "mlm", "maximize_best_checkpoint_metric": maximize}
    for name, value in (("a", 2.4), ("b", 3.0)):
        scores = {"valid": {"accuracy": 0.1, "mlm": value}}
        make_run(tmp_path / name, label=name, trainer=options | {"max_update": 400},
                 results={"metrics": scores})  # fmt: skip
    for metric in (None, "valid.mlm"):
        table = table_of(tmp_path, metric=metric)
        assert "valid.mlm" in table.head
        assert [row[0].text for row in table.rows if any(cell.best for cell in row)] == [best]
        assert not any("turns it round" in note for note in table.notes)


@pytest.mark.parametrize("metric", ["valid.mlm", "valid.next_sentence", "train.strangeness"])
def test_a_guessed_direction_is_said(metric):
    assert Metric.of(metric, [1.0]).guessed
    assert not Metric.of(metric, [1.0], "lower").guessed
    assert not any(Metric.of(f"valid.{m}", [1.0]).guessed for m in ("f1_macro", "score", "loss"))


def test_the_guess_is_in_the_notes(tmp_path):
    make_run(tmp_path / "a", results={"metrics": {"valid": {"mlm": 2.4}}})
    assert "Higher valid.mlm counts" in to_text(table_of(tmp_path))


def test_a_term_of_the_loss_is_better_where_it_is_small(tmp_path):
    for name, value in (("a", 2.4), ("b", 3.0)):
        results = {"metrics": {"valid": {"mlm": value, "hits": value}}, "losses": ["mlm"]}
        make_run(tmp_path / name, label=name, results=results)
    for metric, best in (("valid.mlm", "a"), ("valid.hits", "b")):
        table = table_of(tmp_path, metric=metric)
        assert [row[0].text for row in table.rows if any(cell.best for cell in row)] == [best]
        assert any("turns it round" in note for note in table.notes) == (metric == "valid.hits")


def test_nothing_is_best_without_competition(tmp_path):
    make_run(tmp_path / "a", 0.5)
    assert not any(cell.best for row in table_of(tmp_path).rows for cell in row)


def test_runs_without_score_are_counted_and_named(tmp_path):
    make_run(tmp_path / "a", 0.5, seed=1)
    make_run(tmp_path / "b", None, seed=2)
    make_run(tmp_path / "c", 0.5, seed=3, results={"status": "diverged"})
    make_run(tmp_path / "d", math.nan, seed=4)
    make_run(tmp_path / "e", None, label="never")
    table = table_of(tmp_path)
    assert cells(table, "seeds") == ["1/4", "0/1"]
    assert cells(table, "test.accuracy (%)") == ["50.00", "-"]
    notes = "\n".join(table.notes)
    for name, why in (("b", "not finished"), ("c", "diverged"), ("d", "is nan"), ("e", "not fin")):
        assert re.search(rf"Left out: \S*/{name} .*{why}", notes)
    assert all(
        len(re.findall(r"Left out", to(table))) == 4 for to in (to_text, to_markdown, _to_tex)
    )


def test_duplicate_seeds_and_differing_data_are_warned_about(tmp_path):
    make_run(tmp_path / "a", seed=1)
    make_run(tmp_path / "b", seed=1, results={"data": "other"})
    notes = table_of(tmp_path).notes
    assert any("seed 1 counts 2" in note for note in notes)
    assert any("in the data" in note for note in notes)


def test_costs_with_and_without_pretraining(tmp_path):
    make_run(tmp_path / "a", label="scratch")
    assert table_of(tmp_path).head[-3:] == ["FLOPs", "time", "memory"]
    before = {"seconds": 7200.0, "flops": 5e12, "updates": 1, "run": "x"}
    make_run(tmp_path / "b", label="tuned", results={"pretraining": before})
    table = table_of(tmp_path)
    assert cells(table, "FLOPs") == ["1.0e12", "6.0e12"]
    assert cells(table, "own FLOPs") == ["1.0e12", "1.0e12"]
    assert cells(table, "time") == ["1 min", "2 h 1 min"]
    assert [line["own_seconds"] for line in table.records] == [60.0, 60.0]
    assert [line["seconds"] for line in table.records] == [60.0, 7260.0]


def test_words_have_a_column_where_a_run_saw_some(tmp_path):
    """Those before it included; "-" for a run of an earlier version."""
    make_run(tmp_path / "a", label="none", results={"words_seen": 0})
    assert "words" not in table_of(tmp_path).head
    before = {"seconds": 1.0, "flops": 5e12, "updates": 1, "words": 7412345, "run": "x"}
    make_run(tmp_path / "b", label="tuned", results={"pretraining": before, "words_seen": 0})
    make_run(tmp_path / "c", label="unknown")
    assert cells(table_of(tmp_path), "words") == ["0", "7,412,345", "-"]


def test_seeds_of_a_number_of_words_are_one_setting(tmp_path):
    """Their numbers of updates follow from it; those of a run without it are a setting."""
    for seed, updates in ((1, 400), (2, 401)):
        trainer = {"max_update": updates, "max_words": 1e6}
        schedule = {"_name": "linear", "total_updates": updates}
        make_run(tmp_path / str(seed), seed=seed, trainer=trainer, schedule=schedule)
    assert len(table_of(tmp_path).rows) == 1
    trainer = {"max_update": 402, "max_words": 0.0}
    schedule = {"_name": "linear", "total_updates": 402}
    make_run(tmp_path / "3", trainer=trainer, schedule=schedule)
    assert len(table_of(tmp_path).rows) == 2


def test_flops_by_rule_have_a_column_where_a_run_has_them(tmp_path):
    """The run's own, without pretraining; "-" for a setting whose task has no rule."""
    make_run(tmp_path / "a", label="none")
    assert "FLOPs by rule" not in table_of(tmp_path).head
    assert table_of(tmp_path).records[0]["own_flops_by_rule"] is None
    before = {"seconds": 1.0, "flops": 5e12, "updates": 1, "run": "x"}
    for seed in (1, 2):
        results = {"flops_by_rule": seed * 3e11, "pretraining": before}
        make_run(tmp_path / f"b{seed}", label="some", seed=seed, results=results)
    table = table_of(tmp_path)
    assert table.head[-5:] == ["FLOPs", "own FLOPs", "FLOPs by rule", "time", "memory"]
    assert cells(table, "FLOPs by rule") == ["-", "4.5e11"]
    assert "FLOPs by rule" in to_markdown(table)
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [line["own_flops_by_rule"] for line in lines] == ["", "450000000000.0"]


def test_costs_are_medians_where_scores_are(tmp_path):
    for seed, seconds in enumerate((10.0, 20.0, 90.0)):
        memory = {"peak_memory": seconds * 2**20} if seed else {"peak_memory": None}
        make_run(tmp_path / f"{seed}", 0.5, seed=seed, results={"seconds": seconds, **memory})
    assert cells(table_of(tmp_path), "time") == ["40.0 s"]
    assert cells(table_of(tmp_path, "range"), "time") == ["20.0 s"]
    assert cells(table_of(tmp_path), "memory") == ["-"]


def test_the_best_seed_follows_the_direction(tmp_path):
    for seed, score in enumerate((0.5, 0.9, 0.7)):
        make_run(tmp_path / f"{seed}", score, seed=seed)
    make_run(tmp_path / "never", None, label="never")
    assert cells(table_of(tmp_path), "best") == ["90.00", "-"]
    assert cells(table_of(tmp_path, metric="valid.loss"), "best") == ["0.1000", "-"]
    assert table_of(tmp_path).records[0]["best"] == 0.9


def test_the_best_of_a_range_is_the_highest_median(tmp_path):
    for label, scores in (("a", (0.1, 0.6, 0.61)), ("b", (0.5, 0.55, 0.9))):
        for seed, score in enumerate(scores):
            make_run(tmp_path / f"{label}{seed}", score, label=label, seed=seed)
    assert [row[2].best for row in table_of(tmp_path, "range").rows] == [True, False]
    assert [row[2].best for row in table_of(tmp_path, "sd").rows] == [False, True]


def test_a_cost_that_one_run_did_not_record_is_unknown(tmp_path):
    make_run(tmp_path / "a", seed=1)
    make_run(tmp_path / "b", seed=2, results={"flops": None})
    table = table_of(tmp_path)
    assert cells(table, "FLOPs") == ["-"] and cells(table, "time") == ["1 min"]


def test_settings_that_differ_in_their_pretraining_stay_apart(tmp_path):
    make_run(tmp_path / "pre" / "mlm", label="mlm")
    make_run(tmp_path / "pre" / "rtd", label="rtd")
    for name, start in (("a", None), ("b", "pre/mlm"), ("c", "pre/rtd"), ("d", "pre/rtd")):
        make_run(tmp_path / "fine" / name, seed=ord(name), init_from=start)
    table = table_of(tmp_path / "fine")
    assert cells(table, "pretraining.label") == ["mlm", "rtd", "none"]
    assert cells(table, "seeds") == ["1", "2", "1"]


def moons(tmp_path):
    for label, score in (("hard", 0.6), ("soft", 0.7)):
        for n in (5, 10, 20):
            for seed in (1, 2):
                if (label, n) != ("hard", 10):
                    folder = tmp_path / f"{label}_{n}_{seed}"
                    config = {"task.labelled": f"which_moon_{n}"}
                    make_run(
                        folder, score + n / 100 + seed / 1000, config=config, label=label, seed=seed
                    )
    return find_runs([tmp_path])


def test_pivot(tmp_path):
    runs = moons(tmp_path)
    settings, metric = group(runs), choose_metric(runs, None)
    table = pivot_table(settings, metric, "label", "task.labelled")
    assert table.head[1:] == ["which_moon_5", "which_moon_10", "which_moon_20"]
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts[0] == ["hard", "65.15 ± 0.07 (2)", "", "80.15 ± 0.07 (2)"]
    assert texts[1][2] == "80.15 ± 0.07 (2)"
    assert [row[1].best for row in table.rows] == [False, True]
    assert not table.rows[1][2].best, "alone in its column"
    turned = pivot_table(settings, metric, "task.labelled", "label")
    assert [row[1].text for row in turned.rows] == [texts[0][1], "", texts[0][3]]
    assert len(table.records) == 5 and not table.notes


def test_a_pivot_that_mixes_settings_says_so(tmp_path):
    runs = moons(tmp_path)
    metric = choose_metric(runs, None)
    table = pivot_table(group(runs), metric, "label", None)
    assert cells(table, "seeds") == ["4", "6"]
    mixed = [note for note in table.notes if "mixes" in note]
    assert len(mixed) == 2
    expect_facts(mixed[1], "3 settings", "in task.labelled")


def test_default_metric_and_unknown_metric(tmp_path):
    make_run(tmp_path / "a", results={"metrics": {"valid": {"f1": 0.5, "accuracy": 0.5}}})
    runs = find_runs([tmp_path])
    assert choose_metric(runs, None).name == "valid.f1"
    with pytest.raises(UsageError, match="'valid.accuracy'.*Metrics: valid.f1"):
        choose_metric(runs, "valid.acuracy")
    with pytest.raises(UsageError, match="mean 'valid.f1'"):
        choose_metric(runs, "f1")


def test_without_a_finished_run_there_is_still_a_table(tmp_path):
    make_run(tmp_path / "a", None)
    table = table_of(tmp_path)
    assert cells(table, "seeds") == ["0/1"] and "not finished" in table.notes[0]


def test_hostile_labels_survive_every_format(tmp_path):
    label = 'a|b & 50% of_x_ *$y$* {z}\\~^#<i>[1]\x1b[2J\n"q", end'
    make_run(tmp_path / "a", label=label)
    table = table_of(tmp_path)
    assert "\x1b" not in to_text(table) and to_text(table).count("\n") == 5
    row = to_markdown(table).splitlines()[4]
    assert len(re.findall(r"(?<!\\)\|", row)) == len(table.head) + 1
    assert r"a\|b &amp; 50% of_x\_ \*$y$\* {z}\\\~^#&lt;i&gt;\[1\]" in row
    (line,) = csv.DictReader(io.StringIO(to_csv(table)))
    assert line["label"] == label.replace("\x1b", " ").replace("\n", " ")
    tex = _to_tex(table).splitlines()[7]
    assert r"a\textbar{}b \& 50\% of\_x\_ {*}\$y\${*} \{z\}\textbackslash{}" in tex
    assert r"\textasciitilde{}\textasciicircum{}\#\textless{}i\textgreater{}{[}1{]}" in tex
    assert len(re.findall(r"(?<!\\)&", tex)) == len(table.head) - 1


def test_names_with_inner_underscores_stay_readable_in_markdown():
    assert escape_markdown("which_moon_10") == "which_moon_10"
    assert escape_markdown("_x") == r"\_x"
    assert _escape_tex("which_moon_10") == r"which\_moon\_10"


def test_text_columns_line_up(tmp_path):
    make_run(tmp_path / "a", 0.5, label="ä短")
    make_run(tmp_path / "b", 0.6, label="long name")
    lines = to_text(table_of(tmp_path)).splitlines()[4:6]
    assert lines[0].startswith("long name ") and lines[1].startswith("ä短       ")


@pytest.mark.parametrize(
    "seconds, text",
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min"),
        (725, "12 min 5 s"),
        (3599.9, "1 h"),
        (12_000, "3 h 20 min"),
        (86_399, "1 d"),
        (187_200, "2 d 4 h"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_flops():
    assert [flops_text(x) for x in (1.23e12, 0, None, 5.0)] == ["1.2e12", "0", "-", "5.0e0"]


@pytest.mark.parametrize(
    "name, values, text",
    [
        ("test.accuracy", [0.5, 0.7], "60.00 ± 14.14"),
        ("test.f1", [88.5, 90.5], "89.50 ± 1.41"),
        ("valid.loss", [3.21, 3.23], "3.220 ± 0.014"),
        ("valid.loss", [0.0, 0.0], "0.00 ± 0.00"),
        ("valid.perplexity", [12345.6], "12346"),
        ("valid.bits", [0.000123], "0.0001230"),
        ("test.matthews", [0.5], "0.5000"),
    ],
)
def test_digits(name, values, text):
    assert summarise(values).text(Metric.of(name, values)) == text
