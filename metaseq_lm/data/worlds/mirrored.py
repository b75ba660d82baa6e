"""The world "mirrored": the clauses of "quad", with labels that lie behind, ahead or on both sides.

Each quantity is asked for both where it lies behind a word and where it lies ahead, so that only
the direction differs. Some words of the hidden chain are shown as "?": both sides of one reveal its
state. Each set of labels of words, X, has a set X_end that asks for the label at the end of its
clause instead.

Shapes: N documents, S tokens, M clauses, L tokens of the longest clause, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

import numpy as np

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_world
from metaseq_lm.data.worlds.base import (
    BOTH,
    LEFT,
    NO_LABEL,
    RIGHT,
    Documents,
    uniforms_for,
)
from metaseq_lm.data.worlds.clauses import Brackets
from metaseq_lm.data.worlds.quad import (
    DEPTH,
    HALF,
    HEAD,
    STATE,
    TOPIC,
    Quad,
    QuadConfig,
    one_hot,
)

_BLANK = "?"
_AHEAD, _BEHIND, _AROUND = "ahead", "behind", "around"
_PHRASES = {f"phrases_{place}": place for place in (_AHEAD, _BEHIND, _AROUND)}
_PAIRS = {f"pairs_{place}": place for place in (_AHEAD, _BEHIND)}
KIND = "pairs_around"
_LAST = "pairs_behind"  # the label of the first closing bracket is 0
_END_SUFFIX = "_end"


@dataclass
class _MirroredConfig(QuadConfig):
    """The size of the language, and how much of the hidden chain is not shown."""

    hidden: float = option(
        0.3333333333333333,
        "probability that a word of the hidden chain is shown as ?",
        above=0,
        below=1,
    )


@register_world("mirrored", dataclass=_MirroredConfig)
class Mirrored(Quad):
    """Quad with labels that one side of a word tells, or both, or either: 100 words."""

    config: _MirroredConfig

    def __init__(self, config: _MirroredConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        self.chain = replace(self.chain, blank=len(self.symbols), hidden=config.hidden)
        self.symbols = [*self.symbols, _BLANK]
        counts = [str(count) for count in range(max(config.phrases, config.pairs) + 1)]
        of_words: dict[str, Sequence[str]] = dict.fromkeys(_PHRASES, counts[: config.phrases + 1])
        of_words |= dict.fromkeys(_PAIRS, counts[: config.pairs])
        of_words[KIND] = counts[: config.pairs + 1]
        of_words |= {name: self.label_sets[name] for name in (STATE, DEPTH, HEAD)}
        at_end = {name + _END_SUFFIX: classes for name, classes in of_words.items()}
        of_documents = {name: self.label_sets[name] for name in (TOPIC, HALF)}
        self.label_sets = {**of_documents, **of_words, **at_end}
        self.asked_later = {name + _END_SUFFIX: name for name in of_words}

    def sample(self, keys: np.ndarray) -> Documents:
        documents = super().sample(keys)
        tokens, labels = documents.tokens, dict(documents.labels)
        is_hidden = uniforms_for(keys, "hidden", tokens.shape[1]) < self.config.hidden
        is_hidden &= self.chain.words.contains(tokens)
        tokens[is_hidden] = self.symbols.index(_BLANK)
        labels[STATE] = np.where(is_hidden, labels[STATE], NO_LABEL)
        for name in (*_PHRASES, *_PAIRS, KIND):
            certain = self.at_words(name, tokens, BOTH)
            has_label = ~np.isnan(certain[..., 0])
            labels[name] = np.where(has_label, certain.argmax(axis=-1), NO_LABEL)
        for name, of_word in self.asked_later.items():
            row, word, end = _asked_at_ends(labels[of_word] != NO_LABEL, tokens, of_word == _LAST)
            labels[name] = np.full(tokens.shape, NO_LABEL)
            labels[name][row, end] = labels[of_word][row, word]
        return Documents(tokens, labels)

    # ---------------------------------------------------------------- exact readers

    def posterior(self, name: str, tokens: np.ndarray, sees: str = BOTH) -> np.ndarray | None:
        """Return the probability of each class of a labelled set: see `World.posterior`.

        Labels of words do not depend on the topic, and so not on other clauses. At the end of a
        clause a reader of the left has seen the whole clause, a reader of the right none of it.
        """
        if name in (TOPIC, HALF):
            return super().posterior(name, tokens)
        if name not in self.asked_later:
            return self.at_words(name, tokens, sees)
        of_word = self.asked_later[name]
        at_words = self.at_words(of_word, tokens, BOTH)
        row, word, end = _asked_at_ends(~np.isnan(at_words[..., 0]), tokens, of_word == _LAST)
        posterior = np.full_like(at_words, np.nan)
        posterior[row, end] = self._class_prior(of_word) if sees == RIGHT else at_words[row, word]
        return posterior

    def at_words_of(self, name: str, clauses: np.ndarray, sees: str) -> np.ndarray:
        if name in _PHRASES:
            return self._phrases(_PHRASES[name], clauses, sees)
        if name in _PAIRS:
            return self._pairs(_PAIRS[name], clauses, sees)
        if name == KIND:
            return self._round_pairs(clauses, sees)
        # Open brackets were opened before a word and are closed after it: each side tells DEPTH.
        values = super().at_words_of(name, clauses, sees)
        if name == STATE:
            values[~self.chain.is_blank(clauses)] = np.nan
        return values

    def _phrases(self, place: str, clauses: np.ndarray, sees: str) -> np.ndarray:
        """Return the probability of a clause's number of phrases, (M, L, K).

        It is asked at the first noun, at the verb, or at each preposition and noun between them.
        There a reader of one side knows only that the phrases are no fewer than it has seen.
        """
        phrases = self.agreement.parse(clauses)[1][:, None]
        columns, verbs = np.arange(clauses.shape[1]), 2 * phrases + 1
        inside = (columns > 0) & (columns < verbs)
        is_labelled = {_AHEAD: columns == 0, _BEHIND: columns == verbs, _AROUND: inside}[place]
        labels = np.where(is_labelled & (phrases >= 0), phrases, NO_LABEL)
        certain = one_hot(labels, len(self.agreement.phrase_probs))
        if sees == BOTH:
            return certain
        # At the verb this is one more than the phrases, because a reader of the left sees them all.
        seen = np.broadcast_to((columns + 1) // 2, labels.shape)
        if sees == RIGHT:
            seen = phrases + 1 - seen
        is_certain = (labels == NO_LABEL) | (seen > phrases)
        at_least = np.where(is_certain, 0, seen)
        return np.where(is_certain[..., None], certain, self._phrase_tails[at_least])

    @cached_property
    def _phrase_tails(self) -> np.ndarray:
        """The probability of each number of phrases given at least n, (K, K), by n."""
        n_classes = len(self.agreement.phrase_probs)
        tails = np.triu(np.broadcast_to(self.agreement.phrase_probs, (n_classes, n_classes)))
        return np.asarray(tails / tails.sum(axis=1, keepdims=True))

    def _pairs(self, place: str, clauses: np.ndarray, sees: str) -> np.ndarray:
        """Return the probability of the number of pairs inside a pair of brackets, (M, L, K)."""
        # It is asked at its opening or closing bracket. From right to left closing brackets open.
        counts = _BracketCounts.of(self.brackets, clauses)
        labels = np.where(counts.is_closing, counts.inside, NO_LABEL)
        unopened, height, side = counts.closed - 1, counts.depths + 1, RIGHT
        if place == _AHEAD:
            row, closing = np.nonzero(counts.is_closing)
            labels = np.full_like(labels, NO_LABEL)
            labels[row, counts.partners[row, closing]] = counts.inside[row, closing]
            unopened, height, side = self.config.pairs - counts.opened, counts.depths, LEFT
        if sees == side:
            return _probs_at(_inside_probs(self.config.pairs), labels, unopened, height)
        return one_hot(labels, self.config.pairs)

    def _round_pairs(self, clauses: np.ndarray, sees: str) -> np.ndarray:
        """Return the probability of a number of pairs ( ) in a clause at its fillers, (M, L, K)."""
        # A pair of which a reader has seen no bracket is of each kind with equal probability.
        counts, brackets = _BracketCounts.of(self.brackets, clauses), self.brackets
        opening, closing = clauses == brackets.opening.first, clauses == brackets.closing.first
        total = opening.sum(axis=1, keepdims=True)
        labels = np.where(counts.is_filler, total, NO_LABEL)
        if sees == BOTH:
            return one_hot(labels, brackets.pairs + 1)
        seen, unseen = opening.cumsum(axis=1), brackets.pairs - counts.opened
        if sees == RIGHT:
            seen, unseen = total - closing.cumsum(axis=1), counts.closed
        table = _kind_probs(brackets.pairs, brackets.opening.items)
        return _probs_at(table, labels, seen, unseen)

    def _class_prior(self, name: str) -> np.ndarray:
        """Return the probability of each class, (K,), of the label that X_end asks for."""
        if name in _PHRASES:
            least = int(_PHRASES[name] == _AROUND and self.config.phrases > 0)
            return np.asarray(self._phrase_tails[least])
        pairs = self.config.pairs
        if name in _PAIRS:
            return np.asarray(_inside_probs(pairs)[pairs - 1, 1])
        if name == KIND:
            return np.asarray(_kind_probs(pairs, self.brackets.opening.items)[0, pairs])
        if name == DEPTH:
            return self.brackets.first_depth_probs()
        n_classes = len(self.label_sets[name])
        return np.full(n_classes, 1 / n_classes)


@dataclass(frozen=True)
class _BracketCounts:
    """Counts at each token of clauses of brackets, (M, L); False or undefined in other clauses.

    `opened` and `closed` count the brackets up to and including the token, `depths` and `partners`
    are from `Brackets.parse`, and `inside` counts the pairs within the pair of a closing bracket.
    """

    is_closing: np.ndarray
    is_filler: np.ndarray
    opened: np.ndarray
    closed: np.ndarray
    depths: np.ndarray
    partners: np.ndarray
    inside: np.ndarray

    @classmethod
    def of(cls, brackets: Brackets, clauses: np.ndarray) -> "_BracketCounts":
        is_clause, depths, partners = brackets.parse(clauses)
        opening, closing, fillers = (
            is_clause[:, None] & block.contains(clauses)
            for block in (brackets.opening, brackets.closing, brackets.fillers)
        )
        opened, closed = opening.cumsum(axis=1), closing.cumsum(axis=1)
        inside = opened - np.take_along_axis(opened, np.maximum(partners, 0), axis=1)
        return cls(closing, fillers, opened, closed, depths, partners, inside)


def _completions(pairs: int, height: int) -> int:
    """Return the number of ways to place `pairs` further pairs and close `height` open brackets."""
    return comb(2 * pairs + height, pairs) * (height + 1) // (pairs + height + 1)


def _inside_probs(pairs: int) -> np.ndarray:
    """Return the probability that a bracket that was just opened will have n pairs inside.

    The axes are the pairs that are not yet opened, the depth and n: (pairs, pairs + 1, pairs). The
    probability is the share of the balanced sequences with the same beginning, wherever the fillers
    are, that close the bracket after n pairs.
    """
    ways = np.zeros((pairs, pairs + 1, pairs))
    for unopened in range(pairs):
        for height in range(1, pairs + 1):
            for n in range(unopened + 1):
                after = _completions(unopened - n, height - 1)
                ways[unopened, height, n] = _completions(n, 0) * after
    return np.asarray(ways / np.maximum(ways.sum(axis=-1, keepdims=True), 1))


def _kind_probs(pairs: int, kinds: int) -> np.ndarray:
    """Return the probability of 0, 1, ... pairs of one kind among `pairs`.

    The axes are the pairs of this kind that were seen, the pairs of unknown kind, and the number:
    (pairs + 1, pairs + 1, pairs + 1).
    """
    probs = np.zeros((pairs + 1,) * 3)
    for seen in range(pairs + 1):
        for unseen in range(pairs + 1 - seen):
            for n in range(unseen + 1):
                ways = comb(unseen, n) * (kinds - 1) ** (unseen - n)
                probs[seen, unseen, seen + n] = ways / kinds**unseen
    return probs


def _probs_at(
    table: np.ndarray, labels: np.ndarray, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Return table[first, second], (M, L, K), where there is a label, NaN elsewhere."""
    has_label = labels != NO_LABEL
    values = table[np.where(has_label, first, 0), np.where(has_label, second, 0)]
    return np.where(has_label[..., None], values, np.nan)


def _asked_at_ends(
    is_labelled: np.ndarray, tokens: np.ndarray, last: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return document, labelled word and end of each clause with a label, (A,) each."""
    width = tokens.shape[1]
    ends = np.where(tokens == 0, np.arange(width), width)
    ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    row, word = np.nonzero(is_labelled & (ends < width))
    # np.unique keeps the first of several labelled words of a clause.
    if last:
        row, word = row[::-1], word[::-1]
    _, chosen = np.unique(row * width + ends[row, word], return_index=True)
    row, word = row[chosen], word[chosen]
    return row, word, ends[row, word]
