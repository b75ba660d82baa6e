"""Passages of a split that are also in train, wherever lines and documents begin and end."""

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np

from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

WINDOW = 50  # tokens of a passage
# A split with more tokens is searched in part: blocks of this size at equal distances.
MOST, _BLOCK = 1 << 20, 512
PIECE = 1 << 16  # tokens of train at a time, few enough for a processor's cache
_BASE = 0x9E3779B97F4A7C15  # base of the rolling hash; odd, so that it has an inverse modulo 2**64
_KEY_BITS = 25  # bits of a hash, by which most windows of train are skipped


def shared_passages(train: IndexedDataset, other: IndexedDataset, vocabulary: Vocabulary) -> float:
    """Return the share of the tokens of a split that lie in windows of WINDOW tokens of train.

    Special symbols are left out of both, so that a window may begin and end anywhere. Text in other
    case or other words is not found. Train is read in pieces; the hashes of at most MOST windows of
    the split are held, and compared with the hashes of all windows of train.
    """
    values = np.random.default_rng(0).integers(1, 1 << 64, len(vocabulary), np.uint64)
    values[list(vocabulary.specials)] = 0
    blocks = [encode(block, values) for block in sample(other.tokens)]
    hashes = [_window_hashes(block) for block in blocks]
    distinct = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    if not len(distinct):
        return 0.0
    is_present = find(distinct, _train_windows(train.tokens, values))
    # A token is covered if a window that it lies in is in train.
    hits = (is_present[np.searchsorted(distinct, block)] for block in hashes)
    covered = sum(int(_covered_tokens(hit).sum()) for hit in hits if hit.any())
    return covered / sum(map(len, blocks))


def _covered_tokens(hits: np.ndarray) -> np.ndarray:
    """Return which tokens lie in one of some windows, bool (n,), of windows (n - WINDOW + 1,)."""
    edges = np.zeros(len(hits) + WINDOW, np.int64)
    edges[: len(hits)] += hits
    edges[WINDOW:] -= hits
    return np.asarray(np.cumsum(edges)[:-1] > 0)


def sample(tokens: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of a split, or blocks of it, at equal distances, with MOST tokens."""
    if len(tokens) <= MOST:
        return [tokens]
    starts = np.linspace(0, len(tokens) - _BLOCK, MOST // _BLOCK, dtype=np.int64)
    return [tokens[start : start + _BLOCK] for start in starts]


def encode(tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the number of each token, leaving out tokens with number 0, uint64 (n,).

    Ids outside the vocabulary, which the doctor reports, count as the nearest symbol.
    """
    numbers = np.take(values, tokens, mode="clip")
    return np.asarray(numbers[numbers != 0])


def _train_windows(tokens: np.ndarray, values: np.ndarray) -> Iterator[np.ndarray]:
    end = np.zeros(0, np.uint64)
    for start in range(0, len(tokens), PIECE):
        piece = np.append(end, encode(tokens[start : start + PIECE], values))
        yield _window_hashes(piece)
        end = piece[-(WINDOW - 1) :]


def _window_hashes(numbers: np.ndarray) -> np.ndarray:
    """Return the hash of each window, sum of numbers[i + j] * BASE**j modulo 2**64 for j < WINDOW.

    It is a difference of two sums from the start (Karp and Rabin 1987). (n,) to (n - WINDOW + 1,),
    uint64; empty for fewer than WINDOW numbers.
    """
    count, largest = len(numbers), max(MOST, PIECE + WINDOW)
    sums = np.append(np.uint64(0), np.cumsum(numbers * powers(_BASE, largest)[:count]))
    # Inverse powers make a hash independent of where its window begins.
    inverses = powers(pow(_BASE, -1, 1 << 64), largest)[: max(count - WINDOW + 1, 0)]
    return np.asarray((sums[WINDOW:] - sums[:-WINDOW]) * inverses)


@cache
def powers(base: int, count: int) -> np.ndarray:
    """Return the powers of a number modulo 2**64, from the zeroth on, uint64 (count,)."""
    return np.append(np.uint64(1), np.cumprod(np.full(count - 1, base, np.uint64)))


def find(distinct: np.ndarray, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Return which of some sorted hashes are in one of the pieces, bool (distinct,)."""
    shift = np.uint64(64 - _KEY_BITS)
    has_key = np.zeros(1 << _KEY_BITS, bool)
    has_key[distinct >> shift] = True
    is_present = np.zeros(len(distinct), bool)
    for hashes in pieces:
        hashes = hashes[has_key[hashes >> shift]]
        at = np.minimum(np.searchsorted(distinct, hashes), len(distinct) - 1)
        is_present[at[distinct[at] == hashes]] = True
    return is_present
