"""Orders, shards and streams: every sample once, whatever the replicas and micro-batches."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from metaseq_lm.core.batch import Batch, TokenBatch
from metaseq_lm.data import streams
from metaseq_lm.data.streams import (
    PHASE,
    POOL,
    Growing,
    PhasedOrder,
    Phases,
    Ramp,
    Sequential,
    Shard,
    Shuffled,
    Stream,
    draw_below,
    mean_over_first,
    noise_rows,
    sorted_pass,
)

# The order of an epoch as a table, and with entries computed one by one, as for large corpora.
computed_too = pytest.mark.parametrize("table", [streams.TABLE, 0], indirect=True)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    with mock.patch.object(streams, "TABLE", request.param):
        yield


SIZES = {"count": st.integers(1, 60), "world": st.integers(1, 9), "micro": st.integers(0, 12)}


@settings(max_examples=200, deadline=None)
@given(**SIZES)
def test_parts_partition_the_rows(count, world, micro):
    """Each row once, in order; no part longer than asked, replicas even to one row."""
    parts = [Shard(rank, world, micro).parts(count) for rank in range(world)]
    everything = [int(row) for mine in parts for part in mine for row in part]
    assert everything == list(range(count))
    sizes = [sum(map(len, mine)) for mine in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(0 < len(part) <= (micro or count) for mine in parts for part in mine)
    if micro == 0:
        assert all(len(mine) <= 1 for mine in parts)


@computed_too
@pytest.mark.usefixtures("table")
@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 60), batch=st.integers(1, 20))
def test_the_smallest_batch_is_what_it_says(count, batch):
    for order in (Shuffled(count, batch, 1, "s"), Sequential(count, batch)):
        epoch = -(-count // batch)
        assert order.smallest == min(len(order.batch(i)) for i in range(epoch))


@computed_too
@pytest.mark.usefixtures("table")
@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 50), size=st.integers(1, 60), seed=st.integers(0, 99))
def test_shuffled_epochs(count, size, seed):
    """Each epoch holds every sample once; only its last batch may be short."""
    order = Shuffled(count, size, seed, "train")
    per_epoch = -(-count // size)
    for epoch in range(3):
        batches = [order.batch(epoch * per_epoch + i) for i in range(per_epoch)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert all(len(batch) == size for batch in batches[:-1])


@computed_too
@pytest.mark.usefixtures("table")
def test_shuffled_is_a_pure_function():
    one, other = Shuffled(100, 7, 5, "train"), Shuffled(100, 7, 5, "train")
    numbers = [40, 3, 0, 39, 3, 77, 200, 40]
    wanted = {n: other.batch(n).tolist() for n in sorted(numbers)}
    assert all(one.batch(n).tolist() == wanted[n] for n in numbers)


@computed_too
@pytest.mark.usefixtures("table")
def test_epochs_seeds_and_names_have_their_own_order():
    orders = [
        Shuffled(100, 100, *which).batch(number).tolist()
        for which, number in (((5, "a"), 0), ((5, "a"), 1), ((6, "a"), 0), ((5, "b"), 0))
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("table", [streams.TABLE], indirect=True)  # few samples are uneven above
@pytest.mark.usefixtures("table")
def test_shuffled_is_even():
    order = Shuffled(5, 5, 1, "train")
    places = np.zeros((5, 5))
    for epoch in range(4_000):
        places[order.batch(epoch), np.arange(5)] += 1
    for place in places:
        assert stats.chisquare(place).pvalue > 1e-3


@computed_too
@pytest.mark.usefixtures("table")
@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 2_000), batch=st.integers(1, 20), seed=st.integers(0, 9))
def test_batches_of_like_lengths(count, batch, seed):
    """Each sample once an epoch, with neighbours by length; no epoch is like another."""
    lengths = np.random.default_rng(seed).integers(1, 90, count)
    order = Shuffled(count, batch, seed, "train", lengths)
    epochs = [
        [order.batch(i) for i in range(e * order.per_epoch, (e + 1) * order.per_epoch)]
        for e in range(2)
    ]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).tolist()) == list(range(count))
        assert min(map(len, epoch)) == order.smallest
    whole = [batch_ for batch_ in epochs[0] if len(batch_) == batch]
    if count <= POOL * batch and whole:
        # One pool: sorted by length, batch after batch, in any order of the batches.
        ranges = sorted((int(lengths[b].min()), int(lengths[b].max())) for b in whole)
        assert all(last <= first for (_, last), (first, _) in itertools.pairwise(ranges))
    if len(whole) > 20:
        assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]
        means = [float(lengths[b].mean()) for b in whole]
        assert means != sorted(means)


@computed_too
@pytest.mark.usefixtures("table")
def test_pools_of_like_lengths_are_many():
    """A batch is not always with the same others: pools are of random samples."""
    count, batch = 4 * POOL * 8, 8
    lengths = np.random.default_rng(1).integers(1, 90, count)
    order = Shuffled(count, batch, 1, "train", lengths)
    waste = sum(lengths[order.batch(i)].max() * batch for i in range(order.per_epoch))
    assert waste < 1.05 * lengths.sum()
    together = [
        {tuple(sorted(order.batch(e * order.per_epoch + i))) for i in range(order.per_epoch)}
        for e in range(2)
    ]
    assert len(together[0] & together[1]) < 5


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_batch_says_what_all_cost(grouped, seed):
    """Its size times the ratio is the mean size, whatever the first batch happens to be."""
    lengths = np.random.default_rng(0).lognormal(3, 0.6, 8_000).astype(int) + 1
    order = Shuffled(8_000, 32, seed, "train", lengths if grouped else None)
    streams = {"train": Stream("train", order, lambda s, k, w: {}, seed, lengths), "even": object()}
    sizes = [streams["train"].places(i) for i in range(order.per_epoch)]  # type: ignore[attr-defined]
    assert sizes[3] == 32 * lengths[order.batch(3)].max()
    found = sizes[0] * mean_over_first(streams, {"train": 1, "even": 2})
    assert found == pytest.approx(np.mean(sizes), rel=0.1)
    assert mean_over_first(streams, {"even": 1}) == 1
    both = (sizes[0] + sizes[1]) * mean_over_first(streams, {"train": 2})
    assert both == pytest.approx(2 * np.mean(sizes), rel=0.1)


def test_draws_are_uniform_and_belong_to_the_row():
    drawn = draw_below(1, np.arange(40_000), 20)
    assert stats.chisquare(np.bincount(drawn, minlength=20)).pvalue > 1e-3
    assert (draw_below(1, np.arange(40_000), 20) == drawn).all()
    assert (draw_below(2, np.arange(616, 624), 20) != drawn[616:624]).any()
    # The sample's number counts, not which others are drawn with it.
    assert (draw_below(1, np.arange(12, 16), 20) == drawn[12:16]).all()


@pytest.mark.parametrize("ramp", [Ramp(3, 11, 5), Ramp(1, 4, 1), Ramp(4, 4, 3), Ramp(2, 9, 100)])
def test_a_ramp_rises_by_a_line_and_adds_up(ramp):
    values = [ramp.at(number) for number in range(120)]
    rise = ramp.last - ramp.first
    line = [ramp.first + rise * n / ramp.length for n in range(ramp.length)]
    assert values[0] == ramp.first and set(values[ramp.length :]) == {ramp.last}
    assert all(0 <= exact - value < 1 for value, exact in zip(values, line))
    assert [ramp.before(number) for number in range(121)] == [0, *np.cumsum(values)]


def test_the_order_of_each_phase_begins_with_it():
    """Whatever was shown before; epochs are those of the samples of each phase."""
    phases = Phases((0.3, 0.7), 10)
    assert phases.begins == [0, 3] and Phases((0.25, 0.5, 0.25), 9).begins == [0, 3, 7]
    orders = [
        Growing(10, Ramp(4, 4, 0), 1, "a"),
        Growing(6, Ramp(1, 3, 8), 1, "b", phases.begins[1]),
    ]
    order = PhasedOrder(orders, phases)
    first = np.concatenate([order.batch(n) for n in range(3)])
    assert len(first) == 12 and sorted(first[:10]) == [*range(10)]
    later = np.concatenate([order.batch(n) for n in range(3, 12)])
    assert np.bincount(later[:18] - PHASE).tolist() == [3] * 6
    assert order.epochs(2) == 0.8 and order.epochs(3) == 1.2
    assert order.epochs(12) == pytest.approx(1.2 + len(later) / 6)


@pytest.mark.parametrize(("count", "ramp"), [(10, Ramp(1, 4, 6)), (7, Ramp(5, 20, 3))])
def test_growing_batches_show_each_epoch_once(count, ramp):
    """In the order of Shuffled, without a gap, though a batch may have rows of several epochs."""
    order = Growing(count, ramp, 3, "train")
    batches = [order.batch(number) for number in range(20)]
    assert [len(batch) for batch in batches] == [ramp.at(number) for number in range(20)]
    samples = np.concatenate(batches)
    whole = Shuffled(count, count, 3, "train")
    for epoch in range(len(samples) // count):
        shown = samples[epoch * count : (epoch + 1) * count]
        assert np.array_equal(shown, whole.batch(epoch))
    assert order.smallest == ramp.first


def test_growing_batches_of_many_samples(monkeypatch):
    """Whose order is computed batch by batch."""
    monkeypatch.setattr("metaseq_lm.data.streams.TABLE", 8)
    order = Growing(50, Ramp(3, 7, 4), 1, "train")
    samples = np.concatenate([order.batch(number) for number in range(16)])
    assert sorted(samples[:50]) == [*range(50)] == sorted(samples[50:100])


def test_sequential():
    order = Sequential(7, 3)
    assert len(order) == 3
    assert [order.batch(n).tolist() for n in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_draw_below_an_array():
    bounds = np.arange(1, 2_001)
    drawn = draw_below(3, np.arange(2_000), bounds)
    assert (drawn >= 0).all() and (drawn < bounds).all()
    assert stats.kstest((drawn + 0.5) / bounds, "uniform").pvalue > 1e-3


LENGTHS = np.arange(24) % 7 + 1


@dataclass(kw_only=True)
class KeyedBatch(Batch):
    keys: Tensor


@dataclass(kw_only=True)
class LengthBatch(Batch):
    lengths: Tensor


def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> Batch:
    assert width >= LENGTHS[samples].max()
    return KeyedBatch(samples=samples, keys=keys.view(np.int64), sizes={"rows": len(samples)})


def rows_of(order: object, shards: list[Shard], number: int) -> dict[int, tuple]:
    """Return by sample the key and the noise identity that it gets in a global batch."""
    stream = Stream("train", order, collate, 9, LENGTHS)  # type: ignore[arg-type]
    found: dict[int, tuple] = {}
    for shard in shards:
        for batch in stream.micro_batches(number, shard):
            assert batch.stream == "train" and batch.sizes["rows"] == len(batch.rows)
            for sample, key, row in zip(batch.samples, batch.keys, batch.rows):
                found[int(sample)] = (int(key), int(row))
    return found


@settings(max_examples=60, deadline=None)
@given(world=st.integers(1, 5), micro=st.integers(0, 6), number=st.integers(0, 30))
def test_rows_keep_key_and_noise_however_they_are_cut(world, micro, number):
    order = Shuffled(24, 8, 1, "train")
    whole = rows_of(order, [Shard()], number)
    cut = rows_of(order, [Shard(rank, world, micro) for rank in range(world)], number)
    assert whole == cut and len(whole) == 8
    assert len({key for key, _ in whole.values()}) == 8
    assert len({row for _, row in whole.values()}) == 8


def test_a_batch_has_keys_of_its_own():
    order = Shuffled(24, 8, 1, "train")
    tables = [rows_of(order, [Shard()], number) for number in range(6)]
    keys = [key for found in tables for key, _ in found.values()]
    assert len(set(keys)) == 48


def test_once():
    stream = Stream("valid", Sequential(10, 4), collate, 1, LENGTHS)
    samples = [[int(s) for m in batch for s in m.samples] for batch in stream.one_epoch(Shard())]
    assert samples == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shards = [list(stream.one_epoch(Shard(rank, 3, 0))) for rank in range(3)]
    assert sorted(int(s) for part in shards for b in part for m in b for s in m.samples) == list(
        range(10)
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 7), st.data())
def test_a_sorted_pass_shows_each_chosen_sample_once_by_length(sizes, size, data):
    lengths = np.array(sizes)
    chosen = np.array(data.draw(st.permutations(range(len(sizes)))))[: 1 + len(sizes) // 2]

    def lengths_of(samples: np.ndarray, keys: np.ndarray, width: int) -> Batch:
        assert width >= lengths[samples].max()
        return LengthBatch(lengths=lengths[samples])

    stream = sorted_pass("valid", chosen, lengths, lengths_of, size, 1)
    batches = [micro for batch in stream.one_epoch(Shard(0, 1, 2)) for micro in batch]
    samples = [int(sample) for batch in batches for sample in batch.samples]
    assert sorted(samples) == sorted(chosen.tolist())
    seen = [int(length) for batch in batches for length in batch.lengths]
    assert seen == [sizes[sample] for sample in samples] == sorted(seen)


def test_noise_rows_of_streams_never_meet():
    rows = np.arange(100_000)
    found = [noise_rows(name, rows) for name in ("unlabelled", "support", "query", "train")]
    assert len(np.unique(np.concatenate(found))) == 400_000


def test_arrays_of_a_batch_become_tensors_but_for_rows_and_samples():
    sizes = {"n": np.array([1, 2]), "m": 3}
    batch = TokenBatch(tokens=np.arange(3), rows=np.arange(3), samples=np.arange(3), sizes=sizes)  # type: ignore[arg-type]
    assert torch.equal(batch.tokens, torch.arange(3)) and batch.padding is None
    assert torch.equal(batch.sizes["n"], torch.tensor([1, 2])) and batch.sizes["m"] == 3
    assert isinstance(batch.rows, np.ndarray) and isinstance(batch.samples, np.ndarray)
