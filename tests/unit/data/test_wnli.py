"""Pronoun, query and candidates of Winograd sentences."""

import os
from pathlib import Path

import pytest

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks.wnli import (
    _noun_phrases,
    facts_of,
    key,
    overlap,
    phrase_key,
    words_of,
)
from metaseq_lm.data.labelled.sets import LabelledSet

# sentence, hypothesis; the pronoun marked in the sentence, query, some candidates, some that are
# none
CASES = {
    "plain": (
        "The lamp would not go through the old door because *it* was too wide.",
        "The door was too wide.",
        *("the door", {"the lamp"}, {"the old door", "door", "was", "it"}),
    ),
    "middle": (
        "Rosa thanked Ines because *she* had fixed the car.",
        "Ines had fixed the car.",
        *("Ines", {"Rosa", "the car"}, {"Ines", "thanked"}),
    ),
    "second_pronoun": (
        "Omar told Karl that his train was late, so Lena drove *him* home.",
        "Lena drove Karl home.",
        *("Karl", {"Omar", "Lena", "his train"}, {"Karl"}),
    ),
    "possessive": (
        "Nina lent Paula the bike since *her* scooter was broken.",
        "Paula's scooter was broken.",
        *("Paula's", {"Nina's", "the bike's"}, {"Paula's", "Nina"}),
    ),
    "object_her": (
        "When Nina met Paula, the judge saw *her* first.",
        "The judge saw Paula first.",
        *("Paula", {"Nina", "the judge"}, {"Nina's"}),
    ),
    "sentence_start": (
        "The twins sold the boats. *They* were leaking.",
        "The boats were leaking.",
        *("The boats", {"The twins"}, {"the twins", "The boats"}),
    ),
    "no_capital": (
        "The jug fell on the plate and *it* cracked.",
        "The jug cracked.",
        *("the jug", {"the plate"}, {"The jug"}),
    ),
    "two_names": (
        "Ali and Bea waited for Mr. Crane until *they* were tired.",
        "Ali and Bea were tired.",
        *("Ali and Bea", {"Mr. Crane"}, {"Ali", "Bea"}),
    ),
    "owner": (
        "Vera's brother beat Milan, though *he* is older.",
        "Vera's brother is older.",
        *("Vera's brother", {"Milan"}, {"Vera", "brother"}),
    ),
    "of": (
        "A box of nails stood on the bench until *it* fell.",
        "The box of nails fell.",
        *("the box of nails", {"the bench"}, {"a box", "nails"}),
    ),
    "own_words_first": (
        "Ben passed Tim the ball although *he* was tired.",
        "They say that Tim was tired.",
        *("Tim", {"Ben", "the ball"}, {"Tim", "They"}),
    ),
    "contraction": (
        "The coach praised the keeper; *he*'s happy now.",
        "The keeper's happy now.",
        *("the keeper", {"the coach"}, {"the keeper"}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sentences(name: str) -> None:
    marked, hypothesis, query, among, never = CASES[name]
    sentence, start = marked.replace("*", ""), marked.index("*")
    facts = facts_of(sentence, hypothesis)
    assert facts["pronoun"] == [start, marked.rindex("*") - 1]
    assert facts["query"] == query
    assert among <= set(facts["candidates"]), facts["candidates"]
    assert not never & set(facts["candidates"]), facts["candidates"]


@pytest.mark.parametrize(
    "sentence, hypothesis",
    [
        ("The sun shines.", "The moon shines."),  # no pronoun
        ("He left.", "Snow fell."),  # nothing in common
        ("Ann saw it.", "Ann saw"),  # nothing in its place
        ("It is late.", "It is late."),
        ("It rains.", "..."),
        ("", "The sun shines."),
        ("It rains.", ""),
        ("'it'", "'s"),
    ],
)
def test_rows_without_a_clause(sentence: str, hypothesis: str) -> None:
    assert facts_of(sentence, hypothesis) == {"sentence": sentence, "pronoun": None}


def test_the_pronoun_with_most_around_it() -> None:
    """Two pronouns agree on one side; more words win, of equals the earlier."""
    sentence = "He knew he won and she knew she won."
    facts = facts_of(sentence, "Kim knew she won.")
    assert sentence[slice(*facts["pronoun"])] == "she"
    assert facts["pronoun"][0] == sentence.index("she")


def test_candidates_are_not_repeated_and_stand_in_the_sentence() -> None:
    sentence = "The red cup hit the blue cup, the red cup broke the cup, and it fell."
    facts = facts_of(sentence, "The blue cup fell.")
    keys = [phrase_key(text) for text in facts["candidates"]]
    assert len(keys) == len(set(keys)) and ("red", "cup") in keys
    assert all(text in sentence.lower() for text in facts["candidates"])
    assert not any(overlap(k, phrase_key(facts["query"])) for k in keys)


def test_noun_phrases() -> None:
    words = words_of("Mr. Hall's big dog saw the very old gate of iron in Old Town.")
    texts = [" ".join(word.text for word in words[a:b]) for a, b in _noun_phrases(words)]
    assert {"Mr. Hall", "Mr. Hall 's big dog", "Old Town"} <= set(texts)
    assert {"old gate", "gate of iron", "gate"} <= set(texts)
    assert not {"in Old Town", "the very", "the"} & set(texts)


@pytest.mark.parametrize(
    "one, other, wanted",
    [
        ("the cup", "A cup", True),
        ("cup", "the red cup", True),
        ("red cup", "blue cup", False),
        ("Ann's", "Ann", True),
        ("the cup of tea", "tea cup", False),
    ],
)
def test_overlap(one: str, other: str, wanted: bool) -> None:
    assert overlap(phrase_key(one), phrase_key(other)) is wanted
    assert overlap(phrase_key(other), phrase_key(one)) is wanted


def test_keys() -> None:
    assert key(["The", "Big", "Cup", "’s"]) == ("big", "cup") and key(["the"]) == ()


# ------------------------------------------------------------------------ the official files

REAL = Path(os.environ.get("METASEQ_LM_DATA", "")) / "glue-WNLI"
# Split: rows with a pronoun, of those with the query among the noun phrases, at least.
SHARES = {"train": (0.97, 0.93), "valid": (0.98, 0.95), "test": (0.97, 0.90)}


@pytest.mark.skipif(
    not os.environ.get("METASEQ_LM_DATA") or not REAL.is_dir(),
    reason="METASEQ_LM_DATA has no glue-WNLI",
)
def test_real_rows(tmp_path: Path) -> None:
    """Shares of rows that the rules align; run with -rP to see them."""
    (tmp_path / "train.txt").write_text("the cat sat on the mat\n")
    data = tmp_path / "data"
    command = ["preprocess", "--trainpref", f"{tmp_path}/train.txt", "--destdir", f"{data}"]
    assert main([*command, "--tokenizer", "word"]) == 0
    command = ["preprocess", "--benchmark", "glue/WNLI", "--source", f"{REAL}"]
    assert main([*command, "--destdir", f"{data}"]) == 0
    for split, (aligned, among) in SHARES.items():
        rows = LabelledSet(data / "WNLI", split).rows
        assert rows is not None
        found = [row for row in rows if row["pronoun"]]
        hits, counts = 0, 0
        for row in found:
            words = words_of(row["sentence"])
            every = [key([word.text for word in words[a:b]]) for a, b in _noun_phrases(words)]
            hits += phrase_key(row["query"]) in every
            counts += len(row["candidates"])
        print(split, len(rows), len(found), hits, counts / len(found))
        assert len(found) / len(rows) >= aligned and hits / len(found) >= among
