"""The SuperGLUE example runs on what a user has: data.sh, both sweeps, baseline.py, each config."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from imported import imported
from meta_pseudo_bench import CONFIGS

from metaseq_lm.cli import main
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.benchmarks.as_text import AS_TEXT
from metaseq_lm.training.parts import build_parts, evaluate_split, prepare_config
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

PLACE: Path = CONFIGS.parent / "superglue"
TINY = """
    model.encoder_layers=1 model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=32
    model.encoder_attention_heads=2 task.stride=5 engine.threads=1 engine.tensorboard=false
""".split()
SETS = ["task.labelled=[MultiRC,ReCoRD,CB]", "task.task_tokens=[5,6,3]"]


@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_each_config_makes_an_update(name, superglue, tmp_path):
    """A dry run: one update of each kind with the config's batches, and a validation."""
    more = ["task.tokens_per_sample=20", "model.max_positions=20", "trainer.log_interval=1", *SETS]
    places = [f"data={superglue}", f"save_dir={tmp_path}"]
    config = load_config([*TINY, *more, *places], str(PLACE / "config"), name)
    before = build_parts(config).model.state_dict()
    estimate = estimate_price(config)
    kinds = len(estimate.first_updates)
    assert kinds == (2 if name == "mlm" else 1), "of mlm one with its reward, too"
    run = estimate.parts
    evaluate_split(run, config.trainer.valid_split)
    moved = {n.split(".")[0] for n, w in run.model.state_dict().items() if (w != before[n]).any()}
    assert moved == ({"student"} if name == "mlm" else {"student", "teacher"})


@pytest.mark.parametrize("task, token", [("CB", 3), ("ReCoRD", 6)])
def test_fine_tuning_makes_an_update(task, token, superglue, tmp_path):
    """From a run of the pre-training config, with the model that it had."""
    places = [f"data={superglue}", f"save_dir={tmp_path / 'first'}"]
    more = ["task.tokens_per_sample=20", "model.max_positions=20", "trainer.max_update=1", *SETS]
    TrainingRun(load_config([*TINY, *more, *places], str(PLACE / "config"), "mlm")).train()
    given = [f"init_from={tmp_path / 'first'}", f"task.labelled={task}", f"task.task_token={token}"]
    given += [s for s in TINY if not s.startswith("model.")]
    given += [f"data={superglue}", f"save_dir={tmp_path / 'tuned'}", "task.tokens_per_sample=20"]
    config = prepare_config(load_config(given, str(PLACE / "config"), "finetune"))
    estimate = estimate_price(config)
    assert len(estimate.first_updates) == 1 and config.model.encoder_embed_dim == 16


# Stands for python: notes what it is asked for, and makes what preprocess would.
STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
while [ $# -gt 0 ]; do
    case $1 in
        --benchmark) task=${2#superglue/} ;;
        --source) source=$2 ;;
        --destdir) data=$2 ;;
    esac
    shift
