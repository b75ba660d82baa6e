"""Counter-based random numbers: the same everywhere, of the right distribution, independent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from metaseq_lm.core import random_streams
from metaseq_lm.core.random_streams import GOLDEN
from metaseq_lm.forward.passes import (
    ForwardContext,
    Noise,
    _torch_words,
    current_context,
    use_context,
)

MASK = (1 << 64) - 1


def reference_word(key: int, number: int) -> int:
    """Return word `number` of a row by the published SplitMix64, in whole numbers."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


KEYS = st.integers(0, MASK)


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(KEYS, min_size=1, max_size=5), start=st.integers(0, 1 << 20))
def test_words_are_splitmix64_in_numpy_and_torch(keys: list[int], start: int) -> None:
    array = np.array(keys, dtype=np.uint64)
    wanted = [[reference_word(key, start + i) for i in range(7)] for key in keys]
    assert random_streams.words(array, start, 7).tolist() == wanted
    tensor = torch.from_numpy(array.view(np.int64))
    numbers = torch.arange(start, start + 7)
    assert _torch_words(tensor, numbers).numpy().view(np.uint64).tolist() == wanted


def test_published_numbers() -> None:
    """The first words of SplitMix64 with seed 1234567 (Vigna's reference program)."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert random_streams.words(np.array([1234567], np.uint64), 0, 3)[0].tolist() == wanted


ELSEWHERE = torch.device("meta")  # stands for a device other than the CPU


def test_devices_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would compute, computed here: the same masks and the same numbers, bitwise."""
    place = torch.Tensor.to

    def stay(self: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
        return self if where and where[0] == ELSEWHERE else place(self, *where, **more)

    arange = torch.arange
    monkeypatch.setattr(torch.Tensor, "to", stay)
    monkeypatch.setattr(torch, "arange", lambda *ends, device: arange(*ends))
    here, there = Noise(3, np.arange(5)), Noise(3, np.arange(5), ELSEWHERE)
    for shape in ((5, 7), (5, 3, 11), (10, 2)):
        for dtype in (torch.float32, torch.bool):
            assert torch.equal(here.keep(shape, 0.3, dtype), there.keep(shape, 0.3, dtype))
        assert torch.equal(here.uniform(shape, torch.float64), there.uniform(shape, torch.float64))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rate_and_scale_of_keep(p: float, dtype: torch.dtype) -> None:
    multiplier = Noise(1, np.arange(50)).keep((50, 10_000), p, dtype)
    assert multiplier.dtype == dtype
    low, high = multiplier.unique().tolist()
    assert low == 0 and high == pytest.approx(1 / (1 - p), rel=1e-4)
    dropped = int((multiplier == 0).sum())
    assert stats.binomtest(dropped, multiplier.numel(), p).pvalue > 1e-3
    # Unbiased: the scale belongs to the rate that p is rounded to.
    rate = round(p * 65536) / 65536
    assert high == pytest.approx(1 / (1 - rate), rel=1e-6)
    mask = Noise(1, np.arange(50)).keep((50, 10_000), p, torch.bool)
    assert torch.equal(mask, multiplier != 0)


def test_every_position_of_a_word_has_the_same_rate() -> None:
    """Four 16-bit lanes come from a word; none is favoured."""
    dropped = ~Noise(2, np.arange(20)).keep((20, 40_000), 0.2, torch.bool)
    counts = dropped.view(20, -1, 4).sum((0, 1)).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3


SHAPES: Sequence[Sequence[int]] = ((4, 3), (8, 5, 2), (4, 1), (4, 30), (4, 7, 7))


def sequence(rows: np.ndarray, ahead: int = 0) -> list[torch.Tensor]:
    """Return what several layers in turn would get, rows leading."""
    noise, found = Noise(random_streams.key(1, "noise", 0, 0), rows), []
    for number, shape in enumerate(SHAPES):
        whole = (shape[0] // 4 * len(rows), *shape[1:])
        drawn = noise.keep(whole, 0.2 + 0.1 * (number % 2), torch.float64, ahead)
        found.append(drawn.reshape(len(rows), -1))
        if number == 2:
            found.append(noise.uniform((len(rows), 3), torch.float64))
    return found


@pytest.mark.parametrize("ahead", [1, 2, 3, 5, 16, 17, 1000, 1 << 18])
def test_draws_ahead_change_nothing(ahead: int) -> None:
    rows = np.array([3, 1, 4, 15])
    for one, other in zip(sequence(rows), sequence(rows, ahead)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ahead", [0, 50])
def test_a_row_does_not_depend_on_its_batch(ahead: int) -> None:
    rows = np.array([3, 1, 4, 15])
    together = sequence(rows, ahead)
    for parts in ([[3], [1], [4], [15]], [[15, 4], [3, 1]], [[4, 3, 1, 15, 99, 7]]):
        for part in parts:
            for one, other in zip(together, sequence(np.array(part), ahead)):
                for number, row in enumerate(part):
                    if row in rows:
                        assert torch.equal(other[number], one[list(rows).index(row)])


def test_rows_of_two_axes() -> None:
    rows = np.arange(6).reshape(2, 3)
    one = Noise(1, rows).keep((2, 3, 8), 0.5, torch.bool)
    assert torch.equal(one.view(6, 8), Noise(1, rows.ravel()).keep((6, 8), 0.5, torch.bool))


def test_a_shape_that_does_not_fit_the_rows() -> None:
    with pytest.raises(ValueError, match=r"\(5, 3\) .* 2 rows"):
        Noise(1, np.arange(2)).keep((5, 3), 0.5, torch.float32)


def test_uniform_is_uniform() -> None:
    drawn = Noise(5, np.arange(100)).uniform((100, 1000), torch.float64).numpy()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    # The low bits are random too.
    assert stats.kstest((drawn.ravel() * 2**30) % 1, "uniform").pvalue > 1e-3


def inverse(word: int) -> int:
    """Return the number that the SplitMix64 finaliser maps to `word`."""

    def unshift(z: int, shift: int) -> int:
        found = z
        for _ in range(64 // shift + 1):
            found = z ^ (found >> shift)
        return found

    z = unshift(word, 31)
    z = unshift(z * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK, 27)
    return unshift(z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK, 30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uniform_is_below_one(dtype: torch.dtype) -> None:
    """Even for the largest word, which comes once in 2^25 numbers in float32."""
    noise = Noise(0, np.arange(1))
    noise.keys[0] = (inverse(MASK) - GOLDEN) & MASK
    assert reference_word(int(noise.keys[0]), 0) == MASK
    assert noise.uniform((1, 1), dtype).item() < 1


def columns(*roots: tuple) -> list[np.ndarray]:
    """Return 20,000 uniforms per root."""
    keys = [random_streams.row_keys(random_streams.key(*root), np.arange(20)) for root in roots]
    return [random_streams.uniforms(k, 0, 1000).ravel() for k in keys]


def test_neighbours_are_not_correlated() -> None:
    """Rows, positions, updates, draws and seeds next to each other."""
    noise = columns((1, "noise", 5, 1), (1, "noise", 6, 1), (1, "noise", 5, 2), (2, "noise", 5, 1))
    grid = noise[0].reshape(20, 1000)
    pairs = [(noise[0], other) for other in noise[1:]]
    assert not any(np.isin(one, other).any() for one, other in pairs)
    pairs += [(grid[:-1].ravel(), grid[1:].ravel()), (grid[:, :-1].ravel(), grid[:, 1:].ravel())]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / len(one) ** 0.5


def test_masks_of_neighbours_are_independent() -> None:
    rows = np.arange(400)
    retained = Noise(random_streams.key(1, "noise", 0, 1), rows).keep((400, 64), 0.5, torch.bool)
    later = Noise(random_streams.key(1, "noise", 1, 1), rows).keep((400, 64), 0.5, torch.bool)
    for one, other in (
        (retained[1:], retained[:-1]),
        (retained[:, 1:], retained[:, :-1]),
        (retained, later),
    ):
        agree = int((one == other).sum())
        assert stats.binomtest(agree, one.numel(), 0.5).pvalue > 1e-3


def test_successive_draws_differ() -> None:
    noise = Noise(1, np.arange(3))
    drawn = [noise.keep((3, 50), 0.5, torch.float32) for _ in range(5)]
    for number, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[:number])
    uniform = [noise.uniform((3, 50), torch.float64) for _ in range(3)]
    later = noise.keep((3, 50), 0.5, torch.float32)
    assert not any(torch.equal(later, one) for one in drawn)
    for number, first in enumerate(uniform):
        assert not any(np.isin(first, second).any() for second in uniform[:number])


def test_keys() -> None:
    """A key stands for the whole tuple: order, type and borders count."""
    tuples: list[tuple] = [
        (1, 2),
        (2, 1),
        (12,),
        ("1", 2),
        (1, "2"),
        (1, 2, 0),
        ("a", "bc"),
        ("ab", "c"),
        (-1, 2),
    ]
    assert len({random_streams.key(*parts) for parts in tuples}) == len(tuples)
    assert random_streams.key(1, "noise", 0, 1) == random_streams.key(1, "noise", 0, 1)
    assert all(0 <= random_streams.key(*parts) <= MASK for parts in tuples)
    keys = random_streams.row_keys(7, np.arange(100_000))
    assert len(np.unique(keys)) == 100_000


def test_generator() -> None:
    one, same, other = (
        random_streams.generator(*parts) for parts in ((1, "a"), (1, "a"), (2, "a"))
    )
    drawn = one.permutation(100)
    assert drawn.tolist() == same.permutation(100).tolist() != other.permutation(100).tolist()


def test_the_current_pass() -> None:
    outer, inner = ForwardContext(), ForwardContext(None, True)
    default = current_context()
    assert default.noise is None and not default.double_backward
    with use_context(outer):
        with pytest.raises(RuntimeError), use_context(inner):
            assert current_context() is inner
            raise RuntimeError
        assert current_context() is outer
    assert current_context() is default
