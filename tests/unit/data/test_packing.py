"""Sentences packed into segments: against the rules written out one sentence at a time."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus import packing
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import Draws, Packed, Targets, open_corpus
from metaseq_lm.data.corpus.rows import Corpus, masked_batch
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

WORDS = 60_000  # ids 4 to 59,999: nearly every token of a small corpus is another one
VOCABULARY = Vocabulary([*special_symbols(1), *(f"w{i}" for i in range(4, WORDS))])
PAD, SEP, CLS = VOCABULARY.pad, VOCABULARY.sep, VOCABULARY.cls(0)
Documents = list[list[list[int]]]


def write(prefix: Path, documents: Documents) -> None:
    with IndexedWriter(prefix, np.uint16, documents=True) as writer:
        for document in documents:
            for sentence in document:
                writer.add(np.array(sentence, np.uint16))
            writer.end_documents([len(writer)])


def counting(sizes: list[list[int]]) -> Documents:
    """Return documents of sentences of these sizes; the tokens count up from 4."""
    documents, token = [], 4
    for document in sizes:
        documents.append([])
        for size in document:
            documents[-1].append(list(range(token, token + size)))
            token += size
    assert token < WORDS
    return documents


@dataclass
class Slow:
    """The builder as published: lists of tokens, one decision at a time.

    Each decision is taken from the draws, which stand by number of sentence.
    """

    longest: int
    draws: Draws
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def build(self, documents: Documents) -> list[tuple[list[int], list[int]]]:
        self.target = self.longest
        self.pending: list[tuple[int, list[int]]] = []
        number = 0
        for document in documents:
            for sentence in document:
                if sentence:
                    self.pending.append((number, sentence))
                    number += 1
                if sum(len(s) for _, s in self.pending) >= self.target:
                    self.emit()
            if self.pending:
                self.emit()
        return self.rows

    def emit(self) -> None:
        begin = self.pending[0][0]
        goal = 100_000 if self.draws.single[begin] else (self.target - 3) // 2
        a: list[int] = []
        b: list[int] = []
        for number, sentence in self.pending:
            fits = len(a) + len(sentence) < goal
            lucky = not b and len(a) < goal and self.draws.coin[number]
            (a if not a or fits or lucky else b).extend(sentence)
        a = a[: self.longest - 2]
        b = b[: max(0, self.longest - len(a) - 3)]
        self.rows.append((a, b))
        self.pending = []
        self.target = int(self.draws.next_target[begin])


def unpacked(corpus: Packed, samples: np.ndarray, width: int = 0) -> list[tuple[list, list]]:
    """Return A and B of rows, having checked everything else about their layout."""
    rows, lengths = corpus.rows(samples, width=width)
    segments = corpus.segments(samples, rows.shape[1])
    assert rows.dtype == np.int64 and segments.dtype == np.int64 and segments.shape == rows.shape
    assert rows.shape[1] == max(width, lengths.max())
    assert (lengths == corpus.row_lengths[samples]).all()
    found = []
    for row, segment, length in zip(rows.tolist(), segments.tolist(), lengths):
        assert row[0] == CLS and row[length - 1] == SEP and set(row[length:]) <= {PAD}
        assert PAD not in row[:length] and row.count(CLS) == 1
        first = row.index(SEP)
        a, b = row[1:first], row[first + 1 : length - 1]
        assert row.count(SEP) == 1 + bool(b) and a
        assert segment == [0] * (first + 1) + [1] * (length - first - 1) + [0] * (len(row) - length)
        found.append((a, b))
    return found


sizes_strategy = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=12), min_size=1, max_size=8
).filter(lambda documents: any(len(d) > 1 for d in documents) and sum(map(sum, documents)))


@settings(max_examples=150, deadline=None)
@given(
    sizes=sizes_strategy,
    longest=st.integers(5, 40),
    seed=st.integers(0, 1000),
    chunk=st.integers(1, 30),
    frequent=st.booleans(),
)
def test_rows_are_those_of_the_published_rules(
    tmp_path_factory, sizes, longest, seed, chunk, frequent
):
    """Token by token, also with much more frequent single segments and short targets."""
    folder = tmp_path_factory.mktemp("packed")
    documents = counting(sizes)
    write(folder / "train", documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK", chunk)
        if frequent:
            patch.setattr(packing, "Targets", partial(Targets, short=0.5))
            patch.setattr(packing, "SINGLE", 0.3)
        corpus = Packed(folder, "train", VOCABULARY, longest, seed)
        count = sum(size > 0 for document in sizes for size in document)
        targets = Targets(longest, short=0.5) if frequent else Targets(longest)
        # One stream of numbers, however it is cut.
        draws = Draws.draw(random_streams.generator(seed, "packing", "train"), count, targets)
    wanted = Slow(longest, draws).build(documents)
    assert len(corpus) == len(wanted)
    assert unpacked(corpus, np.arange(len(corpus))) == wanted
    order = np.random.default_rng(seed).integers(0, len(corpus), 7)
    assert unpacked(corpus, order, width=longest + 3) == [wanted[i] for i in order]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    """2,500 documents of up to 30 sentences of up to 16 tokens; a token names its document."""
    folder = tmp_path_factory.mktemp("large")
    draw = np.random.default_rng(1)
    documents: Documents = []
    for i in range(2500):
        sizes = draw.integers(1, 17, draw.integers(1, 31))
        documents.append([[4 + i] * int(size) for size in sizes])
    write(folder / "train", documents)
    return folder, documents


def test_no_row_crosses_documents_and_nothing_but_ends_is_lost(large):
    folder, documents = large
    corpus = Packed(folder, "train", VOCABULARY, 64, 1)
    rows = unpacked(corpus, np.arange(len(corpus)))
    assert all(len({*a, *b}) == 1 for a, b in rows)
    kept = sum(len(a) + len(b) for a, b in rows)
    total = sum(len(sentence) for document in documents for sentence in document)
    full = corpus.row_lengths == 64
    # A row that is not full has lost nothing; a full one at most a sentence, and the room of
    # the special tokens.
    assert total - (16 + 3) * full.sum() <= kept < total
    assert corpus.row_lengths.max() == 64


def test_shares_are_those_of_the_rules():
    """10 % of examples single, 5 % of targets short and uniform, half of the coins true."""
    draws = Draws.draw(random_streams.generator(3, "x"), 200_000, Targets(128))
    assert stats.binomtest(int(draws.single.sum()), 200_000, 0.1).pvalue > 1e-3
    assert stats.binomtest(int(draws.coin.sum()), 200_000, 0.5).pvalue > 1e-3
    counts = np.bincount(draws.next_target, minlength=129)
    assert counts[:5].sum() == 0 and len(counts) == 129
    # 128 is the length of the others too.
    short = int(counts[5:128].sum())
    assert stats.binomtest(short, 200_000, 0.05 * 123 / 124).pvalue > 1e-3
    assert stats.chisquare(counts[5:128]).pvalue > 1e-3


def test_shares_of_rows(tmp_path):
    """One endless document of one-token sentences, where every example reaches its target."""
    write(tmp_path / "train", [[[5]] * 400_000, [[5], [5]]])
    longest = 20
    corpus = Packed(tmp_path, "train", VOCABULARY, longest, 7)
    count, second = len(corpus) - 2, corpus.lengths - corpus.firsts - 3
    assert count > 10_000
    # An example has exactly its target of tokens, and 3 special ones, 2 in a single segment: with
    # targets below 17, or 18, it is shorter than the row. Short targets are 5 to 20, even.
    short = corpus.lengths[:count] < longest
    share = 0.05 * (0.9 * 12 + 0.1 * 13) / 16
    assert stats.binomtest(int(short.sum()), count, share).pvalue > 1e-3
    full_single = (second < 0)[:count] & ~short
    full = int((~short).sum())
    assert stats.binomtest(int(full_single.sum()), full, 0.1).pvalue > 1e-3
    # Half of 19 or 20 without 3 is 8: A has 7 tokens and gets an eighth with every second coin;
    # 17 and 18, of 4 short targets that fill a row, give 6 and 7.
    firsts = corpus.firsts[:count][~short & ~full_single]
    eight = int((firsts == 8).sum())
    long, rare = 0.95 + 0.1 / 16, 0.1 / 16
    assert stats.binomtest(eight, len(firsts), 0.5 * long / (long + rare)).pvalue > 1e-3
    assert set(firsts.tolist()) == {6, 7, 8}


def test_seed_and_split_choose_the_rows(large):
    folder, _ = large
    one, again, other = (Packed(folder, "train", VOCABULARY, 64, seed) for seed in (1, 1, 2))
    assert (one.lengths == again.lengths).all() and (one.firsts == again.firsts).all()
    assert len(one) != len(other) or (one.lengths != other.lengths).any()


def options(**given: object) -> object:
    defaults = {"tokens_per_sample": 16, "sample_break_mode": "segments", "shuffle_tokens": False}
    return SimpleNamespace(**defaults | given)


def test_open_corpus(tmp_path):
    write(tmp_path / "train", counting([[3, 4], [5]]))
    assert isinstance(open_corpus(tmp_path, "train", VOCABULARY, options(), 1), Packed)
    lines = open_corpus(tmp_path, "train", VOCABULARY, options(sample_break_mode="eos"), 1)
    assert isinstance(lines, Corpus) and lines.segments(np.array([0]), 9) is None
    with pytest.raises(UsageError, match=r"tokens_per_sample.* 5\b.* 4\b"):
        open_corpus(tmp_path, "train", VOCABULARY, options(tokens_per_sample=4), 1)


def test_a_corpus_of_lines_is_refused_with_the_remedy(tmp_path):
    with IndexedWriter(tmp_path / "train", np.uint16) as writer:
        writer.add([4, 5])
        writer.add([6])
    with pytest.raises(UsageError, match="preprocess --documents blank"):
        Packed(tmp_path, "train", VOCABULARY, 16, 1)


def test_batches_have_segments(large):
    folder, _ = large
    corpus = Packed(folder, "train", VOCABULARY, 64, 1)
    keys = random_streams.row_keys(1, np.arange(8))
    how = Masking(mask=VOCABULARY.mask, random=0.0, spared=VOCABULARY.specials)
    batch = masked_batch(corpus, how, np.arange(8), keys, 64)
    assert (batch.segments == corpus.segments(np.arange(8), 64)).all()
    lines = Corpus(folder, "train", VOCABULARY, 64, "eos")
    assert masked_batch(lines, how, np.arange(8), keys, 64).segments is None
