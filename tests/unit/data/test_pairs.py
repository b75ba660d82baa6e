"""Pairs of segments: labels, where B comes from, lengths, and what they depend on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.pairs import IS_NEXT, NOT_NEXT, Pairs, pair_batch
from metaseq_lm.data.corpus.rows import cut_pair
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

DOCUMENTS, SENTENCES, LONGEST = 40, 24, 9
WORDS = DOCUMENTS * SENTENCES * LONGEST
VOCABULARY = Vocabulary([*special_symbols(1), *(f"w{i}" for i in range(WORDS))])
PAD, SEP, CLS = VOCABULARY.pad, VOCABULARY.sep, VOCABULARY.cls(0)
TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents of 24 sentences of 1 to 9 tokens; no token occurs twice."""
    folder = tmp_path_factory.mktemp("pairs")
    with IndexedWriter(folder / "train", np.uint16, documents=True) as writer:
        sizes = np.random.default_rng(0).integers(1, LONGEST + 1, DOCUMENTS * SENTENCES)
        writer.extend(4 + np.arange(sizes.sum(), dtype=np.uint16), sizes)
        writer.end_documents(np.arange(0, len(sizes), SENTENCES))
    return folder


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Pairs:
    return Pairs(folder, "train", VOCABULARY, TOKENS, 1)


def keys_of(count: int, root: int = 0) -> np.ndarray:
    return random_streams.row_keys(random_streams.key("pairs", root), np.arange(count))


def split(rows: np.ndarray, lengths: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """Return A and B of rows, having checked the special tokens."""
    found = []
    for row, length in zip(rows.tolist(), lengths):
        assert row[0] == CLS and row[length - 1] == SEP and set(row[length:]) <= {PAD}
        first = row.index(SEP)
        assert row.count(SEP) == 2 and first > 1 and length > first + 2
        found.append((row[1:first], row[first + 1 : length - 1]))
    return found


def test_pairs_follow_each_other_or_come_from_two_documents(pairs: Pairs) -> None:
    """Over several epochs: contiguous texts, sentence borders, documents, labels, segments."""
    data = pairs.data
    document_of = np.repeat(np.arange(DOCUMENTS), SENTENCES)
    sentence_of = np.repeat(np.arange(len(data)), data.sizes)
    begins, ends = data.starts, data.starts + data.sizes
    seen = set()
    for epoch in range(4):
        samples = np.arange(len(pairs))
        rows, lengths, segments, labels = pairs.rows(samples, keys_of(len(pairs), epoch), TOKENS)
        assert rows.shape == segments.shape == (len(pairs), TOKENS) and lengths.max() == TOKENS
        for (a, b), segment, label in zip(split(rows, lengths), segments, labels):
            assert segment.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (
                TOKENS - len(a) - len(b) - 3
            )
            for text in (a, b):
                assert text == list(range(text[0], text[0] + len(text)))
                places = sentence_of[np.array(text) - 4]
                assert len(set(document_of[places].tolist())) == 1
            places = sentence_of[a[-1] - 4], sentence_of[b[0] - 4]
            # A ends with a sentence and B begins with one, however much of them is cut.
            assert a[-1] - 4 + 1 == ends[places[0]] and b[0] - 4 == begins[places[1]]
            same = document_of[places[0]] == document_of[places[1]]
            assert label == (IS_NEXT if same else NOT_NEXT)
            assert not same or b[0] == a[-1] + 1
            full = len(a) + len(b) + 3 == TOKENS
            assert full or (a[0] - 4 in begins and b[-1] - 4 + 1 in ends)
            seen.add((a[0], a[-1], label))
    # Cuts and labels are drawn anew each time.
    assert len(seen) > 2 * len(pairs)


def test_half_of_the_labels(pairs: Pairs) -> None:
    """Half of the examples of several sentences, all of one sentence are NOT_NEXT."""
    samples = np.tile(np.arange(len(pairs)), 100)
    _, _, _, labels = pairs.rows(samples, keys_of(len(samples)))
    several = (np.diff(pairs._examples) > 1)[samples]
    assert (labels[~several] == NOT_NEXT).all() and several.mean() > 0.9
    count = int(several.sum())
    assert stats.binomtest(int((labels[several] == NOT_NEXT).sum()), count, 0.5).pvalue > 1e-3
    assert 0.5 < (labels == NOT_NEXT).mean() < 0.55


def test_other_texts_are_drawn_evenly(pairs: Pairs) -> None:
    """Every other document with the same probability, every sentence of it too; never the same."""
    sample = len(pairs) // 2
    own = int(pairs._document[sample])
    draws = random_streams.uniforms(keys_of(40_000), 0, 2)
    samples = np.full(40_000, sample)
    start, end = pairs._elsewhere(samples, np.full(40_000, 20), draws)
    sentence = np.searchsorted(pairs.data.starts, start)
    documents = np.bincount(sentence // SENTENCES, minlength=DOCUMENTS)
    assert documents[own] == 0
    assert stats.chisquare(np.delete(documents, own)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(sentence % SENTENCES)).pvalue > 1e-3
    # At least 20 tokens and less than a sentence more, or up to the end of the document.
    last = np.searchsorted(pairs.data.starts, end) - 1
    at_end = last % SENTENCES == SENTENCES - 1
    sizes = end - start
    assert ((sizes >= 20) | at_end).all() and (sizes - pairs.data.sizes[last] < 20).all()
    assert (sentence // SENTENCES == last // SENTENCES).all() and at_end.any()


def test_labels_cannot_be_told_from_lengths(pairs: Pairs) -> None:
    """The lengths of rows say little: those of both labels are nearly the same on average."""
    samples = np.tile(np.arange(len(pairs)), 50)
    _, lengths, _, labels = pairs.rows(samples, keys_of(len(samples)))
    several = (np.diff(pairs._examples) > 1)[samples]
    means = [lengths[several & (labels == label)].mean() for label in (IS_NEXT, NOT_NEXT)]
    assert abs(means[0] - means[1]) < 0.1 * TOKENS


def test_a_row_is_the_same_in_any_batch(pairs: Pairs) -> None:
    samples, keys = np.arange(12), keys_of(12)
    how = Masking(mask=VOCABULARY.mask, random=0.0, spared=VOCABULARY.specials)
    together = pair_batch(pairs, how, samples, keys, TOKENS)
    order = np.array([7, 2, 11])
    alone = pair_batch(pairs, how, samples[order], keys[order], TOKENS)
    for name in ("tokens", "segments", "next_sentence"):
        assert torch.equal(getattr(together, name)[order], getattr(alone, name))
    before = keys.copy()
    assert (keys == before).all() and together.next_sentence.dtype == torch.int64


@settings(max_examples=200, deadline=None)
@given(a=st.integers(1, 60), b=st.integers(1, 60), room=st.integers(2, 50))
def test_the_longer_one_gives_way(a: int, b: int, room: int) -> None:
    """Token by token, as published."""
    first, second = a, b
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    found = cut_pair(np.array([a]), np.array([b]), room)
    assert (found[0][0], found[1][0]) == (first, second) and min(first, second) >= 1


def test_one_document_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "train", np.uint16, documents=True) as writer:
        writer.extend(np.arange(4, 10, dtype=np.uint16), np.array([2, 2, 2]))
    with pytest.raises(UsageError, match="one document.*blank line"):
        Pairs(tmp_path, "train", VOCABULARY, 16, 1)
