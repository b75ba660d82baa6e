"""Shuffled rows: what stays in place, that all orders are alike likely, what they depend on."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.core import random_streams
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.pairs import Pairs
from metaseq_lm.data.corpus.rows import Samples, shuffle_tokens
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

SYMBOLS = [*special_symbols(1, unk=True), *(f"w{i}" for i in range(2000))]
VOCABULARY = Vocabulary(SYMBOLS)
SPECIALS = sorted(VOCABULARY.unwritten)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 documents of 6 sentences of 1 to 9 tokens; no token occurs twice."""
    folder = tmp_path_factory.mktemp("shuffled")
    sizes = np.random.default_rng(0).integers(1, 10, 180)
    for split in ("train", "valid"):
        with IndexedWriter(folder / split, np.uint16, documents=True) as writer:
            writer.extend(5 + np.arange(sizes.sum(), dtype=np.uint16), sizes)
            writer.end_documents(np.arange(0, len(sizes), 6))
    return folder


def corpus(
    folder: Path, mode: str, split: str = "train", seed: int = 1, shuffled: bool = True
) -> Samples:
    options = SimpleNamespace(tokens_per_sample=16, sample_break_mode=mode, shuffle_tokens=shuffled)
    return open_corpus(folder, split, VOCABULARY, options, seed)


@pytest.mark.parametrize("mode", ["eos", "none", "segments"])
def test_tokens_are_permuted_within_their_row(folder: Path, mode: str) -> None:
    ordered, shuffled = corpus(folder, mode, shuffled=False), corpus(folder, mode)
    samples = np.arange(len(ordered))
    (rows, lengths), (other, other_lengths) = ordered.rows(samples), shuffled.rows(samples)
    assert (lengths == other_lengths).all()
    is_special = np.isin(rows, SPECIALS)
    assert (is_special == np.isin(other, SPECIALS)).all()
    assert (rows[is_special] == other[is_special]).all()
    assert (np.sort(rows, 1) == np.sort(other, 1)).all()
    long = (~is_special).sum(1) > 4
    assert (rows != other).any(1)[long].mean() > 0.95


@pytest.mark.parametrize("mode", ["eos", "none", "segments"])
def test_the_order_depends_on_seed_and_sample_alone(folder: Path, mode: str) -> None:
    shuffled = corpus(folder, mode)
    rows, _ = shuffled.rows(np.arange(10))
    part, _ = shuffled.rows(np.array([7, 3]), width=16)
    assert (part[:, : rows.shape[1]] == rows[[7, 3]]).all()
    assert (corpus(folder, mode).rows(np.arange(10))[0] == rows).all()
    if mode != "segments":  # whose rows a seed chooses
        assert (corpus(folder, mode, seed=2).rows(np.arange(10))[0] != rows).any()


@pytest.mark.parametrize("mode", ["eos", "none", "segments"])
def test_other_splits_stay_in_order(folder: Path, mode: str) -> None:
    valid = corpus(folder, mode, "valid")
    expected = corpus(folder, mode, "valid", shuffled=False)
    samples = np.arange(len(valid))
    assert (valid.rows(samples)[0] == expected.rows(samples)[0]).all()


def test_all_orders_are_alike_likely() -> None:
    """[UNK] is a token of the text, [SEP] in the middle of a row is not."""
    cls, sep, unk = VOCABULARY.cls(0), VOCABULARY.sep, VOCABULARY.unk
    rows = np.tile([cls, 7, unk, sep, 8, 9, sep, VOCABULARY.pad], (24_000, 1))
    shuffled = shuffle_tokens(rows, VOCABULARY, random_streams.row_keys(3, np.arange(len(rows))))
    assert (shuffled[:, [0, 3, 6, 7]] == rows[:, [0, 3, 6, 7]]).all()
    orders, counts = np.unique(shuffled[:, [1, 2, 4, 5]], axis=0, return_counts=True)
    assert len(orders) == 24 and stats.chisquare(counts).pvalue > 1e-3


def test_pairs_are_shuffled_across_their_segments(folder: Path) -> None:
    pairs = Pairs(folder, "train", VOCABULARY, 48, 1)
    keys = random_streams.row_keys(5, np.arange(len(pairs)))
    ordered = pairs.rows(np.arange(len(pairs)), keys)
    pairs.shuffled = True
    rows, *others = pairs.rows(np.arange(len(pairs)), keys)
    for expected, actual in zip(ordered[1:], others):
        assert (expected == actual).all()
    assert (np.sort(rows, 1) == np.sort(ordered[0], 1)).all() and (rows != ordered[0]).any(1).all()
    assert (np.isin(rows, SPECIALS) == np.isin(ordered[0], SPECIALS)).all()
