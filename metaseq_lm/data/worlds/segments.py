"""Documents as segments, such as clauses or sentences, each of which ends with the symbol 0.

Shapes: N documents, S tokens of the longest, C segments of a document, L tokens of the longest
segment without its end.
"""

import numpy as np

from metaseq_lm.data.worlds.base import NO_TOKEN


def join_segments(
    segments: np.ndarray, **values: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return documents (N, C (L + 1)) of segments (N, C, L + 1), padded on the right.

    Args:
        segments: Segments with at least one unused last token, where their ends are written.
        values: Values of each token, (N, C, L + 1), joined in the same order.
    """
    count = len(segments)
    lengths = (segments != NO_TOKEN).sum(axis=2)
    np.put_along_axis(segments, lengths[:, :, None], 0, axis=2)
    order = np.argsort((segments == NO_TOKEN).reshape(count, -1), axis=1, kind="stable")
    joined = {
        name: np.take_along_axis(array.reshape(count, -1), order, axis=1)
        for name, array in values.items()
    }
    return np.take_along_axis(segments.reshape(count, -1), order, axis=1), joined


def split_segments(
    tokens: np.ndarray, segments: int, longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the segments of documents (N, S).

    Args:
        tokens: Documents.
        segments: C, the number of segments of a document.
        longest: L.

    Returns:
        Whether a document consists of C segments with their ends, (N,); the segments without their
        ends, (N, C, L), undefined for other documents; where each begins, (N, C).
    """
    count, width = tokens.shape
    is_end = tokens == 0
    lengths = (tokens != NO_TOKEN).sum(axis=1)
    rows = np.arange(count)
    good = (is_end.sum(axis=1) == segments) & (lengths > 0)
    good &= is_end[rows, np.maximum(lengths - 1, 0)]
    good &= ((tokens != NO_TOKEN) == (np.arange(width) < lengths[:, None])).all(axis=1)
    segment = np.cumsum(is_end, axis=1) - is_end
    starts = np.zeros((count, segments), np.int64)
    row, column = np.nonzero(is_end & (segment < segments - 1))
    starts[row, segment[row, column] + 1] = column + 1
    segment = np.minimum(segment, segments - 1)
    inside = np.arange(width) - np.take_along_axis(starts, segment, axis=1)
    is_word = (tokens != NO_TOKEN) & ~is_end
    good &= ~(is_word & (inside >= longest)).any(axis=1)
    result = np.full((count, segments, longest), NO_TOKEN)
    row, column = np.nonzero(is_word & (inside < longest))
    result[row, segment[row, column], inside[row, column]] = tokens[row, column]
    return good, result, starts
