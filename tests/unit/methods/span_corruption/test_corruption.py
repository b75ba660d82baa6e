"""T5's arithmetic and masks: lengths, spans, sentinels, and texts put together again."""

from collections.abc import Sequence

import numpy as np
import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import key, row_keys
from metaseq_lm.methods.span_corruption.corruption import (
    Corruption,
    Denoiser,
    _Corrupted,
    _draw_noise,
    roll,
    text_length,
)

PAD, END, LAST = 0, 2, 999  # the sentinels are 999, 998, ...
# Density and mean span by inputs length: tokens, inputs, targets, noise and spans of the helper.
TABLE = {
    (0.15, 3): [(141, 128, 29, 21, 7), (284, 256, 58, 43, 14), (568, 512, 114, 85, 28)],
    (0.15, 8): [(146, 128, 26, 22, 3), (293, 256, 51, 44, 6), (588, 512, 100, 88, 11)],
    (0.5, 3): [(190, 128, 128, 95, 32), (382, 256, 256, 191, 64), (766, 512, 512, 383, 128)],
    (0.5, 8): [(226, 128, 128, 113, 14), (454, 256, 256, 227, 28), (908, 512, 512, 454, 57)],
    (0.15, 64): [(149, 128, 23, 22, 0), (299, 256, 47, 45, 1), (600, 512, 92, 90, 1)],
    (0.5, 64): [(250, 128, 128, 125, 2), (502, 256, 256, 251, 4), (1006, 512, 512, 503, 8)],
}
ROWS = [(kind, 128 << i, row) for kind, rows in TABLE.items() for i, row in enumerate(rows)]


def corruption(*denoisers: Denoiser, rolls: bool = False) -> Corruption:
    return Corruption(denoisers, LAST - np.arange(400), END, PAD, rolls)


def corrupt(
    texts: np.ndarray, lengths: np.ndarray, *denoisers: Denoiser, rolls: bool = False
) -> _Corrupted:
    mixture = corruption(*denoisers, rolls=rolls)
    keys = row_keys(key("rows"), np.arange(len(texts)))
    return mixture(texts, lengths, keys, mixture.choose(keys))


