"""Masking of whole words, spans of words and short spans, as a function of each row's key.

Shapes: B rows, S length, V symbols.
"""

from dataclasses import dataclass

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.random_streams import subkeys, uniforms
from metaseq_lm.data.streams import Phases

__all__ = ["SpanLengths"]

SHORT = 3  # most tokens of a short span
_TOLERANCE = 1e-9  # so that 0.07 * 100 tokens, in floating point a little more than 7, are 7


@dataclass(frozen=True)
class SpanLengths:
    """Geometric lengths, cut off at `longest` and normalised (Joshi et al. 2020, section 3.1).

    Attributes:
        mean: The mean before the cut at `longest`, 1 / p.
        longest: The largest length.
    """

    mean: float = 5.0
    longest: int = 10

    @property
    def probabilities(self) -> np.ndarray:
        """The probability of each length from 1 to `longest`, (longest,)."""
        weights = (1 - 1 / self.mean) ** np.arange(self.longest)
        return np.asarray(weights / weights.sum())

    def draw(self, uniform: np.ndarray) -> np.ndarray:
        """Return the lengths that belong to uniform numbers in [0, 1), int64 of their shape."""
        below = self.probabilities.cumsum()[:-1]
        return np.asarray(1 + np.searchsorted(below, uniform, side="right"))


