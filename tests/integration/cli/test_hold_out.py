"""`preprocess --hold-out` for every kind of data, wrapped text, labels in a file of their own."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import parallel_data
import pytest
import squad_data
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.records.plain_text import wrapped_width
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer

SENTENCES = [f"the dog number {i} barks at cat {i * 7 % 40}" for i in range(40)]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in the folder of the test; return (exit code, output)."""

    def call(*arguments: str) -> tuple[int, str]:
        paths = [a.replace("@", f"{tmp_path}/") for a in arguments]
        return main(paths), "".join(capsys.readouterr())

    return call


@pytest.fixture
def corpus(run: Run, tmp_path: Path) -> Path:
    """A corpus with a tokenizer for the sets in it."""
    (tmp_path / "text").write_text("\n".join(SENTENCES) + "\n")
    arguments = ["--trainpref", "@text", "--destdir", "@data", "--vocab-size", "400"]
    assert run("preprocess", *arguments, "--tokenizer", "char")[0] == 0
    return tmp_path / "data"


def texts(folder: Path, split: str, column: str = "") -> list[str]:
    """Return the sequences of a split."""
    home = folder if (folder / "tokenizer_options.json").exists() else folder.parent
    tokenizer, data = load_tokenizer(home), IndexedDataset(folder / f"{split}{column}")
    return [tokenizer.decode(data[i].tolist()) for i in range(len(data))]


@given(st.integers(2, 300), st.integers(1, 99), st.integers(0, 3))
def test_a_part_is_drawn_by_the_seed(count: int, percent: int, seed: int) -> None:
    for size in (f"{percent}%", str(percent)):
        if not size.endswith("%") and percent >= count:
            with pytest.raises(UsageError, match=str(count)):
                HoldOut(size, seed).choose(count, "rows")
            continue
        held = HoldOut(size, seed).choose(count, "rows")
        share = max(1, min(round(count * percent / 100), count - 1))
        wanted = share if size.endswith("%") else percent
        assert held.sum() == wanted < count and len(held) == count
        assert (held == HoldOut(size, seed).choose(count, "rows")).all()


@pytest.mark.parametrize("size", ["0", "0%", "100%", "-1", "x", "5 %", "1.5"])
def test_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(UsageError, match="--hold-out"):
        HoldOut(size)


LINES = "".join(f"{line}\n" + "\n" * (i % 3 == 0) for i, line in enumerate(SENTENCES))
PAIRS = "".join(f"{a}\n{b}\n\n" for a, b in zip(SENTENCES[::2], SENTENCES[1::2]))
RECORDS = "".join(json.dumps({"body": line}) + "\n" for line in SENTENCES)


