"""Named streams of batches whose order is a pure function of (seed, number of the batch).

Stages of a training batch:
1. an order gives the sample numbers of global batch i (shuffled epochs, uniform draws, or one
pass);
2. a shard takes the rows of this replica and cuts them into micro-batches;
3. a collate function gathers those samples, in one vectorised read, into a Batch.
A checkpoint saves only i. Masks are keyed by (seed, stream, i, row), so neither the number of
workers nor of replicas nor the micro-batch size changes the content of a row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.permutation import Permutation

__all__ = ["Plan", "PlannedStream", "Stream"]

_SAMPLED = 200  # batches of a stream from which the mean size is estimated
POOL = 50  # batches whose samples are sorted by length together
_TOLERANCE = 1e-9  # updates; rounding errors in the shares of a run must not move a phase
PHASE = 1 << 48  # exceeds every sample number of one phase, over all its epochs
TABLE = 1 << 20  # most samples for which the order of an epoch is a table of 8 bytes each


@dataclass(frozen=True)
class Shard:
    """Which rows of a global batch a replica takes, and how many at a time (0 = all at once)."""

    rank: int = 0
    world: int = 1
    micro_batch_size: int = 0

    def parts(self, count: int) -> list[np.ndarray]:
        """Return the row numbers of each micro-batch of this replica, out of `count` rows.

        The list is empty if there are fewer rows than replicas and none is left for this one.
        """
        first = count * self.rank // self.world
        last = count * (self.rank + 1) // self.world
        size = self.micro_batch_size or max(last - first, 1)
        return [np.arange(at, min(at + size, last)) for at in range(first, last, size)]


class Lengths(Protocol):
    """The number of tokens of each sample: an array, or an object that computes its entries."""

    def __len__(self) -> int: ...

    def __getitem__(self, samples: Any, /) -> Any: ...


class Order(Protocol):
    """The sample numbers of each global batch; the smallest batch has `smallest` rows."""

    smallest: int

    def batch(self, number: int) -> np.ndarray:
        """Return the sample numbers of global batch `number`, int64 (rows,)."""


class Shuffled:
    """Epochs over `count` samples, each in new random order; an epoch's last batch may be short.

    With `lengths` (samples,) the samples of a batch are about equally long, so that little time
    goes into padding: see `by_length`.

    Up to TABLE samples the order of an epoch is drawn as a whole. Above that, its entries are
    computed batch by batch (`Permutation`), in time and memory that do not grow with the number of
    samples.

    With `by_epoch`, the sample numbers of epoch e begin at e * count.
    """

    by_epoch = False

    def __init__(
        self, count: int, batch_size: int, seed: int, name: str, lengths: Lengths | None = None
    ) -> None:
        self.count = count
        self.batch_size = batch_size
        self.per_epoch = -(-count // batch_size)
        self.smallest = count - (self.per_epoch - 1) * batch_size

        def permuted(epoch: int) -> np.ndarray:
            generator = random_streams.generator(seed, name, "epoch", epoch)
            order = generator.permutation(count)
            if lengths is None:
                return order
            return by_length(order, lengths, batch_size, generator)

        whole = count // batch_size

        def pooled(epoch: int, pool: int) -> np.ndarray:
            assert lengths is not None
            last = min((pool + 1) * POOL, whole) * batch_size
            places = np.arange(pool * POOL * batch_size, last)
            samples = Permutation(count, seed, name, "epoch", epoch)(places)
            by_size = np.argsort(lengths[samples], kind="stable")
            return np.asarray(samples[by_size].reshape(-1, batch_size))

        # A method cached per object would keep the object alive; a cached closure does not.
        self._order = lru_cache(maxsize=2)(permuted)
        self._pool = lru_cache(maxsize=POOL)(pooled)
        self._key = (seed, name)
        self._sorted = lengths is not None

    def batch(self, number: int) -> np.ndarray:
        epoch, at = divmod(number, self.per_epoch)
        first, last = at * self.batch_size, min((at + 1) * self.batch_size, self.count)
        whole = self.count // self.batch_size
        if self.count <= TABLE or not self._sorted or at == whole:
            return self.part(epoch, first, last)
        moved = Permutation(whole, *self._key, "batches", epoch)(np.array([at]))
        pool, position = divmod(int(moved[0]), POOL)
        return np.asarray(self._pool(epoch, pool)[position])

    def part(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Return samples [first, last) of an epoch, sorted by length only in at most TABLE."""
        offset = epoch * self.count * self.by_epoch
        if self.count <= TABLE:
            return self._order(epoch)[first:last] + offset
        return Permutation(self.count, *self._key, "epoch", epoch)(np.arange(first, last)) + offset


