"""The exact probabilities of the world recall are those of an enumeration of shrunk ones."""

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest

from metaseq_lm.data.worlds import measures
from metaseq_lm.data.worlds.base import BOTH, LEFT, NO_LABEL, RIGHT, World, build_world, words_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SHRUNK = {"values": 2, "fact_values": 2, "shown": 0.4, "facts": 0.3, "attributes": 1}
SHRUNK |= {"entities": 1, "again": 0.4}
WORLDS = {
    "two keys": SHRUNK | {"sections": 2, "units": 2, "keys": 2},
    "three values": SHRUNK | {"sections": 1, "units": 3, "keys": 2, "values": 3},
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
        units.append(((f"key{key}", *words), p * (1 - config.facts)))
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
        if unit[0].startswith("key") or unit[1] == "attribute0":
            return None
        stated = (unit[0], "attribute0") in [other[:2] for other in units]
        return None if stated else f"value0_{world.facts[int(unit[0][6:]), 0]}"
    slots = (1,) if word == "colour" else (1, 2)
    if any(unit[slot] != "?" for slot in slots):
        return None
    values, sides = [], []
    for slot in slots:
        told = [i for i, other in enumerate(units) if other[0] == unit[0] and other[slot] != "?"]
        if not told or told[0] >= end:
            return None
        sides += {"before" if i < number else "after" for i in told}
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


def p_keys(world: World, units: tuple[Unit, ...]) -> float:
    """Return the probability of the keys of units of a document."""
    config, p = world.config, 1.0
    for start in range(0, len(units), config.units):
        keys = [first for first, *_ in units[start : start + config.units] if first[0] == "k"]
        p *= config.keys ** -bool(keys)
        for key, other in pairwise(keys):
            p *= (1 - config.again) / config.keys + config.again * (key == other)
    return p


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
            documents[words] += np.prod(probs) * p_keys(world, words) / len(bindings)
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


def test_a_reader_of_what_follows_an_end_sums_over_what_precedes() -> None:
    """Labels across an end need longer documents: all first sections before a few second ones."""
    world = build_world("recall", 3, words_of(SHRUNK | {"sections": 2, "units": 3, "keys": 2}))
    shown = product(("key0", "key1"), ("?", "colour0", "colour1"), ("?", "size0", "size1"))
    words = [*shown, ("entity0", "attribute0", f"value0_{world.facts[0, 0]}")]
    checked = 0
    for follows in world.sample(world.keys("follows", 0, 8)).tokens[:, world.width :]:
        texts = world.text(follows).split()
        second = [tuple(texts[i : i + 3]) for i in (0, 3, 6)]
        documents = [[*first, *second] for first in product(words, repeat=3)]
        tokens = encoded(world, documents)
        probs = np.exp(world.log_probs(tokens))
        for name in ("colour_before_end", "pair_before_end", "pair_after_end", "pair_across_end"):
            joint = dict.fromkeys(world.label_sets[name], 0.0)
            for row in np.flatnonzero(probs):
                label = labels_of(world, documents[row], name).get(world.width - 1)
                if label is not None:
                    joint[label] += probs[row]
                    asked = row
            if total := sum(joint.values()):
                answers = world.posterior(name, tokens[asked : asked + 1], RIGHT)
                expected = np.array(list(joint.values())) / total
                np.testing.assert_allclose(answers[0, world.width - 1], expected, **EXACT)
                checked += bool(np.ptp(expected) > 1e-6)
    assert checked > 4


@pytest.mark.parametrize(
    "text",
    [
        "key0 ? ? . key0 ? ?",
        "key0 ? ? . key0 ? .",
        "key0 ? ? . . ? ? .",
        "key0 colour0 ? . key0 colour1 ? .",
        "key0 size0 ? . key0 ? ? .",
        "entity0 attribute0 ? . key0 ? ? .",
        "entity0 attribute0 value1_0 . key0 ? ? .",
        "key0 attribute0 value0_0 . key0 ? ? .",
        "entity0 attribute0 wrong . key0 ? ? .",
    ],
)
def test_what_is_no_document_has_probability_zero(text: str) -> None:
    sizes = {"sections": 2, "units": 1, "keys": 1, "entities": 1, "fact_values": 2}
    world = build_world("recall", 0, words_of(sizes))
    right, wrong = (f"value0_{(world.facts[0, 0] + i) % 2}" for i in range(2))
    possible = f"entity0 attribute0 {right} . key0 ? size3 ."
    log_probs = world.log_probs(world.encode([text.replace("wrong", wrong), possible]))
    assert np.isneginf(log_probs[0]) and np.isfinite(log_probs[1])


def test_a_label_needs_what_its_name_says() -> None:
    world = build_world("recall", 11)
    documents = world.sample(world.keys("needs", 0, 2400))
    train, test = documents.select(np.arange(1200)), documents.select(np.arange(1200, 2400))
    for name in set(world.label_sets) - set(world.asked_later) - {"fact"}:
        scores = measures.label_references(world, name, train, test)
        assert scores["needs"] == NEEDS[name.partition("_")[2]] and scores["bayes"] == 1, name
    for later, name in world.asked_later.items():
        scores = measures.label_references(world, later, train, test)
        assert scores["asks"] == name and scores["bayes_left"] == 1 > 1.5 * scores["bayes_right"]


def test_before_and_after_are_mirror_images() -> None:
    world = build_world("recall", 11)
    config, documents = world.config, world.sample(world.keys("mirror", 0, 100))

    def units_of(values: np.ndarray) -> np.ndarray:
        """Return values (N, S, ...) as (N, units, 3, ...)."""
        sections = values.reshape(100, config.sections, world.width, *values.shape[2:])
        return sections[:, :, :-1].reshape(100, -1, 3, *values.shape[2:])

    mirrored = documents.tokens.reshape(100, config.sections, world.width).copy()
    mirrored[:, :, :-1] = units_of(documents.tokens)[:, ::-1].reshape(mirrored[:, :, :-1].shape)
    mirrored = mirrored.reshape(100, -1)
    np.testing.assert_allclose(world.log_probs(mirrored), world.log_probs(documents.tokens))
    for name, (sees, seen) in product(("colour", "pair"), ((LEFT, RIGHT), (RIGHT, LEFT))):
        before = world.posterior(f"{name}_before", mirrored, sees)
        after = world.posterior(f"{name}_after", documents.tokens, seen)
        np.testing.assert_array_equal(units_of(before), units_of(after)[:, ::-1])
        assert (~np.isnan(before)).any()


@pytest.mark.parametrize("kind", ["facts", "recall_left", "recall_right"])
def test_minimal_pairs_contradict_a_fact_or_one_side(kind: str) -> None:
    world = build_world("recall", 11)
    good, bad = world.minimal_pairs(kind, world.keys("pairs", 0, 200))
    assert len(good) > 190 and ((good != bad).sum(axis=1) == 1).all()
    assert np.isfinite(world.log_probs(good)).all() and np.isneginf(world.log_probs(bad)).all()
    for row, position in zip(*np.nonzero(good != bad)):
        right, wrong = world.symbols[good[row, position]], world.symbols[bad[row, position]]
        assert right[:-1] == wrong[:-1]
        slot = position % world.width % 3
        same = np.flatnonzero(good[row] == good[row, position - slot]) + slot
        told = same[(same != position) & (good[row, same] == good[row, position])]
        if kind != "facts":
            assert len(told) and ((told < position) == (kind == "recall_left")).all()


def test_a_document_depends_on_its_key_only() -> None:
    world = build_world("recall", 11)
    keys = world.keys("train", 0, 40)
    whole, part = world.sample(keys), world.sample(keys[17:23])
    np.testing.assert_array_equal(part.tokens, whole.tokens[17:23])
    alone = world.sample_labelled("pair_after_end", "test", keys[17:23]).labels
    np.testing.assert_array_equal(alone["pair_after_end"], whole.labels["pair_after_end"][17:23])
    assert (build_world("recall", 12).facts != world.facts).any()
    assert whole.tokens.shape == (40, 256)


@pytest.mark.parametrize("name", ["fact", "fact_end"])
def test_facts_are_asked_of_other_entities_in_each_split(name: str) -> None:
    world, seen = build_world("recall", 11), {}
    for split in ("train", "valid", "test"):
        documents = world.sample_labelled(name, split, world.keys(split, 0, 200))
        row, column = np.nonzero(documents.labels[name] != NO_LABEL)
        if name == "fact":
            seen[split] = set(documents.tokens[row, column])
        else:
            sections = documents.tokens.reshape(200, -1, world.width)[row, column // world.width]
            first = world.entity_words.contains(sections).argmax(axis=1)
            seen[split] = set(sections[np.arange(len(sections)), first])
    assert not seen["train"] & seen["valid"] and not seen["train"] & seen["test"]
    assert not seen["valid"] & seen["test"] and min(map(len, seen.values())) > 20


def test_bits_of_facts() -> None:
    world = build_world("recall", 11)
    total = 256 * 4 * 3
    assert world.parameters()["bits"] == world.references()["facts"]["bits"] == total
    known = world.fact_units()[..., 2] - world.value_words.first - 8 * np.arange(4)
    certain, nothing = np.eye(8)[known], np.full((256, 4, 8), 1 / 8)
    assert world.bits_known(nothing)["bits"] == 0
    assert world.bits_known(certain)["bits"] == total
    nothing[0] = certain[0]
    some = world.bits_known(nothing)
    assert some["bits"] == 12 and some["bits_per_fact"] == pytest.approx(12 / 1024)
    assert some["bits_per_mention"] == pytest.approx(3 * world.parameters()["frequencies"][0])
    assert world.bits_known(1 - certain)["bits"] == -np.inf
    texts = world.text(world.fact_units()[5, 2])
    assert texts == f"entity5 attribute2 {world.parameters()['facts'][5][2]}"
