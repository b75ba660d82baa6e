"""The exact probabilities of quad and mirrored are those of an enumeration of a shrunk world."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise, product
from math import comb

import numpy as np
import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.ngrams import NGram
from metaseq_lm.data.preprocess.world import _collect_labelled
from metaseq_lm.data.worlds import measures
from metaseq_lm.data.worlds.base import (
    BOTH,
    LEFT,
    NO_LABEL,
    NO_TOKEN,
    RIGHT,
    World,
    build_world,
    words_of,
)
from metaseq_lm.data.worlds.clauses import _balanced

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SHRUNK = dict.fromkeys(("topics", "nouns", "verbs", "fillers", "states", "names"), 2)
SHRUNK["state_words"] = 3
# Of two states the transitions are symmetric.
ONE_CLAUSE = SHRUNK | {"clauses": 1, "states": 3, "chain": 4, "pairs": 3}
SHORT = {"chain": 2, "pairs": 1, "copies": 2, "phrases": 1}
TWO_CLAUSES = SHRUNK | SHORT | {"clauses": 2, "nouns": 1}
SIZES = {"one": ONE_CLAUSE, "two": TWO_CLAUSES}
Words = tuple[str, ...]


def clauses(world: World, topic: int) -> Iterator[tuple[Words, tuple[int, ...], float]]:
    """Yield each way to make a clause: words, the states of the chain, probability.

    Written from the definition of the language, by choice after choice; it shares only the tables.
    """
    table, config = world.parameters(), world.config
    nouns, verbs, fillers = (table[name][topic] for name in ("nouns", "verbs", "fillers"))
    noun_forms = [(f"noun{i}{n}", n, p / 2) for i, p in enumerate(nouns) for n in "sp"]
    after = [(prep, noun, p / 2) for prep in ("P1", "P2") for noun, _, p in noun_forms]
    objects = [((), 0.5), *(((noun,), p / 2) for noun, _, p in noun_forms)]
    for k, p_phrases in enumerate(table["phrases"]):
        for (head, number, p_head), *rest in product(noun_forms, *[after] * k):
            phrases = tuple(word for prep, noun, _ in rest for word in (prep, noun))
            p_rest = np.prod([p for _, _, p in rest])
            for (v, p_verb), (last, p_last) in product(enumerate(verbs), objects):
                words = (head, *phrases, f"verb{v}{number}", *last)
                yield words, (), p_phrases * p_head * p_rest * p_verb * p_last / 4
    step, hidden = table["transitions"], getattr(config, "hidden", 0)
    emit = [{f"state{w}": p * (1 - hidden) for w, p in enumerate(e)} for e in table["emissions"]]
    if hidden:
        emit = [{**words, "?": hidden} for words in emit]
    for states in product(range(config.states), repeat=config.chain):
        p_states = np.prod([1 / config.states, *(step[a][b] for a, b in pairwise(states))])
        for shown in product(*(emit[state].items() for state in states)):
            words, p_words = zip(*shown)
            yield words, states, p_states * np.prod(p_words) / 4
    for numbers in product(range(config.names), repeat=config.copies):
        names = tuple(f"name{i}" for i in numbers)
        yield ("CP", *names, "EQ", *names), (), config.names**-config.copies / 4
    n = config.pairs
    shapes = _balanced(n)
    constant = 1 / (len(shapes) * comb(2 * n + 2, 2) * 3**n * 4)
    for shape, kinds in product(shapes, product("([{", repeat=n)):
        row, stack, left = [], [], list(kinds)
        for sign in shape:
            if sign == "(":
                stack.append(left.pop(0))
                row.append(stack[-1])
            else:
                row.append({"(": ")", "[": "]", "{": "}"}[stack.pop()])
        for at, chosen in product(
            combinations(range(2 * n + 2), 2), product(enumerate(fillers), repeat=2)
        ):
            brackets, words = iter(row), []
            ((first, p_first), (second, p_second)) = chosen
            for position in range(2 * n + 2):
                filler = {at[0]: f"fill{first}", at[1]: f"fill{second}"}.get(position)
                words.append(filler or next(brackets))
            yield tuple(words), (), constant * p_first * p_second


def tables(world: World) -> list[dict[Words, float]]:
    """Return the probability of every document under each topic."""
    result = []
    for topic in range(world.config.topics):
        of_clauses: dict[Words, float] = defaultdict(float)
        for words, _, p in clauses(world, topic):
            of_clauses[(*words, ".")] += p
        documents: dict[Words, float] = {(): 1 / world.config.topics}
        for _ in range(world.config.clauses):
            pairs = product(documents.items(), of_clauses.items())
            documents = {a + b: p * q for (a, p), (b, q) in pairs}
        result.append(documents)
    return result


@pytest.fixture(scope="module", params=list(product(("quad", "mirrored"), SIZES)), ids="-".join)
def enumerated(request: pytest.FixtureRequest) -> tuple[World, list[dict[Words, float]]]:
    """Return a shrunk world and the probability of each of its documents under each topic."""
    name, size = request.param
    world = build_world(name, 3, words_of(SIZES[size]))
    return world, tables(world)


def test_documents_have_their_probability_and_no_others_exist(enumerated) -> None:
    world, by_topic = enumerated
    joint = {document: [table[document] for table in by_topic] for document in by_topic[0]}
    tokens = world.encode([" ".join(document) for document in joint])
    expected = np.array(list(joint.values()))
    log_probs = world.log_probs(tokens)
    np.testing.assert_allclose(np.exp(log_probs), expected.sum(axis=1), **EXACT)
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-12)
    posterior = world.posterior("topic", tokens)
    np.testing.assert_allclose(posterior, expected / expected.sum(axis=1)[:, None], **EXACT)
    halves = world.posterior("topic_half", tokens)
    np.testing.assert_allclose(halves, posterior, **EXACT)  # of two topics each is a half
    drawn = world.sample(world.keys("drawn", 0, 300)).tokens
    assert {tuple(world.text(row).split()) for row in drawn} <= joint.keys()


def test_drawn_documents_have_the_frequencies_of_the_enumeration(enumerated) -> None:
    world, by_topic = enumerated
    size, numbers = len(world.symbols), {word: i for i, word in enumerate(world.symbols)}
    kinds = [block.first for block in (world.agreement.nouns, world.chain.words)]

    def counted(tokens: np.ndarray, topics: np.ndarray) -> np.ndarray:
        """Return how often each symbol occurs, and topic, length and kind as one-hot columns."""
        rows, positions = np.nonzero(tokens != NO_TOKEN)
        words = np.zeros((len(tokens), size))
        np.add.at(words, (rows, tokens[rows, positions]), 1)
        lengths = np.eye(world.longest + 1)[(tokens != NO_TOKEN).sum(axis=1)]
        first = np.digitize(tokens[:, 0], sorted(kinds))
        by_kind = (np.eye(3)[first][:, :, None] * lengths[:, None]).reshape(len(tokens), -1)
        return np.concatenate([words, topics[:, None], by_kind], axis=1)

    tokens = np.full((len(by_topic[0]), world.longest), NO_TOKEN)
    for row, document in enumerate(by_topic[0]):
        tokens[row, : len(document)] = [numbers[word] for word in document]
    joint = np.array([[table[d] for table in by_topic] for d in by_topic[0]])
    total = joint.sum(axis=1)
    expected = total @ counted(tokens, joint[:, 1] / total)
    documents = world.sample(world.keys("frequencies", 0, 30_000))
    drawn = counted(documents.tokens, documents.labels["topic"])
    errors = drawn.std(axis=0) / np.sqrt(len(documents)) + 1e-9
    assert (np.abs(drawn.mean(axis=0) - expected) < 4.5 * errors).all()
    nats = -world.log_probs(documents.tokens)
    entropy = -(total * np.log(total)).sum()
    assert nats.mean() == pytest.approx(entropy, abs=4.5 * nats.std() / np.sqrt(len(nats)))
    # A chain's states: of each word the posterior is as often right as it says.
    is_state = documents.labels["state"] != NO_LABEL
    certainty = world.posterior("state", documents.tokens)[is_state]
    right = certainty.argmax(axis=1) == documents.labels["state"][is_state]
    error = 2 / np.sqrt(len(right))
    assert right.mean() == pytest.approx(certainty.max(axis=1).mean(), abs=error)


def test_cloze_is_that_of_the_enumeration(enumerated) -> None:
    world, by_topic = enumerated
    tokens = world.sample(world.keys("cloze", 0, 25)).tokens
    rows, positions = np.nonzero(tokens != NO_TOKEN)
    expected = np.zeros((len(rows), len(world.symbols)))
    for gap, (row, position) in enumerate(zip(rows, positions)):
        words = world.text(tokens[row]).split()
        for number, symbol in enumerate(world.symbols):
            filled = (*words[:position], symbol, *words[position + 1 :])
            expected[gap, number] = sum(table.get(filled, 0) for table in by_topic)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(world.cloze(tokens, rows, positions), expected, **EXACT)
    by_documents = World.cloze(world, tokens, rows, positions)
    np.testing.assert_allclose(by_documents, expected, **EXACT)


def labels_of(words: Words, states: tuple[int, ...], mirrored: bool) -> dict[str, dict[int, int]]:
    """Return the classes of a clause by set and position, of its end the number of its words."""
    labels: dict[str, dict[int, int]] = defaultdict(dict)
    if words[0].startswith("noun"):
        (verb,) = (at for at, word in enumerate(words) if word.startswith("verb"))
        labels["phrases_ahead"] = {0: verb // 2}
        labels["phrases_behind"] = {verb: verb // 2}
        labels["phrases_around"] = dict.fromkeys(range(1, verb), verb // 2)
        labels["head_number"] = {verb - 1: "sp".index(words[0][-1])} if verb > 1 else {}
    elif states:
        asked = [at for at, word in enumerate(words) if word == "?" or not mirrored]
        labels["state"] = {at: states[at] for at in asked}
    elif words[0] != "CP":
        stack = []
        for at, word in enumerate(words):
            if word in "([{":
                stack.append(at)
            elif word in ")]}":
                inside = sum(other in "([{" for other in words[stack[-1] + 1 : at])
                labels["pairs_ahead"][stack.pop()] = labels["pairs_behind"][at] = inside
            else:
                labels["depth"][at], labels["pairs_around"][at] = len(stack), words.count("(")
    for name, classes in [(name, classes) for name, classes in labels.items() if classes]:
        asked_at = (max if name == "pairs_behind" else min)(classes)
        labels[f"{name}_end"] = {len(words): classes[asked_at]}
    return labels


@cache
def labelled_documents(world: World) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return each document with each choice of states, its probability and labels of words."""
    by_topic = [list(clauses(world, topic)) for topic in range(world.config.topics)]
    forms = [labels_of(*form[:2], world.name == "mirrored") for form in by_topic[0]]
    chosen = list(product(range(len(forms)), repeat=world.config.clauses))
    probs = np.array([[p for _, _, p in of_clauses] for of_clauses in by_topic])
    texts = [" ".join(" ".join((*by_topic[0][c][0], ".")) for c in row) for row in chosen]
    tokens = world.encode(texts)
    names = [name for name in world.label_sets if not name.startswith("topic")]
    labels = {name: np.full(tokens.shape, NO_LABEL) for name in names}
    for document, row in enumerate(chosen):
        start = 0
        for clause in row:
            for name in forms[clause].keys() & labels.keys():
                for at, label in forms[clause][name].items():
                    labels[name][document, start + at] = label
            start += len(by_topic[0][clause][0]) + 1
    return tokens, probs[:, np.array(chosen)].prod(axis=2).mean(axis=0), labels


