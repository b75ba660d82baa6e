"""Labelled sets in the common format: tokens x and label tokens y of equal length, one LM head for all.

A row is `[CLSn] A [SEP]` or `[CLSn] A [SEP] B [SEP]`, n the number of the task; its label is an
ordinary token repeated at every position of the row: class 0 is [SEP], class 1 [CLSn], class 2
[MASK].

Shapes: B rows, S the longest row of the batch, K classes.
"""

from pathlib import Path

import numpy as np

from metaseq_lm.criterions import Batch
from metaseq_lm.data.corpus import padding_of
from metaseq_lm.data.labelled import LabelledSet
from metaseq_lm.data.manifest import require_tokenizer
from metaseq_lm.data.vocabulary import Vocabulary
from metaseq_lm.errors import MetaseqError, UsageError


class TokenLabels:
    """One split of a labelled set in the common format; `number` is the task's n in [CLSn].

    Raises UsageError for more classes than there are label tokens, and MetaseqError for a row
    longer than `tokens_per_sample`.
    """

    def __init__(
        self, folder: Path, split: str, vocabulary: Vocabulary, number: int, tokens_per_sample: int
    ) -> None:
        self.data = LabelledSet(folder, split)
        require_tokenizer(folder, self.data.tokenizer_hash)
        self.vocabulary = vocabulary
        self.cls = vocabulary.cls(number)
        self.class_tokens = np.array([vocabulary.sep, self.cls, vocabulary.mask])
        names = self.data.label_names
        if self.data.regression or not 1 <= len(names) <= len(self.class_tokens):
            raise UsageError(
                f"{folder} has {len(names) or 'real-valued'} labels; label tokens exist for 1 to 3 classes"
            )
        if self.data.labels is None or self.data.form not in ("single", "pair"):
            raise UsageError(
                f"{folder}: '{split}' is of form {self.data.form} "
                f"{'without' if self.data.labels is None else 'with'} labels; rows of one or two "
                "texts with labels are needed"
            )
        self.class_tokens = self.class_tokens[: len(names)]
        self.labels = self.data.labels
        columns = self.data.inputs
        self.lengths = np.sum([column.sizes + 1 for column in columns], axis=0) + 1
        if len(self) and self.lengths.max() > tokens_per_sample:
            row = int(self.lengths.argmax())
            raise MetaseqError(
                f"{folder}: row {row + 1} of '{split}' is {self.lengths[row]} tokens long, "
                f"task.tokens_per_sample is {tokens_per_sample}; raise it (and model.max_positions) or "
                "shorten the text"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def rows(
        self, samples: np.ndarray, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows (B, S) padded to at least `width`, their lengths (B,), label tokens (B,)."""
        columns = [column.gather(samples, self.vocabulary.pad) for column in self.data.inputs]
        lengths = self.lengths[samples]
        tokens = np.full(
            (len(samples), max(width, int(lengths.max()))), self.vocabulary.pad, dtype=np.int64
        )
        tokens[:, 0] = self.cls
        end = np.ones(len(samples), dtype=np.int64)
        row = np.arange(len(samples))
        for values, length in columns:
            at_row, at = np.nonzero(np.arange(values.shape[1]) < length[:, None])
            tokens[at_row, end[at_row] + at] = values[at_row, at]
            end = end + length
            tokens[row, end] = self.vocabulary.sep
            end = end + 1
        return tokens, lengths, self.class_tokens[self.labels[samples]]

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> Batch:
        """Return rows, targets (-1 at padding), classes and their tokens; sizes "targets" and "rows"."""
        tokens, lengths, label_tokens = self.rows(samples, width)
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return {
            "tokens": tokens,
            "padding": padding_of(lengths, tokens.shape[1]),
            "targets": np.where(inside, label_tokens[:, None], -1),
            "classes": self.labels[samples],
            "class_tokens": self.class_tokens,
            "samples": samples,
            "sizes": {"targets": int(inside.sum()), "rows": len(samples)},
        }
