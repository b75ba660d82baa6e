"""What a run leaves in its folder: no temporary files, no secrets, and a clear
message if it goes.
"""

import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from battery import CASES, TINY
from outcomes import expect_error
from real_runs import rows

from metaseq_lm.cli import main
from metaseq_lm.core.secrets import masked
from metaseq_lm.distributed import signals
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training import parts
from metaseq_lm.training.trainer import Trainer

MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=2"]


def test_leftovers_of_killed_processes_are_removed(moons, tmp_path):
    run = tmp_path / "run [1]"
    run.mkdir()
    names = [f".{name}.123.tmp" for name in ("config.yaml", "results.json", "sources.json")]
    for name in (*names, ".mine.tmp"):
        (run / name).write_text("x")
    assert main(["train", str(moons), "--save-dir", str(run), *MLM]) == 0
    assert [path.name for path in run.iterdir() if path.suffix == ".tmp"] == [".mine.tmp"]


@pytest.mark.parametrize("when", ["log", "save"])
def test_deleted_folder_of_a_run_is_named(when, moons, tmp_path, monkeypatch, capsys):
    """And not made anew with a part of its files."""
    run = tmp_path / "run"
    inner = Trainer._update

    def update(trainer: Trainer, *arguments: Any) -> None:
        inner(trainer, *arguments)
        if trainer.update == 1:
            shutil.rmtree(run)

    monkeypatch.setattr(Trainer, "_update", update)
    more = ["trainer.max_update=4", f"trainer.log_interval={1 if when == 'log' else 100}"]
    more += ["trainer.valid_split=''", "trainer.save_interval_updates=2"]
    assert main(["train", str(moons), "--save-dir", str(run), *MLM, *more]) == 1
    said = capsys.readouterr().err
    assert said.count("metaseq-lm: ") == 1 and f"{run}: this folder" in said, said
    assert not run.exists()


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nQ==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "words, shown",
    [
        (["train", "task.hub_token=hf_abc"], "train 'task.hub_token=***'"),
        (["x", "--password", "abc", "a"], "x --password '***' a"),
        (["x", "--api-key=abc"], "x '--api-key=***'"),
        (["x", "db_password=a=b", "my.SECRET='s'"], "x 'db_password=***' 'my.SECRET=***'"),
        (["data=https://me:pw@host/x"], "'data=https://***@host/x'"),
        (["a=https://me:p@w@host/x?api_key=k&n=1"], "'a=https://***@host/x?api_key=***&n=1'"),
        (
            ["label=api_key=a,b", "label=a b_token=c d"],
            "'label=api_key=***' 'label=a b_token=*** d'",
        ),
        (["label='--password abc'"], shlex.join(["label='--password ***'"])),
        (["a={api_key: k, n: 1}"], "'a={api_key: ***, n: 1}'"),
        (['a={"api_key": "k l", "n": 1}'], shlex.join(['a={"api_key": "***", "n": 1}'])),
        (["a=Authorization: Bearer b.c"], "'a=Authorization: ***'"),
        (["label=hf_abcdefghijklmnop1"], "'label=***'"),
        (["db_password=1234", "api_key=5"], "'db_password=***' 'api_key=***'"),
        ([f"label={PEM} b", PEM[:40]], "'label=*** b' '***'"),
        (["x", "--key", "--seed", "3"], "x --key --seed 3"),
        # Free text: nothing says that it is one, as docs/promises.md says.
        (["label=mypassword X", "label=my token is X", "label=secretX"], None),
        (["task.tokens_per_sample=34", "task.task_token=2"], None),
        (["label=a key", "tokenizer=word", "optimizer.lr=1e-3", "--lr", "0.1"], None),
        (["label=a key: b", "init_from=runs/monkey=a,task.task_token=2/b"], None),
        (["data=runs/sk-learn-with-a-long-name", "a=${oc.env:HF_TOKEN}", "api_key="], None),
    ],
)
def test_secrets_are_masked(words, shown):
    assert masked(words) == (shlex.join(words) if shown is None else shown)


def test_command_of_a_run_holds_no_secret(moons, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["metaseq-lm", "train", "hub.token=hf_abc", "seed=1"])
    label = "label='" + PEM.replace("\n", " ") + " db_password=Q2X'"
    assert main(["train", str(moons), "--save-dir", str(tmp_path), *MLM, label]) == 0
    assert (tmp_path / "command.txt").read_text() == "metaseq-lm train 'hub.token=***' seed=1\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [p for p in files if any(s in p.read_bytes() for s in (b"MIIEow", b"Q2X"))]


