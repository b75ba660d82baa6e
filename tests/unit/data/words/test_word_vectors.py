"""Word vectors in GloVe's text format, good and malformed."""

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.words.vocabulary import (
    SPECIAL_WORDS,
    WordVocabulary,
    read_vectors,
    vector_table,
)


def read(tmp_path, content, wanted=None):
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    return {word: v.tolist() for word, v in read_vectors(TextFile(path), wanted).items()}


def test_words_and_numbers(tmp_path):
    found = read(tmp_path, "the 1 2\ncat -0.5 1e-3\n<unk> 9 9\n")
    assert list(found) == ["the", "cat"]
    assert found["cat"] == pytest.approx([-0.5, 1e-3])


@pytest.mark.parametrize(
    "content, wanted, found",
    [
        ("the 1 2 \ncat 0 1 \n", {"cat"}, {"cat": [0, 1]}),
        # The normalised spelling wins, then the first.
        ("The 1 1\nthe 2 2\nTHE 3 3\n", None, {"the": [2, 2]}),
        ("1990 1 1\n1991 2 2\n", None, {"0000": [1, 1]}),
        ("0000 1 1\n1991 2 2\n", None, {"0000": [1, 1]}),
        # The header of word2vec, and words with blanks.
        ("2 2\na 1 2\n. . 3 4\n", None, {"a": [1, 2], ". .": [3, 4]}),
        ("7 2 1\na 1 2\n", None, {"0": [2, 1], "a": [1, 2]}),
    ],
)
def test_wanted_words_spellings_and_headers(tmp_path, content, wanted, found):
    assert read(tmp_path, content, wanted) == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the 1 2\ncat 1\n", "vectors.txt:2: 2 fields"),
        ("the 1 2\ncat 1 2 3\n", "vectors.txt:2: 4 fields"),
        ("the 1 2\ncat 1 x\n", "vectors.txt:2: .*expected numbers"),
        ("the 1 2\n\ncat 1 nan\n", "vectors.txt:3: .*not finite"),
        ("the\n", "vectors.txt:1: 1 fields"),
        ("3 2\n", "holds no word vectors"),
        ("1 ²\nthe 1\n", "vectors.txt:1: .*expected numbers"),
        ("\n", "holds no word vectors"),
    ],
)
def test_malformed_rows(tmp_path, content, message):
    with pytest.raises(MetaseqError, match=message):
        read(tmp_path, content)


def test_the_table():
    known = {"a": np.array([3, 4], np.float32)}
    words = [*SPECIAL_WORDS, "b", "a"]
    table = vector_table(words, known)
    assert table.dtype == np.float32 and table[6].tolist() == [3, 4]
    assert not table[:2].any() and table[2:6].all()
    assert np.array_equal(table, vector_table(words, known))
    with pytest.raises(MetaseqError, match="none of the"):
        vector_table(SPECIAL_WORDS, known)


def test_places_for_words_of_the_vectors(run, tmp_path):
    (tmp_path / "glove.txt").write_text("cat 1 2\nzebra 3 4\n")
    given = ["--words", "--word-vectors", str(tmp_path / "glove.txt")]
    for places, words in {
        "text": ["the", "cat"],
        "vectors": ["cat", "zebra"],
        "both": ["the", "cat", "zebra"],
    }.items():
        options = [*given, "--word-places", places]
        assert run("the the cat\n", *options, dest=places)[0] == 0
        found = WordVocabulary.load(tmp_path / places)
        assert found.words[5:] == words
        assert found.vectors[found.index("cat")].tolist() == [1, 2]
    code, shown = run("the\n", "--words", "--word-places", "both", dest="no")
    assert code == 2 and "needs --word-vectors" in shown and not (tmp_path / "no").exists()
