"""Context-free grammars in Chomsky normal form with probabilities: exact sums over derivations.

A rule A -> B C has children that are nonterminals or preterminals; a preterminal is one word. So a
nonterminal has two words or more, and every sum over sentences of a bounded length is finite.
Probabilities are not scaled: a sentence of 40 words stays far above the smallest float64.

Shapes: A nonterminals, K preterminals, n words of the longest sentence, B sentences. Weights of
words are (n, K, B): the probability of each word under each preterminal, 0 after the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np


class Categorical:
    """Draws from many distributions, each a row of its own length."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.first = np.cumsum([0, *map(len, rows)])
        sums = [np.cumsum(row) / row.sum() + number for number, row in enumerate(rows) if len(row)]
        self._sums = np.concatenate(sums)

    def draw(self, rows: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Return an index into all rows end to end for each of `rows`, (M,)."""
        index = np.searchsorted(self._sums, rows + uniforms, side="right")
        # row + uniform may round to the next whole number.
        return np.asarray(np.minimum(index, self.first[rows + 1] - 1))


@dataclass(frozen=True)
class _Rules:
    """The R rules with one type of left children and one type of right children."""

    left: np.ndarray  # (R,)
    right: np.ndarray
    probs: np.ndarray  # (A, R), 0 except at the parent
    to_left: np.ndarray  # (A or K, R), 1 at the child
    to_right: np.ndarray


class Grammar:
    """A grammar whose sentences have `shortest` to `longest` words, 2 or more.

    Args:
        rules: The probability of each rule (parent, left, right); the first parent is the start.
        shortest: The minimum number of words of a sentence.
        longest: The maximum number of words of a sentence.

    Attributes:
        rules: As above.
        preterminals: The children that are never parents, sorted by name.
        of_length: The probability that a symbol has a number of words, (longest + 1, A + K).
        total: The probability of `shortest` to `longest` words.
    """

    def __init__(
        self, rules: Mapping[tuple[str, str, str], float], shortest: int, longest: int
    ) -> None:
        self.rules, self.shortest, self.longest = rules, shortest, longest
        nonterminals = list(dict.fromkeys(parent for parent, _, _ in rules))
        children = {child for _, *pair in rules for child in pair}
        self.preterminals = sorted(children - set(nonterminals))
        numbers = {name: i for i, name in enumerate([*nonterminals, *self.preterminals])}
        self._size = len(nonterminals)
        of_rules = [list(map(numbers.__getitem__, rule)) for rule in rules]
        self._parent, self._left, self._right = np.array(of_rules).T
        self._probs = np.array(list(rules.values()))
        self._by_kind = {}
        for left, right in product((False, True), repeat=2):
            self._by_kind[left, right] = self._select(left, right, len(numbers))
        self.of_length = self._lengths(len(numbers))
        self.total = float(self.of_length[shortest:, 0].sum())
        self._corners = self._left_corners(len(numbers))
        self._choices = self._choices_of_nodes()

    def reversed(self) -> "Grammar":
        """Return the grammar of the sentences read from right to left."""
        rules = {(parent, right, left): p for (parent, left, right), p in self.rules.items()}
        return Grammar(rules, self.shortest, self.longest)

    def _select(self, left_is_word: bool, right_is_word: bool, n_symbols: int) -> _Rules:
        size = self._size
        kinds = (self._left >= size) == left_is_word, (self._right >= size) == right_is_word
        rows = np.flatnonzero(kinds[0] & kinds[1])
        probs = (np.arange(size)[:, None] == self._parent[rows]) * self._probs[rows]
        children, one_hot = [], []
        for side, is_word in ((self._left, left_is_word), (self._right, right_is_word)):
            child = side[rows] - size * is_word  # preterminals are numbered after nonterminals
            symbols = np.arange(n_symbols - size if is_word else size)[:, None]
            children.append(child)
            one_hot.append((symbols == child) * 1.0)
        return _Rules(children[0], children[1], probs, *one_hot)

    def _lengths(self, n_symbols: int) -> np.ndarray:
        lengths = np.zeros((self.longest + 1, n_symbols))
        lengths[1, self._size :] = 1
        for width in range(2, self.longest + 1):
            parts = lengths[1:width, self._left] * lengths[width - 1 : 0 : -1, self._right]
            np.add.at(lengths[width], self._parent, parts.sum(axis=0) * self._probs)
        return lengths

    def _left_corners(self, n_symbols: int) -> np.ndarray:
        """Return sum over C of p(A -> B C) p(C has d words), (A + K of B, d - 1, A)."""
        corners = np.zeros((n_symbols, self.longest, self._size))
        values = self._probs[:, None] * self.of_length[1:, self._right].T
        np.add.at(
            corners, (self._left[:, None], np.arange(self.longest), self._parent[:, None]), values
        )
        return corners

    # ---------------------------------------------------------------- draws

    def _choices_of_nodes(self) -> tuple[Categorical, np.ndarray]:
        """Return draws of (rule, words of the left child), (M, 2), for nonterminals of w words."""
        rows: list[np.ndarray] = []
        choices: list[np.ndarray] = [np.zeros((0, 2), np.int64)]
        for parent, width in product(range(self._size), range(self.longest + 1)):
            rules = np.flatnonzero(self._parent == parent)
            lengths = self.of_length[1:width]
            probs = lengths[:, self._left[rules]] * lengths[::-1, self._right[rules]]
            split, rule = np.nonzero(probs)
            rows.append((probs * self._probs[rules])[split, rule])
            choices.append(np.stack([rules[rule], split + 1], axis=1))
        return Categorical(rows), np.concatenate(choices)

    def sample(self, widths: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Return the preterminals of sentences, (B, longest), -1 after the last.

        Args:
            widths: The number of words of each sentence, (B,).
            uniforms: Uniform numbers, (B, longest - 1).
        """
        draws, choices = self._choices
        result = np.full((len(widths), self.longest), -1)
        stack = np.zeros((len(widths), self.longest, 3), np.int64)  # symbol, begin, width
        stack[:, 0, 2] = widths
        depth = np.ones(len(widths), np.int64)
        for step in range(self.longest - 1):
            rows = np.flatnonzero(depth)
            depth[rows] -= 1
            symbol, begin, width = stack[rows, depth[rows]].T
            chosen = draws.draw(symbol * (self.longest + 1) + width, uniforms[rows, step])
            rule, split = choices[chosen].T
            for nodes in (
                # The left child is on top of the stack, so that nodes are drawn from left to right.
                np.stack([self._right[rule], begin + split, width - split], axis=1),
                np.stack([self._left[rule], begin, split], axis=1),
            ):
                is_word = nodes[:, 2] == 1
                result[rows[is_word], nodes[is_word, 1]] = nodes[is_word, 0] - self._size
                others = rows[~is_word]
                stack[others, depth[others]] = nodes[~is_word]
                depth[others] += 1
        return result

    # ---------------------------------------------------------------- sums

    def inside(self, weights: np.ndarray) -> list[np.ndarray]:
        """Return the probability of each span by each symbol.

        Returns:
            For each width w, the spans that begin at 0, 1, ...: (n - w + 1, A, B), given words (n,
            K, B); the first entry is empty.
        """
        n, _, batch = weights.shape
        inner = [weights[:0], weights]
        for width in range(2, n + 1):
            spans = np.zeros((n - width + 1, self._size, batch))
            for split in range(1, width):
                rules = self._by_kind[split == 1, width - split == 1]
                left = inner[split][: len(spans), rules.left]
                spans += rules.probs @ (left * inner[width - split][split:, rules.right])
            inner.append(spans)
        return inner

    def sentence_probs(self, inner: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
        """Return the probability of each sentence of `lengths` words, (B,)."""
        of_width = np.stack([spans[0, 0] for spans in inner[1:]])
        possible = (lengths >= self.shortest) & (lengths <= self.longest)
        probs = of_width[np.maximum(lengths, 1) - 1, np.arange(len(lengths))]
        return np.asarray(np.where(possible, probs, 0) / self.total)

    def outside(self, inner: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
        """Return the probability of all other words with each preterminal at a word, (n, K, B)."""
        outer = [np.zeros_like(spans) for spans in inner]
        for width in range(len(inner) - 1, 1, -1):
            outer[width][0, 0, lengths == width] = 1
            spans = outer[width]
            for split in range(1, width):
                rules = self._by_kind[split == 1, width - split == 1]
                left, right = inner[split][: len(spans)], inner[width - split][split:]
                parents = rules.probs.T @ spans
                outer[split][: len(spans)] += rules.to_left @ (parents * right[:, rules.right])
                outer[width - split][split:] += rules.to_right @ (parents * left[:, rules.left])
        return outer[1]

    def outside_of_prefixes(self, inner: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probability of all words before a word with each preterminal there, (n, K, B).

        It is the sum over all that may follow up to a sentence of `shortest` to `longest` words
        (with bounded lengths in place of the prefix probability of Jelinek and Lafferty 1991).
        spine[i, e, A] is the probability of the words before i with an A from i up to e, of which
        no word is seen.
        """
        n, _, batch = inner[1].shape
        longest, size = self.longest, self._size
        spine = np.zeros((n, longest + 1, size, batch))
        spine[0, self.shortest :, 0] = 1
        words = np.zeros_like(inner[1])
        corners = self._corners.reshape(len(self._corners), -1)
        for i in range(n):
            for begin in range(i):
                seen = inner[i - begin][begin]
                rules = self._by_kind[i - begin == 1, False]
                parents = rules.probs.T @ spine[begin, i + 2 :]
                spine[i, i + 2 :] += rules.to_right @ (parents * seen[rules.left])
                rules = self._by_kind[i - begin == 1, True]
                parents = rules.probs.T @ spine[begin, i + 1]
                words[i] += rules.to_right @ (parents * seen[rules.left])
            for end in range(longest - 1, i, -1):
                later = spine[i, end + 1 :].reshape(-1, batch)
                if end == i + 1:
                    words[i] += corners[size:, : len(later)] @ later
                else:
                    spine[i, end] += corners[:size, : len(later)] @ later
        return words
