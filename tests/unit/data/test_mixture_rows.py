"""Rows divided among objectives: numbers, weights of the losses, independence of the cut."""

import numpy as np
import pytest
import torch

from metaseq_lm.core.batch import SequenceBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.mixture import (
    MixtureBatch,
    _loss_weights,
    divide_rows,
    mean_rows,
    mixed_stream,
)
from metaseq_lm.data.streams import Phases, PlannedStream, Shard, Shuffled, Stream


@pytest.mark.parametrize(
    "weights, rows, means",
    [
        ((0.5, 0.5), 8, [4, 4]),
        ((1, 15), 32, [2, 30]),
        ((0.3, 0.7), 7, [2.1, 4.9]),
        ((1, 15), 8, [1, 7]),  # one row at least
        ((0.01, 0.19, 0.8), 6, [1, 1, 4]),
        ((0, 0.5, 0.5), 3, [0, 1.5, 1.5]),
        ((1, 0), 5, [5, 0]),
        ((0.2, 0.2, 0.6), 2, [0.4, 0.4, 1.2]),  # fewer rows than objectives
    ],
)
def test_the_numbers_of_rows_follow_the_weights(weights, rows, means):
    assert mean_rows(weights, rows) == pytest.approx(means)
    counts = np.zeros((400, len(weights)))
    for key in range(400):
        parts = divide_rows(weights, key, rows)
        assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
        assert all((np.diff(part) > 0).all() for part in parts)
        counts[key] = [len(part) for part in parts]
    assert (counts >= np.floor(means)).all() and (counts <= np.ceil(means)).all()
    assert counts.mean(0) == pytest.approx(means, abs=0.1)


def test_every_row_can_be_anyones():
    mine = np.zeros(8)
    for key in range(800):
        mine[divide_rows((0.25, 0.75), key, 8)[0]] += 1
    assert mine / 800 == pytest.approx(np.full(8, 0.25), abs=0.06)


def test_absent_objectives_leave_their_weight_to_others():
    """So that the gradient of a batch of one row is right on average."""
    one, none = np.array([0]), np.array([], int)
    assert _loss_weights((0.25, 0.75), (one, one)).tolist() == [0.25, 0.75]
    assert _loss_weights((0.25, 0.75), (one, none)).tolist() == [1, 0]
    chosen = [len(divide_rows((0.25, 0.75), key, 1)[0]) for key in range(800)]
    assert np.mean(chosen) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    "shares, updates, expected",
    [
        ((0.25, 0.75), 8, [0, 0, 1, 1, 1, 1, 1, 1]),
        ((4, 16, 4), 12, [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]),
        ((1, 1), 3, [0, 0, 1]),
        ((0.1, 0.2, 0.7), 10, [0, 1, 1, 2, 2, 2, 2, 2, 2, 2]),
        ((1,), 2, [0, 0]),
    ],
)
def test_phases(shares, updates, expected):
    phases = Phases(shares, updates)
    assert [phases.at(update) for update in range(updates)] == expected
    assert phases.at(updates + 5) == len(shares) - 1


def rows_batch(samples: np.ndarray, keys: np.ndarray, width: int) -> SequenceBatch:
    tokens = torch.from_numpy(np.stack([samples, keys.astype(np.int64) >> 1], 1))
    return SequenceBatch(tokens=tokens, sizes={"rows": len(samples), "width": width})


def planned_batch(
    samples: np.ndarray, keys: np.ndarray, width: int, numbers: np.ndarray
) -> SequenceBatch:
    batch = rows_batch(samples, keys, width)
    batch.tokens = torch.cat([batch.tokens, torch.from_numpy(numbers)[:, None].long()], 1)
    return batch


def streams(count: int = 20) -> dict[str, Stream]:
    """Return two streams of the same rows, the second with numbers 0, 1, ... of its rows."""
    shared = Shuffled(count, 8, 3, "train"), rows_batch, 3, np.arange(count) + 4
    planned = Shuffled(count, 8, 3, "train"), planned_batch, 3, np.arange(count) + 4
    plan = PlannedStream("train", *planned, plan=lambda key, rows: np.arange(rows, dtype=float))
    return {"a": Stream("train", *shared), "b": plan}


def cut(weights: tuple[float, float], number: int, world: int, size: int) -> dict:
    """Return what each row of a batch is, on all replicas: by sample its objective and tokens."""
    stream, rows = mixed_stream(streams(), lambda update: weights), {}
    for rank in range(world):
        for batch in stream.micro_batches(number, Shard(rank, world, size)):
            assert isinstance(batch, MixtureBatch) and isinstance(batch.batch, SequenceBatch)
            assert not size or len(batch.samples) <= size
            for sample, row, tokens in zip(batch.samples, batch.rows, batch.batch.tokens.tolist()):
                assert sample not in rows
                rows[sample] = (batch.objective, batch.weight, row, tokens)
    return rows


def test_the_cut_of_a_batch_changes_no_row():
    for number in (0, 1, 2, 7):
        whole = cut((0.5, 0.5), number, 1, 0)
        for world, size in ((1, 3), (2, 0), (3, 1), (9, 0)):
            assert cut((0.5, 0.5), number, world, size) == whole
    first, second = (cut((0.5, 0.5), number, 1, 0) for number in (0, 3))
    assert [r[0] for _, r in sorted(first.items())] != [r[0] for _, r in sorted(second.items())]


def test_rows_are_those_of_the_objective_alone():
    """With their own keys, padded as the whole batch, and planned for its rows only."""
    alone = streams()["a"].micro_batches(0, Shard())[0]
    tokens = dict(zip(alone.samples, alone.tokens.tolist()))
    rows = cut((0.5, 0.5), 0, 1, 0)
    for sample, (objective, weight, _, row) in rows.items():
        assert weight == 0.5 and row[:2] == tokens[sample]
        assert len(row) == 2 + (objective == "b")
    assert sorted(r[2] for o, _, _, r in rows.values() if o == "b") == [0, 1, 2, 3]
    only = mixed_stream(streams(), lambda update: (1, 0)).micro_batches(0, Shard())
    assert [batch.objective for batch in only] == ["a"]
    assert torch.equal(only[0].batch.tokens, alone.tokens)  # type: ignore[attr-defined]
    assert only[0].sizes == {"a.rows": 8, "a.width": alone.sizes["width"]}


def test_weights_follow_the_update():
    """Not the number of the batch, which begins anew where the data are reset."""
    stream = mixed_stream(streams(), lambda update: (1, 0) if update < 5 else (0, 1))
    for update, objective in ((0, "a"), (4, "a"), (5, "b"), (99, "b")):
        at_update = stream.at_update(update)
        assert {b.objective for b in at_update.micro_batches(0, Shard())} == {objective}


def test_other_rows_are_refused():
    with pytest.raises(UsageError, match=r"a has 20\b.*b.19\b"):
        mixed_stream({"a": streams()["a"], "b": streams(19)["b"]}, lambda update: (1, 1))


def test_batches_within_are_moved_too():
    batch = MixtureBatch.of("a", 1.0, SequenceBatch(tokens=torch.zeros(2, 3), sizes={"rows": 2}))
    moved = batch.to("meta", torch.float64)
    assert isinstance(moved.batch, SequenceBatch) and isinstance(batch.batch, SequenceBatch)
    assert moved.batch.tokens.is_meta and moved.batch.tokens.dtype == torch.float64
    assert not batch.batch.tokens.is_meta
