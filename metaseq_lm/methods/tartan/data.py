"""Batches of the tasks: masked texts of the labelled set, masked corpus lines, labelled rows.

Shapes: B rows, S length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, ImageBatch, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.row_words import RowWords
from metaseq_lm.data.corpus.rows import Corpus, masked_batch, masked_rows
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.streams import Collate, Words, draw_below


@dataclass(kw_only=True)
class StateBatch(Batch):
    """Encoder states of texts (B, S, D) or images (B, D), for one head."""

    states: Tensor
    targets: Tensor | None
    head: str | None


TaskBatch = TokenBatch | ImageBatch | StateBatch


class Drawn:
    """An order of independent random batches of `count` samples, as in the authors' code.

    The samples of a batch are distinct, unless it is larger than the set: then they are drawn with
    replacement.
    """

    def __init__(self, count: int, batch_size: int, seed: int, name: str) -> None:
        if batch_size < 1:
            raise UsageError(f"the batches of '{name}' must have at least 1 row, got {batch_size}")
        self.count, self.seed, self.name = count, seed, name
        self.smallest = batch_size

    def batch(self, number: int) -> np.ndarray:
        """Return the sample numbers of global batch `number`."""
        if self.smallest > self.count:
            root = random_streams.key(self.seed, self.name, "drawn", number)
            return draw_below(root, np.arange(self.smallest), self.count)
        generator = random_streams.generator(self.seed, self.name, "drawn", number)
        return generator.choice(self.count, self.smallest, replace=False)


class TartanRows(NamedTuple):
    """The lengths of a source's rows in tokens, its collater, and the words of a corpus."""

    lengths: np.ndarray
    collate: Collate
    words: Words | None = None


def masked_texts(rows: SentenceRows, masking: Masking) -> TartanRows:
    """Return the texts of a labelled set, masked, without their labels."""

    def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
        batch = rows.batch(samples, keys, width)
        assert batch.segments is not None
        tokens, segments = batch.tokens.numpy(), batch.segments.numpy()
        return masked_rows(tokens, rows.lengths[samples], segments, keys, masking)

    return TartanRows(rows.lengths, collate)


def masked_lines(corpus: Corpus, count: int, masking: Masking, seed: int, name: str) -> TartanRows:
    """Return `count` masked lines of a corpus (see `_drawn_lines`), one a row, truncated."""
    lines = _drawn_lines(corpus, count, seed, name)

    def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
        return masked_batch(corpus, masking, lines[samples], keys, width)

    def runs(samples: np.ndarray, keys: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        return corpus.runs(lines[samples], width)

    return TartanRows(corpus.row_lengths[lines], collate, RowWords(corpus.data, runs))


def _drawn_lines(corpus: Corpus, count: int, seed: int, name: str) -> np.ndarray:
    """Return `count` random lines (0 = all) of a corpus in break mode eos, in ascending order.

    They are drawn without replacement. Raises UsageError if there are fewer.
    """
    lines = corpus.data.starts[corpus.data.sizes > 0]
    if count > len(lines):
        raise UsageError(
            f"task.lines_per_example asks for {count:,} lines of '{name}', which has "
            f"{len(lines):,}; lower it, or 0 takes all"
        )
    if count:
        chosen = random_streams.generator(seed, "lines", name).permutation(len(lines))[:count]
        lines = lines[np.sort(chosen)]
    # A long line has several samples; the first sample begins with the line.
    return corpus.windows.sample_at(lines)
