"""Masks: counts, spread, independence of padding, batch and neighbours."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options
from metaseq_lm.data.corpus.masking import (
    Masking,
    _pick_by_weight_with_replacement,
    choose,
    mask_tokens,
)

REPLACEMENTS = np.arange(10, 60)
HOW = Masking(mask=1, replacements=REPLACEMENTS)


def keys_of(count: int, root: int = 0) -> np.ndarray:
    return random_streams.row_keys(random_streams.key("masking", root), np.arange(count))


def chosen_of(
    candidates: np.ndarray, rate: float, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return choose(Masking(mask=1, rate=rate), candidates, candidates.sum(1), keys)


def rows_of(lengths: np.ndarray, width: int, seed: int = 0) -> np.ndarray:
    """Return rows of tokens 10 to 59 with padding 0."""
    tokens = np.random.default_rng(seed).integers(10, 60, (len(lengths), width))
    return np.where(np.arange(width) < lengths[:, None], tokens, 0)


@pytest.mark.parametrize(
    ("rate", "length", "wanted"),
    [
        (0.15, 34, {5: 0.9, 6: 0.1}),
        (0.15, 4, {0: 0.4, 1: 0.6}),
        (0.5, 8, {4: 1.0}),
        (1.0, 3, {3: 1}),
    ],
)
def test_number_of_masks(rate: float, length: int, wanted: dict[int, float]) -> None:
    _, counted = chosen_of(np.ones((20_000, length), bool), rate, keys_of(20_000))
    counts = np.bincount(counted.sum(1), minlength=length + 1)
    assert {n for n, c in enumerate(counts) if c} == set(wanted)
    for number, share in wanted.items():
        assert stats.binomtest(int(counts[number]), 20_000, share).pvalue > 1e-3


def test_positions_are_even_and_pairs_too() -> None:
    positions, counted = chosen_of(np.ones((30_000, 7), bool), 0.3, keys_of(30_000))
    chosen = np.zeros((30_000, 7))
    row, at = np.nonzero(counted)
    chosen[row, positions[row, at]] = 1
    assert stats.chisquare(chosen.sum(0)).pvalue > 1e-3
    together = (chosen.T @ chosen)[np.triu_indices(7, 1)]
    assert stats.chisquare(together).pvalue > 1e-3
    # The order in which positions come says nothing about their place.
    first = positions[counted[:, 0], 0]
    assert stats.chisquare(np.bincount(first, minlength=7)).pvalue > 1e-3


def test_actions() -> None:
    """80 % masked, 10 % random, 10 % kept, random tokens uniform."""
    lengths = np.full(20_000, 40)
    tokens = np.full((20_000, 40), 5)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(20_000), HOW)
    assert (targets == 5).all(), "0.15 * 40 is 6 in every row"
    put = masked[np.arange(20_000)[:, None], positions].ravel()
    drawn = put[np.isin(put, REPLACEMENTS)]
    kinds = [(put == 1).sum(), (put == 5).sum(), len(drawn)]
    assert sum(kinds) == len(put) == 120_000
    assert stats.chisquare(kinds, np.array([0.8, 0.1, 0.1]) * 120_000).pvalue > 1e-3
    assert stats.chisquare(np.bincount(drawn - 10, minlength=50)).pvalue > 1e-3


def test_action_does_not_depend_on_the_position() -> None:
    tokens = np.full((30_000, 20), 5)
    masked, positions, _ = mask_tokens(tokens, np.full(30_000, 20), keys_of(30_000), HOW)
    table = np.zeros((20, 3))
    put = masked[np.arange(30_000)[:, None], positions]
    kind = np.where(put == 1, 0, np.where(put == 5, 1, 2))
    np.add.at(table, (positions.ravel(), kind.ravel()), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    # Nor does one position's action on its neighbour's in the list.
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (kind[:, :-1].ravel(), kind[:, 1:].ravel()), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"random": 0.0, "keep": 0.0}, {1}),
        ({"random": 0.0, "keep": 1.0}, {5}),
        ({"random": 1.0, "keep": 0.0}, set(REPLACEMENTS.tolist())),
    ],
)
def test_extreme_shares(options: dict, allowed: set[int]) -> None:
    masking = Masking(mask=1, replacements=REPLACEMENTS, rate=0.5, **options)
    tokens = np.full((300, 20), 5)
    masked, positions, _ = mask_tokens(tokens, np.full(300, 20), keys_of(300), masking)
    assert set(masked[np.arange(300)[:, None], positions].ravel().tolist()) <= allowed


def test_spared_tokens_are_no_candidates() -> None:
    masking = Masking(mask=1, rate=0.5, replacements=REPLACEMENTS, spared=np.array([2, 3]))
    tokens = np.tile([3, 20, 21, 22, 23, 2, 24, 25, 26, 2], (500, 1))
    masked, positions, targets = mask_tokens(tokens, np.full(500, 10), keys_of(500), masking)
    assert set(positions[targets >= 0].tolist()) == {1, 2, 3, 4, 6, 7, 8}
    assert (masked[:, [0, 5, 9]] == tokens[:, [0, 5, 9]]).all()
    # Half of the seven candidates, not of the ten tokens.
    assert set((targets >= 0).sum(1).tolist()) == {3, 4}


def masks(tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> list[dict]:
    """Return per row what a model is given: the hidden row and the target of each position."""
    masked, positions, targets = mask_tokens(tokens, lengths, keys, HOW)
    return [
        {
            "row": masked[i, : lengths[i]].tolist(),
            "targets": {int(p): int(t) for p, t in zip(positions[i], targets[i]) if t >= 0},
            "padding": masked[i, lengths[i] :].tolist(),
        }
        for i in range(len(tokens))
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_is_masked_alike_in_any_batch(data: st.DataObject) -> None:
    """Whatever its padding, its neighbours, its place and the micro-batch."""
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8)))
    width = int(lengths.max()) + data.draw(st.integers(0, 20))
    tokens, keys = rows_of(lengths, width), keys_of(len(lengths), data.draw(st.integers(0, 50)))
    together = masks(tokens, lengths, keys)
    for i, length in enumerate(lengths):
        (alone,) = masks(tokens[i : i + 1, :length], lengths[i : i + 1], keys[i : i + 1])
        assert alone["row"] == together[i]["row"] and alone["targets"] == together[i]["targets"]
        assert not any(together[i]["padding"])
    order = np.array(data.draw(st.permutations(range(len(lengths)))))
    shuffled = masks(tokens[order], lengths[order], keys[order])
    assert shuffled == [together[i] for i in order]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    rate=st.floats(0, 1),
    root=st.integers(0, 1000),
)
def test_positions_are_never_doubled(lengths: list[int], rate: float, root: int) -> None:
    sizes = np.array(lengths)
    width = max(int(sizes.max()), 1)
    tokens = rows_of(sizes, width)
    masking = Masking(mask=1, rate=rate, replacements=REPLACEMENTS)
    masked, positions, targets = mask_tokens(tokens, sizes, keys_of(len(sizes), root), masking)
    for i, length in enumerate(lengths):
        counted = targets[i] >= 0
        mine = positions[i][counted].tolist()
        assert len(set(mine)) == len(mine) and all(p < length for p in mine)
        assert int(rate * length) <= len(mine) <= min(int(rate * length) + 1, length)
        assert targets[i][counted].tolist() == tokens[i][mine].tolist()
        others = np.setdiff1d(np.arange(width), mine)
        assert (masked[i][others] == tokens[i][others]).all()
    assert positions.shape == targets.shape


def test_rows_of_different_keys_are_independent() -> None:
    chosen = np.zeros((20_000, 6), bool)
    positions, counted = chosen_of(np.ones((20_000, 6), bool), 0.5, keys_of(20_000))
    row, at = np.nonzero(counted)
    chosen[row, positions[row, at]] = True
    for place in range(6):
        table = np.zeros((2, 2))
        one, other = chosen[:-1, place].astype(int), chosen[1:, place].astype(int)
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3
    other_positions, _ = chosen_of(np.ones((20_000, 6), bool), 0.5, keys_of(20_000, 1))
    assert (np.sort(positions) == np.sort(other_positions)).all(1).mean() < 0.1


def test_inputs_stay_as_they_are() -> None:
    lengths = np.array([9, 4])
    tokens, keys = rows_of(lengths, 9), keys_of(2)
    before = tokens.copy(), keys.copy()
    mask_tokens(tokens, lengths, keys, HOW)
    assert (tokens == before[0]).all() and (keys == before[1]).all()


NEAREST = {"mask": 1, "random": 0.0, "keep": 0.15, "rounding": "nearest"}


@pytest.mark.parametrize(
    ("rate", "length", "most"),
    [(0.15, 128, 19), (0.15, 512, 79), (0.25, 512, 130), (0.25, 128, 32)],
)
def test_nearest_takes_the_published_number(rate: float, length: int, most: int) -> None:
    """Rate times all tokens with [CLS] and [SEP], rounded, 1 to int((rate + 0.005) * length)."""
    masking = Masking(rate=rate, spared=np.array([2, 3]), tokens_per_sample=length, **NEAREST)
    assert masking.most_chosen == most
    lengths = np.arange(3, length + 1)
    tokens = rows_of(lengths, length)
    tokens[:, 0], tokens[np.arange(len(lengths)), lengths - 1] = 3, 2
    _, positions, targets = mask_tokens(tokens, lengths, keys_of(len(lengths)), masking)
    wanted = [max(1, min(most, round(rate * n))) for n in lengths.tolist()]
    assert (targets >= 0).sum(1).tolist() == wanted
    assert positions.shape == (len(lengths), min(most, round(rate * length)))
    inside = (positions > 0) & (positions < lengths[:, None] - 1)
    assert inside[targets >= 0].all()


def test_nearest_stops_at_the_most_and_at_the_candidates() -> None:
    """A row longer than tokens_per_sample, and rows with fewer candidates than their number."""
    masking = Masking(rate=0.5, spared=np.array([2]), tokens_per_sample=8, **NEAREST)
    tokens = np.full((3, 20), 2)
    tokens[0] = 30
    tokens[1, 4] = 31
    _, positions, targets = mask_tokens(tokens, np.full(3, 20), keys_of(3), masking)
    assert (targets >= 0).sum(1).tolist() == [4, 1, 0] and positions.shape == (3, 4)
    assert (positions[1, 0], targets[1, 0]) == (4, 31)
    free = Masking(rate=0.5, **NEAREST)
    assert free.most_chosen is None
    _, positions, targets = mask_tokens(tokens, np.full(3, 20), keys_of(3), free)
    assert (targets >= 0).all() and positions.shape == (3, 10)


def test_nearest_has_a_width_of_its_own_in_any_micro_batch() -> None:
    lengths = np.array([40, 7, 12, 3, 40, 9])
    masking = Masking(rate=0.15, tokens_per_sample=40, **NEAREST)
    tokens, keys = rows_of(lengths, 40), keys_of(6)
    together = mask_tokens(tokens, lengths, keys, masking)
    for rows in ([1], [3, 2], [4, 0]):
        alone = mask_tokens(tokens[rows], lengths[rows], keys[rows], masking)
        for part, whole in zip(alone, together):
            assert (part == whole[rows]).all()


def test_kept_share_is_within_three_sigma() -> None:
    """ELECTRA's 85 % hidden and 15 % kept, none replaced."""
    masking = Masking(rate=0.15, tokens_per_sample=128, **NEAREST)
    tokens = np.full((5000, 128), 5)
    masked, _, targets = mask_tokens(tokens, np.full(5000, 128), keys_of(5000), masking)
    count = int((targets >= 0).sum())
    assert count == 5000 * 19 and set(np.unique(masked)) == {1, 5}
    sigma = (count * 0.85 * 0.15) ** 0.5
    assert abs(int((masked == 1).sum()) - 0.85 * count) < 3 * sigma


