"""Texts to inputs and targets: spans are replaced by sentinels (Raffel et al. 2020, 3.1.4).

The arithmetic follows the authors' code (t5, data/preprocessors.py). In a text of n tokens,
round(density n) are noise, in round(noise / mean span) spans. Noise and the rest are each cut into
this number of parts, with all cuts equally likely, and alternate, starting with the rest. A
sentinel replaces each span of noise in the inputs, and each part of the rest in the targets:

  text     a b c D e f G H      (capitals: noise)
  inputs   a b c <0> e f <1> [SEP]
  targets  <0> D <1> G H [SEP]

As in the code, and unlike in the paper's figure, no sentinel closes the targets. `random_roll` of
the code rotates a text's noise by a random offset, so that a single span may be anywhere. Here only
offsets that cut no span are drawn, with equal probability, since the two parts of a cut span would
need two sentinels. Shapes: B rows, S length, K spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import subkeys, uniforms

# The task token at the start of a text by the mode of its denoiser (Tay et al. 2023, section
# 3.1.2): regular, sequential and extreme denoising.
MODES = {"": 0, "R": 1, "S": 2, "X": 3}
_SEQUENTIAL = "S"
_USAGE = (
    "write MODE:DENSITY:MEAN_SPAN, such as R:0.15:3 or X:0.5:8, or S:DENSITY, whose noise is the "
    "end of the text"
)


@dataclass(frozen=True)
class Denoiser:
    """How texts are corrupted.

    Attributes:
        density: Share of noise tokens.
        mean_span: Mean number of tokens in a span; ignored in mode "S", where the noise is the end
            of the text, without sentinels.
        mode: One of MODES.
    """

    density: float = 0.15
    mean_span: float = 3.0
    mode: str = ""

    @classmethod
    def parse(cls, text: str) -> "Denoiser":
        """Return the denoiser of an entry of `task.denoisers`; UsageError if it is malformed."""
        mode, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if mode == _SEQUENTIAL and len(values) == 1:
            values.append(0.0)
            in_range = 0 < values[0] < 1
        else:
            in_range = len(values) == 2 and 0 < values[0] < 1 and values[1] >= 1
            in_range = in_range and mode not in ("", _SEQUENTIAL)
        if mode not in MODES or not in_range:
            raise UsageError(f"task.denoisers has '{text}': {_USAGE}")
        return cls(values[0], values[1], mode)

    def counts(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of noise tokens and spans in texts of `lengths`, int64 of their shape.

        The arithmetic is in single precision with halves rounded to even, as in the code. Texts
        have at least one token of noise and one other token, but texts of less than two tokens have
        no noise.
        """
        lengths = np.asarray(lengths)
        noise = np.rint(lengths.astype(np.float32) * np.float32(self.density)).astype(np.int64)
        noise = np.where(lengths > 1, np.clip(noise, 1, np.maximum(lengths - 1, 1)), 0)
        if self.mode == _SEQUENTIAL:
            return noise, np.zeros_like(noise)
        spans = np.rint(noise.astype(np.float32) / np.float32(self.mean_span)).astype(np.int64)
        # Spans alternate with other tokens, so they cannot outnumber these.
        most = np.minimum(noise, lengths - noise)
        return noise, np.where(noise > 0, np.clip(spans, 1, np.maximum(most, 1)), 0)

    def row_lengths(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of inputs and targets, including [SEP], for texts of `lengths`."""
        noise, spans = self.counts(lengths)
        return lengths - noise + spans + 1, noise + spans + 1


class _TextLength(NamedTuple):
    """The length of texts that fill inputs, and the lengths of inputs and targets with [SEP]."""

    tokens: int
    inputs: int
    targets: int


def text_length(inputs_length: int, density: float, mean_span: float) -> _TextLength:
    """Return the length of the longest texts with inputs of at most `inputs_length` tokens.

    It follows `random_spans_helper` of the code, in Python's floating point. That may expect no
    span in a text that has one; inputs and targets are then one token longer. With a density of one
    half it takes a token away if targets would be longer than inputs.
    """

    def lengths(tokens: int) -> tuple[int, int]:
        noise = round(tokens * density)
        spans = round(noise / mean_span)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length - 1
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    inputs, targets = lengths(tokens)
    if density == 0.5 and targets > inputs:
        return _TextLength(tokens - 1, inputs, targets - 1)
    return _TextLength(tokens, inputs, targets)


def _first_of_parts(
    items: np.ndarray, parts: np.ndarray, width: int, keys: np.ndarray
) -> np.ndarray:
    """Cut items[i] items of row i into parts[i] parts, none empty, by keys[i].

    All cuts are equally likely. Returns which items begin a part, boolean (B, width).
    """
    at = np.arange(width)
    u = uniforms(keys, 0, width)
    u[(at == 0) | (at >= items[:, None])] = 2.0  # the first item always begins a part
    rank = u.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray((rank < parts[:, None] - 1) | ((at == 0) & (parts[:, None] > 0)))


def _sizes_of_parts(is_first: np.ndarray, items: np.ndarray, count: int) -> np.ndarray:
    """Return the sizes of at most `count` parts of each row, int64 (B, count), 0 for none."""
    is_item = np.arange(is_first.shape[1]) < items[:, None]
    part = np.where(is_item, is_first.cumsum(1) - 1, count)
    sizes = np.zeros((len(items), count + 1), np.int64)
    np.add.at(sizes, (np.arange(len(items))[:, None], part), 1)
    return sizes[:, :count]


def _draw_noise(
    lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray, width: int, keys: np.ndarray
) -> np.ndarray:
    """Return which tokens of texts of `lengths` (B,) are noise, boolean (B, width).

    Without spans, the noise is the end of a text.
    """
    count = int(spans.max(initial=0))
    at = np.arange(width)
    rest = lengths - noise
    sizes = np.zeros((len(lengths), 2 * count), np.int64)
    for first, items, purpose in ((0, rest, "rest"), (1, noise, "noise")):
        is_first = _first_of_parts(items, spans, width, subkeys(keys, purpose))
        sizes[:, first::2] = _sizes_of_parts(is_first, np.where(spans > 0, items, 0), count)
    marks = np.zeros((len(lengths), width + 1), np.int64)
    ends = np.minimum(sizes.cumsum(1), width)
    np.add.at(marks, (np.arange(len(lengths))[:, None], ends), 1)
    is_noise = marks.cumsum(1)[:, :width] % 2 == 1
    is_end = at >= rest[:, None]
    return np.asarray(np.where(spans[:, None] > 0, is_noise, is_end) & (at < lengths[:, None]))


def roll(is_noise: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return noise (B, S) of texts of `lengths` (B,), rotated by keys; it begins with the rest.

    After the rotation the first token is one of the rest, or the first token of a span.
    """
    at = np.arange(is_noise.shape[1])
    is_inside = is_noise & np.pad(is_noise, ((0, 0), (1, 0)))[:, :-1]
    is_choice = ~is_inside & (at < lengths[:, None])
    number = (uniforms(keys, 0, 1)[:, 0] * is_choice.sum(1)).astype(np.int64)
    first = (is_choice.cumsum(1) > number[:, None]).argmax(1)
    source = (at + first[:, None]) % np.maximum(lengths, 1)[:, None]
    return np.take_along_axis(is_noise, source, 1) & (at < lengths[:, None])


class _Corrupted(NamedTuple):
    """Rows of inputs (B, I) and of targets (B, T), each with [SEP], and their lengths (B,)."""

    inputs: np.ndarray
    input_lengths: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray


@dataclass(frozen=True)
class Corruption:
    """A mixture of denoisers, one for each text, with equal probability.

    Attributes:
        denoisers: The denoisers.
        sentinels: The ids of the sentinels in the order of the spans of a text.
        end: The id of [SEP].
        pad: The id of padding.
        random_roll: Whether the noise of texts with spans is rotated, see `roll`.
    """

    denoisers: Sequence[Denoiser]
    sentinels: np.ndarray
    end: int
    pad: int
    random_roll: bool = False

    def _row_lengths(self, length: int) -> np.ndarray:
        # Of each denoiser, the inputs and targets of a text, (denoisers, 2).
        return np.array([denoiser.row_lengths(np.array(length)) for denoiser in self.denoisers])

    def row_lengths(self, length: int) -> tuple[int, int]:
        """Return the longest inputs and targets, with [SEP], of texts of a length."""
        inputs, targets = self._row_lengths(length).max(0).tolist()
        return inputs, targets

    def joint_length(self, length: int) -> int:
        """Return the largest sum of inputs and targets of one text of a length."""
        return int(self._row_lengths(length).sum(1).max())

    def choose(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of each row's denoiser, int64 (B,)."""
        u = uniforms(subkeys(keys, "denoiser"), 0, 1)[:, 0]
        return np.asarray((u * len(self.denoisers)).astype(np.int64))

    def __call__(
        self, texts: np.ndarray, lengths: np.ndarray, keys: np.ndarray, chosen: np.ndarray
    ) -> _Corrupted:
        """Corrupt texts (B, S) of `lengths` (B,) by keys (B,), row i by denoiser chosen[i].

        The width of inputs and targets depends only on S.
        """
        rows, width = np.arange(len(texts))[:, None], texts.shape[1]
        counts = [denoiser.counts(lengths) for denoiser in self.denoisers]
        noise, spans = np.array(counts)[chosen, :, rows[:, 0]].T
        is_noise = _draw_noise(lengths, noise, spans, width, keys)
        if self.random_roll:
            rolled = roll(is_noise, lengths, subkeys(keys, "roll"))
            is_noise = np.where(spans[:, None] > 0, rolled, is_noise)
        is_first = is_noise & ~np.pad(is_noise, ((0, 0), (1, 0)))[:, :-1] & (spans[:, None] > 0)
        number = is_first.cumsum(1)  # number of the span, from 1
        sentinel = self.sentinels[np.maximum(number - 1, 0)] if len(self.sentinels) else number
        input_width, target_width = self.row_lengths(width)
        input_lengths, target_lengths = lengths - noise + spans + 1, noise + spans + 1
        inputs = np.full((len(texts), input_width), self.pad, np.int64)
        targets = np.full((len(texts), target_width), self.pad, np.int64)
        # In the inputs a sentinel replaces the first token of a span, and the others are left out;
        # in the targets the sentinel precedes the first token.
        is_input = (np.arange(width) < lengths[:, None]) & (~is_noise | is_first)
        row, at = np.nonzero(is_input)
        column = (is_input.cumsum(1) - 1)[row, at]
        inputs[row, column] = np.where(is_first, sentinel, texts)[row, at]
        row, at = np.nonzero(is_noise)
        column = (is_noise.cumsum(1) - 1 + number)[row, at]
        targets[row, column] = texts[row, at]
        row, at = np.nonzero(is_first)
        column = (is_noise.cumsum(1) - 2 + number)[row, at]
        targets[row, column] = sentinel[row, at]
        inputs[rows[:, 0], input_lengths - 1] = self.end
        targets[rows[:, 0], target_lengths - 1] = self.end
        return _Corrupted(inputs, input_lengths, targets, target_lengths)
