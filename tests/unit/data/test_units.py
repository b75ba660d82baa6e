"""Whole words, spans and changing rates of masks."""

import numpy as np
import pytest
from published_masks import gpt_bert_spans, spanbert_spans

from metaseq_lm.config.tasks import SHORT_SPAN, SPAN, WORD
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import key, row_keys
from metaseq_lm.data.corpus.masking import Masking, mask_tokens
from metaseq_lm.data.corpus.units import (
    MaskRates,
    SpanLengths,
    Units,
    choose_short_spans,
    choose_spans,
    choose_words,
    span_counts,
)
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


def test_span_lengths_are_those_of_spanbert():
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
def test_spans_have_the_exact_budget(rate, rounding):
    tokens, lengths = pieces(300, 100)
    options = masking(SPAN, rate=rate, rounding=rounding, tokens_per_sample=100)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(300), options)
    candidates = lengths - 2
    assert ((targets >= 0).sum(1) == np.ceil(np.round(rate * candidates, 9))).all()
    for row in range(300):
        chosen = positions[row][targets[row] >= 0]
        assert len(set(chosen)) == len(chosen) and (tokens[row, chosen] >= 10).all()
    assert (masked == tokens).sum() < tokens.size


def test_the_budget_of_spans_is_rounded_up():
    assert span_counts(np.array([100, 20, 7, 0]), 0.15).tolist() == [15, 3, 2, 0]
    assert span_counts(np.array([100]), 0.07).tolist() == [7]  # 7.000000000000001 in floating point


def test_spans_begin_with_words_and_end_with_them_or_the_budget():
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


def test_all_tokens_of_a_span_are_replaced_alike():
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


def test_spans_by_tokens_favour_long_words():
    """As SpanBERT's code, which draws a token; its paper draws a word (Joshi et al. 2020)."""
    words, rows = [1, 2, 3, 4, 5] * 20, 1500
    starts = np.zeros((rows, sum(words)), bool)
    starts[:, np.cumsum([0, *words[:-1]])] = True
    candidates, size = np.ones_like(starts), np.repeat(words, words)
    counts = np.full(rows, 45)
    generator = np.random.default_rng(1)
    expected = np.zeros(sum(words))
    for _ in range(rows):
        expected[[*spanbert_spans(words, 45, generator)]] += 1 / rows
    by_size = {}
    for by_tokens in (True, False):
        args = starts, candidates, counts, SpanLengths(), keys_of(rows), by_tokens
        is_chosen, number = choose_spans(*args)
        assert (is_chosen.sum(1) == 45).all()
        by_size[by_tokens] = [is_chosen[:, size == n].mean() for n in range(1, 6)]
        if by_tokens:  # spans that touch have one number
            follows = is_chosen[:, 1:] & is_chosen[:, :-1]
            assert (number[:, 1:] == number[:, :-1])[follows].all()
            assert (
                number.max(1) + 1
                == is_chosen[:, 0] + (np.diff(is_chosen) & is_chosen[:, 1:]).sum(1)
            ).all()
    reference = [expected[size == n].mean() for n in range(1, 6)]
    np.testing.assert_allclose(by_size[True], reference, atol=0.006)
    assert by_size[True][4] > by_size[False][4] + 0.01
    assert by_size[True][0] < by_size[False][0] - 0.005


def groups(is_chosen: np.ndarray, most: int = 8) -> np.ndarray:
    """Return the number of groups of 1 to `most` chosen tokens beside each other, by size."""
    edges = np.flatnonzero(np.diff(np.pad(is_chosen.astype(int), ((0, 0), (1, 1))), axis=1))
    sizes = edges[1::2] - edges[::2]
    return np.bincount(sizes, minlength=most + 1)[1 : most + 1]


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_short_spans_are_those_of_gpt_bert(rate):
    """Charpentier and Samuel 2024, code: how many are masked, and in how long groups."""
    rows, length = 4000, 126
    generator = np.random.default_rng(2)
    expected = np.array([gpt_bert_spans(length, rate, generator) for _ in range(rows)])
    tokens, lengths = np.full((rows, length + 2), 10), np.full(rows, length + 2)
    tokens[:, 0], tokens[:, -1] = 2, 3
    options = masking(SHORT_SPAN, rate=rate, random=0.0, keep=0.0)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(rows), options)
    is_masked = (masked == 1)[:, 1:-1]
    assert (is_masked.sum(1) == (targets >= 0).sum(1)).all()
    assert is_masked.sum(1).mean() == pytest.approx(expected.sum(1).mean(), rel=0.01)
    shares, reference = (groups(x) / groups(x).sum() for x in (is_masked, expected))
    np.testing.assert_allclose(shares, reference, atol=0.01)
    np.testing.assert_allclose(is_masked.mean(0), is_masked.mean(), atol=0.035)


