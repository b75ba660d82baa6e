"""N-grams of tokens."""

from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.data.ngrams import NGram, sequences_of
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter

TOKENS, SIZES = np.array([0, 1, 0, 0, 1]), np.array([3, 2])


def test_ngram_is_witten_bell_and_sums_to_one() -> None:
    model = NGram(TOKENS, SIZES, n_symbols=3, order=2)
    # Unigram: counts 3, 2, 0 with two types; after 0: 1 twice, one type.
    unigram = (np.array([3, 2, 0]) + 2 / 3) / 7
    after = (np.array([0, 2, 0]) + unigram) / 3
    probs = [model.token_log_probs(np.array([0, word]), np.array([2]))[1] for word in range(3)]
    np.testing.assert_allclose(np.exp(probs), after)
    assert np.exp(probs).sum() == pytest.approx(1)


def test_contexts_end_at_sequences() -> None:
    model = NGram(TOKENS, SIZES, n_symbols=3)
    together = model.token_log_probs(TOKENS, SIZES)
    apart = [
        model.token_log_probs(part, np.array([len(part)])) for part in (TOKENS[:3], TOKENS[3:])
    ]
    np.testing.assert_array_equal(together, np.concatenate(apart))
    np.testing.assert_allclose(model.log_probs(TOKENS, SIZES), [x.sum() for x in apart])
    # A first token is not the one that follows the sequence before it.
    assert together[0] == together[3] != model.token_log_probs(TOKENS, np.array([5]))[3]


def test_a_smaller_order_is_that_of_its_own_model() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, 400)
    sizes = np.array([100, 0, 300])
    model = NGram(tokens, sizes, n_symbols=5)
    for order in (1, 2):
        np.testing.assert_array_equal(
            model.token_log_probs(tokens, sizes, order),
            NGram(tokens, sizes, 5, order).token_log_probs(tokens, sizes),
        )


def test_nothing_counted_is_uniform() -> None:
    model = NGram(np.zeros(0, np.int64), np.zeros(0, np.int64), n_symbols=4)
    np.testing.assert_allclose(model.token_log_probs(TOKENS, SIZES), -np.log(4))


def test_damaged_ids_count_as_the_nearest_symbol() -> None:
    damaged, repaired = np.array([0, 9, -1, 1]), np.array([0, 2, 0, 1])
    models = [NGram(tokens, np.array([4]), n_symbols=3) for tokens in (damaged, repaired)]
    scores = [model.token_log_probs(damaged, np.array([4])) for model in models]
    np.testing.assert_array_equal(*scores)


def test_of_a_large_corpus_every_nth_sequence_is_counted(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "train", np.uint16) as writer:
        for i in range(10):
            writer.add(np.full(i, i))
    data = IndexedDataset(tmp_path / "train")
    tokens, sizes = sequences_of(data)
    assert sizes.tolist() == list(range(10)) and len(tokens) == 45
    tokens, sizes = sequences_of(data, most=15)
    assert sizes.tolist() == [0, 3, 6, 6]
    assert tokens.tolist() == [3] * 3 + [6] * 6 + [9] * 6
    assert len(tokens) == 15 == sizes.sum()
