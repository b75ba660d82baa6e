import csv
import io
import json
import math
import re

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.formats import _to_tex, to_csv, to_markdown
from metaseq_lm.reporting.numbers import bytes_text, p_text
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.significance import DETECTABLE, choose_test, compare
from metaseq_lm.reporting.stats import TESTS
from metaseq_lm.reporting.stats import Test as SeedTest
from metaseq_lm.reporting.table import choose_metric, setting_table

KEY = "task.labelled"
NOT_BETTER = "not shown to be better"


def sweep(tmp_path, seeds=5, **scores):
    """Runs of each label at n = 5 and 10; n shifts all scores by more than any label does."""
    for label, score in scores.items():
        for n in (5, 10):
            for seed in range(seeds):
                value = score + n / 20 + seed / 1000
                folder = tmp_path / f"{label}_{n}_{seed}"
                config = {KEY: f"which_moon_{n}"}
                make_run(folder, value, config=config, label=label, seed=seed)
    runs = find_runs([tmp_path])
    return group(runs), choose_metric(runs, None)


@pytest.mark.parametrize("sides", [1, 2])
def test_settings_are_compared_with_the_baseline_of_their_own_group(tmp_path, sides):
    settings, metric = sweep(tmp_path, MLM=0.1, better=0.2, worse=0.0)
    found = compare(settings, metric, ["MLM"], SeedTest("permutation", sides))
    assert found.keys == (KEY,)
    for comparison in found.comparisons:
        assert comparison.baseline.values[KEY] == comparison.setting.values[KEY]
    by_label = {
        label: [c for c in found.comparisons if c.setting.values["label"] == label]
        for label in ("MLM", "better", "worse")
    }
    assert all(c.is_baseline and c.texts == ("", "baseline") for c in by_label["MLM"])
    assert all(c.p == sides / 252 and c.holm == 4 * c.p for c in by_label["better"])
    expected = 1.0 if sides == 1 else 2 / 252
    assert all(c.p == expected and c.holm == min(1.0, 4 * c.p) for c in by_label["worse"])
    assert found.family == [c.setting.name for c in found.comparisons if not c.is_baseline]
    verdicts = {c.setting.values["label"]: found.verdict(c) for c in found.tested}
    assert verdicts == {"better": "better", "worse": (NOT_BETTER, "worse")[sides - 1]}
    notes = " ".join(found.notes())
    assert f"{('one', 'two')[sides - 1]}-sided" in notes and "a seed" in notes
    expect_facts(notes, "baseline label=MLM", "equal task.labelled", "the 4 comparisons")
    expect_facts(notes, f" {sides / 252:.2g} for 5 seeds against 5.")
    significant = next(note for note in found.notes() if note.startswith("Significant"))
    assert significant.count("labelled=") == 2 * sides


def test_a_baseline_with_every_key_is_compared_with_all(tmp_path):
    settings, metric = sweep(tmp_path, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["label=MLM", f"{KEY}=which_moon_5"])
    (base,) = [c.setting for c in found.comparisons if c.is_baseline]
    assert base.name == "MLM, labelled=which_moon_5"
    assert all(c.baseline is base and (c.p or c.is_baseline) for c in found.comparisons)


def test_lower_is_better_for_a_loss(tmp_path):
    settings, _ = sweep(tmp_path, MLM=0.1, soft=0.2)  # a higher accuracy is a lower loss here
    loss = choose_metric(find_runs([tmp_path]), "valid.loss")
    assert loss.lower_is_better
    test = SeedTest(sides=1)
    found = compare(settings, loss, ["MLM"], test)
    assert all(c.is_baseline or c.p < 0.01 for c in found.comparisons)
    wrong = choose_metric(find_runs([tmp_path]), "valid.loss", "higher")
    found = compare(settings, wrong, ["MLM"], test)
    assert all(c.is_baseline or c.p > 0.99 for c in found.comparisons)


@pytest.mark.parametrize("test", TESTS)
def test_fewer_than_three_seeds_are_refused(tmp_path, test):
    settings, metric = sweep(tmp_path, 2, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["MLM"], SeedTest(test))
    refused = [c for c in found.comparisons if not c.is_baseline]
    assert all(c.p is None and c.texts == ("n<3", "n<3") for c in refused)
    notes = [note for note in found.notes() if note.startswith("Not compared")]
    assert len(notes) == 2
    expect_facts(notes[0], "soft, labelled=which_moon_5", "2 scored seeds")
    table = setting_table(settings, metric, "sd", found)
    assert all(line["p"] is None and line["p_holm"] is None for line in table.records)


