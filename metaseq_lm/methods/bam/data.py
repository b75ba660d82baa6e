"""Rows of several labelled sets in one batch.

Shapes: B rows of a batch, S its longest row, K the most outputs of a set (classes, or 1 for real
values), N_k rows and K_k outputs of set k.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from metaseq_lm.core.batch import Batch
from metaseq_lm.data.corpus.rows import padding_of
from metaseq_lm.data.labelled.sentence_rows import SentenceRows

WITH_CLASSES = "rows with classes"  # the size that counts a batch's rows of sets with classes


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

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> Batch:
        """Return tokens, segments and padding (B, S) and, of each row, the set, target and weight (B,).

        "set" is the place of the set, "targets" the class or real value, both as floats; "teacher"
        (B, K) is there if there are teachers. The sizes are "rows" and WITH_CLASSES.
        """
        sets = np.searchsorted(self.ends, samples, side="right")
        lengths = self.lengths[samples]
        width = max(width, int(lengths.max()))
        tokens = np.empty((len(samples), width), np.int64)
        segments = np.empty_like(tokens)
        targets = np.empty(len(samples), np.float64)
        for number in np.unique(sets):
            at = np.flatnonzero(sets == number)
            part = self.rows[number]
            own = samples[at] - (self.ends[number] - len(part))
            found = part.batch(own, keys[at], width)
            tokens[at], segments[at] = found["tokens"], found["segments"]
            targets[at] = found["targets"]
        batch: Batch = {
            "tokens": tokens,
            "segments": segments,
            "padding": padding_of(lengths, width),
            "set": sets,
            "targets": targets,
            "weights": self.weights[sets],
            "sizes": {"rows": len(samples), WITH_CLASSES: int(self.with_classes[sets].sum())},
        }
        if self.teachers is not None:
            batch["teacher"] = self.teachers[samples]
        return batch


def side_by_side(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return tables of different widths as one, (sum of N_k, K), with zeros where one has no column."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables])


def one_set(
    rows: SentenceRows, number: int, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> Batch:
    """Return rows of the set at place `number` as SentenceRows gives them, for evaluation."""
    found = rows.batch(samples, keys, width)
    return {**found, "set": np.full(len(samples), number)}
