"""`SPLIT.words`: counts of words over runs of tokens against sums, damage, and fingerprints."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage import word_starts
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, fingerprint
from metaseq_lm.data.storage.word_starts import WordStarts, WordStartsWriter, open_word_starts


def write(prefix: Path, parts: list[list[int]]) -> WordStarts:
    """Write the words of tokens in parts and open them."""
    with WordStartsWriter(prefix) as writer:
        for part in parts:
            writer.extend(np.array(part, np.int32))
    return WordStarts(prefix, sum(map(len, parts)))


same_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
words_of_tokens = st.lists(st.sampled_from([0, 0, 1, 1, 1, 3]), max_size=20)


@same_folder
@given(parts=st.lists(words_of_tokens, max_size=4), data=st.data())
def test_runs_count_the_words_of_their_tokens(tmp_path, parts, data):
    starts = write(tmp_path / "a", parts)
    words = np.array([n for part in parts for n in part], np.int64)
    places = st.lists(st.integers(0, len(words)), min_size=2, max_size=2).map(sorted)
    runs = np.array(data.draw(st.lists(places, max_size=5)), np.int64).reshape(-1, 2)
    counted = starts.count(runs[:, 0], runs[:, 1] - runs[:, 0])
    assert counted.tolist() == [words[first:last].sum() for first, last in runs]
    assert starts.total == words.sum()
    for first, last in runs:
        assert starts.read(first, last).tolist() == words[first:last].tolist()


def test_total_reads_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(word_starts, "CHUNK", 3)
    assert write(tmp_path / "a", [[1, 0, 2, 0, 1, 1, 1]]).total == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "do not belong together or one is truncated"),
        (lambda b: b"X" + b[1:], "not a record of words"),
        (lambda b: b[:8] + b"\x02" + b[9:], "not a record of words of version 1"),
        (lambda b: b[:20], "not a record|do not belong"),
        (lambda b: b[:24] + b"\xff" * 8 + b[32:], "do not belong together"),
        (lambda b: b[:-8] + b"\x09" + b"\0" * 7, "further words do not rise"),
        (lambda b: b[:-1] + b"\xff", "further words do not rise"),
    ],
)
def test_damaged_files(tmp_path, change, message):
    write(tmp_path / "a", [[1, 0, 1, 2, 1, 0, 0, 1, 1]])
    path = tmp_path / "a.words"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MetaseqError, match=message):
        WordStarts(tmp_path / "a", 9)


def test_words_of_other_tokens(tmp_path):
    write(tmp_path / "a", [[1, 0, 1]])
    with pytest.raises(MetaseqError, match=r" 3 tokens.*a.bin.* 4\b"):
        WordStarts(tmp_path / "a", 4)
    assert open_word_starts(tmp_path / "b", 4) is None


TEXT = "the cat sat on  the mat\n\tit's raining,\u2003half a\u00a0day \n\nmore-or-less 12.5 %\n"


@pytest.mark.parametrize(
    "tokenizer",
    ["byte_bpe", "wordpiece", "sentencepiece_bpe", "sentencepiece_unigram", "word", "char"],
)
def test_preprocess_counts_the_words_of_each_line(tmp_path, tokenizer):
    (tmp_path / "train.txt").write_text(TEXT * 20)
    arguments = ["--trainpref", f"{tmp_path}/train.txt", "--destdir", f"{tmp_path}/data"]
    vocabulary = ["--vocab-size", "60" if tokenizer.startswith("sentence") else "400"]
    options = ["--tokenizer", tokenizer, "--task-tokens", "1", *vocabulary]
    assert main(["preprocess", *arguments, *options]) == 0
    expected = [len(line.split()) for line in (TEXT * 20).split("\n") if line.strip()]
    data = IndexedDataset(tmp_path / "data/train")
    starts = WordStarts(data.prefix, len(data.tokens))
    assert starts.count(data.starts, data.sizes).tolist() == expected
    assert Manifest.load(tmp_path / "data").splits["train"]["words"] == sum(expected)


def test_words_do_not_change_the_fingerprint_of_data(tmp_path):
    """So that runs on a folder without them go on when it has been made again with them."""
    (tmp_path / "train.txt").write_text(TEXT)
    arguments = ["--trainpref", f"{tmp_path}/train.txt", "--destdir", f"{tmp_path}/data"]
    assert main(["preprocess", *arguments, "--tokenizer", "word"]) == 0
    folder = tmp_path / "data"
    before, manifest = fingerprint(folder), Manifest.load(folder)
    assert "train.words" in manifest.files
    (folder / "train.words").unlink()
    with pytest.raises(MetaseqError, match=r"train.words: missing"):
        fingerprint(folder)
    del manifest.files["train.words"]
    manifest.save(folder)
    assert fingerprint(folder) == before
