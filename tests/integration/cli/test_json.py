"""`--json` of every command: one document on standard output that fits docs/reference/json.md."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agreement import make_data, make_pairs, make_run, sentences
from documents import document_in, schemas
from league_plans import write_plan
from lm_eval_files import write_results
from sweeping import SHORT, train_in_process

from metaseq_lm.cli import COMMANDS, main
from metaseq_lm.core import documents
from metaseq_lm.data.doctor.environment import EXTRAS
from metaseq_lm.runs.records import write_trial

SWEEP = ["data", "--out", "s", "--grid", "optimizer.lr=1e-3,1e-2", "--seeds", "1,2,3", *SHORT]
SEARCH = ["--search", "optimizer.lr=log 1e-3..1e-1", "--search-flops", "1e9", "--rate", "1e9"]
SEARCH += ["trainer.max_update=0", "trainer.max_flops=2.5e8"]
TRIAL = {"setting": "all", "values": {}, "state": "finished", "flops": 1.0, "share": 1.0}
TRIAL |= {"metric": "valid.loss", "lower_is_better": True, "independent": True}
LISTS = {"u": {"ref": "the cat runs", "hyp_1": {"score": 1.0, "text": "the cat runs"}}}
CASES = [
    ("preprocess", "preprocess --trainpref text.txt --tokenizer word --destdir d"),
    ("preprocess", "merge data more --destdir merged"),
    ("train", "train data --save-dir run"),
    ("config", "train data --print-config task=masked_lm"),
    ("dry-run", ["train", "data", "--dry-run", *SHORT]),
    ("sweep-plan", ["sweep", *SWEEP, "--dry-run", "--executor", "slurm"]),
    ("sweep-estimate", ["sweep", *SWEEP, "--dry-run", "--estimate", "--rate", "1e9"]),
    ("search-plan", ["sweep", "data", "--out", "t", "--dry-run", *SHORT, *SEARCH]),
    ("sweep-status", ["sweep", *SWEEP]),
    ("sweep-status", "sweep status s"),
    ("sweep-status", "sweep resubmit --failed s"),
    ("sweep-cancel", "sweep cancel s"),
    ("league-plan", "league plan.yaml --out L --dry-run"),
    ("league-plan", "sweep --plan plan.yaml"),
    ("ledger", "league ledger ledger plan.yaml"),
    ("evaluate", "evaluate run --split valid"),
    ("score", "score run --input text.txt"),
    ("score", "score run --input text.txt --tokens --out scores.jsonl"),
    ("score-pairs", "score run --input pairs.jsonl --pairs"),
    ("standings", "league report balanced"),
    ("score-suite", "score run --suite pairs --data pairs.jsonl"),
    ("rerank", "rerank --dev lists.json --test lists.json run"),
    ("report", "report s --metric valid.loss"),
    ("report-pairs", "report s --metric valid.loss --pairs optimizer.lr"),
    ("report-expected-best", "report trials --expected-best"),
    ("export", "export run --out exported"),
    ("import", "import exported --out imported"),
    ("import-results", "import results.json --run run"),
    ("doctor", "doctor data"),
    ("environment", "doctor --environment"),
    ("list", "list"),
    ("checkpoints", "list --checkpoints run"),
    ("examples", "examples"),
    ("examples", "examples copied"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, the runs and the files of CASES."""
    folder = tmp_path_factory.mktemp("json")
    data = make_data(folder, valid=50)
    shutil.copytree(data, folder / "more")
    make_run(data, folder / "run", 3, "trainer.valid_split=valid")
    make_pairs(folder / "pairs.jsonl", 8, 1)
    (folder / "text.txt").write_text("\n".join(sentences(8, 1)) + "\n")
    (folder / "lists.json").write_text(json.dumps(LISTS))
    write_results(folder / "results.json")
    write_plan(folder / "plan.yaml", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_in_process(patch)
        assert main(["sweep", *SWEEP]) == 0
    for number, config in enumerate((folder / "s").rglob("config.yaml"), 1):
        trial = shutil.copytree(config.parent, folder / "trials" / str(number))
        write_trial(trial, {**TRIAL, "number": number, "score": float(number)})
    return folder


@pytest.mark.parametrize("name, command", CASES)
def test_a_command_prints_one_document(
    name: str,
    command: str | list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(folder)
    words = command.split() if isinstance(command, str) else command
    assert main([*words, "--json"]) == 0
    assert document_in(capsys.readouterr().out, name)


def test_every_command_and_every_table_has_a_case() -> None:
    commands = {words.split()[0] if isinstance(words, str) else words[0] for _, words in CASES}
    assert set(COMMANDS) - commands == {"import-corpus", "compare"}  # as preprocess, and as league
    of_other_tests = {"error", "commands", "league-predictions"}
    of_other_tests |= {"verification", "submission", "merged"}
    assert schemas().keys() - {name for name, _ in CASES} == of_other_tests


def test_help_has_the_options_of_all_commands_and_needs_no_torch() -> None:
    code = "import sys; from metaseq_lm.cli import main; main(['--help-json'])"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands = document_in(done.stdout, "commands")["commands"]
    assert list(commands) == list(COMMANDS)
    options = {o["name"]: o for o in commands["train"]["options"]}
    assert options["lr"]["key"] == "optimizer.lr" and options["nproc"]["type"] == "integer"
    of_score = {option["name"]: option for option in commands["score"]["options"]}
    assert (of_score["batch_tokens"]["default"], of_score["pairs"]["type"]) == (8192, "boolean")


@pytest.mark.parametrize(
    "command, code",
    [
        ("list tsk --json", 2),
        ("train data --foo --json", 2),
        ("tran --json", 2),
        ("evaluate nope --json", 2),
        ("sweep --plan nope.yaml --json", 2),
        ("doctor --environment data --json", 2),
    ],
)
def test_a_mistake_is_a_document_too(
    command: str, code: int, folder: Path, monkeypatch: Any, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    document = document_in(out, "error")
    assert document["exit_code"] == code and f"metaseq-lm: {document['error']}\n" in err


def test_a_defect_is_one_document_and_a_traceback(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), documents.documents_only():
        1 / 0
    assert document_in(capsys.readouterr().out, "error")["exit_code"] == 1


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture) -> None:
    with documents.documents_only():
        documents.show_result("x", {"a": [float("nan"), {"b": float("-inf")}, 0.5]})
    documents.show_result("x", {}, "the text")
    out = capsys.readouterr().out
    assert out.endswith("}\nthe text\n")
    document = json.loads(out.removesuffix("the text\n"))
    assert document == {"schema": "metaseq-lm/x/1", "a": [None, {"b": None}, 0.5]}


def test_the_environment_has_the_extras_of_the_package(capsys: pytest.CaptureFixture) -> None:
    text = (Path(__file__).parents[3] / "setup.cfg").read_text()
    extras = text.partition("[options.extras_require]")[2].partition("\n[")[0]
    names = {line.split(" =")[0] for line in extras.splitlines() if line.endswith(" =")}
    assert names - EXTRAS.keys() == {"test", "lint", "docs", "mutate", "compare"}
    assert main(["doctor", "--environment", "--json"]) == 0
    parts = document_in(capsys.readouterr().out, "environment")["parts"]
    assert {"torch", "cores", "memory", "sbatch", "optuna"} <= {part["name"] for part in parts}