def test_short_spans_are_replaced_as_a_whole():
    """Of 1 to 3 tokens, at most 2 more than the number asked for, the last one whole."""
    tokens, lengths = pieces(3000, 40)
    candidates, counts = tokens >= 10, np.full(3000, 5)
    is_chosen, number = choose_short_spans(candidates, counts, keys_of(3000))
    assert not (is_chosen & ~candidates).any()
    assert set(is_chosen.sum(1)) == {5, 6, 7}
    sizes = [np.bincount(n[c]) for n, c in zip(number, is_chosen)]
    assert {size for row in sizes for size in row} == {1, 2, 3}
    none, _ = choose_short_spans(candidates, np.zeros(3000, int), keys_of(3000))
    assert not none.any()
    options = masking(SHORT_SPAN, rate=0.3, random=0.1, keep=0.2)
    masked, positions, targets = mask_tokens(tokens, lengths, keys_of(3000), options)
    kinds = np.where(masked == 1, 0, np.where(masked == tokens, 1, 2))
    count = candidates.sum(1)
    number_of_targets = (targets >= 0).sum(1)
    assert (number_of_targets >= np.floor(0.3 * count)).all()
    assert (number_of_targets <= np.ceil(0.3 * count) + 2).all()
    # A token's neighbour in a span has its fate; of two neighbours most are in one.
    beside = positions[:, 1:] == positions[:, :-1] + 1
    beside &= (targets[:, 1:] >= 0) & (targets[:, :-1] >= 0)
    rows = np.broadcast_to(np.arange(3000)[:, None], beside.shape)
    left = kinds[rows[beside], positions[:, :-1][beside]]
    right = kinds[rows[beside], positions[:, 1:][beside]]
    assert np.mean((left == 0) == (right == 0)) > 0.85
    assert np.mean(left == 0) == pytest.approx(0.7, abs=0.03)


def test_whole_words_are_chosen_greedily():
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


@pytest.mark.parametrize("kind", [WORD, SPAN, SHORT_SPAN])
def test_a_row_depends_neither_on_others_nor_on_the_width(kind):
    tokens, lengths = pieces(40, 30)
    options = masking(kind, rate=0.3)
    whole = mask_tokens(tokens, lengths, keys_of(40), options)
    wide = mask_tokens(np.pad(tokens, ((0, 0), (0, 9))), lengths, keys_of(40), options)
    assert (wide[0][:, :30] == whole[0]).all() and (wide[2] == whole[2]).all()
    part = mask_tokens(tokens[7:9], lengths[7:9], keys_of(40)[7:9], options)
    assert (part[0] == whole[0][7:9]).all()


def test_a_word_ends_at_what_cannot_be_masked():
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
def test_words_of_each_tokenizer(train, joined):
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


def test_words_are_chosen_once_and_all_alike():
    with pytest.raises(UsageError, match="mask_unit=word chooses"):
        masking(WORD, legacy_duplicates=True)
    with pytest.raises(UsageError, match="mask_rarity=0"):
        masking(SPAN, weights=np.ones(20))


def test_rates_change_linearly():
    rates = MaskRates((0.3, 0.15), 8)
    values = [rates.at(update) for update in (0, 2, 4, 6, 8, 9, 100)]
    assert values == pytest.approx([0.3, 0.2625, 0.225, 0.1875, 0.15, 0.15, 0.15])
    assert rates.mean == pytest.approx(0.225)
    assert MaskRates((0.1, 0.3, 0.1), 4).at(1) == pytest.approx(0.2)
    assert MaskRates((0.4,), 5).at(3) == MaskRates((0.4,), 5).mean == 0.4


def test_rates_by_phases():
    rates = MaskRates((0.3, 0.15, 0.05), 10, (0.5, 0.3, 0.2))
    assert [rates.at(update) for update in range(12)] == [0.3] * 5 + [0.15] * 3 + [0.05] * 4
    assert rates.mean == pytest.approx(0.205)
    for phases in ((0.5, 0.5), (0.5, 0.3, 0.3)):
        with pytest.raises(UsageError, match="share of the"):
            MaskRates((0.3, 0.15, 0.05), 10, phases)