def splice(inputs: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Put what follows each sentinel in the targets in its place in the inputs."""
    spans: dict[int, list[int]] = {}
    current = None
    for token in targets[:-1]:
        if token > 500:
            current = spans.setdefault(token, [])
        else:
            assert current is not None
            current.append(token)
    text: list[int] = []
    for token in inputs[:-1]:
        text += spans.pop(token) if token > 500 else [token]
    assert not spans
    return text


@pytest.mark.parametrize("kind, inputs_length, row", ROWS)
def test_lengths_are_those_of_t5(kind, inputs_length, row):
    tokens, inputs, targets, noise, spans = row
    assert text_length(inputs_length, *kind) == (tokens, inputs, targets)
    denoiser = Denoiser(*kind)
    masked, parts = denoiser.counts(np.array(tokens))
    assert masked == noise and parts == max(spans, 1)
    longer = spans == 0  # the helper expects no span, the mask has one
    assert denoiser.row_lengths(np.array(tokens)) == (inputs + longer, targets + longer)


def test_counts_are_rounded_to_even_and_bounded():
    lengths = np.array([0, 1, 2, 3, 10, 30, 50, 7])
    noise, spans = Denoiser(0.15, 3).counts(lengths)
    assert noise.tolist() == [0, 0, 1, 1, 2, 4, 8, 1]  # 1.5, 4.5 and 7.5
    assert spans.tolist() == [0, 0, 1, 1, 1, 1, 3, 1]
    assert Denoiser(0.9, 1).counts(np.array([10]))[1].tolist() == [1]  # one other token


@pytest.mark.parametrize("kind", TABLE, ids=str)
def test_texts_are_put_together_again(kind):
    """Of 150 texts of 2 to 766 tokens, each with the lengths of the closed form."""
    lengths = np.linspace(2, 766, 150).astype(np.int64)
    texts = np.random.default_rng(1).integers(10, 500, (150, 766))
    denoiser = Denoiser(*kind)
    inputs, input_lengths, targets, target_lengths = corrupt(texts, lengths, denoiser)
    expected = denoiser.row_lengths(lengths)
    assert (input_lengths == expected[0]).all() and (target_lengths == expected[1]).all()
    for row, length in enumerate(lengths):
        one, other = inputs[row, : input_lengths[row]], targets[row, : target_lengths[row]]
        assert (inputs[row, input_lengths[row] :] == PAD).all()
        assert (targets[row, target_lengths[row] :] == PAD).all()
        assert splice(one.tolist(), other.tolist()) == texts[row, :length].tolist()
        sentinels = one[one > 500]
        assert (sentinels == LAST - np.arange(denoiser.counts(length)[1])).all()
        assert (other[other > 500] == sentinels).all()
        assert other[0] == LAST and one[0] < 500 and one[-2] == sentinels[-1]  # noise ends a text
        assert one[-1] == other[-1] == END


def test_masks_begin_without_noise_and_end_with_it():
    lengths = np.full(20_000, 10)
    noise, spans = np.full(20_000, 4), np.full(20_000, 2)
    keys = row_keys(key("masks"), np.arange(20_000))
    is_noise = _draw_noise(lengths, noise, spans, 12, keys)
    assert not is_noise[:, 0].any() and is_noise[:, 9].all() and not is_noise[:, 10:].any()
    assert (is_noise.sum(1) == 4).all()
    kinds, counts = np.unique(is_noise, axis=0, return_counts=True)
    assert len(kinds) == 3 * 5  # ways to cut 4 and 6 tokens into two parts
    np.testing.assert_allclose(counts / 20_000, 1 / 15, atol=0.008)


def test_the_end_of_a_text_is_the_noise_of_sequential_denoising():
    texts = np.arange(10, 30)[None].repeat(2, 0)
    rows = corrupt(texts, np.array([20, 8]), Denoiser(0.25, 0.0, "S"))
    assert rows.inputs[0, :16].tolist() == [*range(10, 25), END]
    assert rows.targets[0].tolist() == [*range(25, 30), END]
    assert rows.targets[1, :3].tolist() == [16, 17, END]


def test_a_row_depends_neither_on_others_nor_on_the_width():
    denoisers = Denoiser(0.15, 3, "R"), Denoiser(0.25, 0, "S"), Denoiser(0.5, 8, "X")
    lengths = np.random.default_rng(2).integers(2, 60, 90)
    texts = np.random.default_rng(1).integers(10, 500, (90, 60))
    mixture, keys = corruption(*denoisers), row_keys(key("rows"), np.arange(90))
    chosen = mixture.choose(keys)
    assert (np.bincount(chosen) > 20).all()
    whole = mixture(texts, lengths, keys, chosen)
    wide = mixture(np.pad(texts, ((0, 0), (0, 9))), lengths, keys, chosen)
    part = mixture(texts[5:7], lengths[5:7], keys[5:7], chosen[5:7])
    for one, other, few in ((w, o, p) for w, o, p in zip(whole, wide, part)):
        assert (few == one[5:7]).all()
        assert (other[:, : one.shape[1]] == one).all() if one.ndim == 2 else (other == one).all()


@pytest.mark.parametrize(
    "text", ["R:0.15", "S:0.25:3", "Q:0.15:3", "R:1:3", "R:x:3", ":0.15:3", "X:0.5:0.5", "R"]
)
def test_malformed_denoisers_are_refused(text):
    with pytest.raises(UsageError, match="MODE:DENSITY:MEAN_SPAN"):
        Denoiser.parse(text)


def test_denoisers_of_a_mixture():
    assert Denoiser.parse("X:0.5:8") == Denoiser(0.5, 8.0, "X")
    assert Denoiser.parse("S:0.25") == Denoiser(0.25, 0.0, "S")


@pytest.mark.parametrize("density, mean_span", [(0.15, 3), (0.5, 3), (0.15, 64), (0.5, 1)])
def test_rolled_noise_has_as_many_tokens_and_spans(density, mean_span):
    lengths = np.arange(1, 98)
    noise, spans = Denoiser(density, mean_span).counts(lengths)
    keys = row_keys(key("rows"), lengths)
    before = _draw_noise(lengths, noise, spans, 100, keys)
    after = roll(before, lengths, keys)
    starts = after & ~np.pad(after, ((0, 0), (1, 0)))[:, :-1]
    assert (after.sum(1) == noise).all() and (starts.sum(1) == spans).all()
    assert (before != after).any() and not (after & (np.arange(100) >= lengths[:, None])).any()


def test_a_rolled_single_span_begins_anywhere():
    """Chi-square of the starts of 8 tokens in 31, 24 alike likely places."""
    rows = 24_000
    lengths, keys = np.full(rows, 31), row_keys(key("rows"), np.arange(rows))
    is_noise = np.tile(np.arange(31) >= 23, (rows, 1))
    counts = np.bincount(roll(is_noise, lengths, keys).argmax(1), minlength=24)
    assert len(counts) == 24 and ((counts - 1000) ** 2 / 1000).sum() < 49.7  # p = 0.001


def test_rolled_texts_are_put_together_again_but_for_suffixes():
    texts, lengths = np.tile(np.arange(10, 100), (70, 1)), np.arange(21, 91)
    denoisers = Denoiser(0.15, 3, "R"), Denoiser(0.25, 0, "S"), Denoiser(0.5, 64, "X")
    for denoiser in denoisers:
        plain, rolled = (corrupt(texts, lengths, denoiser, rolls=on) for on in (False, True))
        assert np.array_equal(plain.inputs, rolled.inputs) == (denoiser.mode == "S")
        assert np.array_equal(plain.input_lengths, rolled.input_lengths)
        assert np.array_equal(plain.target_lengths, rolled.target_lengths)
        for row in range(len(texts) if denoiser.mode != "S" else 0):
            inputs = rolled.inputs[row, : rolled.input_lengths[row]].tolist()
            targets = rolled.targets[row, : rolled.target_lengths[row]].tolist()
            assert splice(inputs, targets) == texts[row, : lengths[row]].tolist()
