"""Losses of several functions are shown, and never ranked, tested, chosen or drawn."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.settings import differing_functions, group
from metaseq_lm.reporting.table import choose_metric, setting_table

MASKED = {"_name": "masked_lm", "mask_prob": 0.15}
OBJECTIVES = {
    "rtd": {"task": {"_name": "electra", "mask_prob": 0.15}, "criterion": {"_name": "electra_rtd"}},
    "mlm": {"task": MASKED, "criterion": {"_name": "masked_lm"}},
    "all": {
        "task": {"_name": "electra", "mask_prob": 0.15},
        "criterion": {"_name": "all_tokens_mlm"},
    },
}
REMEDY = "a metric of an end task (--metric)"


@pytest.fixture
def objectives(tmp_path: Path) -> Path:
    for label, options in OBJECTIVES.items():
        for seed in (1, 2, 3, 4):
            score = seed / 100 + 0.2 * list(OBJECTIVES).index(label)
            name = tmp_path / "runs" / f"{label}-{seed}"
            trainer = {"max_update": 400, "best_checkpoint_metric": "loss", "valid_split": "valid"}
            make_run(name, score, label=label, seed=seed, **options, trainer=trainer)
    return tmp_path / "runs"


@pytest.mark.parametrize("metric", ["valid.loss", "valid.accuracy"])
def test_no_format_marks_or_tests_a_loss_across_objectives(
    objectives: Path, tmp_path: Path, metric: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "report"
    options = ["--baseline", "mlm", "--detectable", "--x", "criterion._name", "--out", str(out)]
    assert main(["report", str(objectives), "--metric", metric, *options]) == 0
    shown = capsys.readouterr().out
    text = (out / "table.txt").read_text()
    assert "* best" not in text and " *" not in text and REMEDY in text
    expect_facts(text, "all_tokens_mlm, electra_rtd, masked_lm", "rtd with mlm: valid.")
    assert "**" not in (out / "table.md").read_text() and REMEDY in (out / "table.md").read_text()
    assert "textbf" not in (out / "table.tex").read_text()
    assert 'class="best"' not in (page := (out / "report.html").read_text())
    assert "number best" not in page and REMEDY in page
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert {(row["p"], row["difference"]) for row in rows} == {("", "")}
    assert not list(out.glob("score_*.png"))
    expect_facts(shown, "No picture", f": {metric}")


def test_a_metric_of_an_end_task_is_compared_across_objectives(tmp_path: Path) -> None:
    for label, options in OBJECTIVES.items():
        before = make_run(tmp_path / label, **options, label=label)
        make_run(tmp_path / f"{label}-fine", len(label) / 10, label=label, init_from=str(before))
    runs = [run for run in find_runs([tmp_path]) if run.path.name.endswith("fine")]
    for metric in ("test.accuracy", "valid.loss"):  # of the same task, criterion and data
        table = setting_table(group(runs), choose_metric(runs, metric))
        assert any(cell.best for row in table.rows for cell in row)


@pytest.mark.parametrize(
    "change, differs",
    [
        ({"task": {**MASKED, "mask_prob": 0.4}}, ["task.mask_prob"]),
        ({"task": {**MASKED, "random_token_prob": 0.4}}, []),  # the other run has none on record
        ({"results": {"data": "other"}}, ["data_hash"]),
        # An option that the criterion has no more.
        ({"criterion": {"_name": "masked_lm", "sharpness": 0.1}}, ["criterion.sharpness"]),
        ({"task": {"_name": "sentence_pairs", "mask_prob": 0.15}}, ["task._name"]),
        ({"config": {"optimizer.lr": 0.5}, "seed": 7}, []),
        ({"task": {**MASKED, "batch_size": 9, "tokens_per_sample": 7}}, []),
    ],
)
def test_what_makes_another_function(tmp_path: Path, change: Any, differs: list) -> None:
    base = {"task": MASKED, "criterion": {"_name": "masked_lm", "sharpness": 0.0}}
    make_run(tmp_path / "a", **base)
    make_run(tmp_path / "b", **{**base, **change})
    runs = find_runs([tmp_path])
    assert list(differing_functions("valid.loss", runs)) == differs
    assert list(differing_functions("valid.perplexity", runs)) == differs


FOCAL = {"_name": "focal_lm", "gamma": 0.0, "z_loss": 0.0}
RTD = {"_name": "electra_rtd", "disc_positions": "all", "pll_formula": "corrected"}


@pytest.mark.parametrize(
    "criterion, change, recorded, differs",
    [
        # A plug-in's option that says nothing may change the loss; so may one it does not know.
        (FOCAL, {"gamma": 4.0}, {}, ["criterion.gamma"]),
        (FOCAL, {"gamma": 4.0}, {"criterion.gamma": "loss"}, ["criterion.gamma"]),
        (FOCAL, {"gamma": 4.0}, {"criterion.gamma": "weights"}, []),
        (RTD, {"disc_positions": "masked"}, {}, ["criterion.disc_positions"]),
        ({"_name": "masked_lm", "z_loss": 0.0}, {"z_loss": 1e-4}, {}, []),  # of training alone
        ({"_name": "tagging", "label_smoothing": 0.0}, {"label_smoothing": 0.1}, {}, []),
    ],
    ids=["focal", "focal-says", "focal-weights", "rtd", "z_loss", "smoothing"],
)
def test_options_say_whether_they_change_the_loss(
    tmp_path: Path, criterion: dict, change: dict, recorded: dict, differs: list
) -> None:
    for name, values in (("a", criterion), ("b", {**criterion, **change})):
        make_run(tmp_path / name, criterion=values, results={"effects": recorded}, task=MASKED)
    assert list(differing_functions("valid.loss", find_runs([tmp_path]))) == differs


@pytest.mark.parametrize("evaluates_as, is_compared", [("causal_lm", True), ("", False)])
def test_losses_of_what_evaluates_as_another_are_compared(
    tmp_path: Path, evaluates_as: str, is_compared: bool
) -> None:
    for name, values in (
        ("causal", {"task": {"_name": "causal_lm"}, "criterion": {"_name": "causal_lm"}}),
        ("mtp", {"task": {"_name": "mtp"}, "criterion": {"_name": "mtp", "tokens": 4}}),
    ):
        results = {"evaluates_as": evaluates_as} if name == "mtp" else {}
        make_run(tmp_path / name, label=name, results=results, **values)
    runs = find_runs([tmp_path])
    assert (differing_functions("valid.loss", runs) == {}) == is_compared
    task = {"_name": "causal_lm", "tokens_per_sample": 64}  # and other rows
    make_run(tmp_path / "longer", task=task, criterion={"_name": "causal_lm"})
    task["tokens_per_sample"] = 32
    make_run(tmp_path / "shorter", task=task, criterion={"_name": "causal_lm"})
    differing = differing_functions("valid.loss", find_runs([tmp_path]))
    assert "task.tokens_per_sample" in differing


def test_nothing_is_chosen_by_a_loss_of_several_functions(
    objectives: Path, capsys: pytest.CaptureFixture
) -> None:
    for run in objectives.iterdir():  # one label: settings differ in the criterion alone
        file = run / "config.yaml"
        file.write_text(file.read_text().replace(f"label: {run.name.split('-')[0]}", "label: x"))
    chosen = ["--choose", "criterion._name", "--where", "task._name=electra"]
    for by in ([], ["--choose-by", "valid.loss"]):
        assert main(["report", str(objectives), *chosen, *by]) == 2
        message = capsys.readouterr().err
        expect_facts(message, "--choose criterion._name: valid.loss", "--choose-by")


def test_seeds_of_one_objective_are_compared_as_ever(tmp_path: Path) -> None:
    for seed in (1, 2):
        for rate in (0.1, 0.2):
            task = {"config": {"optimizer.lr": rate}, "task": MASKED}
            make_run(tmp_path / f"{rate}-{seed}", rate, seed=seed, **task)
    runs = find_runs([tmp_path])
    table = setting_table(group(runs), choose_metric(runs, "valid.loss"))
    assert sum(cell.best for row in table.rows for cell in row) == 1
    assert not any("another function" in note for note in table.notes)
    assert json.dumps(table.head).count("optimizer.lr") == 1