@pytest.mark.parametrize(
    "content, options, unit",
    [
        (LINES, [], 1),
        (LINES.replace("\n", "\r\n"), ["--workers", "2"], 1),
        (PAIRS, ["--documents", "blank"], 2),
        (PAIRS, ["--documents", "paragraphs"], 1),
        (RECORDS, ["--text-column", "body"], 1),
    ],
)
def test_documents_of_a_corpus(
    content: str, options: list[str], unit: int, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "t").write_bytes(content.encode())
    arguments = ["--trainpref", "@t", "--tokenizer", "char", *options, "--hold-out", "20%"]
    assert run("preprocess", *arguments, "--destdir", "@d")[0] == 0
    train, valid = (texts(tmp_path / "d", split) for split in ("train", "valid"))
    whole = content.split("\n\n") if "paragraphs" in options else SENTENCES
    expected = sorted(" ".join(part.split("\n")) for part in whole if part.strip())
    assert sorted(train + valid) == expected and len(valid) == len(expected) // 5
    splits = Manifest.load(tmp_path / "d").splits
    assert splits["valid"]["documents"] == len(valid) // unit
    assert splits["train"]["documents"] == len(train) // unit
    if unit == 2:  # documents stay whole
        assert all(b == SENTENCES[SENTENCES.index(a) + 1] for a, b in zip(valid[::2], valid[1::2]))
    assert run("preprocess", *arguments, "--destdir", "@e")[0] == 0
    for name in ("train.bin", "valid.bin"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()
    assert run("preprocess", *arguments, "--destdir", "@f", "--hold-out-seed", "1")[0] == 0
    assert texts(tmp_path / "f", "valid") != valid
    assert "no valid split" not in run("doctor", "@d")[1]


def test_the_tokenizer_does_not_see_what_is_held_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("\n".join(chr(0x4E00 + i) for i in range(30)) + "\n")
    arguments = ["--trainpref", "@t", "--tokenizer", "char", "--destdir", "@d"]
    assert run("preprocess", *arguments, "--hold-out", "9")[0] == 0
    symbols = load_tokenizer(tmp_path / "d").vocabulary.symbols
    assert sum(symbol >= "\u4e00" for symbol in symbols if len(symbol) == 1) == 21


def test_a_file_is_a_document(run: Run, tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"a{i} b\nc\n\n\nd e\nf\n")
    files = [f"@{i}.txt" for i in range(10)]
    arguments = ["--trainpref", *files, "--tokenizer", "char", "--documents", "file"]
    assert run("preprocess", *arguments, "--hold-out", "3", "--destdir", "@d")[0] == 0
    splits = Manifest.load(tmp_path / "d").splits
    assert [splits[s]["documents"] for s in ("train", "valid")] == [7, 3]
    assert texts(tmp_path / "d", "valid")[1::2] == ["d e f"] * 3
    code, output = run("preprocess", *arguments, "--hold-out", "10", "--destdir", "@e")
    assert code == 2 and "10 documents" in output and not (tmp_path / "e").exists()
    code, output = run("preprocess", *arguments, "--text-column", "x", "--destdir", "@e")
    assert code == 2 and "--documents file" in output


@pytest.mark.parametrize("policy, code", [("fail", 1), ("skip", 0), ("replace", 0)])
def test_bad_bytes_are_named_by_their_line(
    policy: str, code: int, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "t").write_bytes(b"a\n\nb\n\xff\nc\nd\ne\n")
    arguments = ["--trainpref", "@t", "--tokenizer", "char", "--destdir", "@d"]
    for more in (["--hold-out", "2"], ["--documents", "paragraphs"]):
        options = [*more, "--on-bad-utf8", policy, "--overwrite"]
        found, output = run("preprocess", *arguments, *options)
        assert found == code and (policy != "fail" or "t:4: invalid UTF-8" in output)


def test_rows_and_classes(run: Run, corpus: Path, tmp_path: Path) -> None:
    rows = [{"text": line, "label": "abc"[i % 3]} for i, line in enumerate(SENTENCES)]
    rows.insert(3, {"text": "the dog", "label": "-"})
    rows.append({"text": "rare", "label": "d"})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--labelled", "s", "--trainpref", "@r.jsonl", "--destdir", "@data"]
    assert run("preprocess", *arguments, "--hold-out", "30")[0] == 0
    parts = [LabelledSet(corpus / "s", split) for split in ("train", "valid")]
    assert [len(part) for part in parts] == [11, 30]
    assert {tuple(part.label_names) for part in parts} == {("a", "b", "c", "d")}
    found = [texts(corpus / "s", split, ".input0") for split in ("train", "valid")]
    assert sorted(found[0] + found[1]) == sorted([*SENTENCES, "rare"])


def test_questions_on_a_context_stay_together(run: Run, corpus: Path, tmp_path: Path) -> None:
    article = squad_data.official("x", 12)
    paragraphs = article["data"][0]["paragraphs"]
    # A paragraph for each question, as the library `datasets` exports it.
    article["data"][0]["paragraphs"] = [
        {"context": paragraph["context"], "qas": [question]}
        for paragraph in paragraphs
        for question in paragraph["qas"]
    ]
    squad_data.write(tmp_path / "q.json", article)
    arguments = ["--benchmark", "squad/v2.0", "--trainpref", "@q.json", "--destdir", "@data"]
    assert run("preprocess", *arguments, "--hold-out", "25%")[0] == 0
    contexts = []
    for split in ("train", "valid"):
        (rows,) = (corpus / "SQuAD-2").glob(f"{split}*.jsonl")
        contexts.append({json.loads(row)["context"] for row in rows.read_text().splitlines()})
    assert [len(part) for part in contexts] == [9, 3] and not contexts[0] & contexts[1]


def test_pairs_without_empty_sides(run: Run, tmp_path: Path) -> None:
    folder = parallel_data.write(tmp_path / "text")
    for name in ("train.en", "train.vi"):
        lines = (folder / name).read_text().splitlines()
        lines[5 if name.endswith("en") else 9] = ""
        (folder / name).write_text("\n".join(lines) + "\n")
    arguments = ["--parallel", "p", "--trainpref", "@text/train", "--source-lang", "en"]
    arguments += ["--target-lang", "vi", "--destdir", "@d", "--hold-out", "40"]
    assert run("preprocess", *arguments)[0] == 0
    splits = Manifest.load(tmp_path / "d/p").splits
    assert [splits[s]["rows"] for s in ("train", "valid")] == [6, 40]


@pytest.mark.parametrize(
    "options, held", [([], 4), (["--split-text", "raw", "--documents", "blank"], 8)]
)
def test_sentences_of_words(options: list[str], held: int, run: Run, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(
        "".join(
            f"A dog{'x' * i} is here .\nNo cat{'x' * i} is in the garden .\n\n" for i in range(20)
        )
    )
    arguments = ["--words", "--trainpref", "@t", "--destdir", "@d", "--hold-out", "4", *options]
    assert run("preprocess", *arguments)[0] == 0
    splits = Manifest.load(tmp_path / "d").splits
    assert [splits[s]["sentences"] for s in ("train", "valid")] == [40 - held, held]
    assert splits["valid"]["unknown"] == held  # the vocabulary is of train


def test_what_has_no_valid_split_is_told_and_cannot_be_trained_on(
    run: Run, corpus: Path, tmp_path: Path
) -> None:
    code, output = run("doctor", "@data")
    assert code == 0 and "no valid split" in output and "--hold-out 5%" in output
    arguments = ["train", "@data", "--max-update", "1", "--save-dir", "@run", "model=bert_small"]
    for more in ([], ["trainer.valid_split=train"]):
        code, output = run(*arguments, *more)
        assert code in (1, 2) and not (tmp_path / "run").exists()
        assert bool(more) or "--hold-out 5%" in output
    both = ["--trainpref", "@text", "--validpref", "@text", "--destdir", "@d"]
    assert run("preprocess", *both, "--hold-out", "5")[0] == 2
    assert run("preprocess", *both[2:], "--hold-out", "5")[0] == 2
    code, output = run("preprocess", "--world", "quad", "--destdir", "@w", "--hold-out", "5")
    assert code == 2 and "--hold-out" in output


WORDS = " ".join(f"word{i * i % 97} and{i % 13} the of{'.' * (i % 9 == 0)}" for i in range(900))


@pytest.mark.parametrize(
    "lines, width",
    [
        *((textwrap.wrap(WORDS, width), width) for width in (40, 70, 120)),
        ([WORDS[i : i + 72] for i in range(0, 3600, 72)], 72),
        ([line for i in range(9) for line in [*textwrap.wrap(WORDS[i * 700 :][:700], 65), ""]], 65),
        (SENTENCES, 0),
        ([f"{line} ." for line in textwrap.wrap(WORDS, 60)], 0),
        (WORDS.split()[:500], 0),
        ([WORDS[i : i + 300 + i % 7] for i in range(0, 9000, 300)], 0),
        ([line for text in textwrap.wrap(WORDS, 60) for line in (text, "")], 0),
        (["a line of one form"] * 50, 0),
        ([], 0),
    ],
)
def test_wrapped_lines_are_told(lines: list[str], width: int, run: Run, tmp_path: Path) -> None:
    found = wrapped_width(lines)
    assert abs(found - width) <= 2 and bool(found) == bool(width)
    if not width or width == 120:
        return
    (tmp_path / "t").write_text("\n".join(lines) + "\n")
    arguments = ["preprocess", "--trainpref", "@t", "--destdir", "@d", "--tokenizer", "char"]
    assert "--documents paragraphs" in run(*arguments)[1]
    assert "--documents" not in run(*arguments, "--overwrite", "--documents", "file")[1]


@pytest.mark.parametrize(
    "label_lines, code, labels",
    [
        ("a\nb\nc\n", 0, [0, 1, 2]),
        ("a\n b \nc\n\n\n", 0, [0, 1, 2]),
        ("a\n\nc\n", 0, [0, 1]),
        ("a\nb\n", 1, ["3 lines of text", "2 labels"]),
        ("a\nb\nc\nd\n", 1, ["3 lines of text", "4 labels"]),
        ('{"a": 1}\n{"a": 2}\n{"a": 3}\n', 1, ["JSON"]),
        ("1\n2\n3\n", 0, [0, 1, 2]),
    ],
)
def test_labels_in_a_file_of_their_own(
    label_lines: str, code: int, labels: list, run: Run, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "t").write_text("the dog, NA\n\nNA\ncat 1\n".replace("\n\n", "\n"))
    (tmp_path / "l").write_text(label_lines)
    arguments = ["--labelled", "s", "--trainpref", "@t", "--train-labels", "@l", "--validpref"]
    arguments += ["@t", "--valid-labels", "@l", "--destdir", "@data"]
    found, output = run("preprocess", *arguments)
    assert found == code, output
    if code:
        assert all(part in output for part in labels) and not (corpus / "s").exists()
        return
    for split in ("train", "valid"):
        assert LabelledSet(corpus / "s", split).labels.tolist() == labels
    assert np.all(IndexedDataset(corpus / "s" / "train.input0").sizes > 0)


def test_files_of_labels_are_as_many_as_those_of_texts(run: Run, corpus: Path) -> None:
    arguments = ["--labelled", "s", "--trainpref", "@text", "--destdir", "@data"]
    for more in (["--train-labels", "@text", "@text"], ["--test-labels", "@text"]):
        assert run("preprocess", *arguments, *more)[0] == 2
    for more in (["--text-columns", "a"], ["--columns", "a,b"], ["--label-column", "x"]):
        assert run("preprocess", *arguments, "--train-labels", "@text", *more)[0] == 2
