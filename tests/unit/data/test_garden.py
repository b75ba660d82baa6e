"""The exact sums of the world garden are those of an enumeration of a shrunk one."""

from collections import defaultdict
from functools import cache
from itertools import product

import numpy as np
import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.worlds import measures
from metaseq_lm.data.worlds.base import BOTH, LEFT, NO_TOKEN, RIGHT, World, build_world
from metaseq_lm.data.worlds.garden import MIRROR, SETS

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SHRUNK = ["words=1", "sentences=1", "shortest=3", "longest=6"]
Trees = dict[tuple[tuple[str, str], ...], float]  # words with their preterminals


def trees(world: World) -> Trees:
    """Return the probability of each sentence with its preterminals, from the rules alone."""
    table, config = world.parameters(), world.config
    rules = defaultdict(list)
    for rule, p in table["rules"].items():
        parent, *children = rule.split()
        rules[parent].append((children, p))

    @cache
    def derive(symbol: str, width: int) -> Trees:
        if symbol in table["words"]:
            words = table["words"][symbol].items()
            return {((word, symbol),): p for word, p in words} if width == 1 else {}
        result: Trees = defaultdict(float)
        for (left, right), p in rules[symbol]:
            for split in range(1, width):
                pairs = product(derive(left, split).items(), derive(right, width - split).items())
                for (a, p_a), (b, p_b) in pairs:
                    result[a + b] += p * p_a * p_b
        return result

    widths = range(config.shortest, config.longest + 1)
    every = {tree: p for width in widths for tree, p in derive("S", width).items()}
    total = sum(every.values())
    return {tree: p / total for tree, p in every.items()}


@pytest.fixture(scope="module")
def enumerated() -> tuple[World, Trees]:
    world = build_world("garden", 3, SHRUNK)
    return world, trees(world)


def sentences_of(every: Trees) -> dict[tuple[str, ...], float]:
    result: dict[tuple[str, ...], float] = defaultdict(float)
    for tree, p in every.items():
        result[tuple(word for word, _ in tree)] += p
    return result


def test_sentences_have_their_probability_and_no_others_exist(enumerated) -> None:
    world, every = enumerated
    expected = sentences_of(every)
    tokens = world.encode([" ".join([*words, "."]) for words in expected])
    probs = np.exp(world.log_probs(tokens))
    np.testing.assert_allclose(probs, list(expected.values()), rtol=1e-11)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    documents = world.sample(world.keys("drawn", 0, 20_000))
    nats = -world.log_probs(documents.tokens)
    entropy = -(probs * np.log(probs)).sum()
    assert nats.mean() == pytest.approx(entropy, abs=4 * nats.std() / np.sqrt(len(nats)))
    two = build_world("garden", 3, [*SHRUNK, "sentences=2"])
    first, second = tokens[:7], tokens[7:14]
    pairs = two.encode([f"{world.text(a)} {world.text(b)}" for a, b in zip(first, second)])
    np.testing.assert_allclose(np.exp(two.log_probs(pairs)), probs[:7] * probs[7:14], **EXACT)
    wrong = two.encode([world.text(first[0]), f"{world.text(first[0])} open1_0 mod_0 late2_0 ."])
    assert np.isneginf(two.log_probs(wrong)).all()
    # A gap in the first sentence, or at its end, whose other sentence is impossible.
    ends = (wrong[1] == 0).argmax()
    for gap in (0, ends):
        assert np.isnan(two.cloze(wrong, np.array([1]), np.array([gap]))).all()


def test_cloze_is_that_of_the_enumeration(enumerated) -> None:
    world, every = enumerated
    probs = sentences_of(every)
    tokens = world.sample(world.keys("cloze", 0, 40)).tokens
    rows, positions = np.nonzero(tokens != NO_TOKEN)
    expected = np.zeros((len(rows), len(world.symbols)))
    for gap, (row, position) in enumerate(zip(rows, positions)):
        words = world.text(tokens[row]).split()
        for number, word in enumerate(world.symbols):
            filled = (*words[:position], word, *words[position + 1 :])
            expected[gap, number] = probs.get(filled[:-1], 0) * (filled[-1] == ".")
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(world.cloze(tokens, rows, positions), expected, **EXACT)
    np.testing.assert_allclose(World.cloze(world, tokens, rows, positions), expected, **EXACT)


