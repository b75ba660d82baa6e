"""Every tokenizer: special symbols, round trips, saving; byte-BPE against its library."""

import itertools
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.tokenizers.byte_bpe import _byte_symbols
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class

KINDS = ["byte_bpe", "sentencepiece_bpe", "sentencepiece_unigram", "word", "char"]
TEXT = [
    "It was the best of times, it was the worst of times; it wasn't 1984 yet.",
    "She'd said: \"I'll go, they're late\" - but we've only 12 or 130 of them.",
    "  indented   text\twith tabs and a no-break\u00a0space, naïve café, 漢字 and ½ ²",
    "the [MASK] of [CLS0] and x[SEP]y is text here, [PAD] [UNK] too",
    # Runs of white space become symbols, so that a line cut at the wrong place has other ids.
    "a\t \tb   c \u00a0 \u00a0d\t\te\u3000 f     g \t \t h",
] * 5
SIZE = 500
SPECIAL_LOOKING = "[MASK] a [SEP]b [CLS0] [PAD] [UNK] [CLS29]"
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def trained():
    """One small tokenizer of each kind."""
    return {kind: tokenizer_class(kind).train(iter(TEXT), SIZE, 30) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_the_same_everywhere(trained, kind):
    vocabulary = trained[kind].vocabulary
    assert vocabulary.symbols[:5] == ["[PAD]", "[MASK]", "[SEP]", "[CLS0]", "[CLS1]"]
    assert vocabulary.cls(29) == 32
    assert vocabulary.unk == (None if kind == "byte_bpe" else 33)
    assert len(vocabulary) <= SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_special_looking_text_stays_text(trained, kind):
    tokenizer = trained[kind]
    ids = tokenizer.encode_batch([SPECIAL_LOOKING, *TEXT])
    special = set(tokenizer.vocabulary.specials.tolist()) - {tokenizer.vocabulary.unk}
    assert not special & set(itertools.chain(*ids))
    if kind == "byte_bpe":
        assert tokenizer.decode(ids[0]) == SPECIAL_LOOKING


@pytest.mark.parametrize("kind", KINDS)
def test_training_saving_and_encoding_are_deterministic(trained, kind, tmp_path):
    tokenizer = trained[kind]
    again = tokenizer_class(kind).train(iter(TEXT), SIZE, 30)
    assert again.fingerprint == tokenizer.fingerprint
    names = tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert sorted(names) == sorted(p.name for p in tmp_path.iterdir())
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocabulary.symbols == tokenizer.vocabulary.symbols
    lines = [*TEXT, SPECIAL_LOOKING, "", " ", "\x00\x01", "never seen: ∀x∃y 😀"]
    ids = tokenizer.encode_batch(lines)
    assert loaded.encode_batch(lines) == ids
    values, sizes = loaded.encode_packed(lines)
    assert values.dtype == loaded.dtype == np.uint16 and sizes.dtype == np.int64
    assert values.tolist() == list(itertools.chain(*ids))
    assert sizes.tolist() == [len(i) for i in ids]
    assert all(type(i) is int for i in ids[0])


@pytest.mark.parametrize("kind", KINDS)
@given(lines=st.lists(any_text, max_size=4))
@settings(deadline=None, max_examples=50)
def test_encoding_what_was_decoded_gives_the_same_text(trained, kind, lines):
    tokenizer = trained[kind]
    for line, ids in zip(lines, tokenizer.encode_batch(lines)):
        assert all(0 <= i < len(tokenizer.vocabulary) for i in ids)
        text = tokenizer.decode(ids)
        if kind == "byte_bpe":
            assert text == line
        elif tokenizer.vocabulary.unk not in ids:
            assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
            assert kind != "char" or text == line
            assert kind != "word" or text.split() == line.split()


def library_ids(tokenizer, line):
    """The ids of the library's whole pipeline, special symbols taken as text."""
    library = tokenizers.Tokenizer.from_str(tokenizer.model_bytes().decode())
    library.encode_special_tokens = True
    return library.encode(line, add_special_tokens=False).ids


pieces = st.sampled_from(
    [
        *" \t\n\r\x0b\x1c\x85\u00a0\u2003\u2028\u3000'aéß漢½²٣_-\x00\x7f\ufeff\u200b",
        "  ",
        "'s",
        "'LL",
        *["'re", "the", " of", "12", "ǅ", "e\u0301", "😀", "\u180e", "\u0e33", "[MASK]"],
    ]
)


@given(line=st.lists(pieces, max_size=12).map("".join) | any_text)
@settings(deadline=None, max_examples=400)
@example(line="a\t \tb")
@example(line="a \u00a0\u3000b")
@example(line="x  y   z ")
@example(line=" '")
def test_byte_bpe_gives_the_ids_of_its_library(trained, line):
    tokenizer = trained["byte_bpe"]
    expected = library_ids(tokenizer, line)
    # Twice, because the second time every word comes from the cache.
    assert tokenizer.encode_batch([line, line]) == [expected, expected]


@pytest.mark.parametrize("kind", [*KINDS, "wordpiece"])
def test_word_numbers_have_a_word_of_each_token(kind: str) -> None:
    """Those of the library, where it cuts words; else what white space separates."""
    tokenizer = tokenizer_class(kind).train(iter(TEXT), 160 if kind == "wordpiece" else 300, 1)
    texts = ["the best, it wasn't worst;", "", "naïve 1984", "[CLS0] times"]
    encoded = tokenizer.encode_batch(texts)
    for text, ids, numbers in zip(texts, encoded, tokenizer.word_numbers(texts), strict=True):
        assert len(numbers) == len(ids)
        if kind in ("byte_bpe", "wordpiece"):
            library = tokenizers.Tokenizer.from_str(tokenizer.model_bytes().decode())
            library.encode_special_tokens = True
            expected = library.encode(text, add_special_tokens=False).word_ids
            changes = np.diff(np.array(expected, np.int64)) > 0
            assert (np.diff(numbers) > 0).tolist() == changes.tolist(), text
        elif "[" not in text:
            assert len(np.unique(numbers)) == len(text.split()), text


def test_byte_bpe_with_a_full_cache(trained, monkeypatch):
    monkeypatch.setattr("metaseq_lm.data.tokenizers.byte_bpe.CACHED_WORDS", 3)
    tokenizer = trained["byte_bpe"]
    lines = [f"{a} {b} {a}{b}" for a in TEXT[0].split() for b in ("x", "yy")]
    assert tokenizer.encode_batch(lines) == [library_ids(tokenizer, line) for line in lines]


def test_byte_symbols_are_the_alphabet_of_the_library():
    assert sorted(_byte_symbols()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert _byte_symbols()[32] == "Ġ" and _byte_symbols()[10] == "Ċ"


def test_two_moons_vocabulary():
    # The corpus of the paper is 32,000 sequences of pairs 0..63; random pairs have all its merges.
    draw = random.Random(42)
    lines = [
        " ".join(str(n) for pair in sorted(pairs) for n in pair)
        for pairs in (
            [(draw.randrange(64), draw.randrange(64)) for _ in range(16)] for _ in range(2000)
        )
    ]
    numbers = [str(n) for n in range(64)]
    corpus = [*lines, *numbers, " ".join(numbers * 2)]
    tokenizer = tokenizer_class("byte_bpe").train(corpus, 512, 30, min_frequency=1)
    symbols = tokenizer.vocabulary.symbols
    assert len(symbols) == 407
    assert [symbols[i] for i in tokenizer.encode_batch(["6 24"])[0]] == ["6", "Ġ24"]
    first = "10 39 11 42 23 40 24 36 26 30 36 36 36 37 36 45 37 9 37 14 39 32 40 14 48 17 50 19"
    expected = ["10", *(f"Ġ{n}" for n in first.split()[1:])]
    assert [symbols[i] for i in tokenizer.encode_batch([first])[0]] == expected
    both = [*numbers, *(f" {n}" for n in numbers)]
    assert [len(ids) for ids in tokenizer.encode_batch(both)] == [1] * 128


def test_word_patterns_and_frequencies():
    train = tokenizer_class("word").train
    lines = ["b a, a! c b", "[MASK] a"]
    tokenizer = train(lines, 100, 2, min_frequency=2)
    assert tokenizer.vocabulary.symbols[5:] == ["[UNK]", "b"]
    tokenizer = train(lines, 100, 2, pattern=r"\w+|[^\w\s]")
    assert tokenizer.vocabulary.symbols[6:] == ["a", "b", "!", ",", "MASK", "[", "]", "c"][
        :2
    ] + sorted(["!", ",", "MASK", "[", "]", "c"])
    assert tokenizer.vocabulary.counts[6:8] == [3, 2]
    assert len(tokenizer.encode_batch(["a,b"])[0]) == 3
    assert train(lines, 8, 2).vocabulary.symbols[6:] == ["b", "a"]
    with pytest.raises(UsageError, match="--word-pattern"):
        train(lines, 100, 2, pattern="(")


@pytest.mark.parametrize("kind", KINDS)
def test_too_small_a_vocabulary(kind):
    with pytest.raises(UsageError, match=f"--vocab-size 33.*{kind}"):
        tokenizer_class(kind).train(TEXT, 33, 30)


def test_unknown_kind_and_options():
    with pytest.raises(UsageError, match="'byte_bp'.*'byte_bpe'"):
        tokenizer_class("byte_bp")
    with pytest.raises(UsageError, match="no minimum frequency"):
        tokenizer_class("sentencepiece_bpe").train(TEXT, 400, 30, min_frequency=2)
    with pytest.raises(MetaseqError, match="sentencepiece_bpe cannot"):
        tokenizer_class("sentencepiece_bpe").train([], 400, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_dict_must_be_the_symbols_of_the_model(trained, kind, tmp_path):
    trained[kind].save(tmp_path)
    path = tmp_path / "dict.txt"
    rows = path.read_bytes().splitlines(keepends=True)
    if kind in ("byte_bpe", "sentencepiece_bpe", "sentencepiece_unigram"):
        path.write_bytes(b"".join(rows[:-1]))
        with pytest.raises(MetaseqError, match=f"dict.txt: {len(rows) - 1} rows, but"):
            load_tokenizer(tmp_path)
        path.write_bytes(b"".join([*rows[:-1], b"other 0\n"]))
        with pytest.raises(MetaseqError, match=f"dict.txt:{len(rows)}: symbol 'other'"):
            load_tokenizer(tmp_path)
    path.unlink()
    if kind in ("word", "char"):
        with pytest.raises(MetaseqError, match="dict.txt: no such"):
            load_tokenizer(tmp_path)


def test_damaged_models(trained, tmp_path):
    with pytest.raises(MetaseqError, match="no tokenizer here"):
        load_tokenizer(tmp_path)
    trained["sentencepiece_bpe"].save(tmp_path)
    (tmp_path / "spm.model").write_bytes(b"\x00" * 100)
    with pytest.raises(MetaseqError, match="spm.model: .*sentencepiece_bpe"):
        load_tokenizer(tmp_path)
    trained["byte_bpe"].save(tmp_path)
    good = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    lower = good.replace('"normalizer": null', '"normalizer": {"type": "Lowercase"}')
    for bad in (good[:100], "[]", "{}", lower, good.replace('"type": "BPE"', '"type": "Nothing"')):
        assert bad != good
        (tmp_path / "tokenizer.json").write_text(bad, encoding="utf-8")
        with pytest.raises(MetaseqError, match="tokenizer.json: .*byte_bpe"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_options.json").write_text("{")
    with pytest.raises(MetaseqError, match="tokenizer_options.json: damaged"):
        load_tokenizer(tmp_path)


def test_ids_of_a_padded_embedding_are_left_out() -> None:
    tokenizer = tokenizer_class("char").train(["abc"], vocab_size=30, task_tokens=2)
    (ids,) = tokenizer.encode_batch(["ab"])
    size = len(tokenizer.vocabulary)
    assert tokenizer.decode([ids[0], size, size + 5, ids[1]]) == "ab"
