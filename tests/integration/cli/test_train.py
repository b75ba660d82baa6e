"""The `train` command: flags, help, and every user's mistake as one message and its exit code."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from battery import CASES, TINY
from outcomes import expect_facts

from metaseq_lm.cli import COMMANDS, main
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.masked_lm import MaskedLMTask

MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=2"]


def train(data: Path, save: Path, *more: str) -> int:
    return main(["train", str(data), "--save-dir", str(save), *MLM, *more])


def fails(capsys: pytest.CaptureFixture, code: int, expected: int, *words: str) -> None:
    """Check an exit code and that one message without a traceback holds all `words`."""
    text = capsys.readouterr().err
    message = [line for line in text.splitlines() if line.startswith("metaseq-lm: ")]
    assert code == expected, text
    assert "Traceback" not in text and len(message) == 1
    assert not [word for word in words if word not in message[0]], message[0]


def test_a_run_leaves_all_its_files(moons: Path, tmp_path: Path) -> None:
    assert train(moons, tmp_path, "engine.tensorboard=true", "trainer.final_splits=[valid]") == 0
    names = {p.name for p in tmp_path.iterdir()}
    wanted = {"config.yaml", "command.txt", "log.jsonl", "results.json", "checkpoints", "tb"}
    assert names == wanted
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {
        "update_000000002",
        "best",
        "last",
    }
    assert list((tmp_path / "tb").iterdir())


def test_flags_are_keys(moons: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--lr", "0.25", "--max-update", "7", "--seed", "3", "--label", "it's (a) label"]
    assert main(["train", str(moons), *flags, "--print-config", "optimizer.eps=1e-3"]) == 0
    shown = capsys.readouterr().out
    for line in ("lr: 0.25", "max_update: 7", "seed: 3", "it's (a) label", "eps: 0.001"):
        assert line in shown


def test_help_lists_the_keys_of_the_choice(capsys: pytest.CaptureFixture) -> None:
    choice = ["--task", "meta_pseudo_label", "--criterion", "meta_pseudo_label_soft"]
    assert main(["train", *choice, "--help"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "criterion.fixed_y=false",
        "task.samples_per_task=4",
        "engine.precision",
        "--save-dir",
    ):
        assert text in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_alone_needs_no_torch(command: str) -> None:
    """Its import takes a second."""
    code = (
        "import atexit, sys; from metaseq_lm.cli import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: metaseq-lm") and done.stdout.endswith("\nFalse\n")
    if command == "train":
        assert "\n  task=masked_lm " in done.stdout and "engine.precision=fp32" in done.stdout


def test_a_run_imports_no_compiler_and_no_shards(moons: Path) -> None:
    """Each takes a second of every start, and most runs need neither."""
    code = (
        "import sys; from metaseq_lm.cli import main; main(sys.argv[1:]); "
        "print({'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", code, "train", str(moons), *MLM, "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "an update costs" in done.stderr and done.stdout == "set()\n"


def test_a_dry_run_validates_one_batch(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    monkeypatch.setattr(
        MaskedLMTask, "evaluate", lambda self, engine, model, passes: counted(passes, counts)
    )
    assert train(moons, tmp_path / "run", "--dry-run", "task.batch_size=2") == 0
    assert counts == [1]


def counted(passes: Passes, counts: list[int]) -> Scored:
    counts += [len(list(batches)) for batches in passes.values()]
    return Scored({"loss": 0.0})


def test_dry_run_writes_nothing(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Limits that one update exceeds do not stop it."""
    place = tmp_path / "run"
    assert train(moons, place, "--dry-run", "trainer.max_flops=1") == 0
    assert not place.exists()
    assert re.search(
        r"an update costs \d\S* FLOPs and \d\S* s( \(.*\))?; [\d,]+ parameters .*\n"
        r".*: \d+ updates take \d\S* hours .*; "
        r"memory: \d+\.\d [MG]iB of a",
        capsys.readouterr().err,
    )


