"""`metaseq-lm doctor DATA --runs RUN`: how many times runs see the words of train."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from outcomes import expect, expect_facts

from metaseq_lm.cli import main
from metaseq_lm.data.storage.manifest import Manifest

WORDS = 800  # of train
OPTIONS = [
    *("--task", "masked_lm", "--criterion", "masked_lm"),
    "model.encoder_layers=1",
    "model.encoder_embed_dim=8",
    "model.encoder_ffn_embed_dim=8",
    "model.encoder_attention_heads=1",
    "model.max_positions=24",
    "task.tokens_per_sample=24",
    "task.batch_size=8",
    "trainer.valid_split=''",
    "trainer.log_interval=5",
    "trainer.max_update=10",
    "engine.tensorboard=false",
    "engine.threads=1",
]


def preprocess(folder: Path, word: str) -> Path:
    """Make a data folder of 100 lines of 8 words."""
    folder.mkdir()
    lines = [" ".join(f"{word}{(i * j) % 30}" for j in range(8)) for i in range(100)]
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    command = ["preprocess", "--trainpref", f"{folder}/train.txt", "--tokenizer", "word"]
    assert main([*command, "--destdir", str(folder / "data")]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a finished run, `../run`."""
    folder = preprocess(tmp_path_factory.mktemp("epochs") / "text", "a")
    assert main(["train", str(folder), "--save-dir", f"{folder.parent}/run", *OPTIONS]) == 0
    return folder


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(data.parent / "run", tmp_path / "run"))


def edit(run: Path, **options: float) -> None:
    """Take away what a finished run writes, and change options of the trainer."""
    (run / "results.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command; return the exit code and the lines on runs."""

    def call(folder: Path, *runs: Path) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["doctor", str(folder), "--runs", *map(str, runs)])
        lines = capsys.readouterr().out.splitlines()
        return code, "\n".join(line for line in lines if "/run" in line and "GiB" not in line)

    return call


def seen_of(run: Path) -> int:
    return int(json.loads((run / "results.json").read_text())["words_seen"])


def test_a_finished_run_has_seen_its_text_several_times(data, run, look) -> None:
    times = seen_of(run) / WORDS
    assert times > 1
    code, lines = look(data, run.parent)
    assert code == 0
    assert lines.startswith(f"warning  {run}: ")
    expect_facts(lines, "800 words", "train", f" {times:.2f} times")


def test_a_run_that_sees_less_than_its_text_is_well(data, run, look) -> None:
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "words_seen": WORDS}))
    code, line = look(data, run)
    expect((code, line), 0, f"ok       {run}: ", "800 words", "train", " 1.00 times")


@pytest.mark.parametrize(
    "limits, factor",
    [
        ({"max_update": 40}, 4),
        ({"max_update": 40, "max_words": 2 * WORDS}, 0),
        ({"max_update": 5}, 1),
    ],
    ids=["updates", "words before updates", "a limit that is passed"],
)
def test_an_unfinished_run_goes_on_to_its_first_limit(data, run, look, limits, factor) -> None:
    seen = seen_of(run)
    times = factor * seen / WORDS if factor else max(2.0, seen / WORDS)
    edit(run, **limits)
    code, lines = look(data, run)
    text = f"{run}: will see, by its limits, the 800 words of train {times:.2f} times; more text"
    assert code == 0 and lines.startswith(f"warning  {text}")


def test_a_run_that_has_not_begun_has_a_limit_in_words_or_none(data, run, look) -> None:
    edit(run, max_words=WORDS // 2)
    (run / "log.jsonl").write_text("")
    assert "ok       " in look(data, run)[1] and "train 0.50 times" in look(data, run)[1]
    (run / "results.json").touch()
    edit(run, max_words=0)
    expect_facts(look(data, run)[1], "epochs are not known", "logged")


def test_a_run_of_other_data_is_an_error(data, run, look, tmp_path) -> None:
    other = preprocess(tmp_path / "other", "b")
    code, lines = look(other, run)
    assert code == 1 and lines.startswith(f"error    {run}: its data, {data}, are not {other}")
    edit(run)
    assert look(other, run)[0] == 1 and look(data, run)[0] == 0


def test_a_run_may_be_of_any_of_several_folders(data, run, tmp_path, capsys) -> None:
    other = preprocess(tmp_path / "other", "b")
    assert main(["doctor", str(other), str(data), "--runs", str(run)]) == 0
    expect_facts(capsys.readouterr().out, f"{run}: ", "800 words")


def test_data_that_do_not_say_their_words(data, run, look) -> None:
    copy = Path(shutil.copytree(data, run.parent / "data"))
    manifest = Manifest.load(copy)
    del manifest.splits["train"]["words"]
    manifest.save(copy)
    code, lines = look(copy, run)
    expect((code, lines), 0, "epochs are not known", "data")


def test_a_folder_without_runs_is_named(data, tmp_path, capsys) -> None:
    assert main(["doctor", str(data), "--runs", str(tmp_path)]) == 2
    expect_facts(capsys.readouterr().err, f"{tmp_path}: no runs")