@pytest.mark.parametrize("sees", [LEFT, RIGHT, BOTH])
@pytest.mark.parametrize("name", SETS)
def test_readers_are_those_of_the_enumeration(enumerated, name: str, sees: str) -> None:
    world, every = enumerated
    homonym = f"{SETS[name]}_0"
    part = {
        LEFT: lambda words, i: words[: i + 1],
        RIGHT: lambda words, i: words[i:],
        BOTH: lambda words, i: (words, i),
    }[sees]
    at_word = defaultdict(lambda: np.zeros(2))
    at_end = defaultdict(lambda: np.zeros(2))
    for tree, p in every.items():
        words = tuple(word for word, _ in tree)
        places = [i for i, word in enumerate(words) if word == homonym]
        for i in places:
            at_word[part(words, i)][int(tree[i][1][-1]) - 1] += p
        if places:
            at_end["" if sees == RIGHT else words][int(tree[places[0]][1][-1]) - 1] += p
    sentences = [words for words in sentences_of(every) if homonym in words]
    sentences = sentences[:: 1 + len(sentences) // 100]
    assert len(sentences) > 40
    tokens = world.encode([" ".join([*words, "."]) for words in sentences])
    posterior, later = (world.posterior(n, tokens, sees) for n in (name, f"{name}_end"))
    for row, words in enumerate(sentences):
        for i, word in enumerate(words):
            weights = at_word[part(words, i)]
            wanted = weights / weights.sum() if word == homonym else [np.nan] * 2
            np.testing.assert_allclose(posterior[row, i], wanted, **EXACT)
        weights = at_end["" if sees == RIGHT else words]
        np.testing.assert_allclose(later[row, len(words)], weights / weights.sum(), **EXACT)
        assert np.isnan(later[row, : len(words)]).all()


@pytest.mark.parametrize("sees", [LEFT, RIGHT])
def test_parts_have_the_probability_of_all_that_may_complete_them(enumerated, sees: str) -> None:
    world, every = enumerated
    expected: dict[tuple[str, ...], float] = defaultdict(float)
    for words, p in sentences_of(every).items():
        for i in range(len(words)):
            expected[words[: i + 1] if sees == LEFT else words[i:]] += p
    sentences = world.encode([" ".join(words) for words in list(sentences_of(every))[::100]])
    _, outer = world.sums(sentences, sees)
    for row, words in enumerate(world.text(tokens).split() for tokens in sentences):
        for i in range(len(words)):
            part = tuple(words[: i + 1] if sees == LEFT else words[i:])
            seen = outer[row, i] @ world.probs[:, sentences[row, i]]
            assert seen == pytest.approx(expected[part] * world.grammar.total, rel=1e-11)


def test_the_language_is_its_mirror_image() -> None:
    world = build_world("garden", 5, ["sentences=1"])
    tokens = world.sample(world.keys("mirror", 0, 300)).tokens
    stems = MIRROR | {right: left for left, right in MIRROR.items()}

    def mirrored(word: str) -> str:
        block, number = word.split("_")
        stem = block.rstrip("12")
        return f"{stems.get(stem, stem)}{block[len(stem) :]}_{number}"

    texts = [world.text(row).split()[-2::-1] for row in tokens]
    reversed_ = world.encode([" ".join([*map(mirrored, words), "."]) for words in texts])
    np.testing.assert_allclose(world.log_probs(reversed_), world.log_probs(tokens), rtol=1e-12)
    for name in ("sense", "attachment"):
        there = world.posterior(f"{name}_left", tokens, LEFT)
        back = world.posterior(f"{name}_right", reversed_, RIGHT)
        for row, words in enumerate(texts):
            n = len(words)
            np.testing.assert_allclose(there[row, :n], back[row, :n][::-1], **EXACT)


def test_labels_need_what_their_names_say() -> None:
    world = build_world("garden", 11)
    documents = world.sample(world.keys("needs", 0, 2000))
    train, test = documents.select(np.arange(1000)), documents.select(np.arange(1000, 2000))
    scores = {name: measures.label_references(world, name, train, test) for name in SETS}
    for name in SETS:
        assert scores[name]["needs"] == name.rpartition("_")[2]
        assert world.asked_later[f"{name}_end"] == name
        assert abs(scores[name]["word"] - 0.5) < 0.05 and scores[name]["bayes"] > 0.9
        # Of each word the posterior is as often right as it says.
        posterior = world.posterior(name, test.tokens)[test.labels[name] >= 0]
        certainty = posterior.max(axis=1)
        error = 2 / np.sqrt(len(certainty))
        assert scores[name]["bayes"] == pytest.approx(certainty.mean(), abs=error)
    # A side that tells nothing: no rounding breaks the tie.
    right = world.posterior("sense_left", test.tokens, RIGHT)[test.labels["sense_left"] >= 0]
    is_tie = abs(right[:, 0] - 0.5) < 1e-9
    assert (right[is_tie] == 0.5).all() and is_tie.mean() > 0.3
    for name in ("sense", "attachment"):
        of_left, of_right = scores[f"{name}_left"], scores[f"{name}_right"]
        for left, right in ((LEFT, RIGHT), (RIGHT, LEFT)):
            error = 2 / np.sqrt(min(of_left["labels"], of_right["labels"]))
            assert abs(of_left[f"bayes_{left}"] - of_right[f"bayes_{right}"]) < error


@pytest.mark.parametrize("kind", SETS)
def test_minimal_pairs_differ_in_one_token_and_only_one_is_possible(kind: str) -> None:
    world = build_world("garden", 11)
    good, bad = world.minimal_pairs(kind, world.keys("pairs", 0, 400))
    assert len(good) > 40 and ((good != bad).sum(axis=1) == 1).all()
    assert np.isfinite(world.log_probs(good)).all() and np.isneginf(world.log_probs(bad)).all()
    words = {world.symbols[i][: len(SETS[kind])] for i in good[good != bad]}
    assert words == {SETS[kind]}


def test_a_document_depends_on_its_key_only() -> None:
    world = build_world("garden", 11)
    keys = world.keys("train", 0, 40)
    whole, part = world.sample(keys), world.sample(keys[17:23])
    np.testing.assert_array_equal(part.tokens, whole.tokens[17:23])
    for name in world.label_sets:
        np.testing.assert_array_equal(part.labels[name], whole.labels[name][17:23])


def test_the_longest_sentences_keep_their_precision() -> None:
    world = build_world("garden", 11, ["shortest=40", "longest=40", "sentences=1"])
    tokens = world.sample(world.keys("long", 0, 20)).tokens
    assert ((nats := -world.log_probs(tokens)) > 100).all() and np.isfinite(nats).all()


def test_shortest_above_longest_is_refused() -> None:
    with pytest.raises(UsageError, match="shortest=9"):
        build_world("garden", 0, ["shortest=9", "longest=8"])
