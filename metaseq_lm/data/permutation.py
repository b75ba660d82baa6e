"""A random permutation of any size whose entries are computed one by one, without a table."""

import numpy as np

from metaseq_lm.core import random_streams

_ROUNDS = 8


class Permutation:
    """A pseudo-random permutation of 0, ..., count - 1 in constant memory.

    A Feistel network permutes the smallest power of two that is not below `count`; numbers outside
    go through it again until they fall inside, at most once more on average (cycle walking, Black
    and Rogaway 2002). Few samples reach few of the possible permutations, so that short lists are
    better shuffled by a generator.

    Args:
        count: The size, from 1 to 2**62.
        parts: What the permutation is a function of, see `random_streams.key`.
    """

    def __init__(self, count: int, *parts: int | str) -> None:
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        rounds = np.arange(_ROUNDS)
        self._keys = random_streams.row_keys(random_streams.key(*parts), rounds)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the entries at `positions` (n,), int64 (n,)."""
        values = self._network(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= np.uint64(self.count))):
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        """Permute `values` (n,) among the numbers of `_low` plus `_high` bits."""
        low, high = self._low, self._high
        left, right = values >> low, values & _mask(low)
        # The halves differ by a bit where the number of bits is odd, and change places each round.
        with np.errstate(over="ignore"):
            for key in self._keys:
                scrambled = random_streams.mix(right + key)
                left, right = right, (left ^ scrambled) & _mask(high)
                low, high = high, low
        return (left << low) | right


def _mask(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
