"""Masking of tokens; which tokens of a row are masked is a pure function of the row's key.

Shapes: B rows, S length, M the largest number of chosen positions.
"""

from dataclasses import dataclass, field

import numpy as np

from metaseq_lm.config.tasks import SHORT_SPAN, SPAN
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import mix, uniforms, words
from metaseq_lm.data.corpus.units import (
    SHORT,
    Units,
    choose_short_spans,
    choose_spans,
    choose_words,
    span_counts,
)

__all__ = ["Masking", "candidates_of", "hide", "random_counts"]


@dataclass(frozen=True)
class Masking:
    """Which tokens are chosen for prediction, and their replacements in the input.

    Attributes:
        mask: The id of [MASK], which replaces the chosen tokens that are neither kept nor random.
        rate: The share of candidates that is chosen.
        random: The share of the chosen tokens that becomes a random token of `replacements`.
        keep: The share of the chosen tokens that stays unchanged.
        replacements: The ids that random tokens are drawn from, uniformly.
        spared: The ids that are never chosen.
        rounding: How many tokens of a row are chosen. "random": floor(rate * candidates + U).
            "nearest" (ELECTRA's code, Clark et al. 2020): rate times all real tokens, special ones
            included, rounded, from 1 to `most_chosen`; M then follows from S alone.
        legacy_duplicates: Whether tokens are drawn with replacement, as in ELECTRA's code: a token
            drawn twice counts twice, and is masked if one of the draws masks it.
        tokens_per_sample: The longest row, which limits `most_chosen`.
        weights: Relative probability of drawing each id, positive (V,); empty for equal ones.
            Tokens are drawn one after the other, in proportion to the remaining weights.
        units: Whole words or spans that are chosen instead of single tokens. Words together have at
            most the number of tokens that `rounding` gives, short spans at least that many and up
            to SHORT - 1 more, spans exactly ceil(rate * candidates). Replacements are drawn for
            each token of a word, but once for a span.

    Raises:
        UsageError: A share lies outside [0, 1], or `random` and `keep` together exceed 1; words or
            spans with `legacy_duplicates` or `weights`.
    """

    mask: int
    rate: float = 0.15
    random: float = 0.1
    keep: float = 0.1
    replacements: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    spared: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rounding: str = "random"
    legacy_duplicates: bool = False
    tokens_per_sample: int = 0
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    units: Units | None = None

    def __post_init__(self) -> None:
        shares = (self.rate, self.random, self.keep, self.random + self.keep)
        if not all(0 <= share <= 1 for share in shares):
            raise UsageError(
                f"task.mask_prob {self.rate}, random_token_prob {self.random} and "
                f"leave_unmasked_prob {self.keep} are shares from 0 to 1, the last two together too"
            )
        if self.units is not None and (self.legacy_duplicates or self.weights.size):
            raise UsageError(
                f"task.mask_unit={self.units.kind} chooses whole words, each at most once and all "
                "alike; use task.legacy_duplicates=false and task.mask_rarity=0"
            )

    @property
    def most_chosen(self) -> int | None:
        """The most tokens that "nearest" chooses in a row; None without tokens_per_sample."""
        if not self.tokens_per_sample:
            return None
        return int((self.rate + 0.005) * self.tokens_per_sample)


def _subkeys(keys: np.ndarray, number: int) -> np.ndarray:
    # A sub-key per purpose, so that no draw depends on how wide the batch was padded.
    return mix(keys ^ np.uint64(number))


def candidates_of(tokens: np.ndarray, lengths: np.ndarray, masking: Masking) -> np.ndarray:
    """Return which tokens of rows (B, S) with `lengths` (B,) may be chosen, boolean (B, S)."""
    candidates = np.arange(tokens.shape[1]) < lengths[:, None]
    if masking.spared.size:
        candidates &= ~np.isin(tokens, masking.spared, kind="table")
    return candidates


def random_counts(candidates: np.ndarray, rate: float, keys: np.ndarray) -> np.ndarray:
    """Return floor(rate * n + U) for rows with n candidates, boolean (B, S); int64 (B,).

    The rounding is random, so that the expected number is exactly rate * n.
    """
    count = candidates.sum(1)
    chosen = np.floor(rate * count + uniforms(_subkeys(keys, 2), 0, 1)[:, 0]).astype(np.int64)
    return np.asarray(np.minimum(chosen, count))


