"""Beam search against all sequences there are, and what it does at limits, ties and in batches."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metaseq_lm.models.seq2seq import Beam, beam_search

START, END, PAD = 0, 1, 2
WORDS = (3, 4, 5)
V = 6


def language(seed: int, peaked: float = 1.0) -> Callable[[tuple[int, ...]], Tensor]:
    """Return log-probabilities (V,) that depend on all tokens so far."""

    def after(prefix: tuple[int, ...]) -> Tensor:
        place = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        scores = peaked * torch.randn(V, generator=place, dtype=torch.float64)
        return scores.log_softmax(-1)

    return after


def search(models: list, limits: list[int], how: Beam) -> tuple[Tensor, Tensor]:
    """Search with a model for each row; the state is the tokens so far."""

    def step(last: Tensor, state: list) -> tuple[Tensor, list]:
        state = [
            [(*prefix, int(token)) for prefix, token in zip(row, tokens)]
            for row, tokens in zip(state, last)
        ]
        rows = [torch.stack([m(p) for p in row]) for m, row in zip(models, state)]
        return torch.stack(rows), state

    def reorder(state: list, origin: Tensor) -> list:
        return [[row[int(i)] for i in kept] for row, kept in zip(state, origin)]

    first = [[()] * how.size for _ in models]
    return beam_search(step, reorder, first, torch.tensor(limits), how)


def best_of_all(model: Callable, limit: int, how: Beam) -> tuple[list[int], float]:
    """Return the best of all hypotheses of at most `limit` tokens."""
    found: list[tuple[float, list[int]]] = []
    for length in range(limit):
        for words in itertools.product(WORDS, repeat=length):
            prefix, total = (START,), 0.0
            for word in (*words, END):
                total += float(model(prefix)[word])
                prefix = (*prefix, word)
            score = total / ((5 + length + 1) / 6) ** how.length_penalty
            found.append((score, [*words, END]))
    score, best = max(found)
    return best, score


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -1.0])
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_a_wide_beam_finds_the_best_of_all(penalty: float, limit: int) -> None:
    how = Beam(64, START, END, PAD, penalty, banned=(START, PAD))
    models = [language(seed, peaked) for seed, peaked in ((1, 0.1), (2, 1.0), (3, 3.0))]
    ids, scores = search(models, [limit] * 3, how)
    for model, row, score in zip(models, ids.tolist(), scores.tolist()):
        wanted, value = best_of_all(model, limit, how)
        assert [i for i in row if i != PAD] == wanted
        assert score == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    how = Beam(1, START, END, PAD, banned=(START, PAD))
    model = language(seed, 2.0)
    prefix: tuple[int, ...] = (START,)
    while len(prefix) < 7 and prefix[-1] != END:
        scores = model(prefix)
        if len(prefix) == 6:
            prefix = (*prefix, END)
            break
        prefix = (*prefix, max((END, *WORDS), key=lambda token: float(scores[token])))
    ids, _ = search([model], [6], how)
    assert [i for i in ids[0].tolist() if i != PAD] == list(prefix[1:])


def test_rows_do_not_see_each_other() -> None:
    """A row's result is the same alone, among others, and with others that may be longer."""
    how = Beam(2, START, END, PAD, 1.0, banned=(START, PAD))
    models, limits = [language(seed) for seed in range(4)], [3, 7, 1, 5]
    together, scores = search(models, limits, how)
    for i, (model, limit) in enumerate(zip(models, limits)):
        alone, score = search([model], [limit], how)
        assert [t for t in together[i].tolist() if t != PAD] == [
            t for t in alone[0].tolist() if t != PAD
        ]
        assert float(score) == float(scores[i])
        assert len([t for t in alone[0].tolist() if t != PAD]) <= limit


def test_longer_hypotheses_gain_from_the_penalty() -> None:
    """A word costs log 2, the end costs more: without the penalty it ends at once."""

    def model(prefix: tuple[int, ...]) -> Tensor:
        scores = torch.full((V,), -torch.inf, dtype=torch.float64)
        scores[3], scores[END] = torch.tensor([0.5, 0.5]).log()
        return scores

    for penalty, length in ((0.0, 1), (4.0, 5)):
        ids, _ = search([model], [5], Beam(3, START, END, PAD, penalty))
        assert int((ids != PAD).sum()) == length
