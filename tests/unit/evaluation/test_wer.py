"""Word error rates against their definition, and the interval against the normal approximation."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation.nbest import (
    NBest,
    _difference_interval,
    _edit_distances,
    _error_rate,
    choose_weight,
    split_rates,
)

TEXT = st.lists(st.sampled_from(["a", "b", "ab", "c"]), max_size=6).map(" ".join)


def rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """The word error rate of one hypothesis for each reference."""
    edits = [_edit_distances(r, [h])[0] for r, h in zip(references, hypotheses)]
    return _error_rate(np.array(edits), np.array([len(r.split()) for r in references]))


@cache
def distance(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """The definition: the last words are equal, or one of the three edits is at the end."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        distance(a[:-1], b[:-1]) + (a[-1] != b[-1]),
        distance(a[:-1], b) + 1,
        distance(a, b[:-1]) + 1,
    )


@given(TEXT, st.lists(TEXT, min_size=1, max_size=4))
def test_distances_are_those_of_the_definition(reference: str, hypotheses: list[str]) -> None:
    wanted = [distance(tuple(reference.split()), tuple(h.split())) for h in hypotheses]
    assert _edit_distances(reference, hypotheses).tolist() == wanted


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_a_rate_is_all_edits_over_all_words(pairs: list[tuple[str, str]]) -> None:
    words = sum(len(reference.split()) for reference, _ in pairs)
    edits = sum(distance(tuple(r.split()), tuple(h.split())) for r, h in pairs)
    if not words:
        with pytest.raises(MetaseqError, match="no word"):
            rate(*zip(*pairs))
    else:
        assert rate(*zip(*pairs)) == edits / words


def test_known_rates() -> None:
    assert rate(["a b c", ""], ["a x c d", "y z"]) == 4 / 3
    assert rate([" a\tb "], ["a  b"]) == 0


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    rng = np.random.default_rng(3)
    words = np.full(800, 10)
    baseline = rng.integers(1, 9, 800)
    edits = baseline - (rng.random(800) < 0.3)  # the two go together, as they do in practice
    low, high = _difference_interval(edits, baseline, words)
    change = (edits - baseline) / 10
    error = change.std() / np.sqrt(800)
    assert (low + high) / 2 == pytest.approx(change.mean(), abs=0.15 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert (low, high) == _difference_interval(edits, baseline, words)


def test_the_interval_of_no_change_and_of_one_utterance() -> None:
    words, edits = np.array([3, 0, 5]), np.array([1, 2, 0])
    assert _difference_interval(edits, edits, words) == (0, 0)
    assert _difference_interval(np.array([1]), np.array([3]), np.array([4])) == (-0.5, -0.5)
    # Draws of the empty reference alone have no rate and are left out.
    low, high = _difference_interval(np.array([1, 0]), np.array([0, 0]), np.array([0, 2]))
    assert low == 0 and 0.4 < high <= 0.5


def lists_of(edits: list[list[int]], scores: list[list[float]]) -> list[NBest]:
    """Return lists with references of four words and hypotheses with so many of them wrong."""
    texts = [[" ".join(["x"] * n + ["w"] * (4 - n)) for n in row] for row in edits]
    return [
        NBest(str(n), "w w w w", own, np.array(row))
        for n, (own, row) in enumerate(zip(texts, scores))
    ]


@given(st.data())
def test_the_weight_has_the_fewest_errors_and_is_the_smallest_such(data: st.DataObject) -> None:
    number = st.integers(-4, 4).map(float)
    size, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    rows = st.lists(st.lists(number, min_size=size, max_size=size), min_size=count, max_size=count)
    edits = [[int(abs(e)) for e in row] for row in data.draw(rows)]
    lists, plls = lists_of(edits, data.draw(rows)), [np.array(row) for row in data.draw(rows)]
    grid = [0.0, 0.5, 1.0, 2.0]

    def errors(weight: float) -> int:
        total = 0
        for nbest, own, wrong in zip(lists, plls, edits):
            values = [s + weight * p for s, p in zip(nbest.scores, own)]
            total += wrong[values.index(max(values))]
        return total

    chosen = choose_weight(lists, plls, grid)
    assert [errors(w) > errors(chosen) for w in grid if w < chosen] == [True] * grid.index(chosen)
    assert errors(chosen) == min(map(errors, grid))
    rates = split_rates(lists, plls, chosen)
    assert rates["wer"] == _error_rate(np.array([errors(chosen)]), np.array([4 * count]))
    assert rates["one_best_wer"] == errors(0.0) / (4 * count)
    assert rates["oracle_wer"] == sum(map(min, edits)) / (4 * count)