def test_legacy_duplicates_reach_the_published_share() -> None:
    """19 draws with replacement from 126 candidates hit 13.8 % of 128 tokens on average."""
    lengths, tokens = np.full(4000, 128), rows_of(np.full(4000, 128), 128)
    tokens[:, 0], tokens[:, -1] = 3, 2
    distinct = []
    for legacy in (False, True):
        masking = Masking(
            **NEAREST, spared=np.array([2, 3]), tokens_per_sample=128, legacy_duplicates=legacy
        )
        masked, positions, targets = mask_tokens(tokens, lengths, keys_of(4000), masking)
        assert (targets >= 0).all() and positions.min() == 1 and positions.max() == 126
        assert (np.take_along_axis(tokens, positions, 1) == targets).all()
        hit = np.zeros(tokens.shape, bool)
        hit[np.arange(4000)[:, None], positions] = True
        assert ((masked == tokens) | hit).all()
        distinct.append(hit.mean())
        # A token is kept only if every one of its draws keeps it.
        draws = np.zeros(tokens.shape, int)
        np.add.at(draws, (np.arange(4000)[:, None], positions), 1)
        for times in range(1, draws.max() + 1):
            kept = (masked == tokens)[draws == times]
            assert stats.binomtest(int(kept.sum()), len(kept), 0.15**times).pvalue > 1e-3
        assert draws.max() == 1 if not legacy else draws.max() > 2
        if legacy:
            assert stats.chisquare(draws[:, 1:-1].sum(0)).pvalue > 1e-3
    expected = 126 * (1 - (1 - 1 / 126) ** 19) / 128
    assert distinct[0] == 19 / 128 and abs(distinct[1] - expected) < 4e-4
    assert round(100 * expected, 1) == 13.8