@pytest.mark.parametrize("split", ["valid", "final"])
def test_validation_hears_a_signal_at_the_next_batch(split, moons, tmp_path, monkeypatch, capsys):
    """The updates are saved, and the run goes on to the same end."""
    often = ["trainer.validate_interval_updates=2", "trainer.save_interval_updates=0"]
    more = [*often, "trainer.max_update=4", "task.batch_size=8"]
    more += ["trainer.valid_split=''", "trainer.final_splits=[valid]"] if split == "final" else []
    assert main(["train", str(moons), "--save-dir", str(tmp_path / "whole"), *MLM, *more]) == 0
    run = tmp_path / "run"
    inner, seen = parts._batches_of, []

    def signalled(*arguments: Any) -> Any:
        def read(batches: Any) -> Any:
            for batch in batches:
                seen.append(1)
                if len(seen) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return {name: read(batches) for name, batches in inner(*arguments).items()}

    monkeypatch.setattr(parts, "_batches_of", signalled)
    assert main(["train", str(moons), "--save-dir", str(run), *MLM, *more]) == 75
    assert len(seen) == 2
    said = capsys.readouterr().err
    update = 4 if split == "final" else 2
    assert f"SIGTERM after update {update}; a checkpoint" in said
    assert (run / "checkpoints/last").resolve().name == f"update_{update:09d}"
    assert not signals.last_signal()
    assert main(["train", str(moons), "--save-dir", str(run), *MLM, *more]) == 0
    ends = [checkpoint.load(manifests.resolve(str(r))) for r in (run, tmp_path / "whole")]
    assert all((ends[0].weights[name] == ends[1].weights[name]).all() for name in ends[0].weights)
    assert rows(run, "valid") == rows(tmp_path / "whole", "valid")


PLUGIN = """
from dataclasses import dataclass
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@dataclass
class KeyedConfig:
    api_key: str = option("", "key of a service")
    service: str = option("", "address of a service")

@register_criterion("keyed_lm", dataclass=KeyedConfig)
class Keyed(MaskedLM):
    pass
"""
KEY = "sk-91f04c"


def holding(folder: Path, text: str) -> list[str]:
    """Return the files below a folder that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if text.encode() in path.read_bytes()]


@pytest.fixture
def keyed(tmp_path: Path) -> list[str]:
    """Arguments of a run of a plug-in whose criterion has a secret option."""
    (tmp_path / "keyed.py").write_text(PLUGIN)
    words = [w for w in MLM if not w.startswith(("criterion", "trainer.max_update"))]
    return ["--user-dir", str(tmp_path / "keyed.py"), *words, "criterion=keyed_lm"]


def test_secret_options_are_in_no_file_of_a_run(keyed, moons, tmp_path, monkeypatch, capsys):
    """The same command resumes it; where the value is needed it must be typed again."""
    run, plugin = tmp_path / "run", keyed[:2]
    secrets = [f"criterion.api_key={KEY}", f"criterion.service='http://h/?api_key={KEY}&n=1'"]
    command = ["train", str(moons), "--save-dir", str(run), *keyed, *secrets]
    command += [f"label='api_key={KEY}'"]
    monkeypatch.setattr("sys.argv", ["metaseq-lm", *command])
    assert main([*command, "trainer.max_update=2"]) == 0
    assert main([*command, "trainer.max_update=3"]) == 0
    assert "resumed from" in (run / "log.jsonl").read_text()
    assert not holding(run, KEY)
    again = ["train", "--save-dir", str(run), *plugin, "trainer.max_update=4"]
    evaluate = ["evaluate", str(run), "--split", "valid", *plugin]
    capsys.readouterr()
    for words in (again, evaluate):
        for number, name in enumerate(("api_key", "service")):
            expect_error(capsys, main([*words, *secrets[:number]]), 2, f"criterion.{name}, which")
        assert main([*words, *secrets]) == 0
    assert not holding(run, KEY)


def test_sweep_refuses_secrets(keyed, moons, tmp_path, capsys):
    sweep = ["sweep", str(moons), "--out", str(tmp_path / "sweep"), *keyed]
    (tmp_path / "configs").mkdir()
    text = f"defaults: [base, _self_]\ncriterion: {{api_key: {KEY}}}\n"
    (tmp_path / "configs" / "mine.yaml").write_text(text)
    for more in (
        [f"criterion.api_key={KEY}"],
        ["--grid", f"criterion.api_key={KEY},b"],
        [f"label=https://me:{KEY}@host/x"],
        [f"label='api_key={KEY}'"],
        ["--config-dir", str(tmp_path / "configs"), "--config-name", "mine"],
        ["--executor", "slurm", "--setup", f"export HF_TOKEN={KEY}"],
        ["--executor", "slurm", "--setup", f"login --token {KEY}"],
    ):
        assert main([*sweep, *more]) == 2, more
        said = capsys.readouterr().err
        assert "secret" in said and KEY not in said, said
        assert not (tmp_path / "sweep").exists()