def test_a_seed_run_twice_is_no_third_seed(tmp_path):
    for seed, folder in ((1, "a"), (2, "b"), (2, "c")):
        make_run(tmp_path / f"soft_{folder}", 0.9, label="soft", seed=seed)
    for seed in (1, 2, 3):
        make_run(tmp_path / f"mlm_{seed}", 0.5, label="MLM", seed=seed)
    runs = find_runs([tmp_path])
    _, soft = compare(group(runs), choose_metric(runs, None), ["MLM"]).comparisons
    assert soft.sizes == (2, 3) and soft.p is None


def test_unreachable_significance_is_said(tmp_path):
    settings, metric = sweep(tmp_path, 3, MLM=0.1, soft=0.2)
    (reach,) = [n for n in compare(settings, metric, ["MLM"]).notes() if "fall below" in n]
    expect_facts(reach, "0.1 for 3 seeds", "2 comparisons", "5 seeds a setting")


def test_a_setting_without_baseline_is_named(tmp_path):
    make_run(tmp_path / "extra", 0.5, config={KEY: "which_moon_7"}, label="soft")
    settings, metric = sweep(tmp_path, 3, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["MLM"])
    (lone,) = [c for c in found.comparisons if c.baseline is None]
    assert lone.texts == ("-", "-") and lone.p is None
    assert any("task.labelled=which_moon_7" in note for note in found.notes())


@pytest.mark.parametrize(
    "baseline, message",
    [
        (["MML"], "Did you mean 'MLM'"),
        (["lable=MLM"], "Did you mean 'label'"),
        (["MLM", "soft"], "picks both MLM, labelled=which_moon_5 and soft"),
        ([f"{KEY}=which_moon_5", "MLM", "seed=7"], "no run has that value"),
        (["trainer.max_update=400"], "equal label, task.labelled"),
    ],
)
def test_a_baseline_that_cannot_be_told_names_the_remedy(tmp_path, baseline, message):
    settings, metric = sweep(tmp_path, 3, MLM=0.1, soft=0.2)
    with pytest.raises(UsageError, match=message):
        compare(settings, metric, baseline)


def test_medians_are_compared_for_a_range(tmp_path):
    for label, scores in (("MLM", [0.5, 0.51, 0.52]), ("soft", [0.0, 0.53, 0.54])):
        for seed, score in enumerate(scores):
            make_run(tmp_path / f"{label}{seed}", score, label=label, seed=seed)
    runs = find_runs([tmp_path])
    settings, metric = group(runs), choose_metric(runs, None)
    tests = [choose_test("permutation", 1, spread) for spread in ("sd", "range")]
    means, medians = (compare(settings, metric, ["MLM"], test) for test in tests)
    assert choose_test("welch", 2, "range").centre == "mean"
    assert means.comparisons[1].p > 0.5 > medians.comparisons[1].p
    assert "test of medians" in medians.notes()[0]


def test_every_format_has_the_p_values(tmp_path):
    settings, metric = sweep(tmp_path, 5, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["MLM"])
    table = setting_table(settings, metric, "sd", found)
    soft = found.comparisons[-1]
    at = table.head.index("p")
    assert table.head[at : at + 2] == ["p", "p (Holm)"]
    assert [c.text for c in table.rows[-1][at : at + 2]] == [p_text(soft.p), p_text(soft.holm)]
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(lines[-1]["p"]) == soft.p and float(lines[-1]["p_holm"]) == soft.holm
    assert lines[-1]["baseline"] == "MLM, labelled=which_moon_10" and lines[0]["p"] == ""
    for write in (to_markdown, _to_tex):
        assert re.search(rf"{p_text(soft.p)} \D+{p_text(soft.holm)}", write(table))
    # The best is told within each group, so that soft at n = 5 is one, too.
    assert [[c.best for c in row].count(True) for row in table.rows] == [0, 0, 1, 1]


def test_the_table_shows_differences_and_what_is_detectable(tmp_path):
    settings, metric = sweep(tmp_path, 5, MLM=0.1, soft=0.2)
    comparison = compare(settings, metric, ["MLM"], SeedTest("t", 1), with_detectable=True)
    table = setting_table(settings, metric, "sd", comparison)
    at = table.head.index("difference")
    assert table.head[at - 1 : at + 2] == ["p (Holm)", "difference", DETECTABLE]
    assert DETECTABLE == "detectable (80 % power)"
    # Five scores a thousandth apart have an sd of sqrt(2.5) thousandths; a noncentral t with 8
    # degrees of freedom is above t(0.95, 8) = 1.8595 in four of five draws if it is about 2.7269.
    reach = 2.7269 * math.sqrt(2.5) * math.sqrt(2 / 5) / 1000
    texts = [[cell.text for cell in row[at : at + 2]] for row in table.rows]
    assert texts == [["", ""], ["", ""], *[["+10.00", f"{100 * reach:.2f}"]] * 2]
    assert table.records[-1]["difference"] == pytest.approx(0.1)
    assert table.records[-1]["detectable_80"] == pytest.approx(reach, rel=1e-3)
    assert any(note.startswith(f"{DETECTABLE}: ") for note in table.notes)
    twelve = compare(
        settings, metric, ["MLM"], SeedTest("t", 1), with_detectable=True, seeds=12
    ).notes()
    assert sum(DETECTABLE in n and "12 seeds" in n for n in twelve) == 1
    # A t test has no smallest p to tell of.
    assert not any("cannot fall below" in note for note in table.notes)


