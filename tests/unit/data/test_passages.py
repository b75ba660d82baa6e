"""Passages that a split shares with train: closed forms, pieces, samples, and brute force."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.data.doctor import passages
from metaseq_lm.data.doctor.passages import WINDOW, _window_hashes, shared_passages
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

SPECIALS = special_symbols(1)
FIRST = len(SPECIALS)
VOCABULARY = Vocabulary([*SPECIALS, *map(str, range(5000))])


def split(prefix: Path, *documents: np.ndarray) -> IndexedDataset:
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add(document.astype(np.uint16))
    return IndexedDataset(prefix)


def text(seed: int, count: int) -> np.ndarray:
    return FIRST + np.random.default_rng(seed).integers(0, 5000, count)


@pytest.mark.parametrize("length, share", [(WINDOW - 1, 0.0), (WINDOW, 0.25), (3 * WINDOW, 0.5)])
def test_the_tokens_of_a_passage_count(tmp_path, length, share):
    """Wherever it stands in both splits, cut into documents, with other special symbols."""
    fresh, passage = text(0, 3 * WINDOW), text(1, length)
    valid = split(tmp_path / "valid", fresh[:70], passage[:20], passage[20:], fresh[70:])
    ends = [np.append(part, 1) for part in np.array_split(passage, 3)]
    train = split(tmp_path / "train", text(2, 1000), *ends, text(3, 500))
    assert shared_passages(train, valid, VOCABULARY) == pytest.approx(share)


def test_short_documents_in_another_order_share_no_passage(tmp_path):
    documents = [text(i, 20) for i in range(40)]
    train, valid = (
        split(tmp_path / "train", *documents),
        split(tmp_path / "valid", *documents[::-1]),
    )
    assert shared_passages(train, valid, VOCABULARY) == 0.0


def test_other_case_is_other_text(tmp_path):
    """One token of every 45 differs, so no window is the same."""
    train, changed = text(0, 900), text(0, 900)
    changed[::45] = FIRST
    train_split, valid = split(tmp_path / "train", train), split(tmp_path / "valid", changed)
    assert shared_passages(train_split, valid, VOCABULARY) == 0.0


@pytest.mark.parametrize("piece", [1, 37, WINDOW, 1000])
def test_train_is_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(passages, "PIECE", piece)
    tokens = text(0, 1000)
    valid = split(tmp_path / "valid", tokens[300:560], text(1, 740))
    assert shared_passages(split(tmp_path / "train", tokens), valid, VOCABULARY) == 0.26


def test_blocks_of_a_large_split_tell_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "MOST", 1 << 14)
    train = split(tmp_path / "train", text(0, 100_000))
    shared = [text(0, 100_000)[400 * i : 400 * i + 400] for i in range(250)]
    fresh = [text(1 + i, 600) for i in range(250)]
    valid = split(tmp_path / "valid", *[x for pair in zip(shared, fresh) for x in pair])
    assert shared_passages(train, valid, VOCABULARY) == pytest.approx(0.4, abs=0.1)


def test_nothing_is_shared_with_too_little_text(tmp_path):
    empty, short = split(tmp_path / "empty"), split(tmp_path / "short", text(0, WINDOW - 1))
    assert shared_passages(short, short, VOCABULARY) == 0.0
    assert shared_passages(short, empty, VOCABULARY) == 0.0
    assert shared_passages(empty, split(tmp_path / "a", text(0, 90)), VOCABULARY) == 0.0


def test_ids_outside_the_vocabulary_are_read(tmp_path):
    outside = split(tmp_path / "a", np.full(WINDOW, 60_000))
    assert shared_passages(outside, split(tmp_path / "b", text(0, 90)), VOCABULARY) == 0.0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 3), max_size=40), st.integers(1, 6))
def test_hashes_are_equal_for_equal_windows_only(monkeypatch, tokens, window):
    monkeypatch.setattr(passages, "WINDOW", window)
    numbers = np.random.default_rng(0).integers(1, 1 << 64, 4, np.uint64)[tokens]
    windows = [tokens[i : i + window] for i in range(len(tokens) - window + 1)]
    hashes = _window_hashes(numbers.astype(np.uint64)).tolist()
    assert [hashes.index(h) for h in hashes] == [windows.index(x) for x in windows]
