"""How often each labelled set is seen: in proportion to its size to the power of 0.75.

Two ways to the same shares (Clark et al. 2019). `draws` fixes the number of rows of each set in an
epoch, instead of the random draws of the paper's text. `copies_and_weights` repeats small sets and
weights their losses, as the authors' code does.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.data.streams import by_length


def shares(sizes: Sequence[int], exponent: float) -> np.ndarray:
    """Return each set's share |D|^exponent / sum, float64 (sets,)."""
    powers = np.asarray(sizes, np.float64) ** exponent
    normalised: np.ndarray = powers / powers.sum()
    return normalised


def draws(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return the number of rows of each set in an epoch, which sum to the rows of all sets.

    Nothing is random: they are the nearest whole numbers to the shares that have this sum, so with
    an exponent of 1 an epoch contains every row once.
    """
    total = int(sum(sizes))
    expected = shares(sizes, exponent) * total
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
    them, shuffled together with those of the other sets. A batch may contain the end of one epoch and
    the beginning of the next. With `lengths` (rows,) the rows of a batch within an epoch have about
    the same length: see `by_length`.
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
