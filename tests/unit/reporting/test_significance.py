import csv
import io
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.formats import to_csv, to_markdown, to_tex
from metaseq_lm.reporting.numbers import bytes_text, p_text
from metaseq_lm.reporting.settings import group
from metaseq_lm.reporting.significance import (
    DETECTABLE,
    LEVEL,
    RESAMPLES,
    TESTS,
    attainable_level,
    compare,
    detectable,
    holm,
    p_value,
    smallest_p,
)
from metaseq_lm.reporting.table import choose_metric, setting_table

KEY = "task.labelled"


def sd_of(p):
    """Standard deviation of a p estimated from RESAMPLES draws."""
    return math.sqrt(p * (1 - p) / RESAMPLES)


@pytest.mark.parametrize("centre", ["mean", "median"])
@pytest.mark.parametrize("lower", [False, True])
def test_permutation_agrees_with_scipy(centre, lower):
    rng = np.random.default_rng(3)
    for shift, sizes in [(0.0, (5, 6)), (0.7, (3, 4)), (1.5, (5, 6)), (0.7, (8, 8))]:
        a, b = rng.normal(shift, size=sizes[0]), rng.normal(size=sizes[1])
        middle = getattr(np, centre)
        exact = stats.permutation_test(
            (a, b),
            lambda x, y, axis: middle(x, axis=axis) - middle(y, axis=axis),
            alternative="less" if lower else "greater",
            n_resamples=math.inf,
        ).pvalue
        sampled = math.comb(sum(sizes), sizes[0]) > RESAMPLES
        assert sampled == (sizes == (8, 8))
        error = 5 * sd_of(exact) if sampled else 1e-12
        assert abs(p_value(a, b, lower, "permutation", centre) - exact) <= error


@pytest.mark.parametrize("test", ["permutation", "mann-whitney"])
def test_complete_separation_has_the_p_of_one_arrangement(test):
    a, b = [6, 7, 8, 9, 10], [1, 2, 3, 4, 5]
    exact = 1 / 252
    assert p_value(a, b, False, test) == pytest.approx(exact, rel=1e-12)
    assert p_value(a, b, True, test) == 1.0
    assert p_value(b, a, True, test) == p_value(a, b, False, test)
    assert smallest_p(test, 5, 5) == exact


def test_the_formula_never_gives_zero():
    a, b = np.arange(10) + 1000.0, np.arange(10.0)
    assert p_value(a, b, False, "permutation") >= smallest_p("permutation", 10, 10) == 1 / 10_001
    assert p_value(a, b, False, "bootstrap") == 1 / 10_001


@pytest.mark.parametrize("test", TESTS)
def test_equal_scores_are_no_evidence_in_spite_of_rounding(test):
    # The mean of these depends on their order in its last bit.
    assert p_value([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], False, test) > 0.49
    assert p_value([0.7] * 4, [0.7] * 4, False, test) == 1.0


def test_bootstrap_agrees_with_the_normal_law_for_many_seeds():
    rng = np.random.default_rng(0)
    x, y = (values - values.mean() for values in rng.normal(size=(2, 200)))
    error = math.sqrt(x.var() / 200 + y.var() / 200)
    for distance in (0.0, 1.0, 2.0):
        expected = stats.norm.sf(distance)
        found = p_value(x + distance * error + 7, y + 7, False, "bootstrap")
        assert abs(found - expected) < 5 * sd_of(expected) + 0.005


def test_mann_whitney_with_ties_is_exact_not_the_bold_approximation():
    a, b = [3, 3, 4], [1, 1, 2]
    assert p_value(a, b, False, "mann-whitney") == 1 / 20
    assert stats.mannwhitneyu(a, b, alternative="greater").pvalue < 0.045


@pytest.mark.parametrize("test", ["permutation", "mann-whitney"])
def test_p_is_uniform_where_nothing_differs(test):
    rng = np.random.default_rng(1)
    ps = np.array([p_value(*rng.normal(size=(2, 7)), False, test) for _ in range(300)])
    for level in (0.05, 0.2, 0.5, 0.8):
        assert abs((ps <= level).mean() - level) < 4 * math.sqrt(level * (1 - level) / 300)


@pytest.mark.parametrize("lower", [False, True])
def test_the_t_test_agrees_with_scipy(lower):
    a, b = np.random.default_rng(2).normal(size=(2, 5))
    exact = stats.ttest_ind(a, b, alternative="less" if lower else "greater").pvalue
    assert p_value(a, b, lower, "t") == pytest.approx(exact, rel=1e-12)
    assert p_value([1, 1, 1], [0, 0, 0], False, "t") == 0.0


