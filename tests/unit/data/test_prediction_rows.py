"""Batches whose positions predict tokens: the shift, prefixes, times and noise."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch

from metaseq_lm.core.batch import Layout
from metaseq_lm.data.corpus.predictions import (
    LEAST_TIME,
    MULTIPLE,
    MaskNoise,
    _diffusion_times,
    at_tokens,
    draw_times,
    masked_by_count,
    next_targets,
    prediction_batch,
    source_of,
)
from metaseq_lm.data.streams import PlannedStream, Shard, Shuffled


def test_targets_stay_in_their_document() -> None:
    targets = torch.tensor([[5, 7, -1, 3, 8]])
    assert next_targets(targets, Layout()).tolist() == [[7, -1, 3, 8, -1]]
    packed = Layout(documents=torch.tensor([[0, 0, 0, 1, 1]]))
    assert next_targets(targets, packed).tolist() == [[7, -1, -1, 8, -1]]


def test_the_three_forms_of_the_shift_agree() -> None:
    targets = torch.tensor([[-1, 7, 4, 3, 8]])
    predicted = next_targets(targets, Layout())
    places = torch.arange(1, 5)
    assert predicted[0, source_of(places)].tolist() == targets[0, places].tolist()
    assert at_tokens(predicted)[0, places].tolist() == targets[0, places].tolist()


@pytest.mark.parametrize("is_shifted", [True, False])
def test_predictions_of_rows(is_shifted: bool) -> None:
    rows = np.array([[1, 5, 6, 2], [1, 7, 8, 2], [1, 9, 4, 2]])
    is_target = np.array([[0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 1, 0]], bool)
    weights = np.array([2.0, 1, 3])
    batch = prediction_batch(rows, rows, Layout(), is_target, is_shifted, weights)
    real = batch.targets >= 0
    assert len(batch.targets) == MULTIPLE and real.sum() == 5
    assert (batch.sources[real] + is_shifted).tolist() == [1, 5, 6, 7, 10]
    assert batch.targets[real].tolist() == [5, 7, 8, 2, 4]
    assert batch.weights is not None and batch.weights[real].tolist() == [2, 1, 1, 1, 3]
    assert batch.sizes == {"targets": 5, "rows": 3}


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_one_time_in_each_cell(rows: int) -> None:
    """Of (0, 1], in random order; one row alone has a uniform time."""
    draws = np.array([draw_times(key, rows) for key in range(400)])
    cells = np.ceil(draws * rows) - 1
    assert (np.sort(cells, 1) == np.arange(rows)).all()
    assert draws.mean(0) == pytest.approx(np.full(rows, 0.5), abs=0.075)
    assert draws.var(0) == pytest.approx(np.full(rows, 1 / 12), abs=0.02)
    t = _diffusion_times(draws, "uniform")
    assert (t > LEAST_TIME).all() and (t <= 1).all()


def test_bell_times_have_the_density_of_beta() -> None:
    """The distribution function of Beta(2, 2) is 3 t^2 - 2 t^3."""
    u = np.linspace(0, 1, 101)
    t = (_diffusion_times(u, "bell") - LEAST_TIME) / (1 - LEAST_TIME)
    assert 3 * t**2 - 2 * t**3 == pytest.approx(u, abs=1e-12)


def test_weights_are_inverse_times() -> None:
    candidates = np.ones((500, 40), bool)
    keys = np.arange(500, dtype=np.uint64)
    times = draw_times(9, 500)
    t = _diffusion_times(times, "uniform")
    chosen, weights = MaskNoise().choose(candidates, times, keys)
    assert weights * t == pytest.approx(np.ones(500), abs=1e-12)
    expected = (1 - LEAST_TIME) * t
    # Of 40 tokens each; the sum over all rows is exact to a few standard deviations.
    assert chosen.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert np.corrcoef(chosen.mean(1), expected)[0, 1] > 0.95
    assert (MaskNoise(is_flat=True).choose(candidates, times, keys)[1] == 1).all()


def test_numbers_of_masked_tokens_are_uniform() -> None:
    """Each k and each set of k tokens is alike likely."""
    n, draws = 3, 6000
    candidates = np.tile([False, True, True, True, False], (draws, 1))
    keys = np.random.default_rng(2).integers(0, 2**63, draws).astype(np.uint64)
    chosen, weights = masked_by_count(candidates, draw_times(5, draws), keys)
    assert not chosen[:, [0, 4]].any()
    k = chosen.sum(1)
    assert (weights == n / k).all()
    for size in range(1, n + 1):
        assert (k == size).sum() == draws / n  # one time in each cell
        for subset in combinations(range(1, n + 1), size):
            mask = np.isin(np.arange(5), subset)
            share = (chosen == mask).all(1).mean()
            assert share == pytest.approx(1 / n / comb(n, size), abs=0.02)


def test_plans_belong_to_the_global_batch() -> None:
    """A row's number is the same however the batch is cut; other batches have others."""

    def collate(samples, keys, width, numbers):  # type: ignore[no-untyped-def]
        seen.extend(zip(samples.tolist(), numbers.tolist()))
        return prediction_batch(
            samples[:, None], samples[:, None], Layout(), samples[:, None] < 0, is_shifted=False
        )

    stream = PlannedStream(
        "train", Shuffled(20, 8, 1, "train"), collate, 1, np.ones(20, np.int64), plan=draw_times
    )
    seen: list[tuple[int, float]] = []
    stream.micro_batches(0, Shard())
    whole = dict(seen)
    for world, size in ((1, 3), (2, 0), (4, 1)):
        seen = []
        for rank in range(world):
            stream.micro_batches(0, Shard(rank, world, size))
        assert dict(seen) == whole
    seen = []
    stream.micro_batches(1, Shard())
    assert sorted(dict(seen).values()) != sorted(whole.values())
