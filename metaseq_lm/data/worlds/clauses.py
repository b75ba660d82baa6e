"""The four kinds of clauses of the world "quad": how each is drawn, and its exact probabilities.

Shapes: M clauses, L tokens of the longest clause, Z topics. Clauses are (M, L), padded on the right
with NO_TOKEN, without the symbol that ends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import comb

import numpy as np

from metaseq_lm.data.worlds.base import BOTH, LEFT, NO_LABEL, NO_TOKEN, RIGHT

PHRASES = (0.4, 0.4, 0.2)  # probability of 0, 1, ... prepositional phrases
_OBJECT = 0.5  # probability of an object noun
_FILLERS = 2  # fillers in a clause of brackets
_DISTANCE = 3  # least tokens from an opening to a closing bracket of a minimal pair
UNIFORMS = 24  # random numbers that a clause may use


@dataclass(frozen=True)
class Symbols:
    """A block of consecutive symbols: `items` of them, each in `forms` forms."""

    first: int
    items: int
    forms: int = 1

    def contains(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether tokens belong to the block."""
        return (tokens >= self.first) & (tokens < self.first + self.items * self.forms)

    def item(self, tokens: np.ndarray) -> np.ndarray:
        """Return which item a token of the block is a form of."""
        return np.asarray((tokens - self.first) // self.forms)

    def form(self, tokens: np.ndarray) -> np.ndarray:
        """Return the form of a token of the block: 0 singular or 1 plural."""
        return np.asarray((tokens - self.first) % self.forms)

    def token(self, item: np.ndarray, form: np.ndarray | int = 0) -> np.ndarray:
        """Return the token of an item in a form."""
        return np.asarray(self.first + item * self.forms + form)


class Alphabet:
    """The symbols of a world, in the order of their numbers, to which blocks are added.

    Attributes:
        words: The symbols so far.
    """

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def block(self, items: Sequence[str], forms: Sequence[str] = ("",)) -> Symbols:
        """Append a block: each of `items` in each of `forms`, which are endings."""
        block = Symbols(len(self.words), len(items), len(forms))
        self.words += map("".join, product(items, forms))
        return block


def number_names(word: str, count: int) -> list[str]:
    """Return `count` names: word0, word1, ..."""
    return [f"{word}{number}" for number in range(count)]


def _draw_categorical(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return a position in each row of probabilities, (M, K) or (K,), for uniform numbers (M,)."""
    sums = np.cumsum(probabilities, axis=-1)
    below = (sums <= uniforms[:, None]).sum(axis=-1)
    return np.asarray(np.minimum(below, probabilities.shape[-1] - 1))


def integers_below(uniforms: np.ndarray, count: int | np.ndarray) -> np.ndarray:
    """Return uniform whole numbers from 0 to `count` - 1 for uniform numbers in [0, 1)."""
    return np.asarray(np.minimum((uniforms * count).astype(np.int64), np.asarray(count) - 1))


def _lengths_of(clauses: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each clause, (M,)."""
    return np.asarray((clauses != NO_TOKEN).sum(axis=1))


@dataclass(frozen=True)
class NumberAgreement:
    """Noun, (preposition, noun) k times, verb of the first noun's number, perhaps an object noun.

    With p_z(i) the probability of a lexeme i under topic z, n nouns and k phrases the probability
    of a clause is P(k) 1/2 (1/2)^n (1/2)^k p_z(verb) prod p_z(noun): the length determines k, and
    whether there is an object.
    """

    nouns: Symbols
    verbs: Symbols
    prepositions: Symbols
    noun_probs: np.ndarray  # (Z, nouns)
    verb_probs: np.ndarray  # (Z, verbs)
    phrase_probs: np.ndarray  # (most phrases + 1,)

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a clause."""
        return 2 * len(self.phrase_probs) + 1

    def sample(self, topics: np.ndarray, uniforms: np.ndarray, width: int) -> np.ndarray:
        """Return clauses (M, width) for topics (M,) and uniform numbers (M, UNIFORMS)."""
        clauses = np.full((len(topics), width), NO_TOKEN)
        most = len(self.phrase_probs) - 1
        phrases = _draw_categorical(self.phrase_probs, uniforms[:, 0])
        has_object = uniforms[:, 1] < _OBJECT
        rows = np.arange(len(topics))
        numbers = noun_numbers = integers_below(uniforms[:, 2], 2)
        verbs = _draw_categorical(self.verb_probs[topics], uniforms[:, 3])
        for i in range(most + 2):
            columns, present = np.full(len(topics), 2 * i), phrases >= i
            if i > most:  # the last iteration is the object
                columns, present = 2 * phrases + 2, has_object
            item = _draw_categorical(self.noun_probs[topics], uniforms[:, 4 + 3 * i])
            if i > 0:
                noun_numbers = integers_below(uniforms[:, 5 + 3 * i], 2)
            noun = self.nouns.token(item, noun_numbers)
            clauses[rows[present], columns[present]] = noun[present]
            if 0 < i <= most:
                preposition = self.prepositions.token(integers_below(uniforms[:, 6 + 3 * i], 2))
                clauses[present, 2 * i - 1] = preposition[present]
        clauses[rows, 2 * phrases + 1] = self.verbs.token(verbs, numbers)
        return clauses

    def parse(self, clauses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which clauses are of this kind and how many phrases they have, (M,), else -1."""
        lengths = _lengths_of(clauses)
        phrases = np.full(len(clauses), -1)
        for count in range(len(self.phrase_probs)):
            for length in (2 * count + 2, 2 * count + 3):
                rows = np.flatnonzero(lengths == length)
                words = clauses[rows]
                verbs = words[:, 2 * count + 1]
                good = self.verbs.contains(verbs)
                good &= self.nouns.contains(words[:, self._noun_columns(length)]).all(axis=1)
                good &= self.prepositions.contains(words[:, 1 : 2 * count : 2]).all(axis=1)
                good &= self.verbs.form(verbs) == self.nouns.form(words[:, 0])
                phrases[rows[good]] = count
        return phrases >= 0, phrases

    def _noun_columns(self, length: int) -> list[int]:
        # A noun stands in every second column; an odd length ends with an object.
        return [*range(0, length - 1, 2), *[length - 1] * (length % 2)]

    def log_probs(self, clauses: np.ndarray) -> np.ndarray:
        """Return the log-probability of each clause under each topic, (M, Z)."""
        log_probs = np.full((len(clauses), len(self.noun_probs)), -np.inf)
        is_clause, phrases = self.parse(clauses)
        lengths = _lengths_of(clauses)
        log_nouns, log_verbs = np.log(self.noun_probs.T), np.log(self.verb_probs.T)
        for length in np.unique(lengths[is_clause]):
            rows = np.flatnonzero(is_clause & (lengths == length))
            columns = self._noun_columns(length)
            count = (length - 2) // 2
            nouns = self.nouns.item(clauses[rows][:, columns])
            verbs = self.verbs.item(clauses[rows, 2 * count + 1])
            fair = len(columns) + count + 1  # numbers, prepositions, the object
            constant = np.log(self.phrase_probs[count]) - fair * np.log(2)
            log_probs[rows] = log_nouns[nouns].sum(axis=1) + log_verbs[verbs] + constant
        return log_probs

    def attractors(self, clauses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the verb's column, -1 in other clauses, and whether the noun before misleads.

        It misleads if its number differs from the first noun's. Both are (M,).
        """
        is_clause, phrases = self.parse(clauses)
        rows = np.arange(len(clauses))
        last, first = clauses[rows, 2 * np.maximum(phrases, 0)], clauses[:, 0]
        misleads = is_clause & (self.nouns.form(last) != self.nouns.form(first))
        return np.where(is_clause, 2 * phrases + 1, -1), misleads

    def head_numbers(self, clauses: np.ndarray) -> np.ndarray:
        """Return the number of the head noun at the token before the verb, (M, L).

        It is NO_LABEL elsewhere, and at a noun that is the head itself. The last noun of a phrase
        says nothing about the head, so the word alone is at chance, neither right nor misled.
        """
        labels = np.full(clauses.shape, NO_LABEL)
        columns, _ = self.attractors(clauses)
        rows = np.flatnonzero(columns >= 2)
        labels[rows, columns[rows] - 1] = self.nouns.form(clauses[rows, 0])
        return labels

    def corrupt(
        self, clauses: np.ndarray, uniforms: np.ndarray, attractor: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the verb's column, -1 for other clauses, and the verb of the other number, (M,).

        Args:
            clauses: Clauses (M, L).
            uniforms: Not used.
            attractor: Whether the last noun before the verb differs in number from the first.
        """
        columns, misleads = self.attractors(clauses)
        fits = (columns >= 0) & (misleads == attractor)
        verbs = clauses[np.arange(len(clauses)), columns]
        other = self.verbs.token(self.verbs.item(verbs), 1 - self.verbs.form(verbs))
        return np.where(fits, columns, -1), other


@dataclass(frozen=True)
class Chain:
    """Words of a hidden Markov chain, independent of the topic; some may be shown as a blank.

    The probability of a clause is the sum of the forward variables: a_1(s) = E(s, w_1) / S and
    a_t(s) = E(s, w_t) sum over r of a_(t-1)(r) A(r, s) (Rabiner 1989, section III). With a
    probability h of the blank, E(s, w) is (1 - h) times the word's emission probability, and E(s,
    blank) is h.
    """

    words: Symbols
    length: int
    transitions: np.ndarray  # A (states, states), rows sum to 1
    emissions: np.ndarray  # E (states, words), rows sum to 1
    topics: int
    blank: int | None = None  # the token of a word that is not shown
    hidden: float = 0.0  # the probability of the blank in place of a word

    def sample(
        self, topics: np.ndarray, uniforms: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return clauses and their states, (M, width) each, for uniform numbers (M, UNIFORMS)."""
        clauses = np.full((len(uniforms), width), NO_TOKEN)
        states = np.full((len(uniforms), width), NO_LABEL)
        for column in range(self.length):
            if column == 0:
                states[:, 0] = integers_below(uniforms[:, 0], len(self.transitions))
            else:
                rows = self.transitions[states[:, column - 1]]
                states[:, column] = _draw_categorical(rows, uniforms[:, 2 * column])
            words = _draw_categorical(
                self.emissions[states[:, column]], uniforms[:, 2 * column + 1]
            )
            clauses[:, column] = self.words.token(words)
        return clauses, states

    def parse(self, clauses: np.ndarray) -> np.ndarray:
        """Return which clauses are of this kind, (M,)."""
        words = clauses[:, : self.length]
        good = (self.words.contains(words) | self.is_blank(words)).all(axis=1)
        return np.asarray(good & (_lengths_of(clauses) == self.length))

    def is_blank(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether tokens are the blank."""
        if self.blank is None:
            return np.zeros(tokens.shape, bool)
        return np.asarray(tokens == self.blank)

    def emitted(self, clauses: np.ndarray) -> np.ndarray:
        """Return p(word | state) of clauses of this kind, (M, length, states)."""
        words = clauses[:, : self.length]
        blanks = self.is_blank(words)
        of_words = self.emissions.T[np.where(blanks, 0, self.words.item(words))]
        return np.where(blanks[..., None], self.hidden, (1 - self.hidden) * of_words)

    def forward(self, clauses: np.ndarray) -> np.ndarray:
        """Return the forward variables of clauses of this kind, (M, length, states).

        p(words up to t, state at t); their sum at the last word is the probability of the clause.
        """
        emitted = self.emitted(clauses)
        forward = np.empty_like(emitted)
        forward[:, 0] = emitted[:, 0] / len(self.transitions)
        for position in range(1, self.length):
            reached = forward[:, position - 1] @ self.transitions
            forward[:, position] = reached * emitted[:, position]
        return np.asarray(forward)

    def backward(self, clauses: np.ndarray) -> np.ndarray:
        """Return p(words after t | state at t) of clauses of this kind, (M, length, states)."""
        emitted = self.emitted(clauses)
        backward = np.ones_like(emitted)
        for position in range(self.length - 2, -1, -1):
            after = emitted[:, position + 1] * backward[:, position + 1]
            backward[:, position] = after @ self.transitions.T
        return np.asarray(backward)

    def log_probs(self, clauses: np.ndarray) -> np.ndarray:
        """Return the log-probability of each clause under each topic, (M, Z)."""
        log_probs = np.full((len(clauses), self.topics), -np.inf)
        rows = np.flatnonzero(self.parse(clauses))
        with np.errstate(divide="ignore"):
            log_probs[rows] = np.log(self.forward(clauses[rows])[:, -1].sum(axis=1))[:, None]
        return log_probs

    def posteriors(self, clauses: np.ndarray, sees: str = BOTH) -> np.ndarray:
        """Return the probability of each state at each word, (M, L, states); NaN elsewhere.

        Given all words of the clause, p(s_t | w) is proportional to forward times backward; given
        the words up to t, to forward; given the words from t on, to E(s_t, w_t) times backward,
        because the columns of A sum to 1 and all states are equally frequent at every t. Other
        clauses carry no information.
        """
        posteriors = np.full((*clauses.shape, len(self.transitions)), np.nan)
        rows = np.flatnonzero(self.parse(clauses))
        weights = self.emitted(clauses[rows]) if sees == RIGHT else self.forward(clauses[rows])
        if sees != LEFT:
            weights = weights * self.backward(clauses[rows])
        posteriors[rows, : self.length] = weights / weights.sum(axis=-1, keepdims=True)
        return posteriors


@dataclass(frozen=True)
class Copy:
    """CP, three names, EQ, the same names; all names^3 are equally probable under every topic."""

    marks: Symbols  # CP, EQ
    names: Symbols
    topics: int
    length: int = 3

    @property
    def longest(self) -> int:
        """The number of tokens of a clause."""
        return 2 * self.length + 2

    def sample(self, topics: np.ndarray, uniforms: np.ndarray, width: int) -> np.ndarray:
        """Return clauses (M, width) for uniform numbers (M, UNIFORMS)."""
        clauses = np.full((len(uniforms), width), NO_TOKEN)
        names = self.names.token(integers_below(uniforms[:, : self.length], self.names.items))
        clauses[:, 0], clauses[:, self.length + 1] = self.marks.first, self.marks.first + 1
        clauses[:, 1 : self.length + 1] = clauses[:, self.length + 2 : self.longest] = names
        return clauses

    def parse(self, clauses: np.ndarray) -> np.ndarray:
        """Return which clauses are of this kind, (M,)."""
        first = clauses[:, 1 : self.length + 1]
        second = clauses[:, self.length + 2 : self.longest]
        good = self.names.contains(first).all(axis=1) & (first == second).all(axis=1)
        good &= clauses[:, 0] == self.marks.first
        good &= clauses[:, self.length + 1] == self.marks.first + 1
        return np.asarray(good & (_lengths_of(clauses) == self.longest))

    def log_probs(self, clauses: np.ndarray) -> np.ndarray:
        """Return the log-probability of each clause under each topic, (M, Z)."""
        log_probs = np.full((len(clauses), self.topics), -np.inf)
        log_probs[self.parse(clauses)] = -self.length * np.log(self.names.items)
        return log_probs

    def corrupt(self, clauses: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the column of one of the second names and another of the three, (M,) each.

        Both are -1 for other clauses and where all names are equal. The draw is uniform.
        """
        columns, others = np.full(len(clauses), -1), np.full(len(clauses), NO_TOKEN)
        is_clause = self.parse(clauses)
        names = clauses[:, 1 : self.length + 1]
        differs = names[:, :, None] != names[:, None, :]  # the position, and the other name's
        choices = differs.reshape(len(clauses), -1)
        rows = np.flatnonzero(is_clause & choices.any(axis=1))
        weights = choices[rows] / choices[rows].sum(axis=1, keepdims=True)
        chosen = _draw_categorical(weights, uniforms[rows, 0])
        columns[rows] = self.length + 2 + chosen // self.length
        others[rows] = names[rows, chosen % self.length]
        return columns, others


def _balanced(pairs: int) -> list[str]:
    """Return the balanced sequences of `pairs` pairs of brackets, sorted."""
    if not pairs:
        return [""]
    shapes = []
    for inner in range(pairs):
        for left, right in product(_balanced(inner), _balanced(pairs - 1 - inner)):
            shapes.append(f"({left}){right}")
    return sorted(shapes)


@dataclass(frozen=True)
class Brackets:
    """A balanced sequence of brackets of several kinds with two fillers among them.

    Shape, kinds and positions of the fillers are uniform: with n pairs of K kinds the probability
    is 1 / Catalan(n) K^-n / C(2n + 2, 2) p_z(first filler) p_z(second filler).
    """

    opening: Symbols
    closing: Symbols
    fillers: Symbols
    filler_probs: np.ndarray  # (Z, fillers)
    pairs: int

    @property
    def longest(self) -> int:
        """The number of tokens of a clause."""
        return 2 * self.pairs + _FILLERS

    @cached_property
    def templates(self) -> np.ndarray:
        """Each shape with each choice of positions: the pair of each token, (T, longest).

        An opening bracket is stored as the number of its pair, from 0, a closing one as -1 -
        number, a filler as `pairs`.
        """
        rows = []
        for shape in _balanced(self.pairs):
            stack: list[int] = []
            roles = []
            for at, sign in enumerate(shape):
                if sign == "(":
                    stack.append(shape.count("(", 0, at))
                    roles.append(stack[-1])
                else:
                    roles.append(-1 - stack.pop())
            for positions in combinations(range(self.longest), _FILLERS):
                row = list(roles)
                for position in positions:
                    row.insert(position, self.pairs)
                rows.append(row)
        return np.array(rows)

    def sample(self, topics: np.ndarray, uniforms: np.ndarray, width: int) -> np.ndarray:
        """Return clauses (M, width) for topics (M,) and uniform numbers (M, UNIFORMS)."""
        clauses = np.full((len(topics), width), NO_TOKEN)
        roles = self.templates[integers_below(uniforms[:, 0], len(self.templates))]
        kinds = integers_below(uniforms[:, 1 : 1 + self.pairs], self.opening.items)
        rows = np.arange(len(topics))[:, None]
        is_filler = roles == self.pairs
        pair = np.where(roles < 0, -1 - roles, np.where(is_filler, 0, roles))
        kind = kinds[rows, pair]
        tokens = np.where(roles < 0, self.closing.token(kind), self.opening.token(kind))
        first = 1 + self.pairs
        chosen = [
            _draw_categorical(self.filler_probs[topics], uniforms[:, first + i])
            for i in range(_FILLERS)
        ]
        order = np.minimum(np.cumsum(is_filler, axis=1) - is_filler, _FILLERS - 1)
        fillers = self.fillers.token(np.stack(chosen, axis=1))[rows, order]
        clauses[:, : self.longest] = np.where(is_filler, fillers, tokens)
        return clauses

    def parse(self, clauses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which clauses are of this kind, (M,), depths and partners, (M, L).

        The depth is the number of brackets open at a token; the partner of a closing bracket is the
        column of its opening one, -1 for other tokens.
        """
        tokens = clauses[:, : self.longest]
        is_opening, is_closing = self.opening.contains(tokens), self.closing.contains(tokens)
        is_filler = self.fillers.contains(tokens)
        good = (is_opening | is_closing | is_filler).all(axis=1)
        good &= (_lengths_of(clauses) == self.longest) & (is_filler.sum(axis=1) == _FILLERS)
        depths, partners = np.zeros(clauses.shape, np.int64), np.full(clauses.shape, -1)
        stack = np.full((len(clauses), self.longest + 1), -1)  # columns of the open brackets
        depth, rows = np.zeros(len(clauses), np.int64), np.arange(len(clauses))
        for column in range(tokens.shape[1]):
            stack[rows, np.where(is_opening[:, column], depth, self.longest)] = column
            top = stack[rows, np.maximum(depth - 1, 0)]
            opened = np.maximum(tokens[rows, top], 0) - self.opening.first
            matches = (depth > 0) & (opened == tokens[:, column] - self.closing.first)
            closes = is_closing[:, column]
            good &= ~closes | matches
            partners[:, column] = np.where(closes, top, -1)
            depth = np.maximum(depth + is_opening[:, column] - closes, 0)
            depths[:, column] = depth
        return np.asarray(good & (depth == 0)), depths, partners

    def log_probs(self, clauses: np.ndarray) -> np.ndarray:
        """Return the log-probability of each clause under each topic, (M, Z)."""
        log_probs = np.full((len(clauses), len(self.filler_probs)), -np.inf)
        rows = np.flatnonzero(self.parse(clauses)[0])
        tokens = clauses[rows, : self.longest]
        fillers = tokens[self.fillers.contains(tokens)].reshape(-1, _FILLERS)
        shapes = comb(2 * self.pairs, self.pairs) // (self.pairs + 1)
        choices = shapes * comb(self.longest, _FILLERS) * self.opening.items**self.pairs
        log_fillers = np.log(self.filler_probs.T)[self.fillers.item(fillers)].sum(axis=1)
        log_probs[rows] = log_fillers - np.log(choices)
        return log_probs

    def filler_depths(self, clauses: np.ndarray) -> np.ndarray:
        """Return the depth at each filler, (M, L); NO_LABEL elsewhere."""
        is_clause, depths, _ = self.parse(clauses)
        is_filler = is_clause[:, None] & self.fillers.contains(clauses)
        return np.where(is_filler, depths, NO_LABEL)

    def first_depth_probs(self) -> np.ndarray:
        """Return the probability of each depth at the first filler, (pairs + 1,)."""
        steps = np.sign(self.pairs - self.templates)  # 0 for a filler
        steps = np.where(self.templates < 0, -1, steps)
        first = (steps == 0).argmax(axis=1)
        depths = steps.cumsum(axis=1)[np.arange(len(steps)), first]
        return np.bincount(depths, minlength=self.pairs + 1) / len(steps)

    def corrupt(self, clauses: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the column of a closing bracket and one of another kind, (M,) each; -1 for none.

        The draw is uniform among brackets at least DISTANCE tokens after their partner.
        """
        is_clause, _, partners = self.parse(clauses)
        far = (partners >= 0) & (np.arange(clauses.shape[1]) - partners >= _DISTANCE)
        fits = is_clause & far.any(axis=1)
        rows = np.flatnonzero(fits)
        columns, others = np.full(len(clauses), -1), np.full(len(clauses), NO_TOKEN)
        columns[rows] = _draw_categorical(
            far[rows] / far[rows].sum(axis=1, keepdims=True), uniforms[rows, 0]
        )
        kinds = self.closing.item(clauses[rows, columns[rows]])
        shift = 1 + integers_below(uniforms[rows, 1], self.closing.items - 1)
        others[rows] = self.closing.token((kinds + shift) % self.closing.items)
        return columns, others


Clause = NumberAgreement | Chain | Copy | Brackets


def lexeme_probs(normals: np.ndarray, sharpness: float) -> np.ndarray:
    """Return p_z(i) proportional to exp(sharpness g_zi) / (i + 3), for normal g (Z, items)."""
    weights = np.exp(sharpness * normals) / (np.arange(normals.shape[1]) + 3)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def transition_probs(states: int) -> np.ndarray:
    """Return A (states, states), proportional to .05 plus .7 from s to s + 1."""
    weights = 0.05 + 0.7 * np.roll(np.eye(states), 1, axis=1)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def emission_probs(words: int, states: int, uniforms: Sequence[np.ndarray]) -> np.ndarray:
    """Return E (states, words) for uniform numbers in [0, 1): three arrays (words,).

    Word w has weight r, from .5 to .8, in state a = w mod S, and weight 1 - r in state b = (a + 1 +
    (w div S) mod (S - 1)) mod S, each times a number from .5 to 1.5; then the rows are normalised.
    """
    weights = np.zeros((states, words))
    word = np.arange(words)
    first = word % states
    second = (first + 1 + (word // states) % (states - 1)) % states
    share = 0.5 + 0.3 * uniforms[0]
    weights[first, word] = share * (0.5 + uniforms[1])
    weights[second, word] = (1 - share) * (0.5 + uniforms[2])
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
