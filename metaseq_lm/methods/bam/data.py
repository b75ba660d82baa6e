"""Batches with rows of several labelled sets.

Shapes: B rows of a batch, S its longest row, N_k rows and K_k outputs of set k (its classes, or 1 for
real values), K the largest K_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.data.corpus.rows import padding_of
from metaseq_lm.data.labelled.sentence_rows import SentenceRows

WITH_CLASSES = "rows with classes"  # name of the size that counts the rows of sets with classes


@dataclass(kw_only=True)
class MixedBatch(TokenBatch):
    """Rows of several sets; `targets` (B,) are classes or real values, both as floats.

    Attributes:
        sets: Number of the set of each row (B,).
        weights: Weight of each row's loss (B,).
        teacher: Outputs of each row's teacher (B, K); None without teachers.
        gold_share: Weight of the gold label in the target, used with a teacher.
    """

    targets: Tensor
    sets: Tensor
    weights: Tensor
    teacher: Tensor | None = None
    gold_share: float = 1.0


class MixedRows:
    """The training rows of several sets, numbered from the first row of the first set on.

    Args:
        rows: The rows of each set.
        weights: Weight of the losses of each set.
        teachers: Outputs of each set's teacher, (N_k, K_k).
    """

    def __init__(
        self,
        rows: Mapping[str, SentenceRows],
        weights: Mapping[str, float],
        teachers: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.rows = list(rows.values())
        self.weights = np.array([weights[name] for name in rows])
        self.with_classes = np.array([not part.data.regression for part in self.rows])
        self.ends = np.cumsum([len(part) for part in self.rows])
        self.lengths = np.concatenate([part.lengths for part in self.rows])
        self.teachers = None
        if teachers is not None:
            tables = [teachers[name] for name in rows]
            columns = max(table.shape[1] for table in tables)
            self.teachers = np.concatenate(
                [np.pad(table, ((0, 0), (0, columns - table.shape[1]))) for table in tables]
            )

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> MixedBatch:
        """Return the rows `samples`, padded to at least `width`; sizes "rows" and WITH_CLASSES."""
        sets = np.searchsorted(self.ends, samples, side="right")
        lengths = self.lengths[samples]
        width = max(width, int(lengths.max()))
        tokens = np.empty((len(samples), width), np.int64)
        segments = np.empty_like(tokens)
        targets = np.empty(len(samples), np.float64)
        for number in np.unique(sets):
            at = np.flatnonzero(sets == number)
            part = self.rows[number]
            batch = part.batch(samples[at] - (self.ends[number] - len(part)), keys[at], width)
            tokens[at], segments[at], targets[at] = batch.tokens, batch.segments, batch.targets
        return MixedBatch(
            tokens=as_tensor(tokens),
            segments=as_tensor(segments),
            padding=as_tensor(padding_of(lengths, width)),
            sets=as_tensor(sets),
            targets=as_tensor(targets),
            weights=as_tensor(self.weights[sets]),
            teacher=None if self.teachers is None else self.teachers[samples],
            sizes={"rows": len(samples), WITH_CLASSES: int(self.with_classes[sets].sum())},
        )
