"""Whole documents packed several to a row, with attention only within each document.

Shapes: N pieces (documents, or parts of long ones), B rows, S the longest row of the batch.
"""

from bisect import bisect_left, insort
from functools import lru_cache
from pathlib import Path

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.data.corpus.rows import Samples, fill, open_tokens
from metaseq_lm.data.storage.indexed import concatenate_ranges
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return a row for each piece, int64 (N,), so that the pieces of a row fit into `capacity`.

    The largest piece goes first; each goes into the row with the least room that suffices, or into
    a new one (best-fit decreasing; Ding et al. 2024, algorithm 1).

    Args:
        sizes: Sizes of the pieces (N,), from 1 to `capacity`.
        capacity: The size of a row.

    Example:
        >>> _best_fit(np.array([3, 5, 2, 6]), 8)
        array([1, 1, 0, 0])
    """
    order = np.argsort(-sizes, kind="stable")
    chosen = np.zeros(len(sizes), np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # the free sizes of rows, ascending
    count = 0
    for piece, size in zip(order.tolist(), sizes[order].tolist()):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, room, count = count, capacity, count + 1
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        chosen[piece], left = row, room - size
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(row)
    return chosen


class _RowsByEpoch:
    """The lengths of rows whose numbers continue from epoch to epoch."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return np.asarray(self.lengths[samples % len(self.lengths)])


class PackedDocuments(Samples):
    """Rows `[CLS] x [SEP] [CLS] y [SEP] ...` of whole documents x, y, at most `tokens_per_sample`.

    A document that is too long for a row is cut into parts, which count as documents. Sizes are
    assigned to rows once. Sample number e * len(self) + r is row r in epoch e. The first epoch
    keeps the order of the corpus; in each later one documents of equal size swap places at random,
    so that a document gets new neighbours. All epochs have the same number of rows. Raises the
    errors of `open_tokens`.
    """

    def __init__(
        self, folder: Path, split: str, vocabulary: Vocabulary, tokens_per_sample: int, seed: int
    ) -> None:
        data = self.data = open_tokens(folder, split, vocabulary, tokens_per_sample, least=3)
        self.vocabulary = vocabulary
        room = tokens_per_sample - 2
        bounds = np.append(data.starts, len(data.tokens))[data.documents]
        sizes = np.diff(bounds)
        counts = -(-sizes // room)
        part = concatenate_ranges(np.zeros_like(counts), counts)
        document = np.repeat(np.arange(len(sizes)), counts)
        starts = bounds[document] + part * room
        lengths = np.minimum(room, sizes[document] - part * room)
        rows = _best_fit(lengths + 2, tokens_per_sample)
        order = np.argsort(rows, kind="stable")
        self._starts: np.ndarray = starts[order]
        self._lengths: np.ndarray = lengths[order]
        rows = rows[order]
        self._begins = np.searchsorted(rows, np.arange(int(rows[-1]) + 2))  # pieces of each row
        before = np.cumsum(self._lengths + 2) - (self._lengths + 2)
        self._columns = before - before[self._begins[:-1]][rows]
        self._row_lengths = np.add.reduceat(self._lengths + 2, self._begins[:-1])
        self._by_length = np.argsort(self._lengths, kind="stable")

        def starts_of(epoch: int) -> np.ndarray:
            if not epoch:
                return self._starts
            generator = random_streams.generator(seed, "documents", split, epoch)
            shuffled = np.lexsort((generator.random(len(self._lengths)), self._lengths))
            starts: np.ndarray = np.empty_like(self._starts)
            # Only pieces of one length change places, so the columns of the rows stay right.
            starts[self._by_length] = self._starts[shuffled]
            return starts

        self._starts_of = lru_cache(maxsize=2)(starts_of)

    def __len__(self) -> int:
        return len(self._row_lengths)

    @property
    def row_lengths(self) -> _RowsByEpoch:
        return _RowsByEpoch(self._row_lengths)

    def read(self, samples: np.ndarray, cls: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.row_lengths[samples]
        shape = (len(samples), max(width, int(lengths.max(initial=0))))
        rows = np.full(shape, self.vocabulary.pad, np.int64)
        row, pieces = self._pieces(samples)
        column, sizes = self._columns[pieces], self._lengths[pieces]
        rows[row, column] = self.vocabulary.cls(cls)
        rows[row, column + sizes + 1] = self.vocabulary.sep
        fill(rows, self.data, (row, column + 1), self.runs(samples, 0))
        if width:
            rows, lengths = rows[:, :width].copy(), np.minimum(lengths, width)
        return rows, lengths

    def runs(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        row, pieces = self._pieces(samples)
        starts, sizes = np.zeros(len(pieces), np.int64), self._lengths[pieces]
        epochs = (samples // len(self))[row]
        for epoch in np.unique(epochs):
            is_now = epochs == epoch
            starts[is_now] = self._starts_of(int(epoch))[pieces[is_now]]
        if width:
            sizes = np.clip(width - 1 - self._columns[pieces], 0, sizes)
        return starts, sizes

    def documents(self, samples: np.ndarray, width: int) -> np.ndarray:
        """Return the index of each token's document within its row, int64 (B, width)."""
        row, pieces = self._pieces(samples)
        column = self._columns[pieces]
        inside = column < width
        begins = np.zeros((len(samples), width), np.int64)
        begins[row[inside], column[inside]] = 1
        return np.cumsum(begins, axis=1) - 1

    def _pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the row, an index into `samples`, and the number of each of their pieces."""
        rows = samples % len(self)
        counts = self._begins[rows + 1] - self._begins[rows]
        return np.repeat(np.arange(len(samples)), counts), concatenate_ranges(
            self._begins[rows], counts
        )
