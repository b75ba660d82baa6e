"""Rows of a batch divided among several objectives, each of which makes batches of its rows.

The seed and the number of the batch decide which rows belong to which objective, for the global
batch as a whole, so neither processes nor micro-batches change it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.streams import Shard, Stream

_DIGITS = 9  # decimals of sums of weights that count, so that rounding errors move no row


@dataclass(kw_only=True)
class MixtureBatch(Batch):
    """A micro-batch of one objective of a mixture; its sizes are called OBJECTIVE.SIZE.

    Attributes:
        objective: The name of the objective.
        weight: The weight of its loss.
        batch: The batch that the objective makes of its rows.
    """

    objective: str
    weight: float
    batch: Batch

    @classmethod
    def of(cls, objective: str, weight: float, batch: Batch) -> "MixtureBatch":
        """Return the micro-batch of an objective."""
        return cls(
            objective=objective,
            weight=weight,
            batch=batch,
            sizes={f"{objective}.{name}": size for name, size in batch.sizes.items()},
            rows=batch.rows,
            samples=batch.samples,
            stream=batch.stream,
        )


def mean_rows(weights: Sequence[float], rows: int) -> np.ndarray:
    """Return the expected number of rows of each objective in a batch of `rows`.

    They are proportional to the weights, but each objective with a positive weight gets at least
    one row if there are enough rows.
    """
    shares = np.array(weights, float) / sum(weights)
    means = rows * shares
    if rows < np.count_nonzero(shares):
        return means
    is_raised = np.zeros(len(shares), bool)
    while ((means < 1) & (shares > 0)).any():
        is_raised |= (means < 1) & (shares > 0)
        left = shares * ~is_raised
        means = np.where(is_raised, 1.0, (rows - is_raised.sum()) * left / max(left.sum(), 1e-300))
    return means


def divide_rows(weights: Sequence[float], key: int, rows: int) -> list[np.ndarray]:
    """Return the numbers of the rows of each objective, drawn at random.

    Their number is `mean_rows` rounded up or down at random, so that the expectation is exact.

    Args:
        weights: The weights of the objectives, not all 0.
        key: Key of the global batch.
        rows: Number of its rows.
    """
    generator = random_streams.generator(key, "objectives")
    sums = np.round(np.cumsum(mean_rows(weights, rows)), _DIGITS)
    ends = np.floor(sums + generator.random()).astype(np.int64)
    order = generator.permutation(rows)
    return [np.sort(part) for part in np.split(order, ends[:-1])]


def _loss_weights(weights: Sequence[float], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the weights of the losses of a batch, which sum to 1."""
    # With fewer rows than objectives, an objective without rows leaves its weight to the others.
    present = np.array([weight * bool(len(part)) for weight, part in zip(weights, parts)])
    return np.asarray(present / present.sum())


@dataclass(eq=False)
class _MixedStream(Stream):
    """A stream whose rows are divided among the streams of several objectives.

    Its own collate function is not used. Made by `mixed_stream`.

    Args:
        parts: The streams of the objectives by name, all of the same samples.
        weights: Returns the weights of the objectives in an update, a pure function of its number.
        update: The number of the update.
    """

    parts: Mapping[str, Stream] = field(kw_only=True)
    weights: Callable[[int], Sequence[float]] = field(kw_only=True)
    update: int = field(default=0, kw_only=True)

    def at_update(self, update: int) -> Stream:
        parts = {name: part.at_update(update) for name, part in self.parts.items()}
        return replace(self, parts=parts, update=update)

    def typical(self) -> Stream:
        return replace(self, parts={name: part.typical() for name, part in self.parts.items()})

    def micro_batches(self, number: int, shard: Shard) -> list[Batch]:
        samples, weights = self.order.batch(number), self.weights(self.update)
        width = self.width(number, samples)
        key = random_streams.key(self.seed, self.name, number)
        divided = divide_rows(weights, key, len(samples))
        batches: list[Batch] = []
        of_losses = _loss_weights(weights, divided).tolist()
        # Each objective is divided among the replicas separately, so that they have equal work.
        for (name, stream), rows, weight in zip(self.parts.items(), divided, of_losses):
            for part in shard.parts(len(rows)):
                batch = stream.micro_batch(number, samples, rows[part], width, rows)
                batches.append(MixtureBatch.of(name, weight, batch))
        return batches


def mixed_stream(
    parts: Mapping[str, Stream], weights: Callable[[int], Sequence[float]]
) -> _MixedStream:
    """Return the stream of a mixture; arguments as of `_MixedStream`.

    Raises UsageError if the streams have different samples.
    """
    (first_name, first), *others = parts.items()
    for name, stream in others:
        if len(stream.lengths) != len(first.lengths):
            raise UsageError(
                f"the objectives of a mixture share their rows, but {first_name} has "
                f"{len(first.lengths):,} of them and {name} {len(stream.lengths):,}"
            )
    arguments = first.name, first.order, first.collate, first.seed, first.lengths
    return _MixedStream(
        *arguments, widths=first.widths, words=first.words, parts=parts, weights=weights
    )
