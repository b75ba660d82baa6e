"""UAS and LAS with and without punctuation."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.data.words.vocabulary import is_punctuation
from metaseq_lm.evaluation.words import _attachment_scores

SKIPPED = "! ... `` { } ( ) [ ] -- - , . '' ` ; : ? -LRB- -RRB- -LSB- -RSB- -LCB- -RCB-".split()


@pytest.mark.parametrize("word", SKIPPED)
def test_punctuation_by_form(word):
    assert is_punctuation(word)


@pytest.mark.parametrize("word", ["a", '"', "%", "$", "..", "---", "!!", "'", "#", "1"])
def test_words_that_count(word):
    assert not is_punctuation(word)


def test_attachment_scores_equal_those_by_hand():
    words = ["I", "see", "-LRB-", "him", ")", "!", "?"]
    gold = [2, 0, 4, 2, 4, 0, 1], [1, 0, 2, 3, 2, 0, 2]
    predicted = [2, 0, 1, 1, 4, 2, 0], [1, 0, 2, 3, 1, 2, 0]
    counted = [not is_punctuation(word) for word in words]
    assert _attachment_scores(gold, predicted, counted) == (2 / 3, 2 / 3)
    assert _attachment_scores(gold, predicted) == (3 / 7, 2 / 7)
    # The relation alone is worth nothing.
    assert _attachment_scores(([0], [0]), ([1], [0])) == (0, 0)


def test_only_punctuation_has_no_score():
    uas, las = _attachment_scores(([0, 1], [0, 1]), ([0, 1], [0, 1]), [False, False])
    assert isnan(uas) and isnan(las)


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4, st.booleans()), min_size=1, max_size=30))
def test_counts(rows):
    heads, relations, found, names, counted = (np.array(part) for part in zip(*rows))
    uas, las = _attachment_scores((heads, relations), (found, names), counted)
    kept = [row for row in rows if row[4]]
    if kept:
        assert uas == sum(row[0] == row[2] for row in kept) / len(kept)
        assert las == sum(row[:2] == row[2:4] for row in kept) / len(kept)
        assert 0 <= las <= uas <= 1


def test_lengths_must_fit():
    with pytest.raises(ValueError):
        _attachment_scores(([0], [0]), ([0], [0, 1]))
