"""report --choose and --mean: values chosen by validation, the mean over a benchmark's tasks."""

import json
from pathlib import Path

import pytest
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.choice import chosen_values
from metaseq_lm.reporting.folders import find_runs

TRAINER = {
    "max_update": 400,
    "valid_split": "mini",
    "best_checkpoint_metric": "accuracy",
    "maximize_best_checkpoint_metric": True,
}
# (label, task, rate): (validation, test) of seeds 1 and 2; the best by test is another one.
SCORES = {
    ("mlm", "CB", 0.04): ([0.6, 0.8], [0.5, 0.7]),
    ("mlm", "CB", 0.01): ([0.5, 0.7], [0.9, 0.9]),
    ("mlm", "RTE", 0.04): ([0.4, 0.4], [0.9, 0.9]),
    ("mlm", "RTE", 0.01): ([0.5, 0.6], [0.4, 0.5]),
    ("soft", "CB", 0.04): ([0.5, 0.5], [0.6, 0.6]),
    ("soft", "CB", 0.01): ([0.5, 0.5], [0.9, 0.9]),
    ("soft", "RTE", 0.01): ([0.1, 0.1], [0.3, 0.5]),
}


def make(folder: Path, label: str, task: str, rate: float, seed: int, **more: object) -> Path:
    valid, test = (scores[seed - 1] for scores in SCORES[label, task, rate])
    place = folder / f"{label}-{task}-{rate}-{seed}"
    config = {"task.labelled": task, "optimizer.lr": rate}
    made = make_run(place, test, config=config, label=label, seed=seed, trainer=TRAINER, **more)
    file = place / "results.json"
    results = json.loads(file.read_text())
    results["metrics"] = {"mini": {"accuracy": valid}, "test": {"accuracy": test}}
    file.write_text(json.dumps(results))
    return made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for label, task, rate in SCORES:
        for seed in (1, 2):
            make(tmp_path / "runs", label, task, rate, seed)
    return tmp_path / "runs"


def test_the_value_is_chosen_by_validation(runs: Path) -> None:
    kept, (note,) = chosen_values(find_runs([runs]), "optimizer.lr")
    found = {(r.values["label"], r.values["task.labelled"], r.values["optimizer.lr"]) for r in kept}
    # Of equals the smaller value, which comes first.
    assert found == {
        ("mlm", "CB", 0.04),
        ("mlm", "RTE", 0.01),
        ("soft", "CB", 0.01),
        ("soft", "RTE", 0.01),
    }
    assert len(kept) == 8
    assert "(mini.accuracy)" in note and "mlm, labelled=CB: 0.04" in note


def test_a_value_with_an_unfinished_run_is_passed_over(runs: Path) -> None:
    (runs / "mlm-CB-0.04-2" / "results.json").unlink()
    kept, _ = chosen_values(find_runs([runs]), "optimizer.lr")
    rates = {r.values["optimizer.lr"] for r in kept if r.values["label"] == "mlm"}
    assert rates == {0.01}
    for folder in runs.glob("mlm-RTE-*"):
        (folder / "results.json").unlink()
    kept, _ = chosen_values(find_runs([runs]), "optimizer.lr")
    assert sum(r.name.count("mlm-RTE") for r in kept) == 4, "none to choose from: all stay"


def test_nothing_is_chosen_where_no_value_has_finished(runs: Path) -> None:
    for file in runs.glob("*/results.json"):
        file.unlink()
    every = find_runs([runs])
    kept, notes = chosen_values(every, "optimizer.lr")
    assert len(kept) == len(every)
    assert len(notes) == 1 and "No optimizer.lr" in notes[0]


def test_a_loss_is_better_where_it_is_small(tmp_path: Path) -> None:
    down = {**TRAINER, "best_checkpoint_metric": "loss", "maximize_best_checkpoint_metric": False}
    for rate, score in ((0.1, 0.9), (0.2, 0.5)):
        config = {"optimizer.lr": rate}
        trainer = {**down, "valid_split": "valid"}
        make_run(tmp_path / str(rate), score, config=config, trainer=trainer)
    kept, _ = chosen_values(find_runs([tmp_path]), "optimizer.lr")
    assert [r.values["optimizer.lr"] for r in kept] == [0.1]


