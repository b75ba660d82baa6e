"""Rows of several labelled sets in one batch.

Shapes: B rows of a batch, S its longest row, K the most outputs of a set (classes, or 1 for real
values), N_k rows and K_k outputs of set k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.data.corpus.rows import padding_of
from metaseq_lm.data.labelled.sentence_rows import SentenceRows

WITH_CLASSES = "rows with classes"  # the size that counts a batch's rows of sets with classes


@dataclass(kw_only=True)
class MixedBatch(TokenBatch):
    """Rows of several sets; `targets` (B,) are classes or real values, both as floats.

    Attributes:
        sets: Place of the set that each row is of (B,).
        weights: Weight of each row's loss (B,).
        teacher: Outputs of each row's teacher (B, K); None without teachers.
        gold_share: The gold label's share of the target, where there is a teacher.
    """

    targets: Tensor
    sets: Tensor
    weights: Tensor
    teacher: Tensor | None = None
    gold_share: float = 1.0


class MixedRows:
    """The training rows of several sets as one, numbered through from the first set to the last.

    `weights` are those of the losses of each set; `teachers`, if there are any, the outputs of each
    row's teacher, (N_k, K_k) for each set.
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
        self.teachers = None if teachers is None else side_by_side([teachers[n] for n in rows])

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


def side_by_side(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return tables of different widths as one, (sum of N_k, K), with zeros where one has no column."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables])