def _nearest_counts(lengths: np.ndarray, masking: Masking) -> np.ndarray:
    """Return how many tokens "nearest" chooses in rows of `lengths`, int64 of the same shape."""
    # Halves are rounded to even by numpy, as by TensorFlow and Python.
    counts = np.rint(masking.rate * lengths).astype(np.int64)
    return np.maximum(1, np.minimum(counts, masking.most_chosen or counts))


def pick(
    candidates: np.ndarray, chosen: np.ndarray, most: int, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose chosen[i] of a row's candidates (B, S) without replacement, at most all of them.

    Returns positions (B, M) and which of them count (B, M); M is `most`, or S if that is less.
    """
    length = candidates.shape[1]
    assert length <= 1 << 16
    # The smallest random words win; the low 16 bits carry the position through the partition.
    draws = words(_subkeys(keys, 1), 0, length)
    draws = (draws & ~np.uint64(0xFFFF)) | np.arange(length, dtype=np.uint64)
    draws[~candidates] = np.iinfo(np.uint64).max
    chosen = np.minimum(chosen, candidates.sum(1))
    if most < length:
        draws = np.partition(draws, most - 1, axis=1)[:, :most]
    draws.sort(axis=1)
    counted = np.arange(draws.shape[1]) < chosen[:, None]
    positions = np.where(counted, (draws & np.uint64(0xFFFF)).astype(np.int64), 0)
    return positions, counted


def _pick_with_replacement(
    candidates: np.ndarray, chosen: np.ndarray, most: int, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose chosen[i] times one of a row's candidates (B, S); like `pick`, with repeats."""
    count = candidates.sum(1)[:, None]
    rank = (uniforms(_subkeys(keys, 5), 0, most) * count).astype(np.int64)
    # A stable sort of "no candidate": the candidates come first, in their order.
    order = np.argsort(~candidates, axis=1, kind="stable")
    counted = (np.arange(most) < chosen[:, None]) & (count > 0)
    return np.where(counted, np.take_along_axis(order, rank, 1), 0), counted


def _pick_by_weight(
    weights: np.ndarray, chosen: np.ndarray, most: int, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose chosen[i] of a row's tokens without replacement by `weights` (B, S); as `pick`.

    Tokens that are no candidates have weight 0. The tokens whose exponential clocks of rate w ring
    first are distributed as successive draws in proportion to w (Efraimidis and Spirakis 2006).
    """
    u = uniforms(_subkeys(keys, 1), 0, weights.shape[1])
    with np.errstate(divide="ignore"):
        clocks = np.where(weights > 0, -np.log1p(-u) / weights, np.inf)
    chosen = np.minimum(chosen, (weights > 0).sum(1))
    positions = np.argsort(clocks, axis=1, kind="stable")[:, :most]
    counted = np.arange(positions.shape[1]) < chosen[:, None]
    return np.where(counted, positions, 0), counted


def _pick_by_weight_with_replacement(
    weights: np.ndarray, chosen: np.ndarray, most: int, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose chosen[i] times one of a row's tokens by `weights` (B, S); as `_pick_by_weight`."""
    cumulative = weights.cumsum(1)
    draws = uniforms(_subkeys(keys, 5), 0, most) * cumulative[:, -1:]
    counted = (np.arange(most) < chosen[:, None]) & (cumulative[:, -1:] > 0)
    positions = (cumulative[:, None] <= draws[..., None]).sum(-1)  # (B, M)
    return np.where(counted, positions, 0), counted


def budget(
    masking: Masking, candidates: np.ndarray, lengths: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return how many tokens to choose in rows of `lengths` (B,), int64 (B,), and an upper bound.

    `candidates` (B, S) marks the tokens that may be chosen.
    """
    is_span = masking.units is not None and masking.units.kind == SPAN
    if masking.rounding == "random":
        if is_span:
            chosen = span_counts(candidates.sum(1), masking.rate)
        else:
            chosen = random_counts(candidates, masking.rate, keys)
        return chosen, max(int(chosen.max(initial=0)), 1)
    # The bound follows from the padded width of the global batch, so that noise drawn for the
    # positions does not depend on which rows share a micro-batch.
    width = np.array(candidates.shape[1])
    if is_span:
        most = max(int(span_counts(width, masking.rate)), 1)
        return span_counts(candidates.sum(1), masking.rate), most
    return _nearest_counts(lengths, masking), int(_nearest_counts(width, masking))


def _choose_units(
    masking: Masking,
    tokens: np.ndarray,
    candidates: np.ndarray,
    lengths: np.ndarray,
    keys: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Choose words or spans of rows (B, S), as `choose` chooses tokens.

    Returns positions (B, M), ascending, which of them count (B, M), and the number of the span of
    each (B, M), None for words.
    """
    units, number = masking.units, None
    assert units is not None
    chosen, most = budget(masking, candidates, lengths, keys)
    if units.kind == SHORT_SPAN:
        is_chosen, number = choose_short_spans(candidates, chosen, keys)
        most += SHORT - 1
    elif units.kind == SPAN:
        starts = units.starts(tokens, candidates)
        is_chosen, number = choose_spans(
            starts, candidates, chosen, units.lengths, keys, units.by_tokens
        )
    else:
        is_chosen = choose_words(units.starts(tokens, candidates), candidates, chosen, keys)
    positions = np.argsort(~is_chosen, axis=1, kind="stable")[:, :most]
    counted = np.take_along_axis(is_chosen, positions, 1)
    if number is not None:
        number = np.take_along_axis(number, positions, 1)
    return np.where(counted, positions, 0), counted, number


def choose(
    masking: Masking,
    candidates: np.ndarray,
    lengths: np.ndarray,
    keys: np.ndarray,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose among the candidates (B, S) of rows of `lengths` (B,) as `masking` says.

    `weights` (B, S) holds a weight per token, None for equal ones. Returns positions (B, M) and
    which of them count (B, M).
    """
    chosen, most = budget(masking, candidates, lengths, keys)
    draw, weighted = pick, _pick_by_weight
    if masking.legacy_duplicates:
        draw, weighted = _pick_with_replacement, _pick_by_weight_with_replacement
    if weights is None:
        return draw(candidates, chosen, most, keys)
    return weighted(weights * candidates, chosen, most, keys)


def mask_tokens(
    tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray, masking: Masking
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask tokens of rows (B, S) of `lengths` (B,), row i by keys[i].

    S must be the width of the global batch. Returns the masked rows (B, S), the chosen positions
    (B, M), and their original tokens (B, M), -1 where a row has fewer than M.
    """
    candidates = candidates_of(tokens, lengths, masking)
    spans = None
    if masking.units is not None:
        positions, counted, spans = _choose_units(masking, tokens, candidates, lengths, keys)
    else:
        weights = masking.weights[tokens] if masking.weights.size else None
        positions, counted = choose(masking, candidates, lengths, keys, weights)
    masked, originals = hide(tokens, positions, counted, keys, masking, spans)
    return masked, positions, originals


def hide(
    tokens: np.ndarray,
    positions: np.ndarray,
    counted: np.ndarray,
    keys: np.ndarray,
    masking: Masking,
    spans: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask the tokens of rows (B, S) at `positions` (B, M), row i by keys[i].

    Tokens with equal numbers in `spans` (B, M), below M, are all masked, all random or all kept.
    Returns the masked rows (B, S) and the original tokens (B, M), -1 where `counted` (B, M) is
    false.
    """
    rows = np.arange(len(tokens))[:, None]
    originals = tokens[rows, positions]
    action = uniforms(_subkeys(keys, 3), 0, positions.shape[1])
    if spans is not None:
        action = np.take_along_axis(action, spans, 1)
    hidden = np.where(action < masking.keep, originals, masking.mask)
    if masking.random:
        draw = uniforms(_subkeys(keys, 4), 0, positions.shape[1])
        replacement = masking.replacements[(draw * len(masking.replacements)).astype(np.int64)]
        drawn = (action >= masking.keep) & (action < masking.keep + masking.random)
        hidden = np.where(drawn, replacement, hidden)
    masked = tokens.copy()
    # Uncounted entries all point at position 0; writing there would undo a counted one. Nor may a
    # kept one undo the same token hidden by another draw.
    at_row, at = np.nonzero(counted & (action >= masking.keep))
    masked[at_row, positions[at_row, at]] = hidden[at_row, at]
    return masked, np.where(counted, originals, -1)