done
mkdir -p "$data/$task"
[ -n "$task" ] || touch "$data/dict.txt"
for file in "$source"/val.jsonl*; do [ ! -f "$file" ] || touch "$data/$task/valid.input0.bin"; done
"""


def run_data_script(folder: Path, files: list[str]) -> tuple[subprocess.CompletedProcess, list]:
    """Run data.sh on made files of SuperGLUE; return what it said, and each call of preprocess."""
    for name in files:
        (folder / "superglue" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "superglue" / name).touch()
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, LOG=str(folder / "log"))
    command = ["bash", str(PLACE / "data.sh"), "superglue", "train.txt", "valid.txt", "data"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done, (folder / "log").read_text().splitlines()


def test_data_of_some_tasks(tmp_path):
    """Folders with and without a prefix; what is missing is named, with the remedy."""
    files = ["BoolQ/val.jsonl", "superglue-CB/val.jsonl.xz", "superglue-ReCoRD-part/dev32.jsonl"]
    files += ["superglue-RTE/train.jsonl", "superglue-WSC/val.jsonl", "WSC/val.jsonl"]
    done, calls = run_data_script(tmp_path, files)
    assert done.returncode == 0, done.stderr
    sources = {"BoolQ": "BoolQ", "CB": "superglue-CB", "RTE": "superglue-RTE", "WSC": "WSC"}
    assert calls[1:] == [
        f"-m metaseq_lm preprocess --benchmark superglue/{task} --as-text --source "
        f"superglue/{source} --destdir data"
        for task, source in sources.items()
    ]
    skipped = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert skipped == [f"skipped {task}" for task in ("COPA", "MultiRC", "ReCoRD", "WiC")]
    assert done.stdout.splitlines() == [
        "pre-train with: 'task.labelled=[BoolQ,CB,RTE,WSC]' 'task.task_tokens=[2,3,7,9]'",
        "fine-tune with: --stages BoolQ,CB,WSC",  # RTE has no validation split
    ]


def test_data_of_all_tasks_and_of_none(tmp_path):
    every = [f"{name.split('/')[1]}/val.jsonl" for name in AS_TEXT]
    done, calls = run_data_script(tmp_path, every)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and len(calls) == 9
    (tmp_path / "empty").mkdir()
    done, calls = run_data_script(tmp_path / "empty", [])
    assert done.returncode == 1 and "tasks BoolQ" in done.stderr


def test_sweeps_without_a_task(tmp_path, capsys):
    """The two commands of the page for what lacks ReCoRD: the others keep their tokens."""
    tasks = {"BoolQ": 2, "CB": 3, "COPA": 4, "MultiRC": 5, "RTE": 7, "WiC": 8, "WSC": 9}
    names, numbers = ",".join(tasks), ",".join(map(str, tasks.values()))
    command = ["sweep", str(PLACE / "sweep.yaml"), str(tmp_path), "--out", str(tmp_path / "a")]
    chosen = [f"task.labelled=[{names}]", f"task.task_tokens=[{numbers}]"]
    page = (PLACE.parents[2] / "docs" / "results" / "superglue.md").read_text()
    assert all(words in page for words in [f"'{chosen[0]}' '{chosen[1]}'", f"--stages {names} "])
    one = ["--dry-run", "--seeds", "1", "--grid", "method=mlm"]
    assert main([*command, *one, *chosen]) == 0
    said = capsys.readouterr().out
    assert [said.count(words) for words in chosen] == [1, 1], said
    command[1], command[-1] = str(PLACE / "finetune_sweep.yaml"), str(tmp_path / "b")
    assert main([*command, *one, "--grid", "optimizer.lr=0.04", "--stages", names]) == 0
    said = capsys.readouterr().out
    assert "ReCoRD" not in said and said.count("metaseq-lm train") == len(tasks)
    assert said.count("task.labelled=WSC task.task_token=9") == 1


def test_baseline_names_what_it_skips(superglue, tmp_path, capsys):
    """A set with a training split only, and tasks without a folder, are skipped; others scored."""
    baseline = imported(PLACE / "baseline.py")
    for name in ("CB", "MultiRC"):
        shutil.copytree(superglue / name, tmp_path / "data" / name)
    for file in superglue.glob("*.*"):
        shutil.copy(file, tmp_path / "data")
    source = tmp_path / "ReCoRD"
    source.mkdir()
    shutil.copy(superglue.parent / "ReCoRD" / "train.jsonl", source)
    command = ["preprocess", "--benchmark", "superglue/ReCoRD", "--as-text"]
    command += ["--source", str(source), "--destdir", str(tmp_path / "data")]
    assert main(command) == 0
    capsys.readouterr()
    baseline.main(tmp_path / "data")
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["task"] for row in rows] == ["CB", "MultiRC", "mean"]
    assert rows[2]["score"] == pytest.approx((rows[0]["score"] + rows[1]["score"]) / 2)
    assert "skipped ReCoRD: no" in said.err and "skipped BoolQ: no" in said.err
