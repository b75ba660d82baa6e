"""F1 of spans by Clark et al. and by conlleval: hand-made cases, definitions, properties."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.data.words.tags import bioes_tags, read_spans
from metaseq_lm.evaluation.chunks import (
    _chunk_spans,
    _SpanScores,
    conlleval_report,
    conlleval_spans,
    span_counts,
)

TAGS = st.lists(
    st.sampled_from(["O", *(f"{p}-{k}" for p in "BIES" for k in ("NP", "VP"))]), max_size=9
)


@pytest.mark.parametrize(
    ("tags", "ours", "conlleval"),
    [
        ("", [], []),
        ("O O O", [], []),
        ("B-NP E-NP O S-VP", [(0, 2, "NP"), (3, 4, "VP")], [(0, 2, "NP"), (3, 4, "VP")]),
        # A change of type does not split, and the last one counts; for conlleval it splits.
        ("B-NP I-VP", [(0, 2, "VP")], [(0, 1, "NP"), (1, 2, "VP")]),
        ("B-NP I-VP E-NP", [(0, 3, "NP")], [(0, 1, "NP"), (1, 2, "VP"), (2, 3, "NP")]),
        # I- and E- open a span.
        ("O I-NP I-NP O", [(1, 3, "NP")], [(1, 3, "NP")]),
        ("O E-NP E-NP", [(1, 3, "NP")], [(1, 2, "NP"), (2, 3, "NP")]),
        # Nothing but O, B- and S- ends one.
        ("S-NP I-NP", [(0, 2, "NP")], [(0, 1, "NP"), (1, 2, "NP")]),
        (
            "B-NP E-NP I-NP B-NP",
            [(0, 3, "NP"), (3, 4, "NP")],
            [(0, 2, "NP"), (2, 3, "NP"), (3, 4, "NP")],
        ),
        ("B-NP S-NP", [(0, 1, "NP"), (1, 2, "NP")], [(0, 1, "NP"), (1, 2, "NP")]),
        ("I-PER I-LOC", [(0, 2, "LOC")], [(0, 1, "PER"), (1, 2, "LOC")]),
        ("B-A-B I-A-B", [(0, 2, "A-B")], [(0, 2, "A-B")]),
    ],
)
def test_hand_made(tags, ours, conlleval):
    assert _chunk_spans(tags.split()) == set(ours)
    assert conlleval_spans(tags.split()) == set(conlleval)


def written_out(tags):
    """The rule of the fact sheet as a regular expression over one letter per tag."""
    letters = "".join(tag[0] for tag in tags)
    found = re.finditer("[BS][IE]*|(?:^|(?<=O))[IE]+", letters)
    return {(m.start(), m.end(), tags[m.end() - 1][2:]) for m in found}


def as_perl(tags):
    """conlleval as its script has it: tests of the end and start of a chunk for pairs of tags."""
    spans, start, last = set(), None, ("O", "")
    for word, tag in enumerate([*tags, "O"]):
        now = (tag[0], tag[2:])
        pair = last[0] + now[0]
        changed = last[1] != now[1]
        ends = pair in ("BB", "BS", "BO", "IB", "IS", "IO") or last[0] in "ES"
        ends |= last[0] != "O" and changed
        starts = now[0] in "BS" or pair in ("EE", "EI", "SE", "SI", "OE", "OI")
        starts |= now[0] != "O" and changed
        if ends and start is not None:
            spans.add((start, word, last[1]))
            start = None
        if starts:
            start = word
        last = now
    return spans


@given(TAGS)
def test_definitions(tags):
    assert _chunk_spans(tags) == written_out(tags)
    assert conlleval_spans(tags) == as_perl(tags)
    assert conlleval_spans(tags) == set(read_spans(tags, "conlleval"))


@given(TAGS)
def test_both_agree_where_tags_are_well_formed(tags):
    good = bioes_tags(sorted(conlleval_spans(tags)), len(tags))
    assert _chunk_spans(good) == conlleval_spans(good) == conlleval_spans(tags)


@given(
    st.lists(st.tuples(TAGS, TAGS), max_size=5), st.sampled_from([_chunk_spans, conlleval_spans])
)
def test_counts(pairs, reader):
    gold = [a[: len(b)] for a, b in pairs]
    predicted = [b[: len(a)] for a, b in pairs]
    counts = span_counts(gold, predicted, reader)
    # A span of the whole corpus carries the number of its sentence.
    true = {(i, *s) for i, tags in enumerate(gold) for s in reader(tags)}
    found = {(i, *s) for i, tags in enumerate(predicted) for s in reader(tags)}
    assert counts.scores == _SpanScores(len(true), len(found), len(true & found))
    for name in ("gold", "predicted", "correct"):
        by_type = sum(getattr(scores, name) for scores in counts.by_type.values())
        assert by_type == getattr(counts.scores, name)
    precision, recall, f1 = counts.scores.precision, counts.scores.recall, counts.scores.f1
    assert f1 == pytest.approx(
        2 * precision * recall / (precision + recall) if precision + recall else 0
    )
    assert span_counts(gold, gold, reader).scores.f1 == float(bool(true))


def test_a_type_counts_once_per_sentence():
    counts = span_counts([["S-NP", "O"], ["S-NP", "O"]], [["S-NP", "S-NP"], ["O", "S-NP"]])
    assert counts.scores == _SpanScores(2, 3, 1)
    assert (counts.scores.precision, counts.scores.recall, counts.scores.f1) == (1 / 3, 0.5, 0.4)


def test_nothing_correct_is_zero_and_lengths_must_fit():
    scores = span_counts([["O"]], [["O"]]).scores
    assert (scores.precision, scores.recall, scores.f1) == (0, 0, 0)
    with pytest.raises(ValueError):
        span_counts([["O"]], [[]])
    with pytest.raises(ValueError):
        span_counts([["O"]], [])


def test_the_report_is_the_one_of_the_script():
    gold = [["B-NP", "I-NP", "O", "B-VP"], ["B-NP"]]
    predicted = [["B-NP", "I-NP", "O", "B-NP"], ["B-NP"]]
    assert conlleval_report(gold, predicted).splitlines() == [
        "processed 5 tokens with 3 phrases; found: 3 phrases; correct: 2.",
        "accuracy:  80.00%; precision:  66.67%; recall:  66.67%; FB1:  66.67",
        "               NP: precision:  66.67%; recall: 100.00%; FB1:  80.00  3",
        "               VP: precision:   0.00%; recall:   0.00%; FB1:   0.00  0",
    ]
