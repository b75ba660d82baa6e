"""How a split compares with train: closed forms, and chance."""

from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.data.doctor.likeness import (
    FEWEST,
    SHIFTED,
    _draw_tokens,
    compare,
    divergence,
    sample_size,
    token_counts,
)
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

FIRST = len(special_symbols(1))
VOCABULARY = Vocabulary([*special_symbols(1), *map(str, range(50))])
LARGE = Vocabulary([*special_symbols(1), *map(str, range(4096))])
ZIPF = 1 / np.arange(1, 4097)


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


def texts(draw: np.random.Generator, count: int, tokens: int, focus: float) -> list[np.ndarray]:
    """Return documents of one source, each with a vocabulary that is narrower the smaller `focus`
    is."""
    shares = ZIPF / ZIPF.sum()
    weights = (draw.dirichlet(focus * shares) if focus else shares for _ in range(count))
    return [FIRST + draw.choice(4096, tokens, p=p) for p in weights]


@pytest.mark.parametrize("tokens, focus", [(20, 0), (250, 300)])
@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.6, 1.0, 1.7, 5.0])
@pytest.mark.parametrize("train_tokens", [2 * FEWEST, 10_000, 50_000])
def test_splits_of_one_source_are_alike_at_any_ratio_of_sizes(
    tmp_path: Path, train_tokens: int, ratio: float, tokens: int, focus: float
) -> None:
    draw = np.random.default_rng(3)
    counts = (train_tokens // tokens, max(int(ratio * train_tokens), FEWEST) // tokens)
    train, valid = (
        split(tmp_path / name, texts(draw, count, tokens, focus))
        for name, count in zip(("train", "valid"), counts)
    )
    likeness = compare(train, valid, LARGE)
    assert likeness.usual > 0.002 and likeness.shift < SHIFTED / 2


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_a_shift_is_seen_at_any_ratio_of_sizes(tmp_path: Path, ratio: float) -> None:
    """Half of the tokens of valid are of the rarest fifth of the words of train."""
    draw = np.random.default_rng(3)
    train = split(tmp_path / "train", texts(draw, 500, 20, 0))
    documents = texts(draw, int(500 * ratio), 20, 0)
    for document in documents:
        document[::2] = FIRST + 4095 - draw.integers(0, 800, 10)
    assert compare(train, split(tmp_path / "valid", documents), LARGE).shift > SHIFTED


def test_one_long_document_of_each_source_hides_a_shift(tmp_path: Path) -> None:
    """What is drawn from train is then of another source than the rest of it, too."""
    draw = np.random.default_rng(0)
    sources = [FIRST + 10 * i + draw.integers(0, 10, 4000) for i in range(4)]
    long = split(tmp_path / "long", sources[:3])
    cut = split(tmp_path / "cut", [part for x in sources[:3] for part in np.split(x, 400)])
    valid = split(tmp_path / "valid", np.split(sources[3], 400))
    assert (
        compare(cut, valid, VOCABULARY).shift > 1 > SHIFTED > compare(long, valid, VOCABULARY).shift
    )


def test_a_small_split_tells_nothing(tmp_path: Path) -> None:
    train = split(tmp_path / "train", [FIRST + np.arange(20)] * 30)
    other = split(tmp_path / "valid", [FIRST + np.arange(20, 40)] * 3)
    assert compare(train, other, VOCABULARY).shift == 0.0


def test_tokens_of_shared_documents(tmp_path: Path) -> None:
    """One of two documents, 3 of 10 tokens; its tokens within another one count nothing."""
    a, b = FIRST + np.arange(3), FIRST + np.arange(10, 17)
    train = split(tmp_path / "train", [np.append(b, a), a, FIRST + np.arange(30, 33)])
    likeness = compare(train, split(tmp_path / "valid", [a, b]), VOCABULARY)
    assert likeness.shared == pytest.approx(0.3)


def test_as_many_tokens_are_drawn(tmp_path: Path) -> None:
    train = split(tmp_path / "train", [FIRST + np.arange(4) for _ in range(9)])
    assert len(_draw_tokens(train, 9)) == 9
    assert len(_draw_tokens(train, 999)) == 36
    assert token_counts(_draw_tokens(train, 8), 55)[FIRST] == 2


def test_the_sample_is_at_most_half_of_train(tmp_path: Path) -> None:
    train = split(tmp_path / "train", [FIRST + np.arange(4)] * 9)
    sizes = [
        sample_size(train, split(tmp_path / "valid", [FIRST + np.arange(4)] * count))
        for count in (1, 4, 5, 90)
    ]
    assert sizes == [4, 16, 18, 18]
