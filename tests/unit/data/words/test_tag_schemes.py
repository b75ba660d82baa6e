"""IOB1, BIO, BIOES and what is none of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.words.tags import (
    TagError,
    bio_tags,
    bioes_names,
    bioes_tags,
    guess_scheme,
    read_spans,
    split_tag,
)

KINDS = st.sampled_from(["NP", "VP", "WORK-OF-ART"])


@st.composite
def sentences(draw):
    """Words and spans that do not overlap."""
    spans, at = [], 0
    for gap, size, kind in draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), KINDS), max_size=6)
    ):
        spans.append((at + gap, at + gap + size, kind))
        at += gap + size
    return at + draw(st.integers(0, 2)), spans


def spelled(words, spans, scheme):
    """Spell spans by the definition of each scheme, without the code under test."""
    tags = ["O"] * words
    for number, (start, end, kind) in enumerate(spans):
        touches = number and spans[number - 1][1] == start and spans[number - 1][2] == kind
        for word in range(start, end):
            first, last = word == start, word == end - 1
            prefix = {
                "bio": "B" if first else "I",
                "iob1": "B" if first and touches else "I",
                "bioes": "S" if first and last else "B" if first else "E" if last else "I",
                "bilou": "U" if first and last else "B" if first else "L" if last else "I",
            }[scheme]
            tags[word] = f"{prefix}-{kind}"
    return tags


@given(sentences())
def test_round_trips(sentence):
    words, spans = sentence
    assert bioes_tags(spans, words) == spelled(words, spans, "bioes")
    assert bio_tags(spans, words) == spelled(words, spans, "bio")
    for scheme in ("iob1", "bio", "bioes", "bilou"):
        tags = spelled(words, spans, scheme)
        read = "bioes" if scheme == "bilou" else scheme
        assert read_spans(tags, read) == spans
        if scheme != "iob1":  # conlleval sees what stands there, except IOB1's types side by side
            assert read_spans(tags, "conlleval") == spans


@given(sentences())
def test_the_scheme_is_guessed(sentence):
    words, spans = sentence
    for scheme in ("iob1", "bio", "bioes"):
        tags = spelled(words, spans, scheme)
        guessed = guess_scheme([tags, ["O"]])
        if any(tag != "O" for tag in tags):
            assert read_spans(tags, guessed) == spans
        else:
            assert guessed == "none" or read_spans(tags, guessed) == []


def test_adjacent_types_of_iob1_are_two_spans():
    assert read_spans(["I-PER", "I-LOC", "B-LOC"], "iob1") == [
        *((0, 1, "PER"), (1, 2, "LOC"), (2, 3, "LOC"))
    ]
    assert guess_scheme([["I-PER", "I-LOC", "B-LOC"]]) == "iob1"


@pytest.mark.parametrize(
    ("scheme", "tags", "word"),
    [
        ("bio", ["O", "I-NP"], 1),
        ("bio", ["B-NP", "I-VP"], 1),
        ("bio", ["B-NP", "E-NP"], 1),
        ("bio", ["B_NP"], 0),
        ("bio", ["B-"], 0),
        ("bio", ["BI-NP"], 0),
        ("iob1", ["O", "B-NP"], 1),
        ("iob1", ["I-VP", "B-NP"], 1),
        ("bioes", ["B-NP", "O"], 1),
        ("bioes", ["B-NP"], 0),
        ("bioes", ["S-NP", "I-NP"], 1),
        ("bioes", ["B-NP", "E-VP"], 1),
        ("bioes", ["B-NP", "S-NP"], 1),
    ],
)
def test_tags_that_a_scheme_does_not_allow(scheme, tags, word):
    with pytest.raises(TagError) as caught:
        read_spans(tags, scheme)
    assert caught.value.word == word


def test_conlleval_reads_faulty_tags():
    assert read_spans(["O", "I-NP", "I-VP", "E-VP", "I-VP"], "conlleval") == [
        *((1, 2, "NP"), (2, 4, "VP"), (4, 5, "VP"))
    ]


def test_types_may_hold_dashes_and_classes_are_listed():
    assert split_tag("B-WORK-OF-ART") == ("B", "WORK-OF-ART")
    assert bioes_names(["b", "a", "b"]) == [
        *("O", "B-a", "I-a", "E-a", "S-a", "B-b", "I-b", "E-b", "S-b")
    ]


def test_tags_of_words_and_mixtures():
    assert guess_scheme([["NOUN", "-LRB-", "O"]]) == "none"
    with pytest.raises(UsageError, match="'I-NP', and others, such as 'NOUN'"):
        guess_scheme([["I-NP", "NOUN"]])
    with pytest.raises(UsageError, match="none of iob1, bio and bioes"):
        guess_scheme([["I-NP", "O", "B-NP"]])


def test_spans_that_overlap_have_no_tags():
    for spans in ([(0, 2, "a"), (1, 2, "b")], [(0, 3, "a")], [(1, 1, "a")]):
        with pytest.raises(ValueError):
            bioes_tags(spans, 2)
