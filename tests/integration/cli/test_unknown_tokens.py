"""What preprocess and doctor say of [UNK], and what manifests hold of it."""

import json

import numpy as np
import pytest
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.unknown_tokens import unknown_shares

ENGLISH = "".join(f"the cat sees the dog {'abcdefgh'[i % 8]}\n" for i in range(60))


@pytest.fixture
def preprocess(tmp_path, capsys):
    """Preprocess a text into `data`; return what is shown."""

    def call(text, *options, name="text.txt"):
        (tmp_path / name).write_text(text)
        files = ["--trainpref", f"{tmp_path}/{name}", "--validpref", f"{tmp_path}/{name}"]
        assert main(["preprocess", *files, "--destdir", str(tmp_path / "data"), *options]) == 0
        return "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("options", "is_lost"),
    [
        (("--tokenizer", "char", "--vocab-size", "36"), True),
        (("--tokenizer", "word", "--vocab-size", "36"), True),
        (("--tokenizer", "wordpiece", "--vocab-size", "43"), True),
        (("--tokenizer", "byte_bpe", "--vocab-size", "300"), False),
        (("--tokenizer", "word"), False),
    ],
)
def test_a_corpus(preprocess, tmp_path, capsys, options, is_lost):
    shown, data = preprocess(ENGLISH, *options), tmp_path / "data"
    for split, counts in Manifest.load(data).splits.items():
        tokens, unk = IndexedDataset(data / split).tokens, load_tokenizer(data).vocabulary.unk
        assert counts["unknown"] == (0 if unk is None else (np.array(tokens) == unk).sum())
        assert (counts["unknown"] > 0.2 * counts["tokens"]) == is_lost
    assert ("[UNK]" in shown) == ("byte_bpe" in shown and "warning" in shown) == is_lost
    main(["doctor", str(data)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert any("[UNK]" in line and "--vocab-size" in line for line in lines) == is_lost
    # Texts that are mostly [UNK] look alike.
    assert not (is_lost and any("repeat" in line for line in lines))


def test_a_tokenizer_of_another_script(preprocess, tmp_path, capsys):
    preprocess(ENGLISH, "--tokenizer", "word")
    shown = preprocess(
        "".join(f"κ{i} λόγος\n" for i in range(9)),
        "--overwrite",
        "--tokenizer-from",
        str(tmp_path / "data"),
    )
    expect_facts(shown, "100 %", "of train")
    assert unknown_shares(tmp_path / "data")["valid"] == 1.0


@pytest.mark.parametrize("form", ["labelled", "squad"])
def test_sets(preprocess, tmp_path, capsys, form):
    preprocess(ENGLISH, "--tokenizer", "word")
    if form == "labelled":
        rows = "text\tlabel\nthe cat\tx\nthe Hund\ty\n"
        shown = preprocess(rows, "--labelled", "set", name="set.tsv")
        share = 0.25
    else:
        answers = [{"text": "cat", "answer_start": 4}]
        question = {"id": "1", "question": "the Hund", "answers": answers}
        content = {"paragraphs": [{"context": "the cat", "qas": [question]}]}
        shown = preprocess(
            json.dumps({"version": "1.1", "data": [content]}),
            "--benchmark",
            "squad/v1.1",
            name="squad.json",
        )
        share = 0.25
    folder = next(path.parent for path in (tmp_path / "data").glob("*/manifest.json"))
    expect_facts(shown, " 25 %", "of train")
    assert unknown_shares(folder) == {"train": share, "valid": share}
    assert main(["doctor", str(tmp_path / "data")]) == 1  # both splits are the same
    expect_facts(capsys.readouterr().out, " 25 %", "of train")


def test_folders_of_earlier_versions_are_counted(preprocess, tmp_path):
    preprocess(ENGLISH, "--tokenizer", "word", "--vocab-size", "36")
    data = tmp_path / "data"
    known = unknown_shares(data)
    manifest = Manifest.load(data)
    for counts in manifest.splits.values():
        del counts["unknown"]
    manifest.save(data)
    assert unknown_shares(data) == known and known["train"] == 0.5
    assert unknown_shares(data, most=10) == {"train": None, "valid": None}
    (data / "manifest.json").unlink()
    assert unknown_shares(data) == known
