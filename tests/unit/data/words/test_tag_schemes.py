"""IOB1, BIO, BIOES and what is none of them."""

from collections import Counter

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
    span_like,
    split_tag,
    standard_tags,
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
        after = spans[number + 1] if number + 1 < len(spans) else (-1, -1, "")
        is_touched = after[0] == end and after[2] == kind
        for word in range(start, end):
            first, last = word == start, word == end - 1
            prefix = {
                "bio": "B" if first else "I",
                "iob1": "B" if first and touches else "I",
                "bioes": "S" if first and last else "B" if first else "E" if last else "I",
                "bilou": "U" if first and last else "B" if first else "L" if last else "I",
                "ioe2": "E" if last else "I",
                "ioe1": "E" if last and is_touched else "I",
            }[scheme]
            tags[word] = f"{prefix}-{kind}"
    return tags


@given(sentences())
def test_round_trips(sentence):
    words, spans = sentence
    assert bioes_tags(spans, words) == spelled(words, spans, "bioes")
    assert bio_tags(spans, words) == spelled(words, spans, "bio")
    for scheme in ("iob1", "bio", "bioes", "bilou", "ioe1", "ioe2"):
        tags = spelled(words, spans, scheme)
        read = "bioes" if scheme == "bilou" else scheme
        assert read_spans(tags, read) == spans
        # conlleval sees what stands there, except IOB1's types side by side
        if scheme != "iob1":
            assert read_spans(tags, "conlleval") == spans


@given(sentences())
def test_the_scheme_is_guessed(sentence):
    words, spans = sentence
    for scheme in ("iob1", "bio", "bioes", "ioe1", "ioe2"):
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
    with pytest.raises(UsageError, match="'I-NP'.*'NOUN'"):
        guess_scheme([["I-NP", "NOUN"]])
    with pytest.raises(UsageError, match="iob1, bio, bioes,.*ioe2"):
        guess_scheme([["I-NP", "O", "B-NP"]])


LETTERS = {"B": "begin", "I": "middle", "E": "last", "S": "unit"}


@pytest.mark.parametrize(
    "spell",
    [
        lambda p, kind: f"{p}_{kind}" if p else "O",
        lambda p, kind: f"{p}:{kind}" if p else "0",
        lambda p, kind: f"{p.lower()}-{kind.lower()}" if p else "o",
        lambda p, kind: f"{kind}-{p}" if p else "OUT",
        lambda p, kind: f"{kind}/{p.lower()}" if p else "_",
        lambda p, kind: f"{LETTERS[p].upper()}|{kind}" if p else "OUTSIDE",
        lambda p, kind: {"": "O", "B": "B", "I": "M", "E": "E", "S": "W"}[p] + f"-{kind}" * bool(p),
        lambda p, kind: p or "O",
        lambda p, kind: LETTERS[p].upper() if p else "OTHER",
    ],
)
def test_other_spellings_are_spans(spell):
    spans = [(1, 4, "A-B"), (5, 6, "A-B"), (6, 8, "A-B")]
    parts = [split_tag(tag) for tag in bioes_tags(spans, 10)]
    tags = [spell(prefix.strip("O"), kind) for prefix, kind in parts]
    standard = standard_tags(set(tags))
    read = read_spans([standard[tag] for tag in tags], guess_scheme([[standard[t] for t in tags]]))
    assert [span[:2] for span in read] == [span[:2] for span in spans]
    kinds = {span[2].lower() for span in read}
    assert kinds == ({"a-b"} if any("b" in tag[2:].lower() for tag in tags) else {"span"})


@pytest.mark.parametrize(
    "tags", ["DT NN IN O", "B C O", "N/N S/S NP/N O", "X-B Y O", "i o u", "S-NOM S-ACC"]
)
def test_classes_of_words_are_no_spans(tags):
    assert standard_tags(tags.split()) == {} and span_like(Counter(tags.split())) == ""


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ("NN|B-PER NN|I-PER VB|O", "tags of one span"),
        ("BPER IPER O", "tags of one span"),
        ("(NP* *) * (VP*)", "bracket of a span"),
        ("O O O PER LOC", "'PER' has no prefix"),
        ("0 0 0 1 2", "numbers, most of them 0"),
    ],
)
def test_tags_like_spans_are_seen(tags, reason):
    assert standard_tags(set(tags.split())) == {} and reason in span_like(Counter(tags.split()))


def test_spans_that_overlap_have_no_tags():
    for spans in ([(0, 2, "a"), (1, 2, "b")], [(0, 3, "a")], [(1, 1, "a")]):
        with pytest.raises(ValueError):
            bioes_tags(spans, 2)
