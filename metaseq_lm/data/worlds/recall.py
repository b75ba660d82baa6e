"""The world "recall": values of keys shown elsewhere in the document, and facts of the corpus.

A document is `sections` sections of `units` units of three tokens and an end "."; by default 4 of
21, 256 tokens. A unit is of one of two kinds, which are independent:

* of a key: `key colour size`. Each document binds a key to a new colour and size, uniformly. Each
  of the two is shown with probability `shown`, and hidden as "?" otherwise. With probability
  `again` the unit repeats the key of the last such unit of its section; else the key is uniform.
* of an entity, with probability `facts`: `entity attribute value`. Entities have frequencies
  1/rank^`zipf`, attributes are uniform. The value is a constant of the world: it holds in the
  whole corpus.

So with V colours and V sizes, and k of the bindings shown once or more,

    p(document) = V^-k times the product over units of their probabilities without the values,

or 0 where two values of a binding or of a fact contradict each other. Apart from the order within a
unit, the world is the same when it is read from its end.

Shapes: N documents, S tokens, U units of a document, K keys, V colours or sizes, E entities,
A attributes, F values of each, C classes; a first axis of 2 is for colours and sizes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_world
from metaseq_lm.data.worlds.base import (
    BOTH,
    LEFT,
    NO_LABEL,
    NO_TOKEN,
    RIGHT,
    Documents,
    World,
    seeded_uniforms,
    uniforms_for,
)
from metaseq_lm.data.worlds.clauses import Alphabet, Symbols, integers_below, number_names

_END, _HIDDEN = ".", "?"
_END_TOKEN, _HIDDEN_TOKEN = 0, 1
_UNIT = 3  # tokens of a unit
_COLOUR, _PAIR, _MATCH = "colour", "pair", "match"  # questions about a key
_NOWHERE, _BEFORE, _AFTER = 0, 1, 2  # the only side on which a hidden value is shown
_PLACES = {"before": (_BEFORE, _BEFORE), "after": (_AFTER, _AFTER), "across": (_BEFORE, _AFTER)}
_OF_KEYS = "colour_before colour_after pair_before pair_after pair_across match_across".split()
_FACT, _LATER = "fact", "_end"
_FACTS, _RECALL = "facts", {"recall_left": _BEFORE, "recall_right": _AFTER}
_GROUPS = {"train": (0, 2), "valid": (1,), "test": (3,)}  # ranks modulo 4 of a split's entities


@dataclass
class _RecallConfig:
    """The size of the language; a small one can be enumerated."""

    sections: int = option(4, "sections of a document", at_least=1)
    units: int = option(21, "units of three tokens of a section", at_least=1)
    keys: int = option(16, "keys, bound anew in each document", at_least=1)
    values: int = option(8, "colours of keys, and sizes", at_least=2)
    again: float = option(
        0.5, "probability that a unit has the key of the one before", at_least=0, below=1
    )
    shown: float = option(0.5, "probability that a colour or size is shown", above=0, below=1)
    facts: float = option(0.25, "probability that a unit is a fact", above=0, below=1)
    entities: int = option(256, "entities that facts are about", at_least=1)
    attributes: int = option(4, "attributes of an entity", at_least=1)
    fact_values: int = option(8, "values of an attribute", at_least=2)
    zipf: float = option(1.0, "exponent of the frequencies of entities", at_least=0)


@dataclass(frozen=True)
class _RecallUnits:
    """The units of documents; NO_TOKEN stands for parts that a unit lacks.

    Attributes:
        good: Whether a document has units and ends where they belong, (N,).
        keys: The key, (N, U).
        shown: The number of the colour and of the size where it is shown, (2, N, U).
        entities: The entity, (N, U).
        attributes: Its attribute, (N, U).
        values: The number of the attribute's value, (N, U).
        first: The first unit that shows a key's colour or size, (2, N, K); U where none does.
        last: The last one, -1 where none does.
        bound: The value that the first one shows, NO_TOKEN where none does.
    """

    good: np.ndarray
    keys: np.ndarray
    shown: np.ndarray
    entities: np.ndarray
    attributes: np.ndarray
    values: np.ndarray
    first: np.ndarray
    last: np.ndarray
    bound: np.ndarray

    def of_key(self, table: np.ndarray) -> np.ndarray:
        """Return the entries of a table (2, N, K) for the key of each unit, (2, N, U)."""
        return np.asarray(np.take_along_axis(table, np.maximum(self.keys, 0)[None], axis=2))

    @cached_property
    def hidden_sides(self) -> np.ndarray:
        """BEFORE or AFTER where only that side shows a value that a unit hides, (2, N, U)."""
        return self._sides((self.keys != NO_TOKEN) & (self.shown == NO_TOKEN))

    @cached_property
    def shown_sides(self) -> np.ndarray:
        """BEFORE or AFTER where only that side also shows a value that a unit shows, (2, N, U)."""
        return self._sides(self.shown != NO_TOKEN)

    def _sides(self, of_units: np.ndarray) -> np.ndarray:
        unit = np.arange(self.keys.shape[1])
        before, after = self.of_key(self.first) < unit, self.of_key(self.last) > unit
        return np.where(of_units & (before != after), np.where(before, _BEFORE, _AFTER), _NOWHERE)


@register_world("recall", dataclass=_RecallConfig)
class Recall(World):
    """Values of keys that the document tells before or after, and facts that the corpus tells."""

    pair_kinds = (_FACTS, *_RECALL)
    config: _RecallConfig

    def __init__(self, config: _RecallConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        alphabet = Alphabet(_END, _HIDDEN)
        self.symbols = words = alphabet.words
        self.key_words = alphabet.block(number_names("key", config.keys))
        self.shown_words = tuple(
            alphabet.block(number_names(name, config.values)) for name in ("colour", "size")
        )
        self.entity_words = alphabet.block(number_names("entity", config.entities))
        self.attribute_words = alphabet.block(number_names("attribute", config.attributes))
        self.value_words = alphabet.block(
            number_names("value", config.attributes), number_names("_", config.fact_values)
        )
        self.width = _UNIT * config.units + 1  # tokens of a section
        self.longest = config.sections * self.width
        weights = np.arange(1, config.entities + 1.0) ** -config.zipf
        self.frequencies = weights / weights.sum()
        uniforms = seeded_uniforms(
            "recall", seed, "facts", shape=(config.entities, config.attributes)
        )
        self.facts = integers_below(uniforms, config.fact_values)
        classes = {
            _COLOUR: words[self.shown_words[0].first :][: config.values],
            _PAIR: ["low-low", "low-high", "high-low", "high-high"],
            _MATCH: ["differ", "same"],
            _FACT: words[self.value_words.first :][: config.fact_values],
        }
        of_words = {name: classes[name.partition("_")[0]] for name in (*_OF_KEYS, _FACT)}
        self.asked_later = {name + _LATER: name for name in of_words}
        later = {name: of_words[word] for name, word in self.asked_later.items()}
        self.label_sets = {**of_words, **later}

    # ---------------------------------------------------------------- documents

    def sample(self, keys: np.ndarray) -> Documents:
        tokens = self._draw_documents(keys)
        units = self.parse(tokens)
        return Documents(tokens, {name: self._labels(units, name) for name in self.label_sets})

    def sample_labelled(self, name: str, split: str, keys: np.ndarray) -> Documents:
        """Return documents with the labels of the set `name` alone.

        Facts are asked of other entities in each split (GROUPS), so that a probe cannot learn them
        from its own training set.
        """
        tokens = self._draw_documents(keys)
        units = self.parse(tokens)
        labels = self._labels(units, name)
        if name.startswith(_FACT):
            rows, numbers, columns = self._labelled(units, name)
            other = ~np.isin(units.entities[rows, numbers] % 4, _GROUPS[split])
            labels[rows[other], columns[other]] = NO_LABEL
        return Documents(tokens, {name: labels})

    def _draw_documents(self, keys: np.ndarray) -> np.ndarray:
        config, rows = self.config, np.arange(len(keys))[:, None]
        uniforms = uniforms_for(keys, "units", 5 * config.sections * config.units)
        kind, item, first, second, again = np.moveaxis(uniforms.reshape(len(keys), -1, 5), 2, 0)
        bindings = uniforms_for(keys, "bindings", 2 * config.keys)
        bound = integers_below(bindings, config.values).reshape(len(keys), 2, config.keys)
        is_fact = kind < config.facts
        drawn = integers_below(item, config.keys)
        # A unit draws its key, or repeats the previous key of its section.
        is_first = self._keys_before(np.where(is_fact, NO_TOKEN, drawn)) == NO_TOKEN
        is_drawn = ~is_fact & (is_first | (again >= config.again))
        unit = np.arange(drawn.shape[1])
        latest = np.maximum.accumulate(np.where(is_drawn, unit, 0), axis=1)
        key = np.take_along_axis(drawn, latest, axis=1)
        words = [self.key_words.token(key)]
        for slot, (symbols, uniform) in enumerate(zip(self.shown_words, (first, second))):
            is_shown = uniform < config.shown
            words.append(np.where(is_shown, symbols.token(bound[rows, slot, key]), _HIDDEN_TOKEN))
        entity = np.searchsorted(self.frequencies.cumsum(), item, side="right")
        entity = np.minimum(entity, config.entities - 1)  # sums of rounded numbers may miss 1
        attribute = integers_below(first, config.attributes)
        fact = [
            self.entity_words.token(entity),
            self.attribute_words.token(attribute),
            self.value_words.token(attribute, self.facts[entity, attribute]),
        ]
        units = np.where(is_fact[..., None], np.stack(fact, axis=-1), np.stack(words, axis=-1))
        tokens = np.full((len(keys), config.sections, self.width), _END_TOKEN)
        tokens[:, :, :-1] = units.reshape(len(keys), config.sections, -1)
        return tokens.reshape(len(keys), -1)

    def _keys_before(self, keys: np.ndarray) -> np.ndarray:
        """Return the last key before each unit of keys (N, U) in its section, or NO_TOKEN."""
        count, size = len(keys), self.config.units
        of_sections = keys.reshape(-1, size)
        latest = np.where(of_sections != NO_TOKEN, np.arange(size), NO_TOKEN)
        before = np.full_like(latest, NO_TOKEN)
        before[:, 1:] = np.maximum.accumulate(latest, axis=1)[:, :-1]
        values = np.take_along_axis(of_sections, np.maximum(before, 0), axis=1)
        return np.where(before == NO_TOKEN, NO_TOKEN, values).reshape(count, -1)

    def _keys_after(self, keys: np.ndarray) -> np.ndarray:
        """Return the next key after each unit of keys (N, U) in its section, or NO_TOKEN."""
        return self._keys_before(keys[:, ::-1])[:, ::-1]

    def _transition_probs(self, keys: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return the probability of keys given neighbouring keys; of a draw next to NO_TOKEN."""
        again, drawn = self.config.again, 1 / self.config.keys
        return np.where(others == NO_TOKEN, drawn, (1 - again) * drawn + again * (keys == others))

    def parse(self, tokens: np.ndarray) -> _RecallUnits:
        """Return the units of documents (N, S)."""
        config, count = self.config, len(tokens)
        padded = np.full((count, max(self.longest, tokens.shape[1])), NO_TOKEN)
        padded[:, : tokens.shape[1]] = tokens
        sections = padded[:, : self.longest].reshape(count, config.sections, self.width)
        good = (sections[:, :, -1] == _END_TOKEN).all(axis=1)
        good &= (padded[:, self.longest :] == NO_TOKEN).all(axis=1)
        words = np.moveaxis(sections[:, :, :-1].reshape(count, -1, _UNIT), 2, 0)

        def numbers(block: Symbols, column: int) -> np.ndarray:
            return np.where(block.contains(words[column]), words[column] - block.first, NO_TOKEN)

        keys, entities = numbers(self.key_words, 0), numbers(self.entity_words, 0)
        shown = np.stack([numbers(block, 1 + slot) for slot, block in enumerate(self.shown_words)])
        attributes, values = numbers(self.attribute_words, 1), numbers(self.value_words, 2)
        of_key = ((shown != NO_TOKEN) | (words[1:] == _HIDDEN_TOKEN)).all(axis=0)
        of_entity = (attributes != NO_TOKEN) & (values != NO_TOKEN)
        of_entity &= values // config.fact_values == attributes
        good &= (((keys != NO_TOKEN) & of_key) | ((entities != NO_TOKEN) & of_entity)).all(axis=1)
        size = keys.shape[1]
        first = np.full((2, count, config.keys), size)
        last, bound = np.full_like(first, -1), np.full_like(first, NO_TOKEN)
        shown[:, keys == NO_TOKEN] = NO_TOKEN
        # Where an index occurs twice, numpy keeps the last assignment.
        slot, row, unit = np.nonzero(shown != NO_TOKEN)
        last[slot, row, keys[row, unit]] = unit
        slot, row, unit = slot[::-1], row[::-1], unit[::-1]
        first[slot, row, keys[row, unit]] = unit
        bound[slot, row, keys[row, unit]] = shown[slot, row, unit]
        values = np.where(values == NO_TOKEN, NO_TOKEN, values % config.fact_values)
        return _RecallUnits(good, keys, shown, entities, attributes, values, first, last, bound)

    # ---------------------------------------------------------------- probabilities

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        config, units = self.config, self.parse(tokens)
        is_key, is_shown = units.keys != NO_TOKEN, units.shown != NO_TOKEN
        right = self.facts[units.entities, units.attributes] == units.values
        good = units.good & (is_key | right).all(axis=1)
        good &= (~is_shown | (units.shown == units.of_key(units.bound))).all(axis=(0, 2))
        shown, hidden = is_shown.sum(axis=(0, 2)), (is_key & ~is_shown).sum(axis=(0, 2))
        of_facts = np.log(config.facts * self.frequencies / config.attributes)[units.entities]
        steps = self._transition_probs(units.keys, self._keys_before(units.keys))
        of_keys = np.log((1 - config.facts) * steps)
        log_probs = np.where(is_key, of_keys, of_facts).sum(axis=1)
        log_probs += shown * np.log(config.shown) + hidden * np.log(1 - config.shown)
        log_probs -= (units.bound != NO_TOKEN).sum(axis=(0, 2)) * np.log(config.values)
        return np.where(good, log_probs, -np.inf)

    def cloze(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the probability of each symbol in a gap: see `World.cloze`.

        It is computed directly in possible documents; in others each symbol is tried.
        """
        possible = np.isfinite(self.log_probs(tokens))[rows]
        probs = np.zeros((len(rows), len(self.symbols)))
        other = np.flatnonzero(~possible)
        probs[other] = super().cloze(tokens, rows[other], positions[other])
        section, column = np.divmod(positions, self.width)
        offset = np.where(column == self.width - 1, _UNIT, column % _UNIT)
        probs[possible & (offset == _UNIT), _END_TOKEN] = 1
        unit = section * self.config.units + column // _UNIT
        units = self.parse(tokens)
        is_key = units.keys[rows, np.minimum(unit, units.keys.shape[1] - 1)] != NO_TOKEN
        for number in range(_UNIT):
            inside = possible & (offset == number)
            gaps = np.flatnonzero(inside & ~is_key)
            probs[gaps] = self._fact_cloze(units, rows[gaps], unit[gaps], number)
            gaps = np.flatnonzero(inside & is_key)
            probs[gaps] = self._key_cloze(units, rows[gaps], unit[gaps], number)
        return probs

    def _fact_cloze(
        self, units: _RecallUnits, rows: np.ndarray, unit: np.ndarray, offset: int
    ) -> np.ndarray:
        """Return the probability of each symbol at a place of units that are facts, (M, V)."""
        probs = np.zeros((len(rows), len(self.symbols)))
        attribute, value = units.attributes[rows, unit], units.values[rows, unit]
        if offset == 0:
            weights = self.frequencies * (self.facts[:, attribute].T == value[:, None])
            probs[:, self.entity_words.first :][:, : self.config.entities] = weights
            return np.asarray(probs / weights.sum(axis=1, keepdims=True))
        # The value's word tells the attribute.
        words = (self.attribute_words.token(attribute), self.value_words.token(attribute, value))
        probs[np.arange(len(rows)), words[offset - 1]] = 1
        return probs

    def _key_cloze(
        self, units: _RecallUnits, rows: np.ndarray, unit: np.ndarray, offset: int
    ) -> np.ndarray:
        """Return the probability of each symbol at a place of units of keys, (M, V)."""
        config, probs = self.config, np.zeros((len(rows), len(self.symbols)))
        count = np.arange(len(rows))
        key, shown = units.keys[rows, unit], units.shown[:, rows, unit]
        # Whether other units tell a key's colour and size, and which, (2, M, K).
        alone = (units.first == units.last)[:, rows, key] & (shown != NO_TOKEN)
        bound = units.bound[:, rows].copy()
        bound[:, count, key] = np.where(alone, NO_TOKEN, bound[:, count, key])
        if offset == 0:
            fits = np.where(bound == NO_TOKEN, 1 / config.values, bound == shown[..., None])
            weights = np.where((shown == NO_TOKEN)[..., None], 1, fits).prod(axis=0)
            for others in (self._keys_before(units.keys), self._keys_after(units.keys)):
                weights *= self._transition_probs(
                    np.arange(config.keys), others[rows, unit][:, None]
                )
            probs[:, self.key_words.first :][:, : config.keys] = weights
            return np.asarray(probs / weights.sum(axis=1, keepdims=True))
        probs[:, _HIDDEN_TOKEN] = 1 - config.shown
        values = self._value_probs(bound[offset - 1, count, key])
        block = self.shown_words[offset - 1]
        probs[:, block.first : block.first + config.values] = config.shown * values
        return probs

    def _value_probs(self, values: np.ndarray) -> np.ndarray:
        """Return probabilities of colours or sizes, (..., V), that are uniform for NO_TOKEN."""
        certain = np.eye(self.config.values)[values]
        return np.where((values == NO_TOKEN)[..., None], 1 / self.config.values, certain)

    # ---------------------------------------------------------------- labels

    def _questions(
        self, units: _RecallUnits, word: str, place: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the units that a set might ask about, and the units that it labels, (N, U)."""
        if word == _FACT:
            is_fact = units.entities != NO_TOKEN
            is_stated = self._is_mentioned(units.entities, units.attributes == 0)
            stated = np.take_along_axis(is_stated, np.maximum(units.entities, 0), axis=1)
            return is_fact, is_fact & (units.attributes > 0) & ~stated
        is_hidden = (units.keys != NO_TOKEN) & (units.shown == NO_TOKEN)
        (one, other), (colours, sizes) = _PLACES[place], units.hidden_sides
        if word == _COLOUR:
            return is_hidden[0], colours == one
        fits = ((colours == one) & (sizes == other)) | ((colours == other) & (sizes == one))
        return is_hidden.all(axis=0), fits

    def _is_mentioned(self, entities: np.ndarray, of_units: np.ndarray) -> np.ndarray:
        """Return whether one of some units, all (N, U), is about an entity, (N, E)."""
        is_stated = np.zeros((len(of_units), self.config.entities), bool)
        row, unit = np.nonzero(of_units)
        is_stated[row, entities[row, unit]] = True
        return is_stated

    def _labelled(
        self, units: _RecallUnits, name: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the document, unit and token position of each label of a set, (M,) each.

        A set NAME_end has one label for each section in which the first unit that NAME might ask
        about has a label that is told before the section ends.
        """
        config, later = self.config, name in self.asked_later
        word, _, place = name.removesuffix(_LATER).partition("_")
        candidates, has_label = self._questions(units, word, place)
        has_label = has_label & units.good[:, None]
        if later:
            of_sections = candidates.reshape(len(candidates), config.sections, -1)
            counts = of_sections.cumsum(axis=2).reshape(candidates.shape)
            has_label &= candidates & (counts == 1)
        row, unit = np.nonzero(has_label)
        section, inside = np.divmod(unit, config.units)
        if later and word != _FACT:
            in_time = units.first[:, row, units.keys[row, unit]] < (section + 1) * config.units
            is_told = in_time[0] if word == _COLOUR else in_time.all(axis=0)
            row, unit, section = row[is_told], unit[is_told], section[is_told]
        column = np.full_like(section, self.width - 1) if later else _UNIT * inside
        return row, unit, section * self.width + column

    def _labels(self, units: _RecallUnits, name: str) -> np.ndarray:
        labels = np.full((len(units.good), self.longest), NO_LABEL)
        row, unit, column = self._labelled(units, name)
        labels[row, column] = self._answers(units, name, (row, unit), BOTH).argmax(axis=-1)
        return labels

    def posterior(self, name: str, tokens: np.ndarray, sees: str = BOTH) -> np.ndarray | None:
        """Return the probability of each class of a labelled set: see `World.posterior`.

        A reader knows that a token has a label and where it stands, because all documents have one
        length. The unseen side then tells nothing: its value is uniform.
        """
        units = self.parse(tokens)
        row, unit, column = self._labelled(units, name)
        if sees == RIGHT and name in self.asked_later:
            answers = self._answers_unseen(units, name, row, unit // self.config.units)
        else:
            answers = self._answers(units, name, (row, unit), sees)
        posterior = np.full((*tokens.shape, len(self.label_sets[name])), np.nan)
        posterior[row, column] = answers
        return posterior

    def _answers(
        self, units: _RecallUnits, name: str, of_units: tuple[np.ndarray, np.ndarray], sees: str
    ) -> np.ndarray:
        """Return the probability of each class for units that a reader sees, (M, C)."""
        word, (row, unit) = name.partition("_")[0], of_units
        if word == _FACT:
            facts = self.facts[units.entities[row, unit], 0]
            return np.asarray(np.eye(self.config.fact_values)[facts])
        bound = units.of_key(units.bound)[:, row, unit]
        if sees == RIGHT or (sees == LEFT and name not in self.asked_later):
            side = units.hidden_sides[:, row, unit]
            bound = np.where(side == (_BEFORE if sees == LEFT else _AFTER), bound, NO_TOKEN)
        return self._classes(word, self._value_probs(bound))

    def _classes(self, word: str, values: np.ndarray) -> np.ndarray:
        """Return class probabilities (..., C) from the probabilities of values, (2, ..., V)."""
        if word == _COLOUR:
            return np.asarray(values[0])
        is_high = 2 * np.arange(self.config.values) >= self.config.values
        colours, sizes = values @ np.stack([~is_high, is_high], axis=1)
        pairs = (colours[..., :, None] * sizes[..., None, :]).reshape(*colours.shape[:-1], 4)
        if word == _PAIR:
            return np.asarray(pairs)
        same = pairs[..., 0] + pairs[..., 3]
        return np.stack([1 - same, same], axis=-1)

    def _answers_unseen(
        self, units: _RecallUnits, name: str, rows: np.ndarray, sections: np.ndarray
    ) -> np.ndarray:
        """Return class probabilities at the end of sections, seen from what follows, (M, C)."""
        # The reader does not know which key or entity is asked about; all keys are alike.
        config, ends = self.config, (sections + 1) * self.config.units
        word, _, place = name.removesuffix(_LATER).partition("_")
        if word == _FACT:
            follows = np.arange(units.keys.shape[1]) >= ends[:, None]
            stated = self._is_mentioned(
                units.entities[rows], follows & (units.attributes[rows] == 0)
            )
            weights = self._fact_weights()[sections] * ~stated
            weights /= weights.sum(axis=1, keepdims=True)
            return np.asarray(weights @ np.eye(config.fact_values)[self.facts[:, 0]])
        follows = units.last[:, rows] >= ends[:, None]
        values = self._value_probs(np.where(follows, units.bound[:, rows], NO_TOKEN))
        total = np.zeros((len(rows), len(self.label_sets[name])))
        orders = {_PLACES[place], _PLACES[place][::-1]}
        for order in sorted(orders):
            # The tokens after the word show no colour or size that only tokens before it show.
            excluded = follows & (np.array(order) == _BEFORE)[:, None, None]
            if word == _COLOUR:
                excluded = excluded[:1]
            weights = ~excluded.any(axis=0)
            total += (weights[..., None] * self._classes(word, values)).sum(axis=1)
        return np.asarray(total / total.sum(axis=1, keepdims=True))

    def _fact_weights(self) -> np.ndarray:
        """Return the probability that the end of each section asks for an entity, (sections, E)."""
        # The first fact of the section is another fact of the entity, and no fact before the end
        # states the one that is asked for.
        config, inside = self.config, np.arange(self.config.units)[:, None]
        stated = config.facts * self.frequencies / config.attributes
        first = (1 - config.facts) ** inside * (config.attributes - 1) * stated
        first = (first * (1 - stated) ** (config.units - 1 - inside)).sum(axis=0)
        before = config.units * np.arange(config.sections)[:, None]
        return np.asarray(first * (1 - stated) ** before)

    # ---------------------------------------------------------------- minimal pairs and facts

    def minimal_pairs(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs of documents of a kind: see `World.minimal_pairs`.

        One value is replaced. The bad document has probability 0: it contradicts a fact, or the
        only other units that show the value, which stand before it (recall_left) or after it.
        """
        tokens = self._draw_documents(keys)
        units, rows = self.parse(tokens), np.arange(len(keys))
        uniforms = uniforms_for(keys, f"pair {kind}", 2)
        if kind == _FACTS:
            choices = (units.values != NO_TOKEN)[:, :, None]
            size, values = self.config.fact_values, units.values[:, :, None]
        else:
            choices = np.moveaxis(units.shown_sides == _RECALL[kind], 0, 2)
            size, values = self.config.values, np.moveaxis(units.shown, 0, 2)
        flat = choices.reshape(len(keys), -1)
        counts = flat.sum(axis=1)
        rank = integers_below(uniforms[:, 0], np.maximum(counts, 1))
        chosen = (flat.cumsum(axis=1) > rank[:, None]).argmax(axis=1)
        unit, slot = np.divmod(chosen, choices.shape[2])
        section, inside = np.divmod(unit, self.config.units)
        offset = 2 if kind == _FACTS else 1 + slot
        column = section * self.width + _UNIT * inside + offset
        value = values[rows, unit, slot]
        other = (value + 1 + integers_below(uniforms[:, 1], size - 1)) % size
        bad = tokens.copy()
        bad[rows, column] += other - value
        makes_one = counts > 0
        return tokens[makes_one], bad[makes_one]

    def fact_units(self) -> np.ndarray:
        """Return the tokens of all facts, entity, attribute and value, (E, A, 3)."""
        entity, attribute = map(np.asarray, np.indices(self.facts.shape))
        value = self.value_words.token(attribute, self.facts)
        words = (self.entity_words.token(entity), self.attribute_words.token(attribute), value)
        return np.stack(words, axis=-1)

    def bits_known(self, probabilities: np.ndarray) -> dict[str, float]:
        """Return the bits of facts that a model knows, from its probabilities of the values.

        A fact is worth log2(F) bits plus log2 of the probability of its value: log2(F) where it is
        certain, 0 where nothing is known, less for an error that the model believes.

        Args:
            probabilities: The values' probabilities, (E, A, F), which sum to 1 for an attribute.

        Returns:
            "bits", the sum over all facts; "bits_per_fact", its mean; "bits_per_mention", the mean
            by the frequencies of the entities.
        """
        of_fact = np.take_along_axis(probabilities, self.facts[..., None], axis=2)[..., 0]
        with np.errstate(divide="ignore"):
            bits = np.log2(self.config.fact_values) + np.log2(of_fact)
        return {
            "bits": float(bits.sum()),
            "bits_per_fact": float(bits.mean()),
            "bits_per_mention": float(self.frequencies @ bits.mean(axis=1)),
        }

    def references(self) -> dict[str, Any]:
        """Return the bits of all facts and of one: the entropy of a model without them."""
        per_fact = float(np.log2(self.config.fact_values))
        return {"facts": {"bits": self.facts.size * per_fact, "bits_per_fact": per_fact}}

    def parameters(self) -> dict[str, Any]:
        return {
            "frequencies": self.frequencies.tolist(),
            "facts": [[self.symbols[value] for value in row] for row in self.fact_units()[..., 2]],
            **self.references()["facts"],
        }