def test_legacy_duplicates_with_either_rounding_and_without_candidates() -> None:
    masking = Masking(
        mask=1, rate=0.5, spared=np.array([9]), replacements=REPLACEMENTS, legacy_duplicates=True
    )
    tokens = rows_of(np.full(300, 8), 8)
    tokens[0] = 9
    masked, positions, targets = mask_tokens(tokens, np.full(300, 8), keys_of(300), masking)
    assert (targets >= 0).sum(1).tolist() == [0, *[4] * 299]
    assert (masked[0] == tokens[0]).all()
    assert (np.sort(positions[1:], 1)[:, 1:] == np.sort(positions[1:], 1)[:, :-1]).any()


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(UsageError, match="mask_rounding.*'up'.*random, nearest"):
        check_options(MaskedLMConfig, MaskedLMConfig(mask_rounding="up"), "task.")


def weighted(weights: np.ndarray, **options: object) -> Masking:
    """Return a masking of ids 10, 11, ... by `weights`, with [CLS] 3 and [SEP] 2 spared."""
    table = np.concatenate([np.full(10, 7.0), weights])
    return Masking(mask=1, random=0.0, spared=np.array([2, 3]), weights=table, **options)


def test_one_token_is_drawn_in_proportion_to_its_weight() -> None:
    """With replacement and without, whatever padding and special tokens weigh."""
    weights = np.array([1.0, 2.0, 5.0, 0.5])
    tokens = np.tile([3, 10, 11, 12, 13, 2, 0, 0], (40_000, 1))
    lengths = np.full(40_000, 6)
    for legacy in (False, True):
        masking = weighted(weights, rate=0.2, rounding="nearest", legacy_duplicates=legacy)
        masked, _, targets = mask_tokens(tokens, lengths, keys_of(40_000), masking)
        assert ((targets >= 0).sum(1) == 1).all()
        hit = targets[targets >= 0]
        expected = weights / weights.sum() * 40_000
        assert stats.chisquare(np.bincount(hit - 10, minlength=4), expected).pvalue > 1e-3
        assert (masked[:, [0, 5, 6, 7]] == tokens[:, [0, 5, 6, 7]]).all()