def test_a_dry_run_on_a_cpu_computes_a_part_of_the_batch(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """32 rows are divided by 4, so that 8 are computed; 15 rows are not divided."""
    costs = {}
    for rows in (32, 15):
        options = [f"task.batch_size={rows}", "task.valid_size=8"]
        assert train(moons, tmp_path / "run", "--dry-run", *options) == 0
        said = capsys.readouterr().err
        costs[rows] = float(re.search(r"an update costs (\S+) FLOPs", said)[1])
        assert ("on 1/4 of" in said) == (rows == 32)
    assert costs[32] / costs[15] == pytest.approx(32 / 15, rel=0.05)


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fails(capsys, train(tmp_path / "none", tmp_path / "run"), 2, "none", "no such data folder")


def test_train_without_save_dir_is_refused(moons: Path, capsys: pytest.CaptureFixture) -> None:
    fails(capsys, main(["train", str(moons), *MLM]), 2, "--save-dir")


@pytest.mark.parametrize(
    "override, words",
    [
        ("task=masked_lmm", ("unknown task", "'masked_lm'")),
        ("criterion=maskedlm", ("unknown criterion", "'masked_lm'")),
        ("model=transfromer", ("unknown model", "'transformer'")),
        ("model=bert_smal", ("unknown model", "'bert_small'")),
        ("optimizer=adam", ("unknown optimizer", "'adamw'")),
        ("schedule=inverse_sqr", ("unknown schedule", "'inverse_sqrt'")),
        ("optimizer.lrr=1", ("unknown option 'optimizer.lrr'", "'optimizer.lr'")),
        ("optimizer.lr=high", ("optimizer.lr", "high")),
        ("+optimizer.new=1", ("not added",)),
        ("engine.precision=fp8", ("engine.precision", "fp32")),
        ("engine.device=tpu", ("engine.device", "tpu")),
        ("engine.micro_batch_size=-1", ("engine.micro_batch_size", "at least 0", "-1")),
        ("optimizer.lr=-1", ("optimizer.lr", "at least 0", "-1")),
        ("task.sample_break_mode=line", ("sample_break_mode", "eos")),
        ("task.tokens_per_sample=35", ("35", "34", "max_positions")),
        ("model.encoder_attention_heads=3", ("8", "3", "heads")),
        ("model.encoder_attention_heads=0", ("encoder_attention_heads", "at least 1", "0")),
        ("model.encoder_layers=-1", ("encoder_layers", "at least 1", "-1")),
        ("model.encoder_ffn_embed_dim=-1", ("encoder_ffn_embed_dim", "at least 1")),
        ("model.max_positions=0", ("max_positions", "at least 1")),
        ("model.segments=-1", ("segments", "at least 0")),
        ("schedule.warmup_updates=0", ("warmup_updates",)),
    ],
)
def test_wrong_names_and_values(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, override: str, words: tuple
) -> None:
    fails(capsys, train(moons, tmp_path / "run", override), 2, *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("model", ["bilstm_lm", "wide_resnet"])
def test_models_of_another_kind(
    model: str, moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [
        "train",
        str(moons),
        "--task",
        "masked_lm",
        "--criterion",
        "masked_lm",
        f"model={model}",
    ]
    fails(capsys, main([*words, "--save-dir", str(tmp_path / "run")]), 2, model, "--model")


def test_a_full_gpu_has_a_remedy(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr("metaseq_lm.training.trainer.Trainer._update", full)
    words = ("engine.micro_batch_size", "2.00 GiB")
    fails(capsys, train(moons, tmp_path / "run"), 1, *words)


def test_unknown_flag_and_command(moons: Path, capsys: pytest.CaptureFixture) -> None:
    """A known flag with a wrong value is no misspelt one."""
    assert main(["train", str(moons), "--nproc", "x"]) == 2
    shown = capsys.readouterr().err
    expect_facts(shown, "--nproc: 'x'", "whole number")
    assert "Did you mean" not in shown
    fails(capsys, main(["train", str(moons), "--save-dri", "x"]), 2, "--save-dri", "--save-dir")
    fails(capsys, main(["trian", str(moons)]), 2, "trian", "'train'")


def test_metric_that_is_not_there(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = train(moons, tmp_path, "--best-checkpoint-metric", "f1")
    fails(capsys, code, 2, "f1", "accuracy")


@pytest.mark.parametrize(
    "source, words",
    [
        ("import nothing_of_this_name", ("nothing_of_this_name", "broken.py:1")),
        ("def f(:\n", ("broken.py", "SyntaxError")),
        ("x = 1\nraise RuntimeError('no luck')", ("broken.py:2", "no luck")),
    ],
)
def test_plugin_that_fails_to_import(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, source: str, words: tuple
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    code = train(moons, tmp_path / "run", "--user-dir", str(file))
    fails(capsys, code, 2, "failed to import", *words)


def test_plugin_that_is_not_there(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = train(moons, tmp_path / "run", "--user-dir", str(tmp_path / "gone"))
    fails(capsys, code, 2, "gone", "no such file")


def test_train_in_the_folder_of_another_run_is_refused(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert train(moons, tmp_path) == 0
    code = train(moons, tmp_path, "--seed", "2")
    fails(capsys, code, 2, "seed is 1 there, 2 here", "--save-dir")


def test_divergence_ends_with_3_and_keeps_the_checkpoint(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    more = ("optimizer.lr=1e30", "trainer.max_update=30", "trainer.save_interval_updates=1")
    fails(capsys, train(moons, tmp_path, *more), 3, "not finite", "optimizer.lr")
    assert '"status": "diverged"' in (tmp_path / "results.json").read_text()
    from metaseq_lm.runs import checkpoint

    found, skipped = checkpoint.find_newest(tmp_path / "checkpoints")
    assert found is not None and not skipped
    assert all(w.isfinite().all() for w in found.weights.values())


def test_truncated_corpus(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "data"
    shutil.copytree(moons, data)
    size = (data / "train.bin").stat().st_size
    os.truncate(data / "train.bin", size - 10)
    fails(capsys, train(data, tmp_path / "run"), 1, "train.bin", str(size - 10))


def test_vocabulary_smaller_than_the_data(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = tmp_path / "data"
    shutil.copytree(moons, data)
    lines = (data / "dict.txt").read_text().splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(lines[:100]))
    (data / "manifest.json").unlink()  # which would tell that a file is not whole
    fails(capsys, train(data, tmp_path / "run"), 1, "dict.txt", "100 symbols")


def test_checkpoint_of_another_model(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert train(moons, tmp_path / "first") == 0
    wider = ("model.encoder_embed_dim=16", "--init-from", str(tmp_path / "first"))
    fails(capsys, train(moons, tmp_path / "second", *wider), 1, "does not fit the model", "16")


def test_init_from_nothing(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code = train(moons, tmp_path / "run", "--init-from", str(tmp_path / "gone"))
    fails(capsys, code, 2, "gone", "no such checkpoint")
    code = train(moons, tmp_path / "run", "--init-from", str(moons))
    fails(capsys, code, 2, "is a data folder")


def test_a_file_as_save_dir(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run").write_text("")
    fails(capsys, train(moons, tmp_path / "run"), 2, "is a file; name")


def test_numbers_without_end(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for option, words in (
        ("seed=99999999999999999999", "64 bits"),
        ("optimizer.lr=inf", "is inf"),
    ):
        fails(capsys, train(moons, tmp_path / "run", option), 2, option.partition("=")[0], words)


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from metaseq_lm.cli import COMMANDS, main
from metaseq_lm.tasks import Passes, Scored
from metaseq_lm.tasks.masked_lm import MaskedLMTask
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limit here")
def test_full_disk_keeps_the_last_checkpoint(moons: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: the kernel refuses the same write."""
    assert train(moons, tmp_path) == 0
    command = [sys.executable, "-c", LIMITED, "train", str(moons), "--save-dir", str(tmp_path)]
    done = subprocess.run([*command, *MLM, "trainer.max_update=4"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write checkpoint" in done.stderr and "bytes needed" in done.stderr
    folder = tmp_path / "checkpoints"
    assert (folder / "last").resolve().name == "update_000000002"
    assert not list(folder.glob(".tmp-*"))
    assert train(moons, tmp_path, "trainer.max_update=4") == 0
