"""Labelled sets as rows for a sentence classifier: `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`.

Shapes: N samples, B of them in a batch, K candidates of a sample with choices, S the longest row of
the batch.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.rows import cut_pair, layout_of, segments_of, text_rows
from metaseq_lm.data.labelled.sets import CLOZE, LabelledSet
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary


@dataclass(kw_only=True)
class SentenceBatch(TokenBatch):
    """Rows (B, S) of samples, or (B, K, S) of their candidates."""

    # Begin and end of the two spans of each row (B, 2, 2), if the set has them.
    spans: Tensor | None = None
    # Which candidates a sample lacks, boolean (B, K); None if no sample of the split does.
    absent: Tensor | None = None


class SentenceRows:
    """One split of a labelled set; each sample is one row, or with choices K rows.

    A pair is cut to `tokens_per_sample` by `cut_pair`, and the spans with it; `is_cut` marks the
    samples that lost tokens, boolean (N,). Raises UsageError for a length without room for text and
    MetaseqError for a span that is cut away.
    """

    def __init__(self, data: LabelledSet, vocabulary: Vocabulary, tokens_per_sample: int) -> None:
        self.data = data
        self.vocabulary = vocabulary
        count = len(data.inputs)
        if data.form == "tokens":
            raise UsageError(
                f"{data.folder}: its answers are tokens of the text, not classes; use "
                "task=token_labels, or preprocess without --as-text"
            )
        if data.form == CLOZE:
            raise UsageError(f"{data.folder}: passages with blanks; use task=cloze criterion=cloze")
        self.choices = data.form == "choices"
        if self.choices and len(data.label_names) != count - 1:
            raise MetaseqError(
                f"{data.folder}: {count - 1} candidates in a row but {len(data.label_names)} "
                "labels; the label says which candidate is right, preprocess again with a label "
                "for each"
            )
        # The columns of each row of a sample.
        self.layouts = [tuple(range(count))]
        if self.choices:
            self.layouts = [(0, candidate) for candidate in range(1, count)]
        parts = len(self.layouts[0])
        if tokens_per_sample < 3 + 2 * parts:
            raise UsageError(
                f"task.tokens_per_sample is {tokens_per_sample}, too short for the special tokens "
                "and some text"
            )
        self.room = tokens_per_sample - 1 - parts
        sizes = np.stack([column.sizes for column in data.inputs], 1)
        # How many tokens each part of a row has after the cut, (N, parts).
        self.n_tokens: list[np.ndarray] = []
        self.is_cut = np.zeros(len(data), bool)
        for layout in self.layouts:
            columns = sizes[:, list(layout)]
            if parts == 1:
                n_tokens = np.minimum(columns, self.room)
            else:
                n_tokens = np.stack(cut_pair(columns[:, 0], columns[:, 1], self.room), 1)
            self.n_tokens.append(n_tokens)
            self.is_cut |= (columns > n_tokens).any(1)
        self.absent = np.zeros((len(data), 1), bool)
        if self.choices:
            self.absent = sizes[:, 1:] == 0  # a candidate without tokens is missing
        self.row_lengths = np.stack([n.sum(1) + 1 + n.shape[1] for n in self.n_tokens], 1)
        # The length of the longest row of each sample with special tokens, int64 (N,).
        self.lengths: np.ndarray = self.row_lengths.max(1)
        self.spans = self._place_spans() if data.form == "spans" else None

    def __len__(self) -> int:
        return len(self.data)

    def _place_spans(self) -> np.ndarray:
        """Return where the two spans of each row begin and end in it, (N, 2, 2)."""
        assert self.data.spans is not None
        column, start, end = np.moveaxis(np.asarray(self.data.spans), 2, 0)  # (N, 2) each
        n_tokens = self.n_tokens[0]
        end = np.minimum(end, np.take_along_axis(n_tokens, column, 1))
        lost = np.flatnonzero((end <= start).any(1))
        if len(lost):
            raise MetaseqError(
                f"{self.data.folder}: row {lost[0] + 1} of '{self.data.split}' is cut to "
                f"{self.room} tokens, and nothing of one of its spans is left; raise "
                "task.tokens_per_sample"
            )
        offset = np.where(column == 0, 1, 2 + n_tokens[:, :1])
        return np.stack([start + offset, end + offset], 2)

    def _read_row(self, row: int, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        n_tokens = self.n_tokens[row][samples]
        columns = [self.data.inputs[column] for column in self.layouts[row]]
        texts = [(data, data.starts[samples], n) for data, n in zip(columns, n_tokens.T)]
        tokens, lengths = text_rows(self.vocabulary, 0, texts, width)
        return tokens, segments_of(n_tokens[:, 0], lengths, width)

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> SentenceBatch:
        """Return the rows of `samples`, padded to at least `width`, and the targets (B,), if any.

        Targets are classes or real values. The size "rows" counts samples. `keys` are not used.
        """
        lengths = self.row_lengths[samples]
        width = max(width, int(lengths.max()))
        rows = [self._read_row(row, samples, width) for row in range(len(self.layouts))]
        tokens, segments = zip(*rows)
        shape = (*lengths.shape, width) if self.choices else (len(samples), width)
        labels, spans = self.data.labels, self.spans
        return SentenceBatch(
            tokens=as_tensor(np.stack(tokens, 1).reshape(shape)),
            segments=as_tensor(np.stack(segments, 1).reshape(shape)),
            layout=layout_of(lengths.reshape(shape[:-1]), width),
            targets=None if labels is None else labels[samples],
            spans=None if spans is None else spans[samples],
            absent=self.absent[samples] if self.absent.any() else None,
            samples=samples,
            sizes={"rows": len(samples)},
        )
