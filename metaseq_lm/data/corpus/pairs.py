"""Pairs of segments for next-sentence prediction (Devlin et al. 2019, 3.1 and appendix A.2).

Shapes: B rows, S the longest row of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import SHORTEST, Targets, assign_corpus
from metaseq_lm.data.corpus.phases import PhasedLengths, of_phase
from metaseq_lm.data.corpus.row_words import RowWords
from metaseq_lm.data.corpus.rows import (
    cut_pair,
    masked_rows,
    open_tokens,
    segments_of,
    shuffle_tokens,
    text_rows,
)
from metaseq_lm.data.streams import Lengths
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

IS_NEXT, NOT_NEXT = 0, 1
_KEY = 11  # distinct from the keys of masking
# Rows (B, S), their lengths (B,), segments (B, S) and labels (B,).
_PairRows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(kw_only=True)
class NextSentenceBatch(TokenBatch):
    """Masked pairs; `next_sentence` (B,) is IS_NEXT or NOT_NEXT."""

    next_sentence: Tensor


class Pairs:
    """Rows `[CLS0] A [SEP] B [SEP]`, where B follows A or comes from another document.

    Sentences are collected into examples once, from `seed` and the name of the split, until they
    have tokens_per_sample - 3 tokens (with probability 0.1 another number, 2 or more) or their
    document ends. The rest is drawn from a row's key each time the row is read: where A ends
    (between two sentences), and whether B is another text, which it is in half of the rows. That
    text begins at a random sentence of a random other document and fills up the example. An example
    of one sentence has no B of its own and always gets another, so somewhat more than half of the
    rows are NOT_NEXT. With `shuffled` the tokens of each row are permuted, see `shuffle_tokens`.

    Differences from the published program: short examples are drawn for each example, not once for
    a document; the sentences that another text replaced are not put back (the next epoch may show
    them); the other document is never the same one; and a row that is too long loses the beginning
    of A or the end of B, whichever is longer at the time, so that B still follows A. Raises
    UsageError for a corpus without documents of several sentences or with one document,
    MetaseqError for an empty one.
    """

    def __init__(
        self, folder: Path, split: str, vocabulary: Vocabulary, tokens_per_sample: int, seed: int
    ) -> None:
        self.data = open_tokens(folder, split, vocabulary, tokens_per_sample, least=SHORTEST)
        self.vocabulary = vocabulary
        self.tokens_per_sample = tokens_per_sample
        self.shuffled = False
        targets = Targets(tokens_per_sample - 3, shortest=2, short=0.1)
        generator = random_streams.generator(seed, "pairs", split)
        assigned = assign_corpus(self.data, targets, generator)
        self.targets = assigned.targets
        self._ends = assigned.starts + assigned.sizes
        self._starts = assigned.starts
        # First sentences of examples and of documents, followed by the number of sentences.
        self._examples = np.append(np.flatnonzero(assigned.begins), len(assigned.sizes))
        other = np.append(True, np.diff(assigned.documents) > 0)
        self._documents = np.append(np.flatnonzero(other), len(assigned.sizes))
        self._document = (np.cumsum(other) - 1)[assigned.begins]
        if len(self._documents) < 3:
            raise UsageError(
                f"{self.data.prefix}: one document; next-sentence prediction takes text from other "
                "documents, so put a blank line between documents and preprocess again"
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def row_lengths(self) -> np.ndarray:
        """The largest possible number of tokens of each row, whatever its B; int64 (samples,)."""
        return np.full(len(self), self.tokens_per_sample)

    def rows(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> _PairRows:
        """Return rows (B, S), their lengths (B,), segments (B, S) and labels (B,), all int64.

        Row i is drawn from keys[i]. Rows are padded to the longest, or to `width` if that is more.
        """
        starts, (first, second), labels = self._texts(samples, keys)
        texts = [(self.data, starts[0], first), (self.data, starts[1], second)]
        rows, lengths = text_rows(self.vocabulary, 0, texts, width)
        if self.shuffled:
            keys = random_streams.subkeys(keys, "shuffle tokens")
            rows = shuffle_tokens(rows, self.vocabulary, keys)
        return rows, lengths, segments_of(first, lengths, rows.shape[1]), labels

    @property
    def words(self) -> RowWords:
        """The numbers of words in the rows."""

        def runs(
            samples: np.ndarray, keys: np.ndarray, width: int
        ) -> tuple[np.ndarray, np.ndarray]:
            starts, lengths, _ = self._texts(samples, keys)
            return np.concatenate(starts), np.concatenate(lengths)

        return RowWords(self.data, runs)

    def _texts(
        self, samples: np.ndarray, keys: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Return where A and B start in the token stream, their lengths, and labels, (B,) each."""
        draws = random_streams.uniforms(random_streams.mix(keys ^ np.uint64(_KEY)), 0, 4)
        begin, end = self._examples[samples], self._examples[samples + 1]
        cut = np.minimum(begin + 1 + (draws[:, 0] * (end - begin - 1)).astype(np.int64), end)
        a_start, a_end = self._starts[begin], self._ends[cut - 1]
        b_start, b_end = a_end, self._ends[end - 1]
        labels = np.where((draws[:, 1] < 0.5) | (cut == end), NOT_NEXT, IS_NEXT)
        b = self._elsewhere(samples, self.targets[samples] - (a_end - a_start), draws[:, 2:])
        b_start = np.where(labels == NOT_NEXT, b[0], b_start)
        b_end = np.where(labels == NOT_NEXT, b[1], b_end)
        first, second = cut_pair(a_end - a_start, b_end - b_start, self.tokens_per_sample - 3)
        return (a_end - first, b_start), (first, second), labels

    def _elsewhere(
        self, samples: np.ndarray, sizes: np.ndarray, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where a text of another document begins and ends in the token stream, (B,)."""
        documents = len(self._documents) - 1
        document = (draws[:, 0] * (documents - 1)).astype(np.int64)
        # Numbers from the own document on are one higher, so that it is never drawn.
        document += document >= self._document[samples]
        first, behind = self._documents[document], self._documents[document + 1]
        sentence = first + (draws[:, 1] * (behind - first)).astype(np.int64)
        start = self._starts[sentence]
        # Whole sentences, at least one, of `sizes` tokens unless the document ends before.
        last = np.searchsorted(self._ends, start + np.maximum(sizes, 1))
        return start, self._ends[np.minimum(last, behind - 1)]


class PhasedPairs:
    """Pairs of segments in each phase."""

    def __init__(self, parts: Sequence[Pairs]) -> None:
        self.parts = parts

    @property
    def row_lengths(self) -> Lengths:
        return PhasedLengths(self.parts)

    def rows(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> _PairRows:
        part, numbers = of_phase(self.parts, samples)
        return part.rows(numbers, keys, width)

    @property
    def words(self) -> RowWords:
        def runs(samples: np.ndarray, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
            part, numbers = of_phase(self.parts, samples)
            return part.words.runs(numbers, *arguments)

        return RowWords(self.parts[0].data, runs)


def pair_batch(
    pairs: Pairs | PhasedPairs,
    masking: Masking,
    samples: np.ndarray,
    keys: np.ndarray,
    width: int = 0,
) -> NextSentenceBatch:
    """Return masked pairs with their labels; the counterpart of `rows.masked_batch`."""
    rows, lengths, segments, labels = pairs.rows(samples, keys, width)
    masked = masked_rows(rows, lengths, segments, keys, masking)
    return NextSentenceBatch(**vars(masked), next_sentence=as_tensor(labels))
