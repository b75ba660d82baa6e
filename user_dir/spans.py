"""Which tokens are hidden: spans that start anywhere, a pure function of each row's key.

Shapes: B rows, S length, M = the largest number of chosen positions.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import TokenBatch, count_targets
from metaseq_lm.core.random_streams import subkeys, uniforms, words
from metaseq_lm.data.corpus.masking import Masking, candidates_of, hide, random_counts
from metaseq_lm.data.corpus.rows import Samples, row_layout
from metaseq_lm.data.corpus.units import SpanLengths


@dataclass(kw_only=True)
class SpanBatch(TokenBatch):
    """Rows in which spans are hidden.

    Attributes:
        left: Index just before the span of each position (B, M).
        right: Index just after it (B, M).
        offset: Index of each position within its span (B, M).
    """

    left: Tensor
    right: Tensor
    offset: Tensor


def draw_spans(
    candidates: np.ndarray, counts: np.ndarray, lengths: SpanLengths, keys: np.ndarray
) -> dict[str, np.ndarray]:
    """Choose counts[i] of the candidates (B, S) of row i in spans, cutting the last one to fit.

    Spans do not touch, so that both sides of each are visible; without room there are fewer.
    Returns "positions", "counted", "left" and "right", the indices just outside the span of each
    position, and "offset", its index within the span; all (B, M).
    """
    most, reached = max(int(counts.max(initial=0)), 1), np.zeros(len(candidates), np.int64)
    names = ("positions", "left", "right", "offset")
    drawn = {name: np.zeros((len(candidates), most), np.int64) for name in names}
    orders = np.argsort(words(subkeys(keys, "span start"), 0, candidates.shape[1]), axis=1)
    wanted = lengths.draw(uniforms(subkeys(keys, "span length"), 0, candidates.shape[1]))
    for row, order in enumerate(orders):
        # A further place at the end stops a span that would leave the row.
        free = np.append(candidates[row], False)
        done = 0
        for start in order[candidates[row, order]]:
            room = min(int(wanted[row, start]), int(counts[row]) - done)
            if room < 1:
                break
            # Up to the first place that is taken or not a candidate, which may be `start` itself.
            inside = free[start : start + room]
            size = room if inside.all() else int(inside.argmin())
            at = slice(done, done + size)
            drawn["positions"][row, at] = np.arange(start, start + size)
            drawn["offset"][row, at] = np.arange(size)
            drawn["left"][row, at], drawn["right"][row, at] = start - 1, start + size
            if size:
                free[max(start - 1, 0) : start + size + 1] = False
            done += size
        reached[row] = done
    return {**drawn, "counted": np.arange(most) < reached[:, None]}


def span_batch(
    corpus: Samples,
    lengths_of_spans: SpanLengths,
    masking: Masking,
    samples: np.ndarray,
    keys: np.ndarray,
    width: int = 0,
) -> SpanBatch:
    """Return `samples` with hidden spans and the ends of these spans."""
    rows, lengths = corpus.rows(samples, width=width)
    candidates = candidates_of(rows, lengths, masking)
    counts = random_counts(candidates, masking.rate, keys)
    drawn = draw_spans(candidates, counts, lengths_of_spans, keys)
    counted = drawn.pop("counted")
    tokens, targets = hide(rows, drawn["positions"], counted, keys, masking)
    return SpanBatch(
        tokens=tokens,
        layout=row_layout(corpus, samples, lengths, rows.shape[1]),
        segments=corpus.segments(samples, rows.shape[1]),
        targets=targets,
        sizes={**count_targets(targets), "rows": len(rows)},
        **drawn,
    )
