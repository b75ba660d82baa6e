"""Sets of form "cloze" as rows `[CLS] passage [SEP]` with [MASK] at each blank.

Shapes: N samples, one for each blank; B of them in a batch, K candidates, T tokens of the longest
candidate, S the longest row.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.rows import blank_rows, layout_of
from metaseq_lm.data.labelled.sets import CLOZE, LabelledSet
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary


@dataclass(kw_only=True)
class ClozeBatch(TokenBatch):
    """Rows (B, S) with `positions` (B, 1) of the blanks to fill and `targets` (B,), the candidates.

    Attributes:
        candidates: The tokens of each candidate (B, K, T), padded with -1.
    """

    candidates: Tensor


class ClozeRows:
    """One split of a set of form "cloze".

    A passage longer than `tokens_per_sample` with its special tokens is cut to a window around its
    blank. Raises UsageError for a set of another form or rows without room for text, MetaseqError
    for a damaged set.
    """

    def __init__(self, data: LabelledSet, vocabulary: Vocabulary, tokens_per_sample: int) -> None:
        if data.form != CLOZE:
            raise UsageError(
                f"{data.folder}: a set of form {data.form}; task cloze is for passages with "
                "blanks, such as 'metaseq-lm preprocess --benchmark cloth/CLOTH' makes"
            )
        if tokens_per_sample < 4:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample}, too short for the special tokens "
                "and some text"
            )
        assert data.places is not None
        self.data, self.vocabulary, self.room = data, vocabulary, tokens_per_sample - 2
        rows, self._columns = data.places[:, 0], data.places[:, 2:]
        self._first = np.searchsorted(rows, np.arange(len(data) + 1))  # first blank of each sample
        damaged = (np.diff(self._first) == 0).any() or data.places[:, 1].any()
        if damaged or len(data.inputs) != len(data.label_names) + 1:
            raise MetaseqError(
                f"{data.folder}: '{data.split}' lacks blanks or candidates; preprocess again"
            )
        shrunk = np.bincount(rows, np.diff(self._columns)[:, 0] - 1, len(data)).astype(np.int64)
        sizes = data.inputs[0].sizes - shrunk
        self.is_cut: np.ndarray = sizes > self.room
        # The length of each row with its special tokens, int64 (N,).
        self.lengths: np.ndarray = np.minimum(sizes, self.room) + 2

    def __len__(self) -> int:
        return len(self.data)

    def _cut_window(self, sample: int) -> tuple[np.ndarray, int]:
        """Return the passage around a blank, with [MASK] at each, and the blank's position."""
        tokens = np.array(self.data.inputs[0][sample], np.int64)
        blanks = self._columns[self._first[sample] : self._first[sample + 1]]
        remains = np.ones(len(tokens), bool)
        for first, end in blanks:
            tokens[first], remains[first + 1 : end] = self.vocabulary.mask, False
        position = int(remains[: blanks[0, 0]].sum())
        tokens = tokens[remains]
        start = max(0, min(position - self.room // 2, len(tokens) - self.room))
        return tokens[start : start + self.room], position - start

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> ClozeBatch:
        """Return the rows of `samples` (B,), padded to at least `width`. `keys` are not used."""
        lengths, labels = self.lengths[samples], self.data.labels
        rows = blank_rows(self.vocabulary, 0, lengths - 2, lengths, width)
        positions = np.empty((len(samples), 1), np.int64)
        for number, sample in enumerate(samples.tolist()):
            window, position = self._cut_window(sample)
            rows[number, 1 : 1 + len(window)], positions[number] = window, position + 1
        sizes = np.stack([words.sizes[samples] for words in self.data.inputs[1:]], 1)  # (B, K)
        candidates = np.full((*sizes.shape, max(1, int(sizes.max()))), -1, np.int64)
        for column, words in enumerate(self.data.inputs[1:]):
            for number, sample in enumerate(samples.tolist()):
                candidates[number, column, : sizes[number, column]] = words[sample]
        return ClozeBatch(
            tokens=as_tensor(rows),
            layout=layout_of(lengths, rows.shape[1]),
            positions=as_tensor(positions),
            candidates=as_tensor(candidates),
            targets=None if labels is None else as_tensor(labels[samples]),
            samples=samples,
            sizes={"rows": len(samples)},
        )
