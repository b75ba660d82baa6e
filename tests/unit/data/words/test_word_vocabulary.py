"""Vocabularies of words: normal forms, ids, characters, files on disk and damage to them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.words.vocabulary import (
    SPECIAL_CHARACTERS,
    SPECIAL_WORDS,
    UNKNOWN,
    WordVocabulary,
    characters_of,
    count_words,
    frequent_words,
    normalise,
)


def vocabulary(words=("the", "cat", "0000", "("), characters="acThe1", **more):
    return WordVocabulary([*SPECIAL_WORDS, *words], [*SPECIAL_CHARACTERS, *characters], **more)


@pytest.mark.parametrize(
    ("word", "normal"),
    [
        ("The", "the"),
        ("1984", "0000"),
        ("-LRB-", "("),
        ("-rcb-", "}"),
        ("A3-x", "a0-x"),
        ("-", "-"),
    ],
)
def test_normal_forms(word, normal):
    assert normalise(word) == normal


@given(st.text())
def test_a_normal_form_is_its_own(word):
    assert normalise(normalise(word)) == normalise(word)


def test_ids():
    words = ["THE", "cat", "1984", "-LRB-", "dog", "<pad>", "<unk>"]
    assert list(map(vocabulary().index, words)) == [5, 6, 7, 8, UNKNOWN, UNKNOWN, UNKNOWN]


def test_characters_are_cased():
    codes = np.array([[ord(c) for c in "The"], [ord(c) for c in "tZé"]])
    assert vocabulary().character_ids(codes).tolist() == [[6, 7, 8], [1, 1, 1]]


def test_words_are_counted_in_their_normal_form():
    counts = count_words(Counter({"The": 2, "the": 1, "1984": 1, "2001": 1, "b": 2, "<unk>": 9}))
    assert counts == {"the": 3, "0000": 2, "b": 2}
    assert frequent_words(counts, least=2) == ["the", "0000", "b"]
    assert frequent_words(counts, most=1) == ["the"]
    assert characters_of(["-LRB-", "ab", "B"]) == [*SPECIAL_CHARACTERS, "(", "B", "a", "b"]


@given(st.lists(st.text(min_size=1).map(normalise), unique=True).map(lambda w: [*w]))
def test_saved_and_loaded(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("vocabulary")
    words = [w for w in words if w not in SPECIAL_WORDS]
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return  # halves of characters come from no file
    made = vocabulary(words, sorted(set("".join(words))), counts=list(range(5 + len(words))))
    made.save(folder)
    read = WordVocabulary.load(folder)
    assert (read.words, read.characters, read.counts) == (made.words, made.characters, made.counts)
    assert read.hash == made.hash and read.vectors is None


def test_vectors_are_kept_beside(tmp_path):
    vectors = np.arange(18, dtype=np.float32).reshape(9, 2)
    made = vocabulary(vectors=vectors)
    assert made.save(tmp_path) == ["words.txt", "characters.txt", "word_vectors.safetensors"]
    read = WordVocabulary.load(tmp_path)
    assert np.array_equal(read.vectors, vectors) and read.hash == vocabulary().hash
    vocabulary(["the"]).save(tmp_path)
    with pytest.raises(MetaseqError, match="belong together"):
        WordVocabulary.load(tmp_path).vectors
    (tmp_path / "word_vectors.safetensors").write_bytes(b"junk")
    with pytest.raises(MetaseqError, match="word_vectors.safetensors: damaged"):
        WordVocabulary.load(tmp_path).vectors


def test_the_hash_depends_on_words_and_characters():
    hashes = {vocabulary().hash, vocabulary(["the"]).hash, vocabulary(characters="a").hash}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("words.txt", "the 1\n", "not a vocabulary of words"),
        ("words.txt", "<pad> 0\n<unk> 0\n", "not a vocabulary of words"),
        ("words.txt", "<pad>\n", "words.txt:1: expected"),
        ("characters.txt", "a 1\n", "not a vocabulary of words"),
        ("characters.txt", "<pad> 0\n<unk> 0\n<start> 0\n<end> 0\nab 1\n", "'ab' is not one"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    vocabulary().save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(MetaseqError, match=message):
        WordVocabulary.load(tmp_path)


def test_no_vocabulary(tmp_path):
    with pytest.raises(MetaseqError, match="preprocess --words"):
        WordVocabulary.load(tmp_path)