@dataclass(frozen=True)
class Ramp:
    """A number rising linearly, rounded down, from `first` at 0 to `last` from `length` on."""

    first: int
    last: int
    length: int

    def at(self, number: int) -> int:
        """Return the value at `number`."""
        if number >= self.length:
            return self.last
        return self.last - self._missing[number]

    def before(self, number: int) -> int:
        """Return the sum of the values at all numbers below `number`."""
        return self.last * number - int(self._missing_before[min(number, self.length)])

    @cached_property
    def _missing(self) -> list[int]:
        rise = self.last - self.first
        return [rise - rise * number // self.length for number in range(self.length)]

    @cached_property
    def _missing_before(self) -> np.ndarray:
        return np.cumsum([0, *self._missing])


@dataclass(frozen=True)
class Phases:
    """The phases of a run, one after the other.

    Attributes:
        shares: The relative lengths of the phases, positive.
        updates: The number of updates of the run. A phase begins with the first update that is not
            before its place in the run.
    """

    shares: tuple[float, ...]
    updates: int

    def at(self, update: int) -> int:
        """Return the index of an update's phase, counted from 0; the last phase after the run."""
        return min(int(np.searchsorted(self._ends, update, side="right")), len(self.shares) - 1)

    @cached_property
    def begins(self) -> list[int]:
        """The first update of each phase."""
        return [0, *np.ceil(self._ends[:-1]).astype(int).tolist()]

    @cached_property
    def _ends(self) -> np.ndarray:
        ends = np.cumsum(self.shares) / sum(self.shares) * max(self.updates, 1)
        return np.asarray(ends - _TOLERANCE)


class Growing(Shuffled):
    """Shuffled epochs, one after the other without a gap, in batches whose size rises by a ramp.

    Samples come in the order of Shuffled; a batch may hold the end of one epoch and the beginning
    of the next. The first epoch begins with batch number `begin`.
    """

    def __init__(self, count: int, sizes: Ramp, seed: int, name: str, begin: int = 0) -> None:
        super().__init__(count, sizes.last, seed, name)
        self.sizes = sizes
        self.smallest = sizes.first
        self._skipped = sizes.before(begin)

    def batch(self, number: int) -> np.ndarray:
        first, last = self._seen(number), self._seen(number + 1)
        parts = []
        while first < last:
            epoch, at = divmod(first, self.count)
            end = min(at + last - first, self.count)
            parts.append(self.part(epoch, at, end))
            first += end - at
        return np.concatenate(parts)

    def epochs(self, number: int) -> float:
        """Return how many epochs the batches before `number` cover."""
        return self._seen(number) / self.count

    def _seen(self, number: int) -> int:
        return self.sizes.before(number) - self._skipped


class PhasedOrder:
    """A separate order, over separate samples, for each phase of a run.

    The sample numbers of phase p begin at p * PHASE. Each order begins with the first batch of its
    phase; samples of an unfinished epoch at the end of the phase are not used.
    """

    def __init__(self, orders: Sequence[Growing], phases: Phases) -> None:
        self.orders, self.phases = orders, phases
        self.smallest = min(order.smallest for order in orders)
        last = orders[-1]
        self.count, self.batch_size, self.per_epoch = last.count, last.batch_size, last.per_epoch

    def batch(self, number: int) -> np.ndarray:
        phase = self.phases.at(number)
        return self.orders[phase].batch(number) + phase * PHASE

    def epochs(self, number: int) -> float:
        """Return how many epochs the batches before `number` cover."""
        ends = [*self.phases.begins[1:], number]
        return sum(
            order.epochs(min(number, end))
            for order, begin, end in zip(self.orders, self.phases.begins, ends)
            if begin < number
        )


def by_length(
    order: np.ndarray, lengths: Lengths, batch_size: int, generator: np.random.Generator
) -> np.ndarray:
    """Return a random order in which the samples of a batch are about equally long.

    Every POOL batches of `order` (samples,) are sorted by length among themselves; then all batches
    are shuffled. The short batch at the end, if there is one, stays as it is.
    """
    whole = len(order) - len(order) % batch_size
    pool = POOL * batch_size
    parts = [order[at : min(at + pool, whole)] for at in range(0, whole, pool)]
    parts = [part[np.argsort(lengths[part], kind="stable")] for part in parts]
    batches = np.concatenate([*parts, order[:0]]).reshape(-1, batch_size)
    return np.concatenate([generator.permutation(batches).reshape(-1), order[whole:]])


class Sequential:
    """One pass over `count` samples in their own order, for evaluation."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count = count
        self.batch_size = batch_size
        self.smallest = count - (len(self) - 1) * batch_size

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def batch(self, number: int) -> np.ndarray:
        return np.arange(number * self.batch_size, min((number + 1) * self.batch_size, self.count))


def draw_below(root: int, rows: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Return one uniform integer in [0, bound) per row number."""
    u = random_streams.uniforms(random_streams.row_keys(root, rows), 0, 1)[:, 0]
    return (u * bound).astype(np.int64)


# (sample numbers, a key per row, width to pad to) -> batch
Collate = Callable[[np.ndarray, np.ndarray, int], Batch]


class Words(Protocol):
    """Counts the words of the text that samples hold.

    Attributes:
        missing: Why words cannot be counted, with the remedy; "" if they can.
    """

    @property
    def missing(self) -> str: ...

    def count(self, samples: np.ndarray, keys: np.ndarray, width: int) -> int:
        """Return the number of words in a batch; takes the arguments of its collate function."""


@dataclass(eq=False)
class Stream:
    """A named source of batches: an order of samples and a collate function.

    Args:
        name: Name of the stream.
        order: Returns the sample numbers of each global batch.
        collate: Makes a micro-batch from sample numbers (rows,), a uint64 key per row, from which
            its random numbers are computed, and the width to pad to. If the batch does not set
            `rows` or `samples`, the stream does.
        seed: Seed of the keys.
        lengths: Number of tokens of each sample (samples,). All micro-batches of a global batch are
            padded to its longest row: the positions that a row masks depend on the width, and must
            not depend on how the batch is cut.
        widths: The width that the rows of a global batch are cut to, by its number; None for no
            cut.
        words: The words of the samples; None for a stream that reads no corpus.
    """

    name: str
    order: Order
    collate: Collate
    seed: int
    lengths: Lengths
    widths: Ramp | None = None
    words: Words | None = None

    def micro_batches(self, number: int, shard: Shard) -> list[Batch]:
        """Return this replica's part of global batch `number`."""
        samples = self.order.batch(number)
        width = self.width(number, samples)
        members = np.arange(len(samples))
        parts = shard.parts(len(samples))
        return [self.micro_batch(number, samples, rows, width, members) for rows in parts]

    def micro_batch(
        self, number: int, samples: np.ndarray, rows: np.ndarray, width: int, members: np.ndarray
    ) -> Batch:
        """Return some `rows` of global batch `number`.

        Args:
            number: The number of the global batch.
            samples: All its samples.
            rows: Numbers of the rows of this micro-batch.
            width: The width to pad to.
            members: Numbers of all rows of the global batch that this stream makes, in any
                micro-batch.
        """
        batch = self.gather(number, samples, rows, width, members)
        batch.stream = self.name
        if batch.rows is None:
            batch.rows = noise_rows(self.name, rows)
        if batch.samples is None:
            batch.samples = samples[rows]
        return batch

    def gather(
        self, number: int, samples: np.ndarray, rows: np.ndarray, width: int, members: np.ndarray
    ) -> Batch:
        """Return the output of the collate function; takes the arguments of `micro_batch`."""
        root = random_streams.key(self.seed, self.name, number)
        return self.collate(samples[rows], random_streams.row_keys(root, rows), width)

    def at_update(self, update: int) -> "Stream":
        """Return the stream that the batches of an update come from; by default this one."""
        return self

    def typical(self) -> "Stream":
        """Return a stream whose batches have the mean cost of this stream's batches over a run."""
        return self

    @property
    def smallest_batch(self) -> int:
        """The fewest rows that a global batch of this stream has."""
        return self.order.smallest

    def places(self, number: int) -> int:
        """Return the positions in global batch `number`: rows times width, with padding."""
        samples = self.order.batch(number)
        return len(samples) * self.width(number, samples)

    def count_words(self, number: int) -> int:
        """Return the number of words of the corpus in global batch `number`."""
        assert self.words is not None
        samples = self.order.batch(number)
        root = random_streams.key(self.seed, self.name, number)
        keys = random_streams.row_keys(root, np.arange(len(samples)))
        return self.words.count(samples, keys, self.width(number, samples))

    def width(self, number: int, samples: np.ndarray) -> int:
        """Return the width that the rows of global batch `number`, `samples`, are padded to."""
        longest = int(self.lengths[samples].max())
        if self.widths is None:
            return longest
        return min(longest, self.widths.at(number))

    def one_epoch(self, shard: Shard) -> Iterator[list[Batch]]:
        """Yield all global batches of a Sequential order."""
        if not isinstance(self.order, Sequential):
            raise UsageError(
                f"stream '{self.name}' is endless and cannot be scored; the task's build_streams "
                "must give splits other than train a Sequential order"
            )
        for number in range(len(self.order)):
            yield self.micro_batches(number, shard)


# (key of a global batch, number of its rows) -> a number for each row, float64 (rows,)
Plan = Callable[[int, int], np.ndarray]


@dataclass(eq=False)
class PlannedStream(Stream):
    """A stream with a number per row, drawn for all its rows of a global batch together.

    The numbers can thus be spread evenly over the rows, however the batch is cut.

    Args:
        plan: Draws the numbers; the collate function gets the numbers of its rows (rows,) as a
            fourth argument.
    """

    collate: Callable[..., Batch]
    plan: Plan = field(kw_only=True)

    def gather(
        self, number: int, samples: np.ndarray, rows: np.ndarray, width: int, members: np.ndarray
    ) -> Batch:
        root = random_streams.key(self.seed, self.name, number)
        numbers = np.zeros(len(samples))
        numbers[members] = self.plan(random_streams.key(root, "plan"), len(members))
        keys = random_streams.row_keys(root, rows)
        return self.collate(samples[rows], keys, width, numbers[rows])


@dataclass(eq=False)
class ScheduledStream(Stream):
    """A stream whose batches also depend on the number of the update.

    Args:
        schedule: Returns the collate function of an update, a pure function of its number.

    Its own collate function makes batches of the mean cost.
    """

    schedule: Callable[[int], Collate] = field(kw_only=True)

    def at_update(self, update: int) -> Stream:
        return replace(self, collate=self.schedule(update))

    def typical(self) -> Stream:
        return Stream(self.name, self.order, self.collate, self.seed, self.lengths, self.widths)


def sorted_pass(
    name: str,
    samples: np.ndarray,
    lengths: Lengths,
    collate: Collate,
    batch_size: int,
    seed: int,
) -> Stream:
    """Return one pass over `samples` (rows,) by length, so that little time goes into padding.

    `lengths` covers all samples of the data set, and `collate` takes their numbers. If it does not
    set a batch's `samples`, they are these numbers, not positions in the pass.
    """
    order = samples[np.argsort(lengths[samples], kind="stable")]

    def chosen(places: np.ndarray, keys: np.ndarray, width: int) -> Batch:
        batch = collate(order[places], keys, width)
        if batch.samples is None:
            batch.samples = order[places]
        return batch

    return Stream(name, Sequential(len(order), batch_size), chosen, seed, lengths[order])


def mean_over_first(streams: Mapping[str, Any], needs: Mapping[str, int]) -> float:
    """Return the mean batch size of a kind of update relative to the size of its first batches.

    `needs` is the number of batches that the update takes from each stream. The size of a batch is
    rows times width; the mean is over SAMPLED batches. A stream without the method `places` has
    batches of one size.
    """
    first = sampled = 0
    for name, count in needs.items():
        if count and hasattr(streams[name], "places"):
            sizes = [streams[name].places(i) for i in range(max(count, _SAMPLED))]
            first += sum(sizes[:count])
            sampled += count * sum(sizes[:_SAMPLED])
    return sampled / _SAMPLED / first if first else 1.0


def noise_rows(name: str, rows: np.ndarray) -> np.ndarray:
    """Return row numbers for `forward.passes.Noise` that differ between streams."""
    return rows.astype(np.uint64) + np.uint64(random_streams.key("rows", name) & ~0xFFFFFFFF)
