"""Whole words, spans and changing rates of masks."""

from collections.abc import Callable

import numpy as np
import pytest

from metaseq_lm.config.tasks import SPAN, WORD
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import key, row_keys
from metaseq_lm.data.corpus.masking import Masking, mask_tokens
from metaseq_lm.data.corpus.units import (
    MaskRates,
    SpanLengths,
    Units,
    choose_spans,
    choose_words,
    span_counts,
)
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.byte_bpe import ByteBpe
from metaseq_lm.data.tokenizers.plain import CharTokenizer
from metaseq_lm.data.tokenizers.sentencepiece_models import SentencePieceUnigram
from metaseq_lm.data.tokenizers.wordpiece import WordPiece

LINES = ["the quick brown fox jumped over lazy dogs", "a lazy fox, and the quickest dogs"] * 20
# Tokens 10 to 14 begin words, 15 to 19 go on with one; 0 to 3 are special.
STARTS = np.arange(20) < 15


def keys_of(count: int, name: str = "rows") -> np.ndarray:
    return row_keys(key(name), np.arange(count))


def pieces(rows: int, length: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random rows between special tokens, of which the second half is shorter."""
    tokens = np.random.default_rng(seed).integers(10, 20, (rows, length))
    lengths = np.where(np.arange(rows) < rows // 2, length, length - 5)
    tokens[:, 0] = 2
    tokens[np.arange(rows), lengths - 1] = 3
    tokens[np.arange(length) >= lengths[:, None]] = 0
    return tokens, lengths


def masking(kind: str, **options: object) -> Masking:
    units = Units(kind, STARTS)
    return Masking(
        mask=1, spared=np.arange(4), replacements=np.arange(4, 20), units=units, **options
    )


def words_of(starts: np.ndarray, candidates: np.ndarray, row: int) -> list[np.ndarray]:
    """Return the positions of each word of a row, by a loop."""
    words: list[list[int]] = []
    for at in np.flatnonzero(candidates[row]):
        if starts[row, at]:
            words.append([])
        words[-1].append(at)
    return [np.array(word) for word in words]


def test_span_lengths_are_those_of_spanbert() -> None:
    """Joshi et al. 2020: p = 0.2, at most 10, mean 3.8."""
    lengths = SpanLengths()
    expected = [0.2241, 0.1792, 0.1434, 0.1147, 0.0918, 0.0734, 0.0587, 0.0470, 0.0376, 0.0301]
    np.testing.assert_allclose(lengths.probabilities, expected, atol=5e-5)
    assert lengths.probabilities @ np.arange(1, 11) == pytest.approx(3.797, abs=5e-4)
    uniform = (np.arange(100_000) + 0.5) / 100_000
    shares = np.bincount(lengths.draw(uniform), minlength=11)[1:] / 100_000
    np.testing.assert_allclose(shares, lengths.probabilities, atol=2e-5)
    assert (SpanLengths(mean=1.0).draw(uniform) == 1).all()


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.07, 1.0])
@pytest.mark.parametrize("rounding", ["random", "nearest"])
def test_spans_have_the_exact_budget(rate: float, rounding: str) -> None:
    tokens, lengths = pieces(300, 100)
    options = masking(SPAN, rate=rate, rounding=rounding, tokens_per_sample=100)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(300), options)
    candidates = lengths - 2
    assert ((targets >= 0).sum(1) == np.ceil(np.round(rate * candidates, 9))).all()
    for row in range(300):
        chosen = positions[row][targets[row] >= 0]
        assert len(set(chosen)) == len(chosen) and (tokens[row, chosen] >= 10).all()
    assert (masked == tokens).sum() < tokens.size


def test_the_budget_of_spans_is_rounded_up() -> None:
    assert span_counts(np.array([100, 20, 7, 0]), 0.15).tolist() == [15, 3, 2, 0]
    assert span_counts(np.array([100]), 0.07).tolist() == [7]  # 7.000000000000001 in floating point


def test_spans_begin_with_words_and_end_with_them_or_the_budget() -> None:
    tokens, lengths = pieces(400, 60)
    candidates = tokens >= 10
    starts = masking(SPAN).units.starts(tokens, candidates)  # type: ignore[union-attr]
    counts = span_counts(candidates.sum(1), 0.2)
    is_chosen, number = choose_spans(starts, candidates, counts, SpanLengths(), keys_of(400))
    cut = first_words = 0
    for row in range(400):
        last = number[row][is_chosen[row]].max()
        for span in range(last + 1):
            at = np.flatnonzero(is_chosen[row] & (number[row] == span))
            assert starts[row, at[0]]
            after = at[-1] + 1
            ends = not candidates[row, after] or starts[row, after] or is_chosen[row, after]
            assert ends or span == last
            cut += not ends
            words = starts[row, at].sum()
            assert words <= 10
            first_words += words if span == 0 else 0
    assert cut > 20
    # What is left of 3.8 when spans of 11 tokens or more, or at the end of a row, are cut.
    assert 2.8 < first_words / 400 < 3.8


def test_all_tokens_of_a_span_are_replaced_alike() -> None:
    tokens, lengths = pieces(2000, 40)
    options = masking(SPAN, rate=0.3, random=0.1, keep=0.2)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(2000), options)
    candidates = tokens >= 10
    starts = options.units.starts(tokens, candidates)  # type: ignore[union-attr]
    counts = span_counts(candidates.sum(1), 0.3)
    is_chosen, number = choose_spans(starts, candidates, counts, SpanLengths(), keys_of(2000))
    kinds = np.where(masked == 1, 0, np.where(masked == tokens, 1, 2))
    kept = []
    for row in range(2000):
        for span in range(number[row].max() + 1):
            kind = set(kinds[row, is_chosen[row] & (number[row] == span)])
            assert kind in ({0}, {1}, {2}, {1, 2})  # a random token may be the original one
            kept.append(kind == {1})
    assert np.mean(kept) == pytest.approx(0.21, abs=0.02)


def test_whole_words_are_chosen_greedily() -> None:
    """As a loop: words in random order, each that fits into what is left of the budget."""
    tokens, lengths = pieces(200, 30)
    candidates = tokens >= 10
    starts = masking(WORD).units.starts(tokens, candidates)  # type: ignore[union-attr]
    counts = np.full(200, 7)
    is_chosen = choose_words(starts, candidates, counts, keys_of(200))
    for row in range(200):
        words = words_of(starts, candidates, row)
        chosen = [is_chosen[row, word].all() for word in words]
        assert is_chosen[row].sum() == sum(len(w) for w, c in zip(words, chosen) if c)
        left = 7 - is_chosen[row].sum()
        assert left >= 0
        assert all(len(word) > left for word, c in zip(words, chosen) if not c)
    # Words of one piece are all alike likely.
    single = np.zeros((20_000, 9), bool)
    single[:, 1:-1] = True
    shares = choose_words(single, single, np.full(20_000, 2), keys_of(20_000)).mean(0)
    np.testing.assert_allclose(shares[1:-1], 2 / 7, atol=0.015)


@pytest.mark.parametrize("kind", [WORD, SPAN])
def test_a_row_depends_neither_on_others_nor_on_the_width(kind: str) -> None:
    tokens, lengths = pieces(40, 30)
    options = masking(kind, rate=0.3)
    whole = mask_tokens(tokens, lengths, keys_of(40), options)
    wide = mask_tokens(np.pad(tokens, ((0, 0), (0, 9))), lengths, keys_of(40), options)
    assert (wide[0][:, :30] == whole[0]).all() and (wide[2] == whole[2]).all()
    part = mask_tokens(tokens[7:9], lengths[7:9], keys_of(40)[7:9], options)
    assert (part[0] == whole[0][7:9]).all()


def test_a_word_ends_at_what_cannot_be_masked() -> None:
    tokens = np.array([[2, 15, 16, 11, 17, 3, 18, 3]])
    candidates = tokens >= 10
    starts = Units(WORD, STARTS).starts(tokens, candidates)
    assert starts.tolist() == [[False, True, False, True, False, False, True, False]]


@pytest.mark.parametrize(
    "train, joined",
    [
        (lambda: WordPiece.train(LINES, 120, 3), lambda symbol: symbol.startswith("##")),
        (lambda: ByteBpe.train(LINES, 300, 3), lambda symbol: not symbol.startswith("Ġ")),
        (lambda: SentencePieceUnigram.train(LINES, 60, 3), lambda s: not s.startswith("▁")),
        (lambda: CharTokenizer.train(LINES, 60, 3), lambda symbol: symbol != " "),
    ],
    ids=["wordpiece", "byte_bpe", "unigram", "char"],
)
def test_words_of_each_tokenizer(
    train: Callable[[], Tokenizer], joined: Callable[[str], bool]
) -> None:
    """Pieces that go on with a word belong to the word before them, in text as in the table."""
    tokenizer = train()
    symbols, starts = tokenizer.vocabulary.symbols, tokenizer.word_starts
    assert starts[tokenizer.vocabulary.specials].all()
    [ids] = tokenizer.encode_batch(["the quickest fox jumped"])
    words = "".join("|" * bool(starts[i]) + symbols[i] for i in ids).strip("|").split("|")
    marks = str.maketrans("", "", "#Ġ▁ ")
    assert [word.translate(marks) for word in words] == ["the", "quickest", "fox", "jumped"]
    text = [i for i in range(len(symbols)) if i not in tokenizer.vocabulary.specials]
    if not isinstance(tokenizer, ByteBpe):  # which has other white space, too
        assert [not joined(symbols[i]) for i in text] == starts[text].tolist()


def test_words_are_chosen_once_and_all_alike() -> None:
    with pytest.raises(UsageError, match="mask_unit=word chooses whole words"):
        masking(WORD, legacy_duplicates=True)
    with pytest.raises(UsageError, match="mask_rarity=0"):
        masking(SPAN, weights=np.ones(20))


def test_rates_change_linearly() -> None:
    rates = MaskRates((0.3, 0.15), 8)
    values = [rates.at(update) for update in (0, 2, 4, 6, 8, 9, 100)]
    assert values == pytest.approx([0.3, 0.2625, 0.225, 0.1875, 0.15, 0.15, 0.15])
    assert rates.mean == pytest.approx(0.225)
    assert MaskRates((0.1, 0.3, 0.1), 4).at(1) == pytest.approx(0.2)
    assert MaskRates((0.4,), 5).at(3) == MaskRates((0.4,), 5).mean == 0.4


def test_rates_by_phases() -> None:
    rates = MaskRates((0.3, 0.15, 0.05), 10, (0.5, 0.3, 0.2))
    assert [rates.at(update) for update in range(12)] == [0.3] * 5 + [0.15] * 3 + [0.05] * 4
    assert rates.mean == pytest.approx(0.205)
    for phases in ((0.5, 0.5), (0.5, 0.3, 0.3)):
        with pytest.raises(UsageError, match="a share of the updates for each"):
            MaskRates((0.3, 0.15, 0.05), 10, phases)