@pytest.mark.parametrize("sizes", [(3, 3), (5, 5), (4, 7)])
def test_a_t_test_finds_a_detectable_difference_in_four_of_five_experiments(sizes):
    rng = np.random.default_rng(4)
    a, b = rng.normal(3, 2, size=sizes[0]), rng.normal(5, 1, size=sizes[1])
    pooled = sum((n - 1) * x.var(ddof=1) for n, x in zip(sizes, (a, b))) / (sum(sizes) - 2)
    x, y = (rng.normal(scale=math.sqrt(pooled), size=(20_000, n)) for n in sizes)
    reach = detectable(a, b, "t")
    power = (stats.ttest_ind(x + reach, y, axis=1, alternative="greater").pvalue < LEVEL).mean()
    assert power == pytest.approx(0.8, abs=0.01)
    assert detectable(b, a, "t") == pytest.approx(reach)
    # What 12 of each would find, which scatter as these do.
    x, y = rng.normal(scale=math.sqrt(pooled), size=(2, 20_000, 12))
    reach = detectable(a, b, "t", seeds=12)
    power = (stats.ttest_ind(x + reach, y, axis=1, alternative="greater").pvalue < LEVEL).mean()
    assert power == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("test", ["permutation", "mann-whitney"])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 5)])
def test_the_approximation_of_exact_tests_is_near_their_power(test, sizes):
    a, b = (np.linspace(-1, 1, n) for n in sizes)
    sd = math.sqrt(sum((n - 1) * x.var(ddof=1) for n, x in zip(sizes, (a, b))) / (sum(sizes) - 2))
    rng, reach = np.random.default_rng(8), detectable(a, b, test) / sd
    pairs = [(rng.normal(reach, size=sizes[0]), rng.normal(size=sizes[1])) for _ in range(800)]
    assert np.mean([p_value(x, y, False, test) < LEVEL for x, y in pairs]) == pytest.approx(
        0.8, abs=0.05
    )


def test_three_seeds_detect_nothing_by_permutation():
    a, b = [0.1, 0.2, 0.3], [0.2, 0.3, 0.4]
    assert detectable(a, b, "permutation") is None
    assert detectable(a, b, "mann-whitney") is None
    assert detectable(a, b, "permutation", seeds=4) > 0
    assert detectable([7, 7, 7, 7], [5, 5, 5, 5], "permutation") == 0.0


@pytest.mark.parametrize("sizes", [(3, 5), (5, 5), (4, 4)])
def test_the_largest_level_is_one_that_some_scores_have(sizes):
    n, m = sizes
    for test in ("permutation", "mann-whitney"):
        rng, level = np.random.default_rng(9), attainable_level(test, n, m)
        drawn = [
            p_value(rng.normal(1, size=n), rng.normal(size=m), False, test) for _ in range(400)
        ]
        assert max(p for p in drawn if p < LEVEL) == pytest.approx(level)


def test_p_is_reproducible():
    a, b = [0.4, 0.5, 0.9], [0.3, 0.45, 0.6]
    for test in TESTS:
        assert p_value(a, b, False, test) == p_value(a, b, False, test)


def test_holm_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03] and holm([]) == []


def test_holm_keeps_the_order_and_never_lowers():
    ps = np.random.default_rng(0).random(50) ** 3
    corrected = np.array(holm(list(ps)))
    assert (corrected >= ps).all() and (corrected <= 1).all()
    assert (np.diff(corrected[np.argsort(ps)]) >= 0).all()


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


def test_settings_are_compared_with_the_baseline_of_their_own_group(tmp_path):
    settings, metric = sweep(tmp_path, MLM=0.1, better=0.2, worse=0.0)
    found = compare(settings, metric, ["MLM"])
    assert found.keys == (KEY,)
    for comparison in found.comparisons:
        assert comparison.baseline.values[KEY] == comparison.setting.values[KEY]
    by_label = {
        label: [c for c in found.comparisons if c.setting.values["label"] == label]
        for label in ("MLM", "better", "worse")
    }
    assert all(c.is_baseline and c.texts == ("", "baseline") for c in by_label["MLM"])
    assert all(c.p == 1 / 252 and c.holm == 4 * c.p for c in by_label["better"])
    assert all(c.p == c.holm == 1.0 for c in by_label["worse"])
    notes = " ".join(found.notes())
    assert "permutation test of means" in notes and "10,000 random" in notes
    assert "baseline label=MLM with equal task.labelled" in notes
    assert "the 4 comparisons" in notes and "below about 0.004 for 5 seeds against 5." in notes
    significant = next(note for note in found.notes() if note.startswith("Significant"))
    assert significant.count("better, ") == 2 and "worse" not in significant


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
    assert all(c.is_baseline or c.p < 0.01 for c in compare(settings, loss, ["MLM"]).comparisons)
    wrong = choose_metric(find_runs([tmp_path]), "valid.loss", "higher")
    assert all(c.is_baseline or c.p == 1 for c in compare(settings, wrong, ["MLM"]).comparisons)


