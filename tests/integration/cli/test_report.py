import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import expect_facts
from synthetic import make_run

from metaseq_lm.cli import main


@pytest.fixture
def runs(tmp_path):
    for label in ("hard", "soft"):
        for n in (5, 10):
            for seed in (1, 2):
                score = (0.6 if label == "hard" else 0.7) + n / 100 + seed / 100
                config = {"task.labelled": f"which_moon_{n}"}
                folder = tmp_path / "runs" / f"{label}_{n}_{seed}"
                make_run(folder, score, config=config, label=label, seed=seed)
    return str(tmp_path / "runs")


def test_the_table_is_printed(runs, capsys):
    assert main(["report", runs]) == 0
    out = capsys.readouterr().out
    assert "81.50 ± 0.71 *" in out and out.count("which_moon_5") == 2


def test_detectable_differences_need_a_baseline(runs, capsys):
    assert main(["report", runs, "--sides", "1"]) == 2
    assert "--baseline" in capsys.readouterr().err
    assert main(["report", runs, "--detectable"]) == 2
    assert "give --baseline" in capsys.readouterr().err
    assert main(["report", runs, "--baseline", "mlm", "--seeds", "12"]) == 2
    assert "give --detectable" in capsys.readouterr().err
    assert main(["report", runs, "--baseline", "mlm", "--detectable", "--seeds", "2"]) == 2
    expect_facts(capsys.readouterr().err, "--seeds", "needs 3")


