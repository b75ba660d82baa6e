"""Parallel text: what is stored, rows for the decoder, and what is refused with file and line."""

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import parallel_data
import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.parallel.rows import TranslationRows, drop_long_sentences
from metaseq_lm.data.parallel.sets import ParallelSet, load_sides
from metaseq_lm.data.storage.manifest import Manifest, verify


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return parallel_data.write(tmp_path / "text")


def make(text: Path, *more: str) -> int:
    return main(parallel_data.arguments(text, text.parent / "data" / "toy", *more))


def test_both_sides_come_back(text):
    assert make(text, "--unlabelled", f"{text}/mono.txt") == 0
    data = text.parent / "data" / "toy"
    source, target = load_sides(data)
    for split, name, side, tokenizer in (
        ("train", "train.en", "source", source),
        ("train", "train.vi", "target", target),
        ("valid", "dev.vi", "target", target),
        ("unlabelled", "mono.txt", "source", source),
    ):
        found = getattr(ParallelSet(data, split), side)
        lines = [tokenizer.decode(found[i]) for i in range(len(found))]
        assert lines == (text / name).read_text().splitlines()
    assert ParallelSet(data, "valid").references == (text / "dev.vi").read_text().splitlines()
    assert ParallelSet(data, "unlabelled").target is None and not verify(data)
    assert Manifest.load(data).details["source"] == "en"
    with pytest.raises(MetaseqError, match="no reference translations"):
        _ = ParallelSet(data, "train").references
    with pytest.raises(MetaseqError, match="'test'.*train, unlabelled, valid"):
        ParallelSet(data, "test")
    assert main(["doctor", str(data)]) == 0


def test_rare_words_are_unknown_to_training_but_not_to_references(text):
    """Target words of 5 or fewer occurrences (section 4.3.1); source words that occur once."""
    (text / "train.en").write_text("a b once\n" * 1 + "a b\n" * 5)
    (text / "train.vi").write_text("A five\n" * 5 + "A six\n")
    (text / "dev.en").write_text("a once\n")
    (text / "dev.vi").write_text("A five\n")
    assert make(text) == 0
    data = text.parent / "data" / "toy"
    source, target = load_sides(data)
    assert set(target.vocabulary.symbols) == {"[PAD]", "[MASK]", "[SEP]", "[CLS0]", "[UNK]", "A"}
    assert "once" not in source.vocabulary and "b" in source.vocabulary
    valid = ParallelSet(data, "valid")
    assert target.decode(valid.target[0]) == "A [UNK]" and valid.references == ["A five"]
    assert make(text, "--overwrite", "--target-min-frequency", "5") == 0
    assert "five" in load_sides(data)[1].vocabulary


def test_rows_of_the_decoder(text):
    assert make(text) == 0
    data = text.parent / "data" / "toy"
    pair, sides = ParallelSet(data, "train"), load_sides(data)
    rows = TranslationRows(pair, sides)
    samples = np.array([3, 0, 7])
    batch = rows.batch(samples, np.zeros(3, np.uint64), 9)
    start, end = sides[1].vocabulary.cls(), sides[1].vocabulary.sep
    for i, sample in enumerate(samples):
        source, target = pair.source[sample].tolist(), pair.target[sample].tolist()
        assert batch.tokens[i, : len(source) + 1].tolist() == [*source, sides[0].vocabulary.sep]
        assert batch.padding[i].tolist() == [p > len(source) for p in range(9)]
        assert batch.inputs[i, : len(target) + 1].tolist() == [start, *target]
        wanted = [*target, end] + [-1] * (8 - len(target))
        assert batch.targets[i].tolist() == wanted
    said = int((batch.targets >= 0).sum())
    assert batch.sizes == {"rows": 3, "targets": said, "later_targets": said - 3}
    assert (rows.lengths == pair.source.sizes + 1).all()
    some = drop_long_sentences(pair, 3)
    assert set(pair.source.sizes[some]) == {2, 3} and len(some) < len(pair)
    with pytest.raises(MetaseqError, match="1 tokens.*task.max_length"):
        drop_long_sentences(pair, 1)


def test_tokens_that_a_vocabulary_lacks_are_refused(text):
    """The embedding would fail in the middle of a run, without a file or a place."""
    assert make(text) == 0
    data = ParallelSet(text.parent / "data" / "toy", "train")
    source, target = load_sides(data.folder)
    small: Any = SimpleNamespace(vocabulary=range(5))
    for sides in ((small, target), (source, small)):
        with pytest.raises(MetaseqError, match="dict.txt.* 5 symbols"):
            TranslationRows(data, sides)
    TranslationRows(data, (source, small), with_target=False)


def test_subwords_and_packed_files(text):
    for side in ("en", "vi"):
        path = text / f"train.{side}"
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    assert make(text, "--tokenizer", "byte_bpe", "--vocab-size", "280") == 0
    data = text.parent / "data" / "toy"
    source, _ = load_sides(data)
    lines = [source.decode(row) for row in (ParallelSet(data, "valid").source[i] for i in range(2))]
    assert lines == (text / "dev.en").read_text().splitlines()[:2]


@pytest.mark.parametrize(
    "change, words",
    [
        (("train.vi", "A\n"), "train.vi: 1 lines, but {0}/train.en goes on"),
        (("dev.vi", "A\n\nB\n"), "dev.vi:2: an empty line"),
        (("dev.vi", "A\n" * 13), "dev.en: 12 lines, but {0}/dev.vi goes on"),
        (("dev.vi", None), "dev.vi: no such file (nor with .gz"),
        (("dev.vi", ""), "dev.vi: is empty"),
        (("train.vi", "\n" * 48), "train.vi: no sentences"),
        (("train.en", b"a\n\xff b\n"), "train.en:2: invalid UTF-8"),
    ],
)
def test_files_that_do_not_fit(change, words, text, capsys):
    """One message with file and line; nothing is left behind."""
    name, content = change
    if content is None:
        (text / name).unlink()
    else:
        (text / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert make(text, "--on-bad-utf8", "fail") == (2 if content is None else 1)
    assert words.format(text) in capsys.readouterr().err
    assert not (text.parent / "data").exists() or not any((text.parent / "data").rglob("*.*"))


def test_empty_lines_of_training_are_counted(text, capsys):
    (text / "train.en").write_text("a\n\nb\n\xff\n", encoding="latin-1")
    (text / "train.vi").write_text("A\nB\nC\nD\n")
    assert make(text, "--on-bad-utf8", "skip") == 0
    shown = capsys.readouterr().out
    assert "train: 2 sentences" in shown and "1 skipped" in shown
    assert "1 empty" in shown and f"{text}/train.en:2" in shown


@pytest.mark.parametrize(
    "more, words",
    [
        (["--target-lang", "en"], "are both 'en'"),
        (["--labelled", "x"], "--labelled and --parallel exclude each other"),
        (["--min-frequency", "2"], "--min-frequency does not apply to parallel"),
        (["--target-min-frequency", "0"], "--target-min-frequency must be at least 1, got 0"),
        (["--parallel", "a/b"], "letters, digits"),
        (["--split", "unlabelled=x"], "kept for --unlabelled"),
    ],
)
def test_options_that_do_not_fit(more, words, text, capsys):
    expect_error(capsys, make(text, *more), 2, words)


def test_options_of_parallel_text_need_it(text, capsys):
    words = ["preprocess", "--trainpref", f"{text}/mono.txt", "--destdir", str(text / "d")]
    expect_error(capsys, main([*words, "--source-lang", "en"]), 2, "give --parallel NAME")