@pytest.mark.parametrize("test", TESTS)
def test_fewer_than_three_seeds_are_refused(tmp_path, test):
    settings, metric = sweep(tmp_path, 2, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["MLM"], test)
    refused = [c for c in found.comparisons if not c.is_baseline]
    assert all(c.p is None and c.texts == ("n<3", "n<3") for c in refused)
    notes = [note for note in found.notes() if note.startswith("Not compared")]
    assert len(notes) == 2 and "soft, labelled=which_moon_5 (2 scored seeds)" in notes[0]
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
    assert "0.05 for 3 seeds against 3" in reach
    assert "Times 2 comparisons" in reach and "4 seeds a setting would do" in reach


def test_a_setting_without_baseline_is_named(tmp_path):
    make_run(tmp_path / "extra", 0.5, config={KEY: "which_moon_7"}, label="soft")
    settings, metric = sweep(tmp_path, 3, MLM=0.1, soft=0.2)
    found = compare(settings, metric, ["MLM"])
    (lone,) = [c for c in found.comparisons if c.baseline is None]
    assert lone.texts == ("-", "-") and lone.p is None
    assert any("no baseline has task.labelled=which_moon_7" in note for note in found.notes())


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
    means, medians = (compare(settings, metric, ["MLM"], spread=s) for s in ("sd", "range"))
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
    for write in (to_markdown, to_tex):
        assert re.search(rf"{p_text(soft.p)} \D+{p_text(soft.holm)}", write(table))
    # The best is told within each group, so that soft at n = 5 is one, too.
    assert [[c.best for c in row].count(True) for row in table.rows] == [0, 0, 1, 1]


def test_the_table_shows_differences_and_what_is_detectable(tmp_path):
    settings, metric = sweep(tmp_path, 5, MLM=0.1, soft=0.2)
    comparison = compare(settings, metric, ["MLM"], "t", with_detectable=True)
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
    twelve = compare(settings, metric, ["MLM"], "t", with_detectable=True, seeds=12).notes()
    assert sum(f"{DETECTABLE}: the true difference of means of 12 seeds" in n for n in twelve) == 1
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
    assert columns["p (Holm)"] == ("baseline", "same runs", "0.029", "0.029", "0.029")
    assert any("the 2 comparisons of this table" in note for note in table.notes)
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
    assert "2 comparisons of this table." in compared.notes()[0]
    assert not any("same runs" in line for line in compared.notes())


def test_the_table_as_json_has_unrounded_numbers_and_the_test(tmp_path, capsys):
    sweep(tmp_path, 4, MLM=0.1, soft=0.2)
    words = [str(tmp_path), "--baseline", "MLM", "--metric", "test.accuracy"]
    assert main(["report", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert document["test"]["name"] == "permutation" and document["better"] == "higher"
    assert [row["is_best"] for row in rows] == [False, False, True, True]
    assert rows[-1]["p"] == pytest.approx(1 / 70) and rows[0]["p"] is None
    assert all(row["baseline"].startswith("MLM") and row["scored"] == 4 for row in rows)
    assert any(note.startswith("p: permutation test") for note in document["notes"])
    assert main(["report", *words, "--json", "--out", str(tmp_path / "x")]) == 2


def test_numbers_are_written_short():
    texts = [p_text(p) for p in (None, 1.0, 0.0126, 0.00126, 0.0001, 1e-7)]
    assert texts == ["-", "1.000", "0.013", "0.0013", "0.0001", "<0.0001"]
    sizes = [bytes_text(x) for x in (None, 343 * 2**20, 1023.6 * 2**20, 1.25 * 2**30)]
    assert sizes == ["-", "343 MiB", "1.0 GiB", "1.2 GiB"]