def test_out_writes_and_names_every_file(runs, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    options = ["--columns", "task.labelled", "--x", "task.labelled", "--curve", "train.loss"]
    assert main(["report", runs, *options, "valid.accuracy", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    expected = {
        "table.txt",
        "table.md",
        "table.csv",
        "table.tex",
        "curves_train.loss.png",
        "curves_valid.accuracy.png",
        "score_by_task.labelled.png",
        "score_by_flops.png",
        "report.html",
    }
    assert set(os.listdir(out)) == expected
    assert all(str(out / name) in printed for name in expected)
    assert (out / "table.txt").read_text(encoding="utf-8") in printed


@pytest.mark.parametrize("names", ["text", "md", "csv", "tex", "png", "html", "png,html"])
def test_each_format_alone(names, runs, tmp_path, capsys):
    out = tmp_path / "o"
    assert main(["report", runs, "--x", "task.labelled", "--format", names, "--out", str(out)]) == 0
    ends = {name.replace("text", "txt") for name in names.split(",")}
    assert {path.suffix[1:] for path in out.iterdir()} == ends
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in out.iterdir())


def test_chosen_formats_only(runs, tmp_path, capsys):
    assert main(["report", runs, "--format", "md,csv", "--out", str(tmp_path / "o")]) == 0
    assert set(os.listdir(tmp_path / "o")) == {"table.md", "table.csv"}
    capsys.readouterr()
    assert main(["report", runs, "--format", "tex"]) == 0
    assert capsys.readouterr().out.startswith(r"\begin{table}")


def test_the_page_alone_leaves_no_pictures_behind(runs, tmp_path):
    options = ["--baseline", "label=hard", "--test", "mann-whitney", "--format", "html"]
    assert main(["report", runs, *options, "--out", str(tmp_path / "o")]) == 0
    assert os.listdir(tmp_path / "o") == ["report.html"]
    page = (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    assert page.count('<svg class="chart') == 2
    assert "Mann-Whitney U test" in page and "n&lt;3" in page


def test_a_sweep_by_one_command(tmp_path, capsys):
    sweep, planned = tmp_path / "sweep", []
    for label in ("MLM", "soft"):
        for seed in (1, 2, 3, 4):
            name = f"{label}_{seed}"
            stages = [{"name": s, "folder": f"{name}/{s}"} for s in ("pretrain", "finetune")]
            planned.append({"name": name, "folder": name, "stages": stages})
            if name == "soft_4":
                continue
            make_run(sweep / name / "pretrain", 0.1, label=label, seed=seed)
            start = str(sweep / name / "pretrain")
            score = 0.5 + seed / 100 + 0.2 * (label == "soft")
            make_run(sweep / name / "finetune", score, label=label, seed=seed, init_from=start)
    (sweep / "sweep.json").write_text(json.dumps({"runs": planned}))
    out = tmp_path / "out"
    argv = ["report", str(sweep), "--baseline", "label=MLM", "--sides", "1", "--out", str(out)]
    assert main(argv) == 0
    text = (out / "table.txt").read_text(encoding="utf-8")
    soft = next(line for line in text.splitlines() if line.startswith("soft"))
    assert re.search(r" 3  +72.00 ± 1.00 \*  +73.00  +(0.02\d|0.03\d)  +\1 ", soft)
    expect_facts(text, "Missing: soft_4", "soft (p = 0.0")
    assert "Missing: soft_4" in (out / "report.html").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out


def test_a_sweep_that_has_not_started_says_so(tmp_path, capsys):
    (tmp_path / "sweep.json").write_text(
        json.dumps({"runs": [{"name": "a", "stages": [{"name": "", "folder": "a"}]}]})
    )
    assert main(["report", str(tmp_path), "--baseline", "MLM"]) == 1
    assert "Missing: a (" in capsys.readouterr().err


def test_where_selects_runs(runs, capsys):
    assert main(["report", runs, "--where", "label=soft", "task.labelled=which_moon_5"]) == 0
    out = capsys.readouterr().out
    assert "hard" not in out and "76.50 ± 0.71" in out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--metric", "test.acuracy"], "Did you mean 'test.accuracy'"),
        (["--rows", "labell"], "Did you mean 'label'"),
        (["--columns", "labelled"], "Did you mean 'task.labelled'"),
        (["--x", "task.labeled", "--out", "o"], "Did you mean 'task.labelled'"),
        (["--control", "label=none", "--out", "o"], "--control label=none: no run has that value"),
        (
            ["--control", "label=soft", "--where", "label=soft", "--out", "o"],
            "none left to compare",
        ),
        (["--control", "label=soft"], "--out DIR"),
        (["--curve", "valid.acc", "--out", "o"], "Did you mean 'valid.accuracy'"),
        (["--format", "pdf"], "--format has 'pdf'"),
        (["--format", "png"], "--out DIR"),
        (["--format", "html"], "--out DIR"),
        (["--baseline", "sof"], "Did you mean 'soft'"),
        (["--baseline", "soft", "--columns", "task.labelled"], "leave --rows and --columns out"),
        (["--stage", "finetune"], "no sweep.json"),
        (["--where", "label=sof"], "Did you mean 'soft'"),
        (["--html", "x"], "Did you mean '--format html'"),
    ],
)
def test_wrong_usage_names_the_remedy_and_writes_nothing(
    runs, options, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["report", runs, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert os.listdir(tmp_path) == ["runs"]


def test_failed_runs_do_not_stop_the_report(runs, tmp_path, capsys):
    make_run(tmp_path / "runs" / "soft_5_3", None, label="soft", seed=3)
    assert main(["report", runs, "--out", str(tmp_path / "o")]) == 0
    assert "soft_5_3" in capsys.readouterr().out


def test_only_unfinished_runs(tmp_path, capsys):
    make_run(tmp_path / "r", None)
    assert main(["report", str(tmp_path / "r"), "--x", "seed", "--out", str(tmp_path / "o")]) == 0
    assert "No picture" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "o")]) == 2


def test_a_damaged_run_is_an_error_that_names_it(runs, capsys):
    path = Path(runs) / "soft_5_1" / "results.json"
    path.write_text(json.dumps([1]))
    assert main(["report", runs]) == 1
    assert str(path) in capsys.readouterr().err


def test_reading_runs_needs_neither_torch_nor_matplotlib(runs):
    code = (
        "import sys; from metaseq_lm.cli import main; main(['report', sys.argv[1]]); "
        "print([m for m in ('torch', 'matplotlib', 'sklearn') if m in sys.modules], "
        "sum(m.startswith(('metaseq_lm.reporting', 'metaseq_lm.league')) for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, runs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy, _, count = done.stdout.splitlines()[-1].rpartition(" ")
    assert heavy == "[]" and int(count) <= 9
