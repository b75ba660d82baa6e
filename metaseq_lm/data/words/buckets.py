"""Orders of training batches whose sentences are about equally long.

As in the code of Clark et al. 2018, sentences are taken in pieces, each piece in buckets by length,
and a batch is filled to a constant sum of the square roots of its lengths. Their pieces follow the
file. Here each piece is a sample of the whole file, so that a run that ends early sees all texts.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np

from metaseq_lm.config.tasks import BUCKETS
from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError

CHUNK = 10_000  # sentences of unlabelled text that are put into buckets together
_FEW = 4  # batches; fewer would have nearly the same sentences in every epoch


class Bucketed:
    """Epochs of batches of sentences of about equal length.

    A batch is a pure function of seed, name and its number. With `chunk`, a permutation that is the
    same in all epochs spreads the sentences over pieces, and each piece is put into buckets and
    shuffled by itself, so that memory holds the plan of one piece only. A bucket of less than FEW
    batches joins a neighbour.

    Args:
        lengths: The number of words of each sentence (sentences,).
        batch_size: The mean number of sentences of a batch; each holds a sum of sqrt(length) of
            about batch_size times the mean of sqrt(length).
        seed: The seed of the run.
        name: The name of the stream.
        samples: The sentences to use; all by default.
        chunk: The approximate number of sentences in a piece; 0 takes all together.
        longest: Sentences of this many words or more are left out; 0 keeps all.
        buckets: The lengths at which a new bucket begins.

    Raises:
        UsageError: No sentence is left, or the lengths do not grow.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        seed: int,
        name: str,
        samples: np.ndarray | None = None,
        chunk: int = 0,
        longest: int = 0,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        if any(after <= before for before, after in pairwise([0, *buckets])):
            raise UsageError(
                f"task.buckets must be lengths that grow, from 1 on; got {list(buckets)}"
            )
        chosen = np.arange(len(lengths)) if samples is None else np.asarray(samples)
        # The narrowest type: there may be tens of millions of them.
        chosen = chosen.astype(np.min_scalar_type(max(len(lengths) - 1, 0)))
        chosen = chosen[lengths[chosen] > 0]
        if longest:
            chosen = chosen[lengths[chosen] < longest]
        if not len(chosen):
            limit = f" and fewer than {longest} (task.unlabelled_longest)" if longest else ""
            raise UsageError(f"stream '{name}': no sentence of at least 1 word{limit}")
        self.count = len(chosen)
        self._lengths, self._begins = lengths, list(buckets)
        per_batch = batch_size * float(self._weights(chosen).mean())
        pieces = max(1, round(len(chosen) / chunk)) if chunk else 1
        if pieces > 1:
            random_streams.generator(seed, name, "pieces").shuffle(chosen)
        self._buckets = [
            self._fill_buckets(part, per_batch) for part in np.array_split(chosen, pieces)
        ]
        self._ends = np.cumsum(list(map(_count_batches, self._buckets)))
        self.per_epoch = int(self._ends[-1])
        # A number of sentences that no batch falls below in any epoch.
        self.smallest = self.count
        for members, n in chain.from_iterable(self._buckets):
            weights = self._weights(members)
            fewest = int(weights.sum() / n / weights.max() - 1e-9)
            self.smallest = min(self.smallest, max(1, fewest))
        # A cached method would keep the object alive; a cached closure does not.
        self._batches = lru_cache(maxsize=2)(
            lambda epoch, piece: self._shuffle_batches(
                self._buckets[piece], random_streams.generator(seed, name, "epoch", epoch, piece)
            )
        )

    def _weights(self, sentences: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(self._lengths[sentences].astype(np.float64)))

    def _fill_buckets(self, samples: np.ndarray, per_batch: float) -> list[tuple[np.ndarray, int]]:
        bucket_numbers = np.searchsorted(self._begins, self._lengths[samples], side="right")
        buckets: list[np.ndarray] = []

        def is_small() -> bool:
            return float(self._weights(buckets[-1]).sum()) < _FEW * per_batch

        for number in range(len(self._begins) + 1):
            members = samples[bucket_numbers == number]
            if buckets and is_small():
                buckets[-1] = np.concatenate([buckets[-1], members])
            elif len(members):
                buckets.append(members)
        if len(buckets) > 1 and is_small():
            buckets[-2:] = [np.concatenate(buckets[-2:])]
        counts = [max(1, round(float(self._weights(m).sum()) / per_batch)) for m in buckets]
        return [(members, min(n, len(members))) for members, n in zip(buckets, counts)]

    def _shuffle_batches(
        self, buckets: list[tuple[np.ndarray, int]], generator: np.random.Generator
    ) -> list[np.ndarray]:
        plan = []
        for members, batches in buckets:
            order = generator.permutation(members)
            plan += np.split(order, _cuts(self._weights(order), batches))
        return [plan[i] for i in generator.permutation(len(plan))]

    def batch(self, number: int) -> np.ndarray:
        """Return the sentences of global batch `number`, int64 (rows,)."""
        epoch, at = divmod(number, self.per_epoch)
        piece = int(np.searchsorted(self._ends, at, side="right"))
        before = int(self._ends[piece - 1]) if piece else 0
        return self._batches(epoch, piece)[at - before].astype(np.int64)


def _count_batches(buckets: Sequence[tuple[np.ndarray, int]]) -> int:
    return sum(batches for _, batches in buckets)


def _cuts(weights: np.ndarray, batches: int) -> np.ndarray:
    """Return where to cut items of these weights into `batches` runs of about equal weight.

    int64 (batches - 1,); no run is empty.

        >>> _cuts(np.array([1.0, 1.0, 1.0, 1.0, 4.0, 4.0]), batches=3)
        array([4, 5])
    """
    numbers = np.arange(1, batches)
    totals = np.cumsum(weights)
    # By the middles of the items, so that equal ones make equal runs.
    places = np.searchsorted(totals - weights / 2, totals[-1] * numbers / batches)
    # Room for one item in each run before and after.
    places = np.maximum.accumulate(np.maximum(places, numbers) - numbers) + numbers
    return np.asarray(np.minimum(places, len(weights) - batches + numbers))