@pytest.mark.parametrize("sees", [LEFT, RIGHT, BOTH])
def test_labels_of_words_are_those_of_the_enumeration(enumerated, sees: str) -> None:
    world, _ = enumerated
    tokens, weights, labels = labelled_documents(world)
    documents = world.sample(world.keys("labels", 0, 100))
    if world.name == "quad" and sees == RIGHT:
        assert {world.posterior(name, tokens, sees) for name in world.label_sets} == {None}
        return
    rows, lengths = np.arange(len(tokens)), (tokens != NO_TOKEN).sum(axis=1)
    for name in labels:
        posterior, drawn = world.posterior(name, documents.tokens, sees), documents.labels[name]
        np.testing.assert_array_equal(np.isnan(posterior[..., 0]), drawn == NO_LABEL)
        places = np.argwhere(drawn != NO_LABEL)
        assert len(places) > 8
        if sees == BOTH and not name.startswith("state"):
            assert (posterior.argmax(axis=-1) == drawn)[drawn != NO_LABEL].all()
        for row, position in places[:: len(places) // 8]:
            words = documents.tokens[row][documents.tokens[row] != NO_TOKEN]
            columns = position + (lengths - len(words) if sees == RIGHT else 0 * lengths)
            alike = (lengths == len(words)) | (sees != BOTH)
            alike &= (columns >= 0) & (columns < lengths)
            first = 0 if sees == RIGHT else -position
            for offset in range(first, 1 if sees == LEFT else len(words) - position):
                shifted = (columns + offset) % tokens.shape[1]
                alike &= tokens[rows, shifted] == words[position + offset]
            classes = labels[name][rows, np.where(alike, columns, 0)]
            alike &= classes != NO_LABEL
            expected = np.bincount(classes[alike], weights[alike], posterior.shape[-1])
            expected /= expected.sum()
            np.testing.assert_allclose(posterior[row, position], expected, **EXACT)


def test_each_side_is_needed_by_two_labels_and_the_order_turns_on_mirrored_ones() -> None:
    world = build_world("mirrored", 0)
    scores = {}
    for name in world.label_sets:
        train, test = (_collect_labelled(world, name, split, 512) for split in ("train", "test"))
        scores[name] = measures.label_references(world, name, train, test)
    needs = {name: score["needs"] for name, score in scores.items() if "needs" in score}
    for need, names in {
        RIGHT: {"phrases_ahead", "pairs_ahead"},
        LEFT: {"phrases_behind", "pairs_behind"},
        BOTH: {"phrases_around", "pairs_around", "state"},
        measures.EITHER: {"depth", "head_number"},
    }.items():
        assert {name for name in needs if needs[name] == need} == names
    assert {name: scores[name]["asks"] for name in world.asked_later} == world.asked_later
    assert world.asked_later.keys() == {f"{name}_end" for name in needs}
    for name in ("phrases", "pairs"):
        behind, ahead = scores[f"{name}_behind"], scores[f"{name}_ahead"]
        assert behind["bayes_left"] == 1 > behind["bayes_right"] + 0.3
        assert ahead["bayes_right"] == 1 > ahead["bayes_left"] + 0.3


def test_what_is_no_document_has_probability_zero() -> None:
    world = build_world("quad", 3, words_of(TWO_CLAUSES))
    wrong = [
        "noun0s verb0s .",  # one clause
        "noun0s verb0s . noun0s verb0s",  # no end
        ". .",
        "noun0s verb0p . noun0s verb0s .",  # agreement
        "noun0s P1 . noun0s verb0s .",
        "CP name0 name1 EQ name0 name0 . noun0s verb0s .",
        "( ] fill0 fill0 . noun0s verb0s .",
        ") ( fill0 fill0 . noun0s verb0s .",
        "( fill0 fill0 fill0 . noun0s verb0s .",
        "state0 . noun0s verb0s .",
        "noun0s verb0s . noun0s verb0s . noun0s",
    ]
    tokens = world.encode(wrong)
    assert np.isneginf(world.log_probs(tokens)).all()
    right = world.encode(["noun0s P1 noun0p verb0s . CP name0 name1 EQ name0 name1 ."])
    assert np.isfinite(world.log_probs(right)).all()
    right[0, 2] = NO_TOKEN
    assert np.isneginf(world.log_probs(right)).all()


def test_tables_are_as_defined() -> None:
    table = build_world("quad", 5, ["sharpness=0"]).parameters()
    np.testing.assert_allclose(table["transitions"][4], [0.05, 0.05, 0.05, 0.05, 0.05, 0.75])
    emissions = np.array(table["emissions"])
    for word in range(24):
        first = word % 6
        second = (first + 1 + word // 6 % 5) % 6
        assert set(np.flatnonzero(emissions[:, word])) == {first, second}
    lexemes = 1 / (np.arange(10) + 3)
    np.testing.assert_allclose(table["nouns"], [lexemes / lexemes.sum()] * 8)
    np.testing.assert_allclose(table["phrases"], [0.4, 0.4, 0.2])
    logits = np.log(build_world("quad", 5, ["topics=2000"]).parameters()["nouns"])
    scores = logits + np.log(np.arange(10) + 3)
    # 1.3 times normal numbers, less the mean of their row.
    spread = (scores - scores.mean(axis=1, keepdims=True)).std() * np.sqrt(10 / 9)
    assert spread == pytest.approx(1.3, abs=0.03)


def test_a_document_depends_on_its_key_only() -> None:
    world = build_world("quad", 11)
    keys = world.keys("train", 0, 40)
    whole, part = world.sample(keys), world.sample(keys[17:23])
    np.testing.assert_array_equal(part.tokens, whole.tokens[17:23])
    np.testing.assert_array_equal(part.labels["state"], whole.labels["state"][17:23])
    assert world.text(whole.tokens[0]) == world.text(build_world("quad", 11).sample(keys).tokens[0])
    other = build_world("quad", 12)
    assert (other.parameters()["nouns"][0] != np.array(world.parameters()["nouns"][0])).any()


def test_labels_of_documents() -> None:
    world = build_world("quad", 0, ["clauses=1"])
    text = "( [ fill0 ] ( fill1 ) ) ."
    certain = world.posterior("depth", world.encode([text]))[0]
    assert certain[2].argmax() == 2 and certain[5].argmax() == 2 and np.isnan(certain[3]).all()
    # The noun before the verb tells nothing of the head's number, and is not the head itself.
    documents = world.sample(world.keys("heads", 0, 4000))
    rows, columns = np.nonzero(documents.labels["head_number"] != NO_LABEL)
    numbers = (documents.tokens[rows, columns] - world.agreement.nouns.first) % 2
    agreeing = (numbers == documents.labels["head_number"][rows, columns]).mean()
    assert abs(agreeing - 0.5) < 3 * (0.25 / len(rows)) ** 0.5 and len(rows) > 500
    assert world.agreement.prepositions.contains(documents.tokens[rows, columns - 1]).all()


@pytest.mark.parametrize("kind", ["agreement_attractor", "agreement_plain", "copy", "brackets"])
def test_minimal_pairs_differ_in_one_token_and_only_one_is_possible(kind: str) -> None:
    world = build_world("quad", 11)
    good, bad = world.minimal_pairs(kind, world.keys("pairs", 0, 300))
    assert len(good) > 40 and ((good != bad).sum(axis=1) == 1).all()
    assert np.isfinite(world.log_probs(good)).all() and np.isneginf(world.log_probs(bad)).all()
    rows, positions = np.nonzero(good != bad)
    words = [(world.symbols[good[i]], world.symbols[bad[i]]) for i in zip(rows, positions)]
    for right, wrong in words:
        if kind.startswith("agreement"):
            assert right[:-1] == wrong[:-1] and {right[-1], wrong[-1]} == {"s", "p"}
        elif kind == "copy":
            assert right[:4] == wrong[:4] == "name"
        else:
            assert right in ")]}" and wrong in ")]}"
    if kind.startswith("agreement"):
        for row, position in zip(rows, positions):
            misleads = (
                world.symbols[good[row, position - 1]][-1] != world.symbols[good[row, position]][-1]
            )
            assert misleads == (kind == "agreement_attractor")


def test_baselines_of_labelled_sets() -> None:
    world = build_world("quad", 11)
    documents = world.sample(world.keys("baselines", 0, 1200))
    train, test = documents.select(np.arange(800)), documents.select(np.arange(800, 1200))
    topic = measures.label_references(world, "topic", train, test)
    assert topic["chance"] == 1 / 8 and topic["majority"] < 0.2
    assert 0.4 < topic["bag_of_words"] < topic["bayes"] < 0.85
    state = measures.label_references(world, "state", train, test)
    assert state["word"] < state["bayes_left"] < state["bayes"]
    # The share of each word's most probable state, all states being as frequent.
    best = world.chain.emissions.max(axis=0).sum() / 6
    assert state["word"] == pytest.approx(best, abs=4 / np.sqrt(state["labels"]))


def test_ties_of_pairs_count_one_half() -> None:
    scores = np.array([-np.inf, 0.0, 1.0]), np.array([-np.inf, 1.0, 0.0])
    assert measures.pair_accuracy(*scores) == 0.5


@pytest.mark.slow
def test_full_world_has_the_expected_constants() -> None:
    """Over draws of the constants, with the spread between draws.

    The expected values are those of an independent implementation with one draw.
    """
    rows = []
    for seed in range(6):
        world = build_world("quad", seed)
        documents = world.sample(world.keys("constants", 0, 1500))
        ngram = NGram(*measures.join_documents(documents.tokens[:500]), len(world.symbols))
        losses = measures.measure_losses(world, ngram, documents, gaps=3000)
        accuracy = {}
        for name in world.label_sets:
            reference = measures.label_references(world, name, documents, documents)
            accuracy[name] = (reference["bayes"], reference.get("bayes_left"))
        word = world.chain.emissions.max(axis=0).sum() / 6
        means = [losses[name].mean for name in ("document", "token", "unigram", "cloze")]
        rows.append([*means, accuracy["topic"][0], *accuracy["state"], word])
        assert accuracy["depth"] == accuracy["head_number"] == (1, 1)
        # 4 clauses of a mean of 4.1, 7, 8 and 8 words, and their ends.
        assert abs(documents.lengths.mean() - 31.1) < 4 * documents.lengths.std() / 1500**0.5
    values = np.array(rows)
    reference_values = [56.13, 1.819, 4.084, 0.965, 0.680, 0.894, 0.820, 0.644]
    distance = np.abs(values.mean(axis=0) - reference_values) / values.std(axis=0, ddof=1)
    assert (distance < 3).all(), distance


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qaud", [], "Did you mean 'quad'"),
        ("quad", ["topcs=3"], "Did you mean 'topics'"),
        ("quad", ["topics=many"], "topics=many"),
        ("quad", ["topics=0"], "topics must be at least 1"),
    ],
)
def test_wrong_worlds_are_refused(name: str, options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_world(name, 0, options)
