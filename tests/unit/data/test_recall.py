"""The exact probabilities of the world recall are those of an enumeration of shrunk ones."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from metaseq_lm.data.worlds import measures
from metaseq_lm.data.worlds.base import BOTH, LEFT, NO_LABEL, RIGHT, World, build_world, words_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SHRUNK = {"values": 2, "fact_values": 2, "shown": 0.4, "facts": 0.3, "attributes": 1, "entities": 1}
WORLDS = {
    "two keys": SHRUNK | {"sections": 2, "units": 2, "keys": 2},
    "three values": SHRUNK | {"sections": 1, "units": 3, "keys": 2, "values": 3},
    "three units": SHRUNK | {"sections": 2, "units": 3, "keys": 1},
    "entities": SHRUNK | {"sections": 2, "units": 2, "keys": 1, "entities": 2, "attributes": 2},
}
NEEDS = {"before": "left", "after": "right", "across": "both"}
Unit = tuple[str, str, str]


def possible_units(world: World, colours: list[int], sizes: list[int]) -> list[tuple[Unit, float]]:
    """Return the units of a document with these bindings, and their probabilities."""
    config, table, units = world.config, world.parameters(), []
    for key, has_colour, has_size in product(range(config.keys), (0, 1), (0, 1)):
        words = f"colour{colours[key]}" * has_colour or "?", f"size{sizes[key]}" * has_size or "?"
        p = np.prod(
            [config.shown if shown else 1 - config.shown for shown in (has_colour, has_size)]
        )
        units.append(((f"key{key}", *words), p * (1 - config.facts) / config.keys))
    for entity, attribute in product(range(config.entities), range(config.attributes)):
        p = config.facts * table["frequencies"][entity] / config.attributes
        value = table["facts"][entity][attribute]
        units.append(((f"entity{entity}", f"attribute{attribute}", value), p))
    return units


def label_of(world: World, units: list[Unit], number: int, name: str, end: int) -> str | None:
    """Return the class of a unit of a document, told before unit `end`; written from the words."""
    word, _, place = name.partition("_")
    unit = units[number]
    if word == "fact":
        stated = (unit[0], "attribute0") in [other[:2] for other in units]
        if unit[0].startswith("key") or unit[1] == "attribute0" or stated:
            return None
        return f"value0_{world.facts[int(unit[0][6:]), 0]}"
    values, sides = [], []
    for slot in (1,) if word == "colour" else (1, 2):
        told = [i for i, other in enumerate(units) if other[0] == unit[0] and other[slot] != "?"]
        sides += {"before" if i < number else "after" for i in told}
        if unit[slot] != "?" or not told or told[0] >= end:
            return None
        values.append(units[told[0]][slot])
    wanted = ["after", "before"] if place == "across" else [place] * len(values)
    if sorted(sides) != wanted:
        return None
    high = [2 * int(value[-1]) >= world.config.values for value in values]
    if word == "match":
        return "same" if high[0] == high[1] else "differ"
    return values[0] if word == "colour" else "-".join("high" if h else "low" for h in high)


def labels_of(world: World, units: list[Unit], name: str) -> dict[int, str | None]:
    """Return the class at each position that may have one."""
    size, word = world.config.units, world.asked_later.get(name, name)
    positions = [3 * number + number // size for number in range(len(units))]
    if name == word:
        everywhere = len(units)
        return {p: label_of(world, units, n, word, everywhere) for n, p in enumerate(positions)}
    labels = {}
    for end in range(size, len(units) + 1, size):
        for number in range(end - size, end):
            unit, asks_for = units[number], 2 if word.startswith("colour") else 3
            if word == "fact":
                may_ask = unit[0].startswith("entity")
            else:
                may_ask = unit[0].startswith("key") and set(unit[1:asks_for]) == {"?"}
            if may_ask:
                labels[3 * end + end // size - 1] = label_of(world, units, number, word, end)
                break
    return labels


@pytest.fixture(scope="module", params=WORLDS.values(), ids=WORLDS)
def enumerated(request: pytest.FixtureRequest) -> tuple[World, dict[tuple[Unit, ...], float]]:
    """Return a shrunk world and the probability of each of its documents."""
    world = build_world("recall", 3, words_of(request.param))
    config, documents = world.config, defaultdict(float)
    bindings = list(product(range(config.values), repeat=2 * config.keys))
    for binding in bindings:
        units = possible_units(world, binding[: config.keys], binding[config.keys :])
        for document in product(units, repeat=config.sections * config.units):
            words, probs = zip(*document)
            documents[words] += np.prod(probs) / len(bindings)
    return world, documents


def encoded(world: World, documents: list[tuple[Unit, ...]]) -> np.ndarray:
    """Return documents as tokens, with the ends of sections."""
    size, texts = world.config.units, []
    for units in documents:
        sections = [units[i : i + size] for i in range(0, len(units), size)]
        texts.append(" . ".join(" ".join(map(" ".join, section)) for section in sections) + " .")
    return world.encode(texts)


def test_documents_have_their_probability_and_no_others_exist(enumerated) -> None:
    world, documents = enumerated
    probs = np.exp(world.log_probs(encoded(world, list(documents))))
    np.testing.assert_allclose(probs, list(documents.values()), **EXACT)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    drawn = world.sample(world.keys("drawn", 0, 20_000)).tokens
    nats = -world.log_probs(drawn)
    entropy = -(probs * np.log(probs)).sum()
    assert nats.mean() == pytest.approx(entropy, abs=4.5 * nats.std() / np.sqrt(len(nats)))


def test_cloze_is_that_of_the_enumeration(enumerated) -> None:
    world, documents = enumerated
    table = dict(zip(map(bytes, encoded(world, list(documents))), documents.values()))
    tokens = world.sample(world.keys("cloze", 0, 25)).tokens
    rows, positions = np.indices(tokens.shape).reshape(2, -1)
    filled = np.repeat(tokens[rows], len(world.symbols), axis=0)
    symbols = np.tile(np.arange(len(world.symbols)), len(rows))
    filled[np.arange(len(filled)), np.repeat(positions, len(world.symbols))] = symbols
    expected = np.array([table.get(bytes(row), 0) for row in filled]).reshape(len(rows), -1)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(world.cloze(tokens, rows, positions), expected, **EXACT)
    tokens[0, 1] = 0  # possible again where the gap is there
    by_documents = World.cloze(world, tokens, rows, positions)
    np.testing.assert_allclose(world.cloze(tokens, rows, positions), by_documents, **EXACT)


def test_labels_and_readers_are_those_of_the_enumeration(enumerated) -> None:
    world, documents = enumerated
    tokens = encoded(world, list(documents)).astype(np.int8)
    probs = np.array(list(documents.values()))
    labels = {name: np.full(tokens.shape, NO_LABEL) for name in world.label_sets}
    for (name, classes), (row, units) in product(world.label_sets.items(), enumerate(documents)):
        for position, label in labels_of(world, units, name).items():
            labels[name][row, position] = NO_LABEL if label is None else classes.index(label)
    seen = {
        BOTH: lambda p: tokens,
        LEFT: lambda p: tokens[:, : p + 1],
        RIGHT: lambda p: tokens[:, p:],
    }
    for sees, (name, of_set) in product(seen, labels.items()):
        posterior = world.posterior(name, tokens, sees)
        np.testing.assert_array_equal(np.isnan(posterior[..., 0]), of_set == NO_LABEL)
        for position in np.flatnonzero((of_set != NO_LABEL).any(axis=0)):
            rows = np.flatnonzero(of_set[:, position] != NO_LABEL)
            view = np.ascontiguousarray(seen[sees](position)[rows])
            _, group = np.unique(view.view(f"V{view[0].nbytes}").ravel(), return_inverse=True)
            joint = np.zeros((group.max() + 1, len(world.label_sets[name])))
            np.add.at(joint, (group, of_set[rows, position]), probs[rows])
            expected = joint[group] / joint[group].sum(axis=1, keepdims=True)
            np.testing.assert_allclose(posterior[rows, position], expected, **EXACT)
    drawn = world.sample(world.keys("labels", 0, 200))
    numbers = {bytes(row): number for number, row in enumerate(tokens)}
    chosen = [numbers[bytes(row)] for row in drawn.tokens.astype(np.int8)]
    for name, values in labels.items():
        np.testing.assert_array_equal(drawn.labels[name], values[chosen])