def test_pairs_are_successive_draws_by_weight() -> None:
    """P({i, j}) = w_i w_j / W (1 / (W - w_i) + 1 / (W - w_j)): the second of what the
    first leaves.
    """
    weights = np.array([1.0, 2.0, 5.0, 0.5])
    tokens = np.tile([10, 11, 12, 13], (40_000, 1))
    masking = weighted(weights, rate=0.5, rounding="nearest")
    _, positions, _ = mask_tokens(tokens, np.full(40_000, 4), keys_of(40_000), masking)
    assert positions.shape == (40_000, 2) and (positions[:, 0] != positions[:, 1]).all()
    i, j = np.triu_indices(4, 1)
    total, (a, b) = weights.sum(), (weights[i], weights[j])
    expected = a * b / total * (1 / (total - a) + 1 / (total - b))
    assert abs(expected.sum() - 1) < 1e-12
    counts = np.zeros((4, 4))
    np.add.at(counts, (positions.min(1), positions.max(1)), 1)
    assert stats.chisquare(counts[i, j], expected * 40_000).pvalue > 1e-3


@pytest.mark.parametrize("options", [{}, NEAREST, {"legacy_duplicates": True}])
def test_weights_change_which_tokens_are_chosen_but_not_how_many(options: dict) -> None:
    """The number is that without weights, in any micro-batch, and equal weights are no weights."""
    lengths = np.array([40, 7, 12, 3, 40, 9] * 300)
    tokens, keys = rows_of(lengths, 40), keys_of(len(lengths))
    options = {"mask": 1, "replacements": REPLACEMENTS, **options}
    table = np.where(np.arange(60) % 2, 1.0, 1e-3)
    masking = Masking(**options, weights=table, tokens_per_sample=40)
    whole = mask_tokens(tokens, lengths, keys, masking)
    alike = mask_tokens(tokens, lengths, keys, Masking(**options, tokens_per_sample=40))
    assert ((whole[2] >= 0).sum(1) == (alike[2] >= 0).sum(1)).all()
    rows = [1, 3, 2, 11]
    for part, all_rows in zip(mask_tokens(tokens[rows], lengths[rows], keys[rows], masking), whole):
        assert (part == all_rows[rows][:, : part.shape[1]]).all()
    shares = [(targets[targets >= 0] % 2).mean() for targets in (whole[2], alike[2])]
    assert shares[0] > 0.95 and 0.4 < shares[1] < 0.6
    same = mask_tokens(tokens, lengths, keys, Masking(**options, weights=np.full(60, 3.0)))
    hit = np.zeros(40)
    np.add.at(hit, same[1][lengths[:, None] * (same[2] >= 0) == 40], 1)
    assert stats.chisquare(hit).pvalue > 1e-3


def test_a_row_without_candidates_is_left_as_it_is() -> None:
    masking = weighted(np.ones(50), rate=0.5, rounding="nearest")
    tokens = np.full((2, 6), 2)
    tokens[1, 3] = 20
    masked, positions, targets = mask_tokens(tokens, np.full(2, 6), keys_of(2), masking)
    assert (targets >= 0).sum(1).tolist() == [0, 1] and positions[1, 0] == 3
    assert (masked[0] == tokens[0]).all()


def test_with_replacement_a_row_without_weights_has_none() -> None:
    weights = np.array([[0.0, 0.0], [0.0, 1.0]])
    positions, counted = _pick_by_weight_with_replacement(weights, np.full(2, 2), 2, keys_of(2))
    assert counted.tolist() == [[False] * 2, [True] * 2] and positions[1].tolist() == [1, 1]
