"""Masks as positions: which tokens of a row are hidden is a pure function of the row's key.

Shapes: B rows, S length, M = the largest number of chosen positions.
"""

from dataclasses import dataclass, field

import numpy as np

from metaseq_lm.randomness import mix, uniforms, words


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden.

    `rate` of the candidates are chosen; of the chosen, `keep` stay as they are, `random` become a
    token drawn uniformly from `replacements`, the rest become `mask`. `spared` ids are no
    candidates.
    """

    mask: int
    rate: float = 0.15
    random: float = 0.1
    keep: float = 0.1
    replacements: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    spared: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def _subkeys(keys: np.ndarray, number: int) -> np.ndarray:
    # A sub-key per purpose, so that no draw depends on how wide the batch was padded.
    return mix(keys ^ np.uint64(number))


def choose(candidates: np.ndarray, rate: float, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose floor(rate * n + U) of a row's n candidates, without replacement.

    `candidates` is boolean (B, S). Returns positions (B, M) and which of them count (B, M); the
    rounding is random, so that the expected number is exactly rate * n.
    """
    length = candidates.shape[1]
    assert length <= 1 << 16
    # The smallest random words win; the low 16 bits carry the position through the partition.
    draws = words(_subkeys(keys, 1), 0, length)
    draws = (draws & ~np.uint64(0xFFFF)) | np.arange(length, dtype=np.uint64)
    draws[~candidates] = np.iinfo(np.uint64).max
    count = candidates.sum(1)
    chosen = np.floor(rate * count + uniforms(_subkeys(keys, 2), 0, 1)[:, 0]).astype(np.int64)
    chosen = np.minimum(chosen, count)
    most = max(int(chosen.max(initial=0)), 1)
    if most < length:
        draws = np.partition(draws, most - 1, axis=1)[:, :most]
    draws.sort(axis=1)
    counted = np.arange(draws.shape[1]) < chosen[:, None]
    positions = np.where(counted, (draws & np.uint64(0xFFFF)).astype(np.int64), 0)
    return positions, counted


def mask_tokens(
    tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray, how: Masking
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hide tokens of rows (B, S) with `lengths` (B,), row i by keys[i].

    Returns the hidden rows (B, S), the chosen positions (B, M) and their original tokens (B, M), -1
    where a row has fewer than M.
    """
    candidates = np.arange(tokens.shape[1]) < lengths[:, None]
    if how.spared.size:
        candidates &= ~np.isin(tokens, how.spared, kind="table")
    positions, counted = choose(candidates, how.rate, keys)
    rows = np.arange(len(tokens))[:, None]
    originals = tokens[rows, positions]
    action = uniforms(_subkeys(keys, 3), 0, positions.shape[1])
    hidden = np.where(action < how.keep, originals, how.mask)
    if how.random:
        draw = uniforms(_subkeys(keys, 4), 0, positions.shape[1])
        replacement = how.replacements[(draw * len(how.replacements)).astype(np.int64)]
        drawn = (action >= how.keep) & (action < how.keep + how.random)
        hidden = np.where(drawn, replacement, hidden)
    masked = tokens.copy()
    # Uncounted entries all point at position 0; writing there would undo a counted one.
    at_row, at = np.nonzero(counted)
    masked[at_row, positions[at_row, at]] = hidden[at_row, at]
    return masked, positions, np.where(counted, originals, -1)
