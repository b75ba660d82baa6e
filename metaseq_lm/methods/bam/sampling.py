"""How often each labelled set is seen: in proportion to its size to the power of 0.75.

Two ways to the same shares (Clark et al. 2019): a quota of rows in each epoch, in place of the random
draws of the paper's text, or whole copies of small sets and a loss weight for what copies cannot
express (the authors' code).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.data.streams import by_length, check_batch_size


def shares(sizes: Sequence[int], exponent: float) -> np.ndarray:
    """Return |D|^exponent of each set over the sum of them all, float64 (sets,)."""
    powers = np.asarray(sizes, np.float64) ** exponent
    normalised: np.ndarray = powers / powers.sum()
    return normalised


def draws(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return how many rows of an epoch each set gives; together as many as there are rows.

    Nothing is random: they are the nearest whole numbers to the shares that have this sum, so that
    with an exponent of 1 an epoch is every row once.
    """
    total = int(sum(sizes))
    wanted = shares(sizes, exponent) * total
    counts = np.floor(wanted).astype(int)
    most = np.argsort(counts - wanted, kind="stable")[: total - counts.sum()]
    counts[most] += 1
    return [int(count) for count in counts]


def copies_and_weights(
    sizes: Mapping[str, int], exponent: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Return how many copies of each set make an epoch, and the weight of its losses.

    Copies are round(|D|^a |A|^(1 - a) / |D|), a the exponent and A the largest set (of GLUE, MNLI).
    Weights, of a mean of 1 over the sets, give each set the weight |D|^a in all. Source: the
    authors' code.
    """
    names, counts = list(sizes), np.array(list(sizes.values()), np.float64)
    anchor = counts.max() ** (1 - exponent)
    copies = np.rint(counts**exponent * anchor / counts)
    weights = counts**exponent / (copies * counts)
    weights /= weights.mean()
    return dict(zip(names, copies.astype(int).tolist())), dict(zip(names, weights.tolist()))


class MixedEpochs:
    """Endless whole batches of rows of several sets, numbered through from the first set to the last.

    Set k gives `counts[k]` rows to an epoch: all its rows as often as that allows, then some of
    them, all in an order of the epoch's own. A batch runs on into the next epoch, so that each has
    `batch_size` rows. With `lengths` (rows,) the rows of a batch, but for those of two epochs, are
    about equally long: see `by_length`.
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
        check_batch_size(batch_size)
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
            # What the last batch of the epoch before takes comes first.
            begun = -number * self.total % batch_size
            rest = by_length(order[begun:], lengths, batch_size, generator)
            return np.concatenate([order[:begun], rest])

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
