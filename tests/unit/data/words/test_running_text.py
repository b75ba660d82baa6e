"""Sentences and words of running text."""

import pytest

from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.words.running_text import TextReader, _sentences_of, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don't know.", "I do n't know ."),
        ("He's Mr. Smith's, isn't he?", "He 's Mr. Smith 's , is n't he ?"),
        ("(The U.S. paid 1,000.50 in 1990.)", "( The U.S. paid 1,000.50 in 1990 . )"),
        (
            '"Well-known," said J. R. Jones--and left..."Go."',
            "`` Well-known , '' said J. R. Jones -- and left ... '' Go . ''",
        ),
        ('a 51-kDa 22.4+/-8.6 ("so")', "a 51-kDa 22.4 +/- 8.6 ( `` so '' )"),
        ("NF-kappaB [e.g. p50]; CD28+ cells", "NF-kappaB [ e.g. p50 ] ; CD28 + cells"),
        ("They’ll go’s", "They ’ll go ’s"),
    ],
)
def test_words(text, words):
    assert words_of(text) == words.split()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A b . C d ! E ?", 3),
        ('He said " no . " Then he left .', 2),
        ("See Fig . below and go .", 1),
        ("What ? ! No", 2),
        ("no end", 1),
        ("( A b . ) C", 2),
        ('" A b . C d . " E', 3),
        ('A b . " C d . " E', 3),
    ],
)
def test_sentences(text, count):
    found = list(_sentences_of(text.split()))
    assert len(found) == count and [w for s in found for w in s] == text.split()


def test_readers(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"A dog\nbarked. It ran\n\n\xffaway.\n")
    assert list(TextReader(TextFile(path))) == [
        *(["A", "dog"], ["barked.", "It", "ran"], ["\ufffdaway."])
    ]
    raw = TextReader(TextFile(path, "skip"), "raw")
    assert list(raw) == [["A", "dog"], ["barked", "."], ["It", "ran"]]
    assert raw.counts == {"lines": 4, "blank": 1, "bad_utf8": 1, "skipped": 1}
    joined = TextReader(TextFile(path), "raw", paragraphs=True)
    assert list(joined) == [*(["A", "dog", "barked", "."], ["It", "ran"], ["\ufffd", "away", "."])]
    split = list(TextReader(TextFile(path), "sentences"))
    assert split[:2] == [["A", "dog"], ["barked.", "It", "ran"]]
