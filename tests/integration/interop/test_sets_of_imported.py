"""Labelled sets beside or without a corpus, with the tokenizer of an imported model."""

from pathlib import Path

import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.storage.manifest import Manifest, fingerprint_of_run
from metaseq_lm.data.tokenizers.loading import load_tokenizer

pytest.importorskip("transformers")
from hf_folders import make

TRAIN = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--model"]
TRAIN += ["inherit", "--max-update", "2", "task.labelled=topic", "task.tokens_per_sample=20"]
TRAIN += ["engine.device=cpu", "engine.tensorboard=false", "trainer.best_checkpoint_metric=loss"]
TRAIN += ["schedule=constant", "trainer.maximize_best_checkpoint_metric=false"]
QUESTIONS = """{"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "the quick fox
jumps", "qas": [{"id": "q", "question": "who",
"answers": [{"text": "fox", "answer_start": 10}]}]}]}]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an imported model, the files of a labelled set and of one from GLUE."""
    make(tmp_path / "hf", "BertModel")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")]) == 0
    rows = "the quick fox\tno\nit was the best\tyes\n" * 8
    (tmp_path / "topic.tsv").write_text("text\tlabel\n" + rows)
    (tmp_path / "CoLA").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "CoLA" / f"{split}.tsv").write_text("gj\t1\t\tthe fox\ngj\t0\t*\tfox the\n" * 8)
    (tmp_path / "squad.json").write_text(QUESTIONS.replace("\n", " "))
    return tmp_path


def topic(folder: Path, dest: str, *options: str) -> int:
    splits = [f"--{split}pref={folder / 'topic.tsv'}" for split in ("train", "valid")]
    return main(["preprocess", "--labelled", "topic", *splits, "--destdir", dest, *options])


@pytest.mark.parametrize("source", ["imported", "hf"])
def test_a_new_folder_gets_the_tokenizer(folder: Path, source: str, capsys) -> None:
    data, start = str(folder / "data"), str(folder / "imported")
    assert topic(folder, data, "--tokenizer-from", str(folder / source)) == 0
    assert load_tokenizer(data).fingerprint == load_tokenizer(start).fingerprint
    run = ["--save-dir", str(folder / "run"), "--init-from", start]
    assert main(["train", data, *TRAIN, *run]) == 0
    assert main(["evaluate", str(folder / "run"), "--split", "valid"]) == 0
    capsys.readouterr()
    assert main(["doctor", data]) == 0
    assert "0 errors" in capsys.readouterr().out


def test_benchmarks_and_questions_bring_it_too(folder: Path) -> None:
    source = ["--tokenizer-from", str(folder / "imported")]
    cola = ["--benchmark", "glue/CoLA", "--source", str(folder / "CoLA")]
    squad = ["--benchmark", "squad/v1.1", "--trainpref", str(folder / "squad.json")]
    for number, kind in enumerate((cola, squad)):
        data = folder / f"data{number}"
        assert main(["preprocess", *kind, *source, "--destdir", str(data)]) == 0
        assert load_tokenizer(data).vocabulary.symbols[0] == "[PAD]"


def test_the_imported_folder_holds_sets_itself(folder: Path) -> None:
    start = str(folder / "imported")
    assert topic(folder, start) == 0
    run = ["--save-dir", str(folder / "run"), "--init-from", start]
    assert main(["train", start, *TRAIN, *run]) == 0


def test_another_tokenizer_is_refused(folder: Path, capsys) -> None:
    """Before anything is written, and at the start of training from another model."""
    make(folder / "hf2", "RobertaModel")
    assert main(["import", str(folder / "hf2"), "--out", str(folder / "roberta")]) == 0
    data = str(folder / "data")
    assert topic(folder, data, "--tokenizer-from", str(folder / "imported")) == 0
    other = ["--tokenizer-from", str(folder / "roberta"), "--overwrite"]
    before = Manifest.load(folder / "data" / "topic")
    expect_error(capsys, topic(folder, data, *other), 2, "another tokenizer already")
    assert Manifest.load(folder / "data" / "topic") == before
    run = ["--save-dir", str(folder / "run"), "--init-from", str(folder / "roberta")]
    expect_error(capsys, main(["train", data, *TRAIN, *run]), 2, "with another tokenizer")


def test_messages_name_the_remedy(folder: Path, capsys) -> None:
    expect_error(capsys, topic(folder, str(folder / "none")), 2, "give --tokenizer-from DIR")
    assert not (folder / "none").exists()
    data = str(folder / "data")
    assert topic(folder, data, "--tokenizer-from", str(folder / "hf")) == 0
    run = ["--save-dir", str(folder / "run"), "--init-from", str(folder / "hf")]
    expect_error(capsys, main(["train", data, *TRAIN, *run]), 2, "metaseq-lm import")


def test_a_corpus_beside_the_sets_still_counts(folder: Path) -> None:
    """The fingerprint of a run covers the folder wherever there is something in it."""
    data = folder / "data"
    assert topic(folder, str(data), "--tokenizer-from", str(folder / "hf")) == 0
    alone = fingerprint_of_run(data, {"labelled": "topic"})
    text = folder / "text.txt"
    text.write_text("the quick fox\n")
    corpus = ["--trainpref", str(text), "--tokenizer-from", str(folder / "hf")]
    assert main(["preprocess", *corpus, "--destdir", str(data)]) == 0
    assert fingerprint_of_run(data, {"labelled": "topic"}) != alone
