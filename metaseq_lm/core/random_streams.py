"""Counter-based random numbers: pure functions of (seed, update, draw, row, position).

There is no state for checkpoints to store, and the numbers do not depend on how the rows of a batch
are spread over micro-batches, workers or replicas. The generator is SplitMix64 (Steele, Lea and
Flood 2014): word k of a row is mix(row key + k * GOLDEN). The torch implementation gives the same
bits (forward.passes.Noise).
"""

import hashlib
from functools import lru_cache

import numpy as np

__all__ = ["subkeys", "uniforms", "words"]

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def key(*parts: int | str) -> int:
    """Return a 64-bit hash of the tuple `parts`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mix(words: np.ndarray) -> np.ndarray:
    """Scramble uint64 `words` in place (the SplitMix64 finaliser) and return them."""
    words ^= words >> np.uint64(SHIFTS[0])
    words *= np.uint64(FACTORS[0])
    words ^= words >> np.uint64(SHIFTS[1])
    words *= np.uint64(FACTORS[1])
    words ^= words >> np.uint64(SHIFTS[2])
    return words


def row_keys(root: int, rows: np.ndarray) -> np.ndarray:
    """Return one uint64 key per row number; `root` is the `key` of the draw."""
    with np.errstate(over="ignore"):
        return mix(np.uint64(root) + mix(np.asarray(rows).astype(np.uint64) + np.uint64(GOLDEN)))


def subkeys(keys: np.ndarray, purpose: str) -> np.ndarray:
    """Return keys (rows,) for a `purpose`; their numbers are independent of the ones of `keys`."""
    return mix(keys ^ np.uint64(key("subkeys", purpose)))


@lru_cache(maxsize=64)
def _counters(start: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def words(keys: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return words `start` to `start + count` of each row, uint64 (rows, count)."""
    return mix(keys[:, None] + _counters(start, count))


def uniforms(keys: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return float64 numbers in [0, 1) with 53 random bits, (rows, count)."""
    return (words(keys, start, count) >> np.uint64(11)) * 2.0**-53


def generator(*parts: int | str) -> np.random.Generator:
    """Return a numpy generator for draws that do not belong to a row, such as permutations."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))