def test_three_seeds_never_detect_anything_says_the_table(tmp_path):
    settings, metric = sweep(tmp_path, 3, MLM=0.1, soft=0.2)
    comparison = compare(settings, metric, ["MLM"], with_detectable=True)
    table = setting_table(settings, metric, "sd", comparison)
    at = table.head.index(DETECTABLE)
    assert [row[at].text for row in table.rows] == ["", "", "never", "never"]


def test_the_same_runs_under_two_labels_are_corrected_once(tmp_path):
    scores = {"MLM": 0.1, "best": 0.2, "last": 0.2, "soft": 0.15, "MLM again": 0.1}
    for seed in range(1, 5):
        for label, score in scores.items():
            change = {"trainer.keep_last": 3} if label == "last" else {}
            shown = {"seed": seed, "label": label, "save_dir": label}
            folder = tmp_path / f"{label}-{seed}"
            make_run(
                folder,
                score + seed / 1000,
                config=change,
                results={"seconds": 60 + len(label), "versions": {"torch": label}},
                **shown,
            )
    settings = group(find_runs([tmp_path]))
    metric = choose_metric([run for s in settings for run in s.runs], "test.accuracy")
    table = setting_table(settings, metric, "sd", compare(settings, metric, ["MLM"]))
    columns = dict(zip(table.head, zip(*([cell.text for cell in row] for row in table.rows))))
    assert columns["label"] == ("MLM", "MLM again", "best", "last", "soft")
    assert columns["p (Holm)"] == ("baseline", "same runs", "0.057", "0.057", "0.057")
    assert any("the 2 comparisons" in note for note in table.notes)
    for names in ("best and last", "MLM and MLM again"):
        assert any(note.startswith(f"{names} are the same") for note in table.notes)


def test_runs_that_scored_the_same_with_other_options_are_two(tmp_path):
    for seed in range(1, 5):
        for label, rate in (("MLM", 0.1), ("a", 0.2), ("b", 0.3)):
            config = {"optimizer.lr": rate}
            make_run(
                tmp_path / f"{label}-{seed}",
                0.5 + seed / 1000,
                config=config,
                seed=seed,
                label=label,
            )
    settings = group(find_runs([tmp_path]))
    compared = compare(settings, choose_metric(find_runs([tmp_path]), "test.accuracy"), ["MLM"])
    assert "the 2 comparisons" in compared.notes()[0]
    assert not any("same runs" in line for line in compared.notes())


@pytest.mark.parametrize("sides", [[], ["--sides", "1"]])
def test_the_table_as_json_has_unrounded_numbers_and_the_test(tmp_path, capsys, sides):
    sweep(tmp_path, 4, MLM=0.1, soft=0.2)
    words = [str(tmp_path), "--baseline", "MLM", "--metric", "test.accuracy", *sides]
    assert main(["report", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    test, count = document["test"], 2 if not sides else 1
    assert test["name"] == TESTS[0] and test["sides"] == count and test["unit"].startswith("a seed")
    assert test["family"] == [row["label"] + f", labelled={row[KEY]}" for row in rows[2:]]
    assert [row["is_best"] for row in rows] == [False, False, True, True]
    assert rows[-1]["p"] == pytest.approx(count / 70) and rows[0]["p"] is None
    assert all(row["baseline"].startswith("MLM") and row["scored"] == 4 for row in rows)
    assert any(note.startswith("p: ") for note in document["notes"])
    assert main(["report", *words, "--json", "--out", str(tmp_path / "x")]) == 2


def test_numbers_are_written_short():
    texts = [p_text(p) for p in (None, 1.0, 0.0126, 0.00126, 0.0001, 1e-7)]
    assert texts == ["-", "1.000", "0.013", "0.0013", "0.0001", "<0.0001"]
    sizes = [bytes_text(x) for x in (None, 343 * 2**20, 1023.6 * 2**20, 1.25 * 2**30)]
    assert sizes == ["-", "343 MiB", "1.0 GiB", "1.2 GiB"]
