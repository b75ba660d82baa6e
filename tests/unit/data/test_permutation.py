"""Permutations computed entry by entry."""

import numpy as np
import pytest
from scipy import stats

from metaseq_lm.data.permutation import Permutation


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 100, 1000, 4096, 4097, 65_537])
def test_every_number_occurs_once(count: int) -> None:
    entries = Permutation(count, 7, "train", 0)(np.arange(count))
    assert np.array_equal(np.sort(entries), np.arange(count))


def test_entries_do_not_depend_on_what_else_is_asked_for() -> None:
    permutation = Permutation(10_000, 1)
    whole = permutation(np.arange(10_000))
    places = np.array([9_999, 0, 512, 512, 77])
    assert np.array_equal(permutation(places), whole[places])


def test_other_keys_give_other_orders() -> None:
    orders = {
        tuple(Permutation(50, seed, epoch)(np.arange(50))) for seed in range(5) for epoch in (0, 1)
    }
    assert len(orders) == 10


def test_25_billion_is_an_ordinary_size() -> None:
    count = 25_000_000_000
    entries = Permutation(count, 3)(np.arange(count - 5000, count))
    assert entries.min() >= 0 and entries.max() < count
    assert len(np.unique(entries)) == 5000
    assert stats.kstest(entries / count, "uniform").pvalue > 1e-4


def test_neighbours_are_spread_evenly() -> None:
    """First entries over many keys are uniform, and so are the steps between neighbours."""
    count, cells = 1000, 20
    first = np.array([Permutation(count, seed)(np.arange(2)) for seed in range(4000)])
    for values in (first[:, 0], first[:, 1], (first[:, 1] - first[:, 0]) % count):
        observed = np.bincount(values * cells // count, minlength=cells)
        assert stats.chisquare(observed).pvalue > 1e-4
    order = Permutation(1 << 16, 5)(np.arange(1 << 16))
    assert abs(stats.spearmanr(order[:-1], order[1:]).statistic) < 0.02
    assert abs(stats.spearmanr(order, np.arange(1 << 16)).statistic) < 0.02
