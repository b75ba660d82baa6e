"""Character offsets of tokens: every tokenizer, any text."""

import re
import unicodedata

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import tokenizer_class

KINDS = ["byte_bpe", "sentencepiece_bpe", "sentencepiece_unigram", "word", "word_pattern", "char"]
TEXT = [
    "It was the best of times, it was the worst of times; it wasn't 1984 yet.",
    "She'd said: \"I'll go, they're late\" - but we've only 12 or 130 of them.",
    "naïve café, 漢字 and ½ ² ﬁne, Ａ wide letter and a\tb   c \u00a0 d",
] * 5
strange = st.sampled_from(
    [
        *" \t\n\x1c\x85\u00a0\u2003\u3000\u200b\ufeff'aé½²ﬁ漢ﷺ´\u0e33\u0301\u1ebd\x01_.",
        "😀",
        "the",
        " of",
    ]
)
any_text = st.lists(strange, max_size=10).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    """One small tokenizer of each kind."""
    found = {}
    for kind in [*KINDS, "wordpiece"]:
        name = "word" if kind == "word_pattern" else kind
        options = {"pattern": r"\s?\w+|[^\w\s]"} if kind == "word_pattern" else {}
        found[kind] = tokenizer_class(name).train(iter(TEXT), 400, 3, **options)
    return found


def normal(tokenizer: Tokenizer, text: str) -> str:
    """The text in the form of the pieces: sentencepiece normalises it."""
    composed = tokenizer.name.startswith("sentencepiece")
    text = tokenizer._processor.Normalize(text) if composed else text
    text = "".join(text.replace("\u2581", " ").split())
    # Without the white space between them a letter and its accent are one character.
    return unicodedata.normalize("NFC", text) if composed else text


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
@settings(deadline=None, max_examples=200)
@example(text="  the  best ½x ﬁ e\u0301 漢字\x00z \u200b q")
@example(text="ﷺ of times")
@example(text="\u200b the")
@example(text="a\x85\u0301")
def test_offsets(trained, kind, text):
    """The ids are those of encode_batch; spans rise, hold every word, and start at one."""
    tokenizer = trained[kind]
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode_batch([text])[0]
    assert all(type(n) is int for n in (*ids, *starts, *ends))
    assert len(ids) == len(starts) == len(ends)
    assert starts == sorted(starts) and ends == sorted(ends)
    assert all(0 <= start <= end <= len(text) for start, end in zip(starts, ends))
    covered = {at for start, end in zip(starts, ends) for at in range(start, end)}
    kept = "".join(c for at, c in enumerate(text) if at in covered)
    if kind == "word_pattern":  # what the pattern does not match has no token
        assert normal(tokenizer, kept) == "".join(c for c in normal(tokenizer, text) if c in kept)
    else:
        assert normal(tokenizer, kept) == normal(tokenizer, text)
    for start, end in zip(starts, ends):
        word = text[start:end]
        assert not word[:1].isspace() or not normal(tokenizer, word)


@pytest.mark.parametrize("kind", [*KINDS, "wordpiece"])
@given(lines=st.lists(any_text, max_size=4))
@settings(deadline=None, max_examples=200)
@example(lines=["", " it was", "the\u2003best  of\ttimes ", "a\x1cb", "½ x\u200by \u200b \x00"])
@example(lines=["a \u0303 \ufeff b \u0e48", "\u0303 x", "\u0303", "a \u0303  "])
@example(lines=["naïve 漢字", "漢\u3000字", " ", "qqq\x85zzz", "\u2581the of"])
def test_words_begin_in_the_tokens_that_cover_their_first_characters(trained, kind, lines):
    tokenizer = trained[kind]
    values, sizes, words = tokenizer.encode_with_words(lines)
    plain_values, plain_sizes = tokenizer.encode_packed(lines)
    assert values.tolist() == plain_values.tolist() and sizes.tolist() == plain_sizes.tolist()
    expected = []
    for line in lines:
        _, _, ends = tokenizer.encode_with_offsets(line)
        counts = [0] * len(ends)
        for match in re.finditer(r"\S+", line):
            later = [token for token, end in enumerate(ends) if end > match.start()]
            for token in [*later, len(ends) - 1][:1] if ends else ():
                counts[token] += 1
        expected += counts
        if ends:  # also words without a token
            assert sum(counts) == len(line.split())
    assert words.tolist() == expected


def test_words_of_a_tokenizer_that_joins_words():
    """A token counts all words that begin in it; white space alone counts none."""
    tokenizer = tokenizer_class("word").train(["a b-c"], 40, 1, pattern=r"\w+ \w+|\w+|\s")
    ids, sizes, words = tokenizer.encode_with_words(["a b c", "", "a  b"])
    assert sizes.tolist() == [3, 0, 4] and words.tolist() == [2, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_plain_text(trained, kind):
    """What a token says is what stands at its place; no text comes twice."""
    tokenizer = trained[kind]
    text = "It was  the worst, 1984 times"
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    for i, start, end in zip(ids, starts, ends):
        if i != tokenizer.vocabulary.unk:
            said = tokenizer.decode([i]).strip()
            assert said == text[start:end].strip(), (said, text[start:end])
    assert sum(end - start for start, end in zip(starts, ends)) <= len(text)
    parts = [text[start:end] for start, end in zip(starts, ends)]
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_offsets_of_split_characters(trained):
    """Each byte token of a character, and each piece of a spelled-out one, covers all of it."""
    _, starts, ends = trained["byte_bpe"].encode_with_offsets("a 😀b")
    assert (starts[0], ends[0], starts[-1], ends[-1]) == (0, 1, 3, 4)
    assert set(zip(starts[2:-1], ends[2:-1])) == {(2, 3)} and len(starts) > 4
    ids, starts, ends = trained["sentencepiece_unigram"].encode_with_offsets("x ½")
    assert len(ids) > 3 and (starts[-1], ends[-1]) == (2, 3)
    symbols = [trained["sentencepiece_unigram"].vocabulary.symbols[i] for i in ids]
    assert (2, 3) == (starts[symbols.index("⁄")], ends[symbols.index("⁄")])


def test_symbols_that_a_model_lacks_move_no_later_word():
    """Byte-level BPE gives no token for a byte that an imported alphabet leaves out."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    numbers = {symbol: i for i, symbol in enumerate([*specials, *"abcĠ"])}
    library = tokenizers.Tokenizer(models.BPE(vocab=numbers, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ids, starts, ends = tokenizer_class("byte_bpe")(library).encode_with_offsets("az bc a")
    assert [numbers[symbol] for symbol in "aĠbcĠa"] == ids
    assert (starts, ends) == ([0, 2, 3, 4, 5, 6], [1, 3, 4, 5, 6, 7])
