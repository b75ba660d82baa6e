"""What every command keeps to: exit codes, JSON, --quiet, and mistakes that are refused before
torch.
"""

import errno
import importlib
import json
import keyword
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import expect_facts

from metaseq_lm.cli import COMMANDS, main
from metaseq_lm.core.errors import Interrupted
from metaseq_lm.runs import checkpoint, manifests

# A word that is typed wrong, and what the message says of it. One process tries all.
MISTAKES = {
    "train data --task maskd_lm": "unknown task 'maskd_lm'. Did you mean 'masked_lm'",
    "train data --criterion foo": "unknown criterion 'foo'",
    "train data model=bert_smal": "unknown model 'bert_smal'. Did you mean 'bert_small'",
    "train data --optimizer adamm": "unknown optimizer",
    "train data --schedule triangular": "unknown schedule",
    "train data task.foo=1": "unknown option 'task.foo'",
    "train data --task cvt --criterion cvt_aux criterion.foo=1": "unknown option 'criterion.foo'",
    "train data --learning-rate 1": "Here it is --lr.",
    "train data optimizer.learning_rate=1": "Here it is optimizer.lr",
    "train data --precision fp8": "engine.precision is 'fp8'",
    "train data --lr x": "optimizer.lr",
    "train data criterion.weight=x --user-dir plug_in.py --criterion mine": "criterion.weight",
    "train data --user-dir plug_in.py --criterion mina": "Did you mean 'mine'",
    "train nope": "no such data folder",
    "train data --reset foo": "--reset has 'foo'",
    "sweep data --out s --grid criterion=masked_lm,foo": "unknown criterion 'foo'",
    "sweep data --out s --grid optimizer.lr=1e-3,x": "lr=x-seed=1: optimizer.lr",
    "sweep data --out s --grid task.foo=1,2": "unknown option 'task.foo'",
    "sweep data --output_dir s": "Here it is --out.",
    "preprocess --destdir d --trainpref text.txt --tokenizer foo": "unknown tokenizer 'foo'",
    "preprocess --destdir d --trainpref text.txt --output-dir x": "Here it is --destdir",
    "evaluate run task.foo=1": "'task.foo' is no option of this run",
    "evaluate nope": "no such checkpoint",
    "evaluate run --foo": "unknown argument --foo. See",
    "score run --input text.txt engine.precision=x": "engine.precision is 'x'",
    "score run --input text.txt --max-tokens 8": "Here it is --batch-tokens",
    "rerank --dev lists.json --test lists.json run task.foo=1": "'task.foo' is no option",
    "export nope --out e": "no such checkpoint",
    "export run --out e --part foo": "invalid choice",
    "list tsk": "unknown kind 'tsk'. Did you mean 'task'",
    "report nope": "nope: no such folder",
    "tran data": "unknown command 'tran'. Did you mean 'train'",
}
PLUG_IN = """
from dataclasses import dataclass

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@dataclass
class MineConfig:
    weight: float = option(1.0, "a weight")

@register_criterion("mine", dataclass=MineConfig)
class Mine(MaskedLM):
    pass
"""
TRY_ALL = """
import contextlib, io, json, sys
from metaseq_lm.cli import main
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(words.split())
    print(json.dumps([words, code, said.getvalue(), "torch" in sys.modules]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with what the commands of MISTAKES name; run holds a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    (tmp_path / "text.txt").write_text("a b c\n")
    lists = {"u": {"ref": "a b", "hyp_1": {"score": 1.0, "text": "a b"}}}
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    names = {"task": "masked_lm", "criterion": "masked_lm", "model": "transformer"}
    names |= {"optimizer": "adamw", "schedule": "linear"}
    config = {group: {"_name": name} for group, name in names.items()}
    description = {"config": {**config, "engine": {}, "trainer": {}}, "valid": {"loss": 2.0}}
    for update in (2, 4):
        state = {"update": update}
        path = tmp_path / "run" / "checkpoints"
        checkpoint.save(path, update, {"w": torch.ones(3)}, state, description)
    checkpoint.link(path, "best", manifests.folder_of(path, 2))
    return tmp_path


def test_mistakes_are_refused_before_torch_is_imported(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", TRY_ALL],
        input=json.dumps(sorted(MISTAKES, key=lambda words: "plug_in.py" in words)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        words, code, said, has_torch = json.loads(line)
        is_early = not has_torch or "plug_in.py" in words  # which imports it itself
        assert code == 2 and MISTAKES[words] in said and is_early, (words, code, said)
        assert "Traceback" not in said and said.count("\n") == 1, said


MISSING = (
    *("preprocess --trainpref nope --destdir d", "preprocess --split x=nope --destdir d"),
    "preprocess --trainpref text.txt --destdir d --tokenizer-from nope",
    "preprocess --labelled x --trainpref nope --destdir nope",
    "preprocess --benchmark glue/CoLA --source nope --destdir d --tokenizer-from nope",
    "preprocess --parallel x --trainpref nope --source-lang a --target-lang b --destdir d",
    "preprocess --words --trainpref nope --destdir d",
    "preprocess --treebank x --trainpref nope --destdir nope",
    *("merge nope --destdir d", "import-corpus --trainpref nope --destdir d"),
    *("train nope --save-dir r", "train nope", "train data --save-dir r --config-dir nope"),
    "train data --save-dir r --user-dir nope/x",
    *("sweep nope --out s", "sweep nope.yaml --out s", "sweep status nope"),
    *("evaluate nope", "evaluate text.txt", "export nope --out e", "import nope --out i"),
    *("score nope --input text.txt", "score run --input nope", "report nope", "doctor nope"),
    *("rerank --dev nope --test nope run", "list --checkpoints nope", "list --user-dir nope/x"),
)


@pytest.mark.parametrize("words", MISSING)
def test_a_path_that_is_not_there_is_wrong_usage(
    words: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(words.split()) == 2
    said = "".join(capsys.readouterr())
    assert "nope" in said or "text.txt" in said


def test_data_are_looked_for_before_the_folder_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", "data/nope"]) == 2
    error = capsys.readouterr().err
    expect_facts(error, "data/nope: ", "no such")


# How a command ends, by what happens in it; 0 after a closed pipe where all it does is to print.
ENDS: list[tuple[BaseException, int]] = [
    (KeyboardInterrupt(), 130),
    (Interrupted("stopped"), 75),
    (OSError(errno.ENOSPC, "No space left on device", "file"), 1),
    (PermissionError(errno.EACCES, "Permission denied", "file"), 1),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "vanished"), 1),
]
PRINTING = ("evaluate", "score", "rerank", "report", "doctor", "list", "examples")
ARGUMENTS = {
    "preprocess": "--destdir d",
    "merge": "s --destdir d",
    "import-corpus": "--destdir d",
    "compare": "f --task f",
    "evaluate": "r",
    "score": "r --input f",
    "rerank": "--dev f --test f",
    "report": "r",
    "import": "r --out o",
    "export": "r --out o",
    "doctor": "d",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_codes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = command.replace("-", "_") + "_" * keyword.iskeyword(command)
    module = importlib.import_module(f"metaseq_lm.cli.{name}")
    words = [command, *ARGUMENTS.get(command, "").split()]
    for error, code in [*ENDS, (BrokenPipeError(), 0 if command in PRINTING else 1)]:

        def end(args: Any, error: BaseException = error) -> int:
            raise error

        monkeypatch.setattr(module, "run", end)
        assert main(words) == code, (command, error)
    if command in ("evaluate", "report", "score", "rerank"):  # a file may be missing then
        assert main([*words, "--out", "o"]) == 1


def test_a_deleted_current_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setenv("PWD", str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    assert main(["list", "task"]) == 1
    assert f"{tmp_path / 'gone'}: was deleted" in capsys.readouterr().err


def test_checkpoints_of_a_run(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "--checkpoints", "run", "--json", "--verify"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["update"], row["best"], row["last"]) for row in rows] == [
        (2, True, False),
        (4, False, True),
    ]
    assert all(row["verified"] and row["metrics"] == {"loss": 2.0} for row in rows)
    files = (folder / "run/checkpoints/update_000000004").iterdir()
    sizes = {file.name: file.stat().st_size for file in files}
    assert rows[1]["bytes"] == sizes["model.safetensors"] + sizes["state.pt"]
    weights = folder / "run/checkpoints/update_000000004/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert main(["list", "--checkpoints", "run"]) == 0  # not read
    assert main(["list", "--checkpoints", "run", "--verify"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "update_000000002" in shown[-2] and "best, verified" in shown[-2]
    assert "damaged: " in shown[-1] and "model.safetensors" in shown[-1]


def test_json_of_list_and_doctor(moons: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "criterion", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["bam_distill"]["tasks"] == ["bam"]
    assert rows["masked_lm"]["module"] == "metaseq_lm.criterions.masked_lm"
    code = main(["doctor", str(moons), "--json"])
    levels = [row["level"] for row in json.loads(capsys.readouterr().out)]
    assert code == int("error" in levels) and "ok" in levels


def test_quiet_leaves_results_and_errors(
    tmp_path: Path, moons: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("the dog barks at the cat\n" * 40)
    options = ["--trainpref", str(tmp_path / "text.txt"), "--tokenizer", "word"]
    summaries = []
    for more in ([], ["--quiet"]):
        assert (
            main(["preprocess", *options, "--destdir", str(tmp_path / f"d{len(more)}"), *more]) == 0
        )
        summaries.append("train" in capfd.readouterr().out)
    assert summaries == [True, False]
    manifest = json.loads((tmp_path / "d1" / "manifest.json").read_text())
    assert "--quiet" not in manifest["command"]
