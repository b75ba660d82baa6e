"""How a split compares with train: closed forms, and chance."""

from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.data.doctor.likeness import compare, divergence, drawn, token_counts
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

FIRST = len(special_symbols(1))
VOCABULARY = Vocabulary([*special_symbols(1), *map(str, range(50))])


def split(prefix: Path, documents: list[np.ndarray]) -> IndexedDataset:
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add(document.astype(np.uint16))
    return IndexedDataset(prefix)


def test_the_divergence_of_counts_with_one_added() -> None:
    assert divergence(np.array([3, 1]), np.array([3, 1])) == 0.0
    wanted = 4 / 6 * np.log(4 / 6 * 2) + 2 / 6 * np.log(2 / 6 * 2)
    assert divergence(np.array([3, 1]), np.array([2, 2])) == pytest.approx(wanted, abs=1e-15)


def test_documents_of_one_source_differ_by_chance_alone(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    documents = [FIRST + draw.integers(0, 50, 20) for _ in range(500)]
    train = split(tmp_path / "train", documents[:450])
    likeness = compare(train, split(tmp_path / "valid", documents[450:]), VOCABULARY)
    assert likeness.divergence > 0.01 and likeness.shift < 0.02 and likeness.shared == 0.0
    moved = [np.maximum(document, FIRST + 25) for document in documents[450:]]
    assert compare(train, split(tmp_path / "moved", moved), VOCABULARY).shift > 0.2


def test_a_small_split_tells_nothing(tmp_path: Path) -> None:
    train = split(tmp_path / "train", [FIRST + np.arange(20)] * 30)
    other = split(tmp_path / "valid", [FIRST + np.arange(20, 40)] * 3)
    assert compare(train, other, VOCABULARY).shift == 0.0


def test_tokens_of_shared_documents(tmp_path: Path) -> None:
    """One of two documents is in train, with 3 of 10 tokens; the same tokens within another one
    are none."""
    a, b = FIRST + np.arange(3), FIRST + np.arange(10, 17)
    train = split(tmp_path / "train", [np.append(b, a), a, FIRST + np.arange(30, 33)])
    likeness = compare(train, split(tmp_path / "valid", [a, b]), VOCABULARY)
    assert likeness.shared == pytest.approx(0.3)


def test_as_many_tokens_are_drawn(tmp_path: Path) -> None:
    train = split(tmp_path / "train", [FIRST + np.arange(4) for _ in range(9)])
    assert len(drawn(train, 9)) == 12
    assert len(drawn(train, 999)) == 36
    assert token_counts(drawn(train, 8), 55)[FIRST] == 2
