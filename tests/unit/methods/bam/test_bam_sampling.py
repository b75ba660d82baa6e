"""Shares of the sets: the table of the authors' code, draws, copies, epochs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaseq_lm.core.loading import load_config
from metaseq_lm.methods.bam.data import (
    MixedEpochs,
    _sampling_shares,
    copies_and_weights,
    rows_per_epoch,
)
from metaseq_lm.tasks import with_epochs

# MRPC and STS-B are doubled with their texts swapped.
GLUE = {
    "CoLA": 8551,
    "MNLI": 392702,
    "MRPC": 7336,
    "QNLI": 108436,
    "QQP": 363869,
    "SST-2": 67349,
    "STS-B": 11498,
    "RTE": 2490,
}
SHARES = [0.0203, 0.3581, 0.0181, 0.1364, 0.3382, 0.0954, 0.0253, 0.0080]
COPIES = [3, 1, 3, 1, 1, 2, 2, 4]
WEIGHTS = [0.863, 0.995, 0.897, 1.373, 1.014, 0.773, 1.203, 0.882]


def test_the_table_of_the_authors_code():
    copies, weights = copies_and_weights(GLUE, 0.75)
    assert list(copies.values()) == COPIES
    assert list(weights.values()) == pytest.approx(WEIGHTS, abs=6e-4)
    assert _sampling_shares(list(GLUE.values()), 0.75) == pytest.approx(SHARES, abs=6e-5)
    total = sum(copies[name] * size for name, size in GLUE.items())
    config = load_config(["task=bam", "criterion=bam_distill", "schedule=polynomial"])
    found = with_epochs(config, total, 128, 6)
    # The fact sheet's 50,640 does not round an epoch up to whole batches; here all tasks do.
    assert total == 1_080_322 and found.trainer.max_update == 50_646
    assert found.criterion.total_updates == found.schedule.total_updates == 50_646


def test_copies_and_weights_make_the_shares():
    """Copies alone miss them by up to a half, the weights make up for it, exactly."""
    copies, weights = copies_and_weights(GLUE, 0.75)
    seen = np.array([copies[n] * size * weights[n] for n, size in GLUE.items()])
    assert seen / seen.sum() == pytest.approx(
        _sampling_shares(list(GLUE.values()), 0.75), rel=1e-12
    )
    assert copies_and_weights(GLUE, 1.0) == (dict.fromkeys(GLUE, 1), dict.fromkeys(GLUE, 1.0))


sizes_of = st.lists(st.integers(1, 500), min_size=1, max_size=6)


@given(sizes_of, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_draws_are_the_nearest_whole_shares(sizes, exponent):
    counts = rows_per_epoch(sizes, exponent)
    assert sum(counts) == sum(sizes)
    assert np.abs(np.array(counts) - _sampling_shares(sizes, exponent) * sum(sizes)).max() < 1
    assert rows_per_epoch(sizes, 1.0) == sizes


@given(sizes_of, st.integers(1, 70), st.integers(0, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_its_counts_and_every_row_as_often(sizes, rows, seed, grouped):
    """Batches are full; in each epoch a set's rows are seen equally often, but for one."""
    counts = rows_per_epoch(sizes, 0.5)
    lengths = np.random.default_rng(seed).integers(1, 60, sum(sizes)) if grouped else None
    order = MixedEpochs(sizes, counts, rows, seed, "train", lengths)
    total = sum(counts)
    batches = [order.batch(i) for i in range(-(-2 * total // rows))]
    assert {len(batch) for batch in batches} == {rows}
    stream = np.concatenate(batches)
    first = np.cumsum([0, *sizes])
    for epoch in range(2):
        seen = Counter(stream[epoch * total : (epoch + 1) * total].tolist())
        for k, (size, count) in enumerate(zip(sizes, counts)):
            own = [seen[row] for row in range(first[k], first[k] + size)]
            assert sum(own) == count and max(own) - min(own) <= 1
    again = MixedEpochs(sizes, counts, rows, seed, "train", lengths)
    assert (again.batch(len(batches) - 1) == batches[-1]).all()


def test_rows_of_a_batch_are_about_equally_long():
    """In each epoch, though batches run on; sets of like lengths stay mixed."""
    lengths = np.random.default_rng(0).integers(1, 61, 5000)
    grouped = MixedEpochs([4000, 1000], [3507, 1503], 32, 1, "train", lengths)
    drawn = MixedEpochs([4000, 1000], [3507, 1503], 32, 1, "train")
    for epoch in range(1, 4):
        numbers = range(epoch * 5010 // 32 + 1, (epoch + 1) * 5010 // 32 - 1)
        widths = [[lengths[o.batch(i)].max() for i in numbers] for o in (grouped, drawn)]
        assert np.mean(widths[0]) < 33 and np.mean(widths[1]) > 57  # of a mean of 30.5
        shares = [(grouped.batch(i) >= 4000).mean() for i in numbers]
        assert np.mean(shares) == pytest.approx(0.3, abs=0.01) and np.std(shares) < 0.12
    starts = [lengths[grouped.batch(i)].max() for i in range(160, 180)]
    assert np.std(starts) > 8  # batches of all lengths in any order


def test_sets_of_other_lengths_hardly_share_batches_of_rows_equally_long():
    """Their shares of an epoch stay what they are; without grouping every batch has both."""
    generator = np.random.default_rng(0)
    lengths = np.concatenate([generator.integers(1, 20, 4000), generator.integers(20, 60, 1000)])
    shares = []
    for grouping in (lengths, None):
        order = MixedEpochs([4000, 1000], [3507, 1503], 32, 1, "train", grouping)
        shares.append([(order.batch(i) >= 4000).mean() for i in range(156)])
        assert np.mean(shares[-1]) == pytest.approx(0.3, abs=0.01)
    mixed = [np.mean([0 < share < 1 for share in found]) for found in shares]
    assert mixed[0] < 0.05 and mixed[1] > 0.99


def test_epochs_differ_and_are_mixed():
    order = MixedEpochs([400, 100], [300, 200], 100, 1, "train")
    batches = [order.batch(i) for i in range(10)]
    assert not (np.sort(np.concatenate(batches[:5])) == np.sort(np.concatenate(batches[5:]))).all()
    small = [(batch >= 400).mean() for batch in batches]
    assert np.mean(small) == pytest.approx(0.4) and 0.2 < min(small) < max(small) < 0.6