def test_nothing_to_choose_by(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        make_run(tmp_path / str(rate), 0.5, config={"optimizer.lr": rate})
    with pytest.raises(UsageError, match="no best checkpoint"):
        chosen_values(find_runs([tmp_path]), "optimizer.lr")


def test_another_metric_chooses(runs: Path, capsys: pytest.CaptureFixture) -> None:
    """By the test scores in place of the validation; where lower is better, the lowest."""
    for options, shown in ((["test.accuracy"], "0.01"), (["test.loss"], "0.04")):
        for file in runs.glob("mlm-CB-*/results.json"):
            results = json.loads(file.read_text())
            results["metrics"]["test"]["loss"] = results["metrics"]["test"]["accuracy"]
            file.write_text(json.dumps(results))
        words = ["--where", "label=mlm", "task.labelled=CB", "--choose", "optimizer.lr"]
        assert main(["report", str(runs), *words, "--choose-by", *options]) == 0
        note = f"optimizer.lr was chosen by {options[0]}: mlm: {shown}."
        assert note in capsys.readouterr().out
    assert main(["report", str(runs), "--choose-by", "test.loss"]) == 2
    assert "give --choose KEY" in capsys.readouterr().err
    assert main(["report", str(runs), "--choose", "optimizer.lr", "--choose-by", "no.such"]) == 2
    assert "'no.such'" in capsys.readouterr().err


def test_the_mean_of_a_row(runs: Path, capsys: pytest.CaptureFixture) -> None:
    """mlm: seeds (.5 + .4) / 2 and (.7 + .5) / 2; soft: (.9 + .3) / 2 and (.9 + .5) / 2."""
    options = ["--columns", "task.labelled", "--choose", "optimizer.lr", "--mean"]
    assert main(["report", str(runs), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line for line in lines if line.startswith("label \\")]
    assert head.split()[-3:] == ["CB", "RTE", "mean"]
    (mlm,) = [line for line in lines if line.startswith("mlm ")]
    (soft,) = [line for line in lines if line.startswith("soft ")]
    assert mlm.endswith("52.50 ± 10.61 (2)") and "65.00 ± 7.07 (2) *" in soft
    assert any(line.startswith("optimizer.lr was chosen") for line in lines)
    assert not any("mixes" in line for line in lines)


def test_no_mean_without_all_columns(runs: Path, capsys: pytest.CaptureFixture) -> None:
    """Only seeds that every column has count."""
    (runs / "soft-RTE-0.01-1" / "results.json").unlink()
    for seed in (1, 2):
        (runs / f"mlm-RTE-0.01-{seed}" / "results.json").unlink()
        (runs / f"mlm-RTE-0.04-{seed}" / "results.json").unlink()
    options = ["--where", "optimizer.lr=0.01", "--columns", "task.labelled", "--mean"]
    assert main(["report", str(runs), *options]) == 0
    out = capsys.readouterr().out
    (mlm,) = [line for line in out.splitlines() if line.startswith("mlm ")]
    (soft,) = [line for line in out.splitlines() if line.startswith("soft ")]
    assert mlm.split()[-1] == "-" and "70.00 (1)" in soft
    assert "no mean" in out


def test_wrong_options(runs: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(runs), "--mean"]) == 2
    assert "give --columns" in capsys.readouterr().err
    assert main(["report", str(runs), "--choose", "optimizer.rl"]) == 2
    assert "optimizer.lr" in capsys.readouterr().err


# ------------------------------------------------------------------------ samples


def test_samples(runs: Path, tmp_path: Path) -> None:
    """The last samples of the first run of a setting that has some, as Markdown and in the page."""
    for seed, update in ((1, 100), (1, 200), (2, 300)):
        line = {"kind": "samples", "update": update, "texts": [f"x {update}\ny <b>", "# z"]}
        with open(runs / f"mlm-CB-0.04-{seed}" / "log.jsonl", "a") as log:
            log.write(json.dumps(line) + "\n")
    assert main(["report", str(runs), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "samples.md").read_text()
    assert "update 200" in page and "    x 200\n    y <b>\n\n    # z" in page
    assert "x 100" not in page and "x 300" not in page
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<pre>x 200\ny &lt;b&gt;" in html
