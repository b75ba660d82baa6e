"""Batches with rows of several labelled sets, and how often each set is seen.

A set is seen in proportion to its size to the power of 0.75 (Clark et al. 2019), in one of two
ways. `rows_per_epoch` fixes the number of rows of each set in an epoch, where the paper's text has
random draws. `copies_and_weights` repeats small sets and weights their losses, as in the authors'
code.

Shapes: B rows of a batch, S its longest row, N_k rows and K_k outputs of set k (its classes, or 1
for real values), K the largest K_k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.streams import by_length

WITH_CLASSES = "rows with classes"  # size that counts the rows of sets with classes


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
    gold_share: float | Tensor = 1.0


class MixedRows:
    """The training rows of several sets, numbered through all sets in order.

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
            layout=layout_of(lengths, width),
            sets=as_tensor(sets),
            targets=as_tensor(targets),
            weights=as_tensor(self.weights[sets]),
            teacher=None if self.teachers is None else self.teachers[samples],
            sizes={"rows": len(samples), WITH_CLASSES: int(self.with_classes[sets].sum())},
        )


def _sampling_shares(sizes: Sequence[int], exponent: float) -> np.ndarray:
    """Return each set's share |D|^exponent / sum, float64 (sets,)."""
    powers = np.asarray(sizes, np.float64) ** exponent
    normalised: np.ndarray = powers / powers.sum()
    return normalised


def rows_per_epoch(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return the number of rows of each set in an epoch, which sum to the rows of all sets.

    The numbers are not random: they are the whole numbers nearest to the shares that have this sum,
    so an epoch with an exponent of 1 contains every row once.
    """
    total = int(sum(sizes))
    expected = _sampling_shares(sizes, exponent) * total
    counts = np.floor(expected).astype(int)
    largest_remainders = np.argsort(counts - expected, kind="stable")[: total - counts.sum()]
    counts[largest_remainders] += 1
    return [int(count) for count in counts]


def copies_and_weights(
    sizes: Mapping[str, int], exponent: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the number of copies of each set in an epoch, and the weight of its losses.

    Copies are round(|D|^a |A|^(1 - a) / |D|), with a the exponent and A the largest set (MNLI in
    GLUE). Weights have a mean of 1 over the sets and make the total weight of a set proportional to
    |D|^a. Source: the authors' code.
    """
    counts = np.array(list(sizes.values()), np.float64)
    copies = np.rint(counts**exponent * counts.max() ** (1 - exponent) / counts)
    weights = counts**exponent / (copies * counts)
    weights /= weights.mean()
    return dict(zip(sizes, copies.astype(int).tolist())), dict(zip(sizes, weights.tolist()))


class MixedEpochs:
    """An endless order of full batches of rows of several sets, numbered as in `MixedRows`.

    An epoch has `counts[k]` rows of set k: all its rows as often as possible, then a random part of
    them, shuffled together with the rows of other sets. A batch may contain the end of one epoch
    and the start of the next. With `lengths` (rows,), the rows of a batch within an epoch have
    similar lengths, see `by_length`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        batch_size: int,
        seed: int,
        name: str,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.smallest = self.batch_size = batch_size
        self.total = int(sum(counts))

        def epoch(number: int) -> np.ndarray:
            generator = random_streams.generator(seed, name, "epoch", number)
            parts, first = [], 0
            for size, count in zip(sizes, counts):
                cycles = [generator.permutation(size) for _ in range(-(-count // size))]
                parts.append(first + np.concatenate([np.zeros(0, int), *cycles])[:count])
                first += size
            order = generator.permutation(np.concatenate(parts))
            if lengths is None:
                return order
            # The first rows belong to a batch that began in the previous epoch.
            carried = -number * self.total % batch_size
            rest = by_length(order[carried:], lengths, batch_size, generator)
            return np.concatenate([order[:carried], rest])

        # A method cached per object would keep the object alive; a cached closure does not.
        self._epoch = lru_cache(maxsize=2)(epoch)

    def batch(self, number: int) -> np.ndarray:
        """Return the sample numbers of global batch `number`, int64 (batch_size,)."""
        at, left, parts = number * self.batch_size, self.batch_size, []
        while left:
            epoch, start = divmod(at, self.total)
            part = self._epoch(epoch)[start : start + left]
            parts.append(part)
            at, left = at + len(part), left - len(part)
        return np.concatenate(parts)
