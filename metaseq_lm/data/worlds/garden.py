"""The world "garden": sentences of a grammar whose words are ambiguous until one side is read.

A document is a few independent sentences, each ended with ".". A sentence is drawn from the grammar
in Chomsky normal form below, conditioned on its length. A preterminal ends with its kind, 1 or 2. A
third of the words are homonyms: both kinds have them with the same probabilities, so that only
other words reveal the kind.

* An opener decides the kind (the sense) of a late word after it, across modifiers and embedded
  sentences: `open1 mod late1`. Mirrored, a closer decides that of an early word: `early1 close1`.
* Opener and closer together decide the kind of an inner word: 1 if their kinds are equal.
* The kind of a verb decides whether a postposition attaches to it, `[[verb1 noun] post1]`, or to
  the noun, `[verb2 [noun post2]]`. Mirrored, a preposition before a noun and a final verb.
* A verb and a final verb together decide what a link between them attaches to: the first,
  `[[verb1 link1] final1]`, if their kinds are equal, else the second, `[verb1 [link2 final2]]`.

Tags of the kind may follow a late word, or a postposition of a noun (mirrored: precede an early
word, or a preposition), and stand on either side of an inner word or a link: knowledge of the kinds
has to help predict other words, or no model learns it.

The language is its own mirror image: reversed, with words of `MIRROR` exchanged, a sentence has the
same probability.

Shapes: N documents, S tokens, C sentences of a document, L words of the longest sentence, K
preterminals, V symbols.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_world
from metaseq_lm.data.worlds.base import (
    BOTH,
    NO_LABEL,
    NO_TOKEN,
    RIGHT,
    Documents,
    World,
    normalise_probabilities,
    uniforms_for,
)
from metaseq_lm.data.worlds.grammar import Categorical, Grammar
from metaseq_lm.data.worlds.segments import join_segments, split_segments

_END = "."
MIRROR = {
    "open": "close",
    "late": "early",
    "verb": "final",
    "post": "pre",
    "Rest": "Lead",
    "VP": "PV",
    "NPost": "PreN",
}
_INSERTED = (("mod", 0.7), ("S", 0.3))  # material between a cue and the word that it decides
_LONGER = 0.45  # the probability of one more of these
_CLOSE = 0.3  # the probability of none
_TAGGED = 0.3  # the probability of one more tag of its kind after (mirrored: before) such a word
_SIDES = (0.4, 0.25, 0.25, 0.1)  # probabilities of cues on both sides: kinds 1 1, 1 2, 2 1 and 2 2

_WORDS = 300
# Words of kind 1 or 2 only, homonyms of both, and the share of homonyms in sentences.
_LEXICON = {
    "open": (6, 4, 0.1),
    "late": (8, 20, 0.5),
    "inner": (8, 20, 0.5),
    "verb": (8, 4, 0.1),
    "post": (4, 8, 0.5),
    "link": (4, 8, 0.5),
    "tag": (6, 0, 0.0),
}
_PLAIN = {"noun": 32, "mod": 28}
SETS = {
    "sense_left": "late",
    "sense_right": "early",
    "sense_both": "inner",
    "attachment_left": "post",
    "attachment_right": "pre",
    "attachment_both": "link",
}
_AT_END = "_end"
_SENTENCES = 128  # sentences summed over at once
# Where nothing reveals the kind, the posterior is 1/2: the order of a sum must not break the tie.
_EXACT_DIGITS = 12


@dataclass
class _GardenConfig:
    """The size of the language; a small one can be enumerated."""

    words: int = option(_WORDS, "words, about; each class of them has one at least", at_least=1)
    exponent: float = option(1.0, "of Zipf's law for the words of a class", at_least=0)
    sentences: int = option(2, "sentences of a document", at_least=1, at_most=64)
    shortest: int = option(6, "words of a sentence, at least", at_least=2, at_most=40)
    longest: int = option(24, "words of a sentence, at most", at_least=2, at_most=40)


def _mirror_symbol(symbol: str) -> str:
    """Return the symbol that stands for another one in a sentence read from right to left."""
    stem = symbol.rstrip("12")
    both_ways = MIRROR | {right: left for left, right in MIRROR.items()}
    return both_ways.get(stem, stem) + symbol[len(stem) :]


def _rules() -> dict[tuple[str, str, str], float]:
    weights: dict[tuple[str, str, str], float] = defaultdict(float)

    def add(parent: str, left: str, right: str, weight: float, both_ways: bool = False) -> None:
        mirror_image = _mirror_symbol(parent), _mirror_symbol(right), _mirror_symbol(left)
        for rule in ((parent, left, right), mirror_image)[: 1 + both_ways]:
            weights[rule] += weight

    add("S", "S", "S", 1.5)
    for kind in "12":
        # The word that a cue decides follows at once, or after material.
        add("S", f"open{kind}", f"late{kind}", _CLOSE, True)
        add("S", f"open{kind}", f"Rest{kind}", 1 - _CLOSE, True)
        add(f"Rest{kind}", f"Rest{kind}", f"tag{kind}", _TAGGED, True)
        for phrase in (f"Core{kind}", f"Link{kind}"):
            add(phrase, phrase, f"tag{kind}", _TAGGED / 3, True)
        words = ("Rest", "late"), ("Core", "inner"), ("Link", "link")
        for (item, share), (phrase, word) in product(_INSERTED, words):
            once, again = (share * (1 - _TAGGED) * p for p in (1 - _LONGER, _LONGER))
            add(f"{phrase}{kind}", item, f"{word}{kind}", once, True)
            add(f"{phrase}{kind}", item, f"{phrase}{kind}", again, True)
    for item, share in _INSERTED:
        add("NP", item, "noun", share * (1 - _LONGER), True)
        add("NP", item, "NP", share * _LONGER, True)
    # A verb decides what a postposition attaches to; mirrored, a preposition.
    for noun, weight in (("noun", _CLOSE), ("NP", 1 - _CLOSE)):
        add("VP", "verb1", noun, weight, True)
        add("NPost", noun, "post2", weight, True)
    # Both verbs together decide what a link between them attaches to.
    for kind, (link, weight) in product("12", (("link", _CLOSE), ("Link", 1 - _CLOSE))):
        add(f"VLink{kind}", f"verb{kind}", f"{link}1", weight)
        add(f"LinkV{kind}", f"{link}2", f"final{kind}", weight)
    add("NPost", "NPost", "tag2", _TAGGED * 1.5, True)
    add("S", "VP", "post1", 1, True)
    add("S", "verb2", "NPost", 1, True)
    # Equal kinds on both sides make an inner word of kind 1, and attach a link to the first verb.
    for (left, right), weight in zip(product("12", repeat=2), _SIDES):
        kind = "1" if left == right else "2"
        add("S", f"open{left}", f"Frame{left}", 2 * weight)
        if kind == "1":
            add("S", f"VLink{left}", f"final{right}", 2 * weight)
        else:
            add("S", f"verb{left}", f"LinkV{right}", 2 * weight)
        add(f"Frame{left}", f"inner{kind}", f"close{right}", _CLOSE * weight)
        add(f"Frame{left}", f"Core{kind}", f"close{right}", (1 - _CLOSE) * weight)
    sums: dict[str, float] = defaultdict(float)
    for (parent, _, _), weight in weights.items():
        sums[parent] += weight
    return {rule: weight / sums[rule[0]] for rule, weight in weights.items()}


class _Lexicon:
    """The words in blocks, and the probability of each by preterminal.

    Args:
        preterminals: The names of the preterminals.
        config: Sizes.

    Attributes:
        symbols: The words in the order of their numbers; the first one ends a sentence.
        blocks: The numbers of the words of each block by its name: `late1` of kind 1 only, `late`
            of both kinds.
        probs: (K, V + 1); the last column, for NO_TOKEN, is 0.
    """

    def __init__(self, preterminals: list[str], config: _GardenConfig) -> None:
        self.symbols = [_END]
        self.blocks: dict[str, np.ndarray] = {}
        self._config = config
        shares = {}
        for name, (of_one_kind, homonyms, share) in _LEXICON.items():
            for stem in dict.fromkeys((name, _mirror_symbol(name))):
                self._add(stem, homonyms)
                for kind in "12":
                    self._add(f"{stem}{kind}", of_one_kind)
                    shares[f"{stem}{kind}"] = {f"{stem}{kind}": 1 - share}
                    if homonyms:
                        shares[f"{stem}{kind}"][stem] = share
        for name, count in _PLAIN.items():
            self._add(name, count)
            shares[name] = {name: 1.0}
        self.probs = np.zeros((len(preterminals), len(self.symbols) + 1))
        for row, preterminal in zip(self.probs, preterminals):
            for block, share in shares[preterminal].items():
                weights = (1.0 + np.arange(len(self.blocks[block]))) ** -config.exponent
                row[self.blocks[block]] = share * weights / weights.sum()

    def _add(self, block: str, count: int) -> None:
        size = max(1, round(count * self._config.words / _WORDS)) if count else 0
        self.blocks[block] = np.arange(size) + len(self.symbols)
        self.symbols += [f"{block}_{number}" for number in range(size)]


@register_world("garden", dataclass=_GardenConfig)
class Garden(World):
    """Sentences of a grammar with homonyms that what precedes, what follows or both decide."""

    config: _GardenConfig
    pair_kinds = tuple(SETS)

    def __init__(self, config: _GardenConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        if config.shortest > config.longest:
            raise UsageError(
                f"shortest={config.shortest} longest={config.longest}: the first must not be above"
            )
        self.grammar = Grammar(_rules(), config.shortest, config.longest)
        self._reversed = self.grammar.reversed()
        lexicon = _Lexicon(self.grammar.preterminals, config)
        self.symbols, self.blocks, self.probs = lexicon.symbols, lexicon.blocks, lexicon.probs
        self.longest = config.sentences * (config.longest + 1)
        self.asked_later = {name + _AT_END: name for name in SETS}
        self._preterminals = {}
        for name, stem in SETS.items():
            kinds = f"{stem}1", f"{stem}2"
            self._preterminals[name] = list(map(self.grammar.preterminals.index, kinds))
        senses, attachments = ("kind1", "kind2"), ("verb", "noun")
        classes = {name: senses if "sense" in name else attachments for name in SETS}
        classes["attachment_both"] = ("before", "behind")
        self.label_sets = classes | {name + _AT_END: classes[name] for name in SETS}
        self._words = Categorical([row[row > 0] for row in self.probs])
        self._word_numbers = np.nonzero(self.probs)[1]
        lengths = self.grammar.of_length[config.shortest :, 0]
        self._lengths = Categorical([lengths])

    # ---------------------------------------------------------------- documents

    def sample(self, keys: np.ndarray) -> Documents:
        config, longest = self.config, self.config.longest
        shape = (len(keys), config.sentences, longest + 1)
        leaves, tokens = np.full(shape, -1), np.full(shape, NO_TOKEN)
        for number in range(config.sentences):
            uniforms = uniforms_for(keys, f"sentence {number}", 2 * longest)
            none = np.zeros(len(keys), np.int64)
            widths = config.shortest + self._lengths.draw(none, uniforms[:, 0])
            leaves[:, number, :-1] = self.grammar.sample(widths, uniforms[:, 1:longest])
            row, column = np.nonzero(leaves[:, number] >= 0)
            words = self._words.draw(leaves[row, number, column], uniforms[row, longest + column])
            tokens[row, number, column] = self._word_numbers[words]
        labels = {}
        for name, preterminals in self._preterminals.items():
            labels[name] = values = np.full(shape, NO_LABEL)
            for label, preterminal in enumerate(preterminals):
                values[self._is_homonym(name, tokens) & (leaves == preterminal)] = label
            at_end = labels[name + _AT_END] = np.full(shape, NO_LABEL)
            first_labelled = (values != NO_LABEL).argmax(axis=2)[..., None]
            first = np.take_along_axis(values, first_labelled, axis=2)
            lengths = (tokens != NO_TOKEN).sum(axis=2, keepdims=True)
            np.put_along_axis(at_end, lengths, first, axis=2)
        joined, of_tokens = join_segments(tokens, **labels)
        return Documents(joined, of_tokens)

    def _is_homonym(self, name: str, tokens: np.ndarray) -> np.ndarray:
        return np.isin(tokens, self.blocks[SETS[name]])

    def _split(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return split_segments(tokens, self.config.sentences, self.config.longest)

    # ---------------------------------------------------------------- probabilities

    def sums(self, sentences: np.ndarray, sees: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Return sums over the derivations of sentences (M, L).

        Args:
            sentences: Sentences, padded on the right.
            sees: Which other words the second sum covers: LEFT, RIGHT or BOTH; None for no second
                sum.

        Returns:
            The probability of each sentence, (M,), and the joint probability of the other words
            that are seen and each preterminal at a word, (M, L, K), up to a factor.
        """
        count, longest = sentences.shape
        lengths = (sentences != NO_TOKEN).sum(axis=1)
        grammar = self._reversed if sees == RIGHT else self.grammar
        columns = np.arange(longest)
        if sees == RIGHT:
            columns = np.where(columns < lengths[:, None], lengths[:, None] - 1 - columns, columns)
            sentences = np.take_along_axis(sentences, columns, axis=1)
        probs = np.zeros(count)
        outer = np.zeros((count, longest, len(grammar.preterminals)) if sees else 0)
        order = np.argsort(lengths, kind="stable")
        for start in range(0, count, _SENTENCES):
            rows = order[start : start + _SENTENCES]
            width = max(1, lengths[rows[-1]])
            weights = self.probs[:, sentences[rows, :width].T].swapaxes(0, 1)
            inner = grammar.inside(np.ascontiguousarray(weights))
            probs[rows] = grammar.sentence_probs(inner, lengths[rows])
            if sees == BOTH:
                outer[rows, :width] = grammar.outside(inner, lengths[rows]).transpose(2, 0, 1)
            elif sees:
                outer[rows, :width] = grammar.outside_of_prefixes(inner).transpose(2, 0, 1)
        if sees == RIGHT:
            outer = np.take_along_axis(outer, columns[..., None], axis=1)
        return probs, outer

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        good, sentences, _ = self._split(tokens)
        probs, _ = self.sums(sentences.reshape(-1, self.config.longest), None)
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs).reshape(len(tokens), -1).sum(axis=1)
        return np.asarray(np.where(good, log_probs, -np.inf))

    def cloze(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the probability of each symbol in a gap: see `World.cloze`.

        An end of a sentence has probability 1: with any other symbol there the document has too few
        sentences.
        """
        config = self.config
        good, sentences, starts = self._split(tokens)
        probs, outer = self.sums(sentences.reshape(-1, config.longest), BOTH)
        impossible = probs.reshape(len(tokens), -1) == 0
        number = (starts[rows] <= positions[:, None]).sum(axis=1) - 1
        others = impossible[rows].sum(axis=1) - impossible[rows, number]
        is_end = tokens[rows, positions] == 0
        column = np.minimum(positions - starts[rows, number], config.longest - 1)
        weights = outer[rows * config.sentences + number, column] @ self.probs[:, :-1]
        weights[is_end] = 0
        weights[is_end, 0] = ~impossible[rows, number][is_end]
        weights[~good[rows] | (others > 0)] = 0
        with np.errstate(divide="ignore"):
            return normalise_probabilities(np.log(weights))

    def posterior(self, name: str, tokens: np.ndarray, sees: str = BOTH) -> np.ndarray | None:
        """Return the probability of each class of a labelled set: see `World.posterior`.

        At the end of a sentence, the right side reveals only that there is a label.
        """
        of_word = self.asked_later.get(name, name)
        at_end = name != of_word
        _, sentences, starts = self._split(tokens)
        flat = sentences.reshape(-1, self.config.longest)
        is_labelled = self._is_homonym(of_word, flat)
        rows = np.flatnonzero(is_labelled.any(axis=1))
        preterminals = self._preterminals[of_word]
        if at_end and sees == RIGHT:
            joint = np.broadcast_to(self._prior_of_first(of_word), (*flat[rows].shape, 2))
        else:
            _, outer = self.sums(flat[rows], BOTH if at_end else sees)
            of_words = self.probs[preterminals][:, flat[rows]].transpose(1, 2, 0)
            joint = outer[..., preterminals] * of_words
        row, column = np.nonzero(is_labelled[rows])
        if at_end:
            row, first = np.unique(row, return_index=True)
            column = column[first]
        with np.errstate(divide="ignore"):
            values = normalise_probabilities(np.log(joint[row, column])).round(_EXACT_DIGITS)
        document, number = np.divmod(rows[row], self.config.sentences)
        if at_end:
            column = (flat[rows[row]] != NO_TOKEN).sum(axis=1)
        posterior = np.full((*tokens.shape, 2), np.nan)
        posterior[document, starts[document, number] + column] = values
        return posterior

    def _prior_of_first(self, name: str) -> np.ndarray:
        """Return weights of the classes of the first labelled word of a sentence, (2,)."""
        homonyms = self.probs[:, self.blocks[SETS[name]]].sum(axis=1)
        before = np.repeat((1 - homonyms)[None, :, None], self.config.longest, axis=0)
        outer = self.grammar.outside_of_prefixes(self.grammar.inside(before))
        chosen = self._preterminals[name]
        return np.asarray(outer[:, chosen, 0].sum(axis=0) * homonyms[chosen])

    # ---------------------------------------------------------------- minimal pairs

    def minimal_pairs(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of documents of a kind: see `World.minimal_pairs`.

        The first word that belongs to one kind only is replaced by the word of the other kind with
        the same rank. Pairs whose bad document is possible are left out.
        """
        tokens = self.sample(keys).tokens
        first, second = (self.blocks[f"{SETS[kind]}{number}"] for number in "12")
        partner = np.full(len(self.symbols) + 1, NO_TOKEN)
        partner[first], partner[second] = second, first
        others = partner[tokens]
        rows = np.flatnonzero((others != NO_TOKEN).any(axis=1))
        columns = (others[rows] != NO_TOKEN).argmax(axis=1)
        bad = tokens[rows].copy()
        bad[np.arange(len(rows)), columns] = others[rows, columns]
        is_pair = np.isneginf(self.log_probs(bad))
        return tokens[rows[is_pair]], bad[is_pair]

    def parameters(self) -> dict[str, Any]:
        words = {}
        for name, row in zip(self.grammar.preterminals, self.probs.tolist()):
            words[name] = {word: p for word, p in zip(self.symbols, row) if p}
        rules = {" ".join(rule): p for rule, p in self.grammar.rules.items()}
        return {"rules": rules, "words": words}
