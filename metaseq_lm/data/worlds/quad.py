"""The world "quad": four kinds of clauses under one hidden topic, each with its own long distance.

A document has a topic z, uniform, and four clauses, whose kinds are uniform and independent of all
else: subject-verb agreement over attractors, words of a hidden Markov chain, copies of names and
nested brackets (`clauses` has their forms and probabilities). Each ends with ".". With p(c | z) the
probability of a clause c, 1/4 of its probability within its kind,

    p(document) = 1/Z sum over z of the product over clauses c of p(c | z).

Shapes: N documents, S tokens, C clauses of a document, L tokens of the longest clause without its
end, Z topics, V symbols.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_world
from metaseq_lm.data.worlds.base import (
    BOTH,
    CHUNK,
    NO_LABEL,
    NO_TOKEN,
    RIGHT,
    Documents,
    World,
    normalise_probabilities,
    seeded_uniforms,
    uniforms_for,
)
from metaseq_lm.data.worlds.clauses import (
    PHRASES,
    UNIFORMS,
    Alphabet,
    Brackets,
    Chain,
    Clause,
    Copy,
    NumberAgreement,
    emission_probs,
    integers_below,
    lexeme_probs,
    number_names,
    transition_probs,
)
from metaseq_lm.data.worlds.segments import join_segments, split_segments

_END = "."
NUMBERS, _NUMBER_ENDINGS = ("singular", "plural"), ("s", "p")
_ATTRACTOR, PLAIN, _COPY, _BRACKETS = "agreement_attractor", "agreement_plain", "copy", "brackets"
TOPIC, HALF, STATE, DEPTH, HEAD = "topic", "topic_half", "state", "depth", "head_number"


@dataclass
class QuadConfig:
    """The size of the language; a small one can be enumerated."""

    topics: int = option(8, "topics", at_least=1)
    nouns: int = option(10, "nouns, each singular and plural", at_least=1)
    verbs: int = option(8, "verbs, each singular and plural", at_least=1)
    fillers: int = option(12, "fillers between brackets", at_least=1)
    states: int = option(6, "states of the hidden chain", at_least=2)
    state_words: int = option(24, "words of the hidden chain", at_least=2)
    names: int = option(16, "names that are copied", at_least=1)
    sharpness: float = option(1.3, "how much topics differ in their lexemes", at_least=0)
    clauses: int = option(4, "clauses of a document", at_least=1, at_most=64)
    phrases: int = option(2, "most phrases between noun and verb", at_least=0, at_most=2)
    chain: int = option(7, "words of a clause of the hidden chain", at_least=1, at_most=12)
    copies: int = option(3, "names that are copied in a clause", at_least=1, at_most=12)
    pairs: int = option(3, "pairs of brackets of a clause", at_least=1, at_most=5)


@register_world("quad", dataclass=QuadConfig)
class Quad(World):
    """Agreement, a hidden chain, copies and brackets under a topic: 99 words, 4 clauses."""

    pair_kinds = (_ATTRACTOR, PLAIN, _COPY, _BRACKETS)
    config: QuadConfig

    def __init__(self, config: QuadConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        alphabet = Alphabet(_END)
        self.symbols = alphabet.words
        # The order of the blocks is that of the symbols' numbers.
        marks, prepositions = alphabet.block(["CP", "EQ"]), alphabet.block(["P1", "P2"])
        opening, closing = alphabet.block("([{"), alphabet.block(")]}")
        nouns = alphabet.block(number_names("noun", config.nouns), _NUMBER_ENDINGS)
        verbs = alphabet.block(number_names("verb", config.verbs), _NUMBER_ENDINGS)
        fillers = alphabet.block(number_names("fill", config.fillers))
        state_words = alphabet.block(number_names("state", config.state_words))
        names = alphabet.block(number_names("name", config.names))
        noun_probs, verb_probs, filler_probs = self._lexemes()
        phrase_probs = np.array(PHRASES[: config.phrases + 1])
        phrase_probs /= phrase_probs.sum()
        self.agreement = NumberAgreement(
            nouns, verbs, prepositions, noun_probs, verb_probs, phrase_probs
        )
        self.chain = Chain(
            state_words,
            config.chain,
            transition_probs(config.states),
            emission_probs(
                config.state_words,
                config.states,
                [self._constants(f"emissions {i}", 1, config.state_words)[0] for i in range(3)],
            ),
            config.topics,
        )
        self.copy = Copy(marks, names, config.topics, config.copies)
        self.brackets = Brackets(opening, closing, fillers, filler_probs, config.pairs)
        self.width = max(
            self.agreement.longest, self.chain.length, self.copy.longest, self.brackets.longest
        )
        self.longest = config.clauses * (self.width + 1)
        self.label_sets = {
            TOPIC: number_names("topic", config.topics),
            # Objectives that learn from labels can take two classes.
            HALF: ("lower", "upper"),
            STATE: number_names("s", config.states),
            DEPTH: [str(depth) for depth in range(config.pairs + 1)],
            HEAD: NUMBERS,
        }

    @property
    def kinds(self) -> tuple[Clause, ...]:
        """The kinds of clauses in the order of their numbers."""
        return self.agreement, self.chain, self.copy, self.brackets

    def _constants(self, purpose: str, rows: int, columns: int) -> np.ndarray:
        return seeded_uniforms("quad", self.seed, purpose, shape=(rows, columns))

    def _lexemes(self) -> list[np.ndarray]:
        """Return the probabilities of nouns, verbs and fillers by topic, (Z, items) each."""
        normal = np.vectorize(NormalDist().inv_cdf)
        tables = []
        for name in ("nouns", "verbs", "fillers"):
            uniforms = self._constants(name, self.config.topics, getattr(self.config, name))
            # inv_cdf does not accept 0.
            normals = normal(np.maximum(uniforms, 2.0**-54))
            tables.append(lexeme_probs(normals, self.config.sharpness))
        return tables

    # ---------------------------------------------------------------- documents

    def sample(self, keys: np.ndarray) -> Documents:
        config, count = self.config, len(keys)
        first = uniforms_for(keys, "document", 65)
        topics = integers_below(first[:, 0], config.topics)
        kinds = integers_below(first[:, 1 : 1 + config.clauses], len(self.kinds))
        shape = (count, config.clauses, self.width + 1)
        tokens = np.full(shape, NO_TOKEN)
        labels = {name: np.full(shape, NO_LABEL) for name in (STATE, DEPTH, HEAD)}
        for position in range(config.clauses):
            uniforms = uniforms_for(keys, f"clause {position}", UNIFORMS)
            for number in range(len(self.kinds)):
                # Rows have uniform numbers of their own, so this order does not change a document.
                rows = np.flatnonzero(kinds[:, position] == number)
                clauses, labelled = self._sample_clauses(number, topics[rows], uniforms[rows])
                tokens[rows, position, :-1] = clauses
                for name, values in labelled.items():
                    labels[name][rows, position, :-1] = values
        joined, flat = join_segments(tokens, **labels)
        halves = self._topic_halves(topics)
        return Documents(joined, {TOPIC: topics, HALF: halves, **flat})

    def _topic_halves(self, topics: np.ndarray) -> np.ndarray:
        return np.asarray(2 * topics >= self.config.topics).astype(np.int64)

    def _sample_clauses(
        self, number: int, topics: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return clauses (M, L) of a kind, and their labels by the name of the set, (M, L)."""
        if number == 0:
            clauses = self.agreement.sample(topics, uniforms, self.width)
            return clauses, {HEAD: self.agreement.head_numbers(clauses)}
        if number == 1:
            clauses, states = self.chain.sample(topics, uniforms, self.width)
            return clauses, {STATE: states}
        if number == 2:
            return self.copy.sample(topics, uniforms, self.width), {}
        clauses = self.brackets.sample(topics, uniforms, self.width)
        return clauses, {DEPTH: self.brackets.filler_depths(clauses)}

    def split(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the clauses of documents (N, S).

        Returns:
            Whether a document consists of C clauses that end with ".", (N,); the clauses without
            their ends, (N, C, L), undefined for other documents; where each begins, (N, C).
        """
        return split_segments(tokens, self.config.clauses, self.width)

    # ---------------------------------------------------------------- probabilities

    def clause_log_probs(self, clauses: np.ndarray) -> np.ndarray:
        """Return log p(clause | z) of clauses (M, L), (M, Z); a clause has the form of one kind."""
        log_probs = np.full((len(clauses), self.config.topics), -np.inf)
        for kind in self.kinds:
            np.maximum(log_probs, kind.log_probs(clauses), out=log_probs)
        return np.asarray(log_probs - np.log(len(self.kinds)))

    def topic_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return log p(document, z) of documents (N, S), (N, Z)."""
        joint = np.empty((len(tokens), self.config.topics))
        for start in range(0, len(tokens), CHUNK // 8):
            part = slice(start, start + CHUNK // 8)
            good, clauses, _ = self.split(tokens[part])
            of_clauses = self.clause_log_probs(clauses.reshape(-1, self.width))
            sums = of_clauses.reshape(*clauses.shape[:2], -1).sum(axis=1)
            joint[part] = np.where(good[:, None], sums, -np.inf)
        return np.asarray(joint - np.log(self.config.topics))

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(np.logaddexp.reduce(self.topic_log_probs(tokens), axis=1))

    def cloze(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the probability of each symbol in a gap: see `World.cloze`.

        Only the clause with the gap is computed anew, under each topic. An end of a clause has
        probability 1: with any other symbol there the document has too few clauses.
        """
        size, config = len(self.symbols), self.config
        good, clauses, starts = self.split(tokens)
        of_clauses = self.clause_log_probs(clauses.reshape(-1, self.width))
        of_clauses = of_clauses.reshape(len(tokens), config.clauses, -1)
        log_probs = np.full((len(rows), size), -np.inf)
        is_end = tokens[rows, positions] == 0
        log_probs[is_end, 0] = 0
        inside = np.flatnonzero(~is_end & good[rows])
        clause = (starts[rows[inside]] <= positions[inside][:, None]).sum(axis=1) - 1
        column = positions[inside] - starts[rows[inside], clause]
        step = max(1, CHUNK // size)
        for start in range(0, len(inside), step):
            gaps = inside[start : start + step]
            in_clause, in_column = clause[start : start + step], column[start : start + step]
            filled = np.repeat(clauses[rows[gaps], in_clause], size, axis=0)
            candidates = np.tile(np.arange(size), len(gaps))
            filled[np.arange(len(filled)), np.repeat(in_column, size)] = candidates
            others = of_clauses[rows[gaps]].copy()
            others[np.arange(len(gaps)), in_clause] = 0
            joint = self.clause_log_probs(filled).reshape(len(gaps), size, -1)
            joint = joint + others.sum(axis=1)[:, None]
            log_probs[gaps] = np.logaddexp.reduce(joint, axis=2)
        return normalise_probabilities(log_probs)

    def posterior(self, name: str, tokens: np.ndarray, sees: str = BOTH) -> np.ndarray | None:
        """Return the probability of each class of a labelled set: see `World.posterior`.

        Topic and its half follow from Bayes' rule, states from forward-backward or its forward
        part. Depth and the head's number are certain, also from the left. None for readers of the
        right.
        """
        if sees == RIGHT:
            return None
        if name in (TOPIC, HALF):
            topics = normalise_probabilities(self.topic_log_probs(tokens))
            if name == TOPIC:
                return topics
            upper = topics @ self._topic_halves(np.arange(self.config.topics))
            return np.stack([1 - upper, upper], axis=-1)
        return self.at_words(name, tokens, sees)

    def at_words(self, name: str, tokens: np.ndarray, sees: str) -> np.ndarray:
        """Return the probability of each class at the labelled words, (N, S, K), NaN elsewhere."""
        _, clauses, starts = self.split(tokens)
        values = self.at_words_of(name, clauses.reshape(-1, self.width), sees)
        return _in_documents(values, starts, tokens.shape)

    def at_words_of(self, name: str, clauses: np.ndarray, sees: str) -> np.ndarray:
        """Return the same for clauses, (M, L, K)."""
        if name == STATE:
            return self.chain.posteriors(clauses, sees)
        if name == DEPTH:
            return one_hot(self.brackets.filler_depths(clauses), len(self.label_sets[DEPTH]))
        return one_hot(self.agreement.head_numbers(clauses), len(NUMBERS))

    # ---------------------------------------------------------------- minimal pairs

    def minimal_pairs(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of documents of a kind: see `World.minimal_pairs`.

        The first clause that has the form is changed. The bad document has probability 0.
        """
        tokens = self.sample(keys).tokens
        _, clauses, starts = self.split(tokens)
        uniforms = uniforms_for(keys, f"pair {kind}", 2)
        flat = clauses.reshape(-1, self.width)
        repeated = np.repeat(uniforms, self.config.clauses, axis=0)
        if kind == _COPY:
            columns, others = self.copy.corrupt(flat, repeated)
        elif kind == _BRACKETS:
            columns, others = self.brackets.corrupt(flat, repeated)
        else:
            columns, others = self.agreement.corrupt(flat, repeated, kind == _ATTRACTOR)
        columns = columns.reshape(clauses.shape[:2])
        rows = np.flatnonzero((columns >= 0).any(axis=1))
        clause = (columns[rows] >= 0).argmax(axis=1)
        bad = tokens[rows].copy()
        position = starts[rows, clause] + columns[rows, clause]
        bad[np.arange(len(rows)), position] = others.reshape(columns.shape)[rows, clause]
        return tokens[rows], bad

    def parameters(self) -> dict[str, Any]:
        return {
            "nouns": self.agreement.noun_probs.tolist(),
            "verbs": self.agreement.verb_probs.tolist(),
            "phrases": self.agreement.phrase_probs.tolist(),
            "fillers": self.brackets.filler_probs.tolist(),
            "transitions": self.chain.transitions.tolist(),
            "emissions": self.chain.emissions.tolist(),
        }


def _in_documents(values: np.ndarray, starts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return values of clauses, (N * C, L, K), at the words of their documents, (N, S, K).

    Args:
        values: NaN where there is none.
        starts: Where each clause begins, (N, C).
        shape: N and S.
    """
    of_clauses = values.reshape(*starts.shape, *values.shape[1:])
    row, clause, column = np.nonzero(~np.isnan(of_clauses[..., 0]))
    of_documents = np.full((*shape, values.shape[-1]), np.nan)
    of_documents[row, starts[row, clause] + column] = of_clauses[row, clause, column]
    return of_documents


def one_hot(labels: np.ndarray, count: int) -> np.ndarray:
    """Return one-hot probabilities (..., count) of labels (...), NaN for NO_LABEL."""
    certain = np.eye(count)[np.maximum(labels, 0)]
    return np.where((labels == NO_LABEL)[..., None], np.nan, certain)
