"""N-gram models of tokens: a baseline that a language model has to beat.

Shapes: T tokens of N sequences, end to end.
"""

import numpy as np

from metaseq_lm.data.storage.indexed import IndexedDataset

_COUNTED = 10_000_000  # tokens of a corpus: their n-grams are counted in seconds


class NGram:
    """An n-gram model with the smoothing of Witten and Bell (1991).

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)), where T(h) is the number of different
    tokens after h, h' is h without its first token, and the level below the unigram is 1/V.

    Args:
        tokens: The sequences that it counts, (T,); an id outside the symbols counts as the nearest
            one.
        sizes: The number of tokens of each sequence, (N,).
        n_symbols: The number of symbols, V.
        order: n; where a context extends before a sequence, it holds a symbol of its own.
    """

    def __init__(
        self, tokens: np.ndarray, sizes: np.ndarray, n_symbols: int, order: int = 3
    ) -> None:
        self.n_symbols, self.order = n_symbols, order
        grams = self._grams(tokens, sizes)
        self._counts = []
        for length in range(1, order + 1):
            codes, counts = np.unique(self._codes(grams, length), return_counts=True)
            contexts = codes // (n_symbols + 1)  # sorted, because the codes are
            first = np.flatnonzero(np.diff(contexts, prepend=-1))
            totals = np.add.reduceat(counts, first) if len(first) else counts
            types = np.diff(np.append(first, len(codes)))
            self._counts.append((codes, counts, contexts[first], totals, types))

    def _grams(self, tokens: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Return the tokens, and the tokens 1, 2, ... places before them, `order` arrays (T,)."""
        tokens = tokens.astype(np.int64).clip(0, self.n_symbols - 1)
        position = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        grams = [tokens]
        for distance in range(1, self.order):
            before = np.full(len(tokens), self.n_symbols)
            before[distance:] = tokens[:-distance]
            before[position < distance] = self.n_symbols
            grams.append(before)
        return grams

    def _codes(self, grams: list[np.ndarray], length: int) -> np.ndarray:
        """Return a number for the last `length` tokens of each gram, (T,)."""
        codes = np.zeros(len(grams[0]), np.int64)
        for column in reversed(grams[:length]):
            codes = codes * (self.n_symbols + 1) + column
        return codes

    def token_log_probs(
        self, tokens: np.ndarray, sizes: np.ndarray, order: int | None = None
    ) -> np.ndarray:
        """Return the log-probability of each token given those before it, (T,).

        Args:
            tokens: The sequences, (T,).
            sizes: The number of tokens of each, (N,).
            order: A smaller n to use instead, such as 1 for frequencies alone.
        """
        grams = self._grams(tokens, sizes)
        probs = np.full(len(tokens), 1 / self.n_symbols)
        for length, (codes, counts, contexts, totals, types) in enumerate(self._counts[:order], 1):
            gram = self._codes(grams, length)
            context = gram // (self.n_symbols + 1)
            count = _look_up(codes, counts, gram)
            total = _look_up(contexts, totals, context)
            kinds = _look_up(contexts, types, context)
            seen = total > 0
            probs[seen] = ((count + kinds * probs) / np.maximum(total + kinds, 1))[seen]
        return np.asarray(np.log(probs))

    def log_probs(self, tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the log-probability of each sequence, (N,)."""
        rows = np.repeat(np.arange(len(sizes)), sizes)
        return np.bincount(rows, self.token_log_probs(tokens, sizes), len(sizes))


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the value of each of the queries; 0 for one that is not in the sorted `keys`."""
    if not len(keys):
        return np.zeros(len(queries), np.int64)
    positions = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[positions] == queries, values[positions], 0)


def sequences_of(data: IndexedDataset, most: int = _COUNTED) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (T,) and the sizes (N,) of the sequences of a corpus.

    A corpus of more than `most` tokens is thinned to every second, third, ... sequence, and then
    cut to its first `most` tokens if there are still more.
    """
    step = max(1, -(-len(data.tokens) // most))
    if step == 1:
        return data.tokens, data.sizes
    starts, sizes = data.starts[::step], data.sizes[::step]
    before = np.cumsum(sizes) - sizes
    sizes = np.clip(most - before, 0, sizes)
    parts = [data.tokens[start : start + size] for start, size in zip(starts, sizes)]
    return np.concatenate(parts), sizes