@dataclass(frozen=True)
class Units:
    """The units that are masked as a whole.

    Attributes:
        kind: "word"; "span", consecutive words, their number drawn from `lengths`; or "short_span",
            1 to SHORT consecutive tokens.
        word_starts: Which tokens begin a word, boolean (V,); not used for short spans.
        lengths: The lengths of spans in words.
        by_tokens: Whether a span begins with the word of a token that is drawn, see `choose_spans`.
    """

    kind: str
    word_starts: np.ndarray
    lengths: SpanLengths = SpanLengths()
    by_tokens: bool = False

    def starts(self, tokens: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Return where words of rows (B, S) begin, boolean (B, S).

        A word consists of candidates, boolean (B, S); any other token ends it.
        """
        follows = np.zeros_like(candidates)
        follows[:, 1:] = candidates[:, :-1]
        return np.asarray(candidates & (self.word_starts[tokens] | ~follows))


def span_counts(candidates: np.ndarray, rate: float) -> np.ndarray:
    """Return ceil(rate * n) for numbers n of candidates, int64: SpanBERT's budget."""
    counts = np.ceil(rate * candidates - _TOLERANCE).astype(np.int64)
    return np.asarray(np.minimum(counts, candidates))


def choose_words(
    starts: np.ndarray, candidates: np.ndarray, counts: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Choose whole words, in random order, that together have at most counts[i] tokens of row i.

    A word that would exceed this number is skipped, and the next one is tried (the code of Devlin
    et al. 2019). Takes where words begin and the candidates, boolean (B, S); returns the chosen
    tokens, boolean (B, S).
    """
    rows, length = np.arange(len(starts))[:, None], starts.shape[1]
    word = np.where(candidates, starts.cumsum(1) - 1, length)
    sizes = np.zeros((len(starts), length + 1), np.int64)
    np.add.at(sizes, (rows, word), 1)
    sizes[:, length] = 0  # tokens that are no candidates
    draws = np.where(sizes[:, :length] > 0, uniforms(subkeys(keys, "words"), 0, length), 2.0)
    order = np.argsort(draws, axis=1, kind="stable")
    is_chosen, used = np.zeros_like(sizes, dtype=bool), np.zeros(len(starts), np.int64)
    for rank in range(int(starts.sum(1).max(initial=0))):
        at = (rows[:, 0], order[:, rank])
        fits = (sizes[at] > 0) & (used + sizes[at] <= counts)
        is_chosen[at] = fits
        used += np.where(fits, sizes[at], 0)
        # Most rows reach their number long before their last word.
        if (used == counts).all():
            break
    return np.asarray(is_chosen[rows, word])


def choose_spans(
    starts: np.ndarray,
    candidates: np.ndarray,
    counts: np.ndarray,
    lengths: SpanLengths,
    keys: np.ndarray,
    by_tokens: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose spans of whole words until they cover exactly counts[i] tokens of row i.

    A span begins at a uniformly drawn word outside all spans and may run into others; the last one
    is cut to the exact number (Joshi et al. 2020). Takes where words begin and the candidates,
    boolean (B, S). Returns the chosen tokens, boolean (B, S), and the number of the span of each,
    int64 (B, S).

    With `by_tokens`, as in the authors' code, a token outside all spans is drawn and its word
    begins the span, so that words of several tokens are more likely; spans that touch share a
    number.
    """
    word, block = starts.cumsum(1), (~candidates).cumsum(1)
    is_chosen, number = np.zeros_like(candidates), np.zeros(candidates.shape, np.int64)
    keys, at = subkeys(keys, "spans"), np.arange(candidates.shape[1])
    for span in range(int(counts.max(initial=0))):
        left = counts - is_chosen.sum(1)
        if not left.any():
            break
        # Numbers of its own for each span, whatever other rows of the batch still need.
        uniform = uniforms(keys, 2 * span, 2)
        free = (candidates if by_tokens else starts) & ~is_chosen
        rank = (uniform[:, 0] * free.sum(1)).astype(np.int64)
        first = (free.cumsum(1) > rank[:, None]).argmax(1)[:, None]
        if by_tokens:
            first = np.where(starts & (at <= first), at, 0).max(1)[:, None]
        last = np.take_along_axis(word, first, 1) + lengths.draw(uniform[:, 1])[:, None]
        inside = candidates & (at >= first) & (word < last)
        inside &= block == np.take_along_axis(block, first, 1)
        fresh = inside & ~is_chosen
        fresh &= fresh.cumsum(1) <= left[:, None]
        is_chosen |= fresh
        number[fresh] = span
    return is_chosen, _number_groups(is_chosen) if by_tokens else number


def _number_groups(is_chosen: np.ndarray, ends: np.ndarray | None = None) -> np.ndarray:
    """Return the index of each chosen token's group, counted from 0, int64 (B, S).

    A group is a run of adjacent chosen tokens, boolean (B, S). A chosen token where `ends`, boolean
    (B, S), is true begins a new group.
    """
    follows = np.zeros_like(is_chosen)
    follows[:, 1:] = is_chosen[:, :-1]
    if ends is not None:
        follows &= ~ends
    return np.asarray(np.maximum((is_chosen & ~follows).cumsum(1) - 1, 0))


def choose_short_spans(
    candidates: np.ndarray, counts: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose spans of 1 to SHORT tokens until they cover at least counts[i] tokens of row i.

    A row is cut into spans of uniform lengths, which are taken whole in random order, so up to
    SHORT - 1 extra tokens are chosen (Charpentier and Samuel 2024, code; without its memory of
    tokens that were masked before). Only `candidates`, boolean (B, S), are chosen. Returns the same
    as `choose_spans`.
    """
    rows, length = np.arange(len(candidates))[:, None], candidates.shape[1]
    sizes = 1 + (SHORT * uniforms(subkeys(keys, "short spans"), 0, length)).astype(np.int64)
    begins = np.zeros((len(candidates), length + SHORT), bool)
    begins[:, 0] = True
    begins[rows, np.minimum(sizes.cumsum(1), length)] = True
    begins = begins[:, :length]
    draws = uniforms(subkeys(keys, "order of spans"), 0, length)[rows, begins.cumsum(1) - 1]
    draws[~candidates] = 2.0
    counts = np.minimum(counts, candidates.sum(1))
    last = np.sort(draws, axis=1)[rows[:, 0], np.maximum(counts - 1, 0)]
    is_chosen = candidates & (draws <= last[:, None]) & (counts > 0)[:, None]
    return is_chosen, _number_groups(is_chosen, begins)


@dataclass(frozen=True)
class MaskRates:
    """The share of masked tokens as a function of the update.

    Attributes:
        rates: The shares, at least one.
        updates: The number of updates of the run.
        phases: The share of the updates for each of `rates`, which is then constant in its phase.
            If empty, the share changes linearly between the rates: it is `rates[0]` in the first
            update and would reach the last rate in the update after the end of the run.

    Raises:
        UsageError: The phases do not fit the rates, or their shares do not sum to 1.
    """

    rates: tuple[float, ...]
    updates: int
    phases: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        is_whole = abs(sum(self.phases) - 1) <= _TOLERANCE
        if self.phases and not (is_whole and len(self.phases) == len(self.rates)):
            raise UsageError(
                f"task.mask_phases is {list(self.phases)}: give a share of the updates for each of "
                f"task.mask_rates={list(self.rates)}, 1 together; or leave it out for rates that "
                "change linearly"
            )

    def at(self, update: int) -> float:
        """Return the share in an update, counted from 0; the last share after the run."""
        if self.phases:
            return self.rates[Phases(self.phases, self.updates).at(update)]
        done = update / max(self.updates, 1)
        return float(np.interp(done, np.linspace(0, 1, len(self.rates)), self.rates))

    @property
    def mean(self) -> float:
        """The mean share over the run, ignoring the rounding of phases to updates."""
        rates = np.array(self.rates)
        if self.phases:
            return float(rates @ self.phases)
        if len(rates) > 1:
            rates = (rates[1:] + rates[:-1]) / 2
        return float(np.mean(rates))
