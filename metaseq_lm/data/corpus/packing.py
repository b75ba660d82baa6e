"""Sentences packed into rows of two segments, as ELECTRA's data builder does it.

A row is `[CLSn] A [SEP]` or `[CLSn] A [SEP] B [SEP]`. The rules are from
build_pretraining_dataset.py of google-research/electra (Clark et al. 2020). Shapes: B rows, S the
longest row of the batch, N sentences.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.config.tasks import DOCUMENTS, SEGMENTS
from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.documents import PackedDocuments
from metaseq_lm.data.corpus.phases import PhasedSamples
from metaseq_lm.data.corpus.rows import Corpus, Samples, blank_rows, fill, open_tokens, segments_of
from metaseq_lm.data.storage.indexed import IndexedDataset, concatenate_ranges
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

__all__ = ["open_corpus"]

SHORTEST = 5  # [CLS] a [SEP] b [SEP]
SINGLE = 0.1  # probability
_ENDLESS = 100_000  # length of a first segment that leaves no room for a second
CHUNK = 1 << 18


@dataclass(frozen=True)
class Targets:
    """How many tokens to collect for an example: `longest`, except with probability `short`.

    Then the number is drawn from `shortest` to `longest`.
    """

    longest: int
    shortest: int = SHORTEST
    short: float = 0.05


@dataclass(frozen=True)
class Draws:
    """The random numbers of consecutive sentences, one of each kind per sentence.

    A sentence uses its own `coin`; an example uses `single` and `next_target` of its first one.
    """

    coin: np.ndarray  # boolean: a sentence that makes the first segment too long joins it
    single: np.ndarray  # boolean: the example has one segment
    next_target: np.ndarray  # int64: the target length of the example after it

    @classmethod
    def draw(cls, generator: np.random.Generator, count: int, targets: Targets) -> "Draws":
        """Draw for `count` sentences: `coin` with probability 1/2, `single` with SINGLE."""
        u = generator.random((count, 4))
        least, most = targets.shortest, targets.longest
        short = least + (u[:, 3] * (most - least + 1)).astype(np.int64)
        following = np.where(u[:, 2] < targets.short, short, most)
        return cls(u[:, 0] < 0.5, u[:, 1] < SINGLE, following)


def _assign_sentences(
    sizes: np.ndarray, last: np.ndarray, targets: Targets, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign sentences of `sizes` (N,), at least 1, to examples and segments, one after the other.

    An example ends with the sentence that brings it to its target length, or with its document
    (`last`, boolean (N,)). The target of the next example is drawn at its end and holds across
    documents; the first target is the longest. Returns `begins`, `second` and `targets` of an
    Assignment.

    Documents of sentences with 3, 2, 4 and with 5, 1 tokens make an example each. The first segment
    of the first has less than (12 - 3) // 2 tokens; the second example is one of the tenth that
    have one segment only:

        >>> targets, generator = Targets(longest=12, short=0.0), np.random.default_rng(0)
        >>> sizes, last = np.array([3, 2, 4, 5, 1]), np.array([False, False, True, False, True])
        >>> begins, second, lengths = _assign_sentences(sizes, last, targets, generator)
        >>> begins.astype(int), second.astype(int), lengths
        (array([1, 0, 0, 1, 0]), array([0, 1, 1, 0, 0]), array([12, 12]))
    """
    # 2 where an example begins, 1 in a second segment, 0 elsewhere: a byte for each sentence.
    codes, lengths = bytearray(len(sizes)), []
    target = following = targets.longest
    length = first = limit = 0
    second = False
    for begin in range(0, len(sizes), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        draws = Draws.draw(generator, len(sizes[chunk]), targets)
        columns = (sizes[chunk], last[chunk], draws.coin, draws.single, draws.next_target)
        sentences = zip(*(column.tolist() for column in columns))
        for i, (size, end, coin, single, next_target) in enumerate(sentences, begin):
            if not length:
                limit = _ENDLESS if single else (target - 3) // 2
                following, first, second, codes[i] = next_target, size, False, 2
                lengths.append(target)
            elif first + size < limit or (coin and not second and first < limit):
                first += size
            else:
                second, codes[i] = True, 1
            length += size
            if end or length >= target:
                length, target = 0, following
    kinds = np.frombuffer(codes, np.uint8)
    return kinds == 2, kinds == 1, np.array(lengths, np.int64)


@dataclass(frozen=True)
class _Assignment:
    """The example and segment of each sentence of a corpus."""

    starts: np.ndarray  # where each sentence begins in the token stream, int64 (N,)
    sizes: np.ndarray  # the tokens of each sentence, int64 (N,)
    documents: np.ndarray  # the document of each sentence, int64 (N,)
    begins: np.ndarray  # whether an example begins with the sentence, boolean (N,)
    second: np.ndarray  # whether the sentence is in the second segment of its example, boolean (N,)
    targets: np.ndarray  # the target length of each example, int64 (examples,)


def assign_corpus(
    data: IndexedDataset, targets: Targets, generator: np.random.Generator
) -> _Assignment:
    """Assign all sentences of a corpus that have tokens to examples.

    Raises UsageError for a corpus without documents of several sentences.
    """
    if (np.diff(data.documents) <= 1).all():
        raise UsageError(
            f"{data.prefix}: no document has more than one sentence, so there is nothing to pack "
            "into segments; put one sentence on each line and a blank line after each document, "
            "and run 'metaseq-lm preprocess --documents blank'"
        )
    filled = np.flatnonzero(data.sizes)
    sizes = data.sizes[filled]
    documents = np.repeat(np.arange(len(data.documents) - 1), np.diff(data.documents))[filled]
    last = np.append(np.diff(documents) > 0, True)
    assigned = _assign_sentences(sizes, last, targets, generator)
    return _Assignment(data.starts[filled], sizes, documents, *assigned)


class Packed(Samples):
    """A corpus of documents of sentences, packed into rows of at most `tokens_per_sample` tokens.

    Which sentences make a row is drawn once, from `seed` and the name of the split. Raises
    UsageError for a corpus without documents of several sentences, MetaseqError for an empty one.
    """

    def __init__(
        self, folder: Path, split: str, vocabulary: Vocabulary, tokens_per_sample: int, seed: int
    ) -> None:
        self.data = open_tokens(folder, split, vocabulary, tokens_per_sample, least=SHORTEST)
        self.vocabulary = vocabulary
        generator = random_streams.generator(seed, "packing", split)
        assignment = assign_corpus(self.data, Targets(tokens_per_sample), generator)
        # Tables of examples and of pieces, which are runs of the token stream. A segment that is
        # too long is truncated: A keeps tokens_per_sample - 2 tokens, B the room that A leaves.
        example = np.cumsum(assignment.begins) - 1
        # All of A, then all of B, each in its order.
        order = np.argsort(2 * example + assignment.second, kind="stable")
        example, second = example[order], assignment.second[order]
        starts, sizes = assignment.starts[order], assignment.sizes[order]
        segment = 2 * example + second
        totals = np.bincount(segment, sizes, 2 * (example[-1] + 1)).astype(np.int64)
        first = np.minimum(totals[::2], tokens_per_sample - 2)
        rest = np.minimum(totals[1::2], np.maximum(tokens_per_sample - first - 3, 0))
        before = np.cumsum(sizes) - sizes
        opens = np.append(True, segment[1:] != segment[:-1])
        offset = before - before[opens][np.cumsum(opens) - 1]
        room = np.where(second, rest[example], first[example]) - offset
        # A sentence that follows a piece without a gap in text and segment belongs to it.
        joined = ~opens & np.append(False, starts[1:] == starts[:-1] + sizes[:-1])
        head = np.flatnonzero(~joined)
        lengths = np.minimum(np.add.reduceat(sizes, head), room[head])
        head, self.piece_lengths = head[lengths > 0], lengths[lengths > 0]
        self.piece_starts = starts[head]
        column = 1 + offset + second * (first[example] + 1)
        self.piece_columns = column[head]
        counts = np.bincount(example[head], minlength=len(first))
        self.pieces = np.append(0, np.cumsum(counts))
        self.firsts = first
        self.lengths = first + 2 + np.where(rest > 0, rest + 1, 0)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def row_lengths(self) -> np.ndarray:
        return self.lengths

    def read(self, samples: np.ndarray, cls: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        pieces, counts = self._pieces(samples)
        places = (np.repeat(np.arange(len(samples)), counts), self.piece_columns[pieces])
        lengths = self.lengths[samples]
        rows = blank_rows(self.vocabulary, cls, self.firsts[samples], lengths, width)
        fill(rows, self.data, places, self.runs(samples, width))
        return rows, lengths

    def runs(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        pieces, _ = self._pieces(samples)
        return self.piece_starts[pieces], self.piece_lengths[pieces]

    def _pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the pieces of samples (B,), and how many each sample has (B,)."""
        counts = self.pieces[samples + 1] - self.pieces[samples]
        return concatenate_ranges(self.pieces[samples], counts), counts

    def segments(self, samples: np.ndarray, width: int) -> np.ndarray | None:
        return segments_of(self.firsts[samples], self.lengths[samples], width)


def open_corpus(
    folder: Path, split: str, vocabulary: Vocabulary, config: Any, seed: int
) -> Samples:
    """Return the samples of a split according to `config`, the options of a task.

    `sample_break_mode` "eos" and "none" give a Corpus, "segments" a Packed and "documents" a
    PackedDocuments; "train" has one of them for each of `row_lengths`, if there are any. With
    `shuffle_tokens` the rows of "train" are shuffled by `seed`. Raises UsageError for a wrong
    length of rows, MetaseqError for data that cannot be used.
    """
    if split == "train" and getattr(config, "has_phases", False):
        phases = config.in_phases()
        return PhasedSamples([open_corpus(folder, split, vocabulary, c, seed) for c in phases])
    break_mode, longest = config.sample_break_mode, config.tokens_per_sample
    corpus: Samples
    if break_mode == SEGMENTS:
        corpus = Packed(folder, split, vocabulary, longest, seed)
    elif break_mode == DOCUMENTS:
        corpus = PackedDocuments(folder, split, vocabulary, longest, seed)
    else:
        corpus = Corpus(folder, split, vocabulary, longest, break_mode)
    if split == "train" and config.shuffle_tokens:
        corpus.shuffle_key = random_streams.key(seed, "shuffle tokens")
    return corpus
