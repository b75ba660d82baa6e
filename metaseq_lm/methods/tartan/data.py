"""The rows of the tasks: texts of the end task's own training set, drawn lines of a corpus, labels.

Shapes: B rows, S length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, ImageBatch, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.rows import Corpus, masked_batch, masked_rows
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.streams import Collate, draw_below


@dataclass(kw_only=True)
class HeadedImageBatch(ImageBatch):
    """Images, and the name of the head that they are for."""

    head: str


@dataclass(kw_only=True)
class StateBatch(Batch):
    """Rows or images whose states (B, S, D) or (B, D) in the body are known, for one head."""

    states: Tensor
    targets: Tensor | None
    head: str | None


# What a task's head is given: its rows or images, or their states.
TaskBatch = TokenBatch | HeadedImageBatch | StateBatch


class Drawn:
    """Batches of different samples out of `count`, each drawn anew, as the authors' code does.

    With replacement where a batch is larger than the set.
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


@dataclass(frozen=True)
class Rows:
    """What a stream needs of a source: the tokens of each sample's row, and its collater."""

    lengths: np.ndarray
    collate: Collate


def with_head(collate: Collate, head: str, attend_to_padding: bool) -> Collate:
    """Return a collater that names the head; `attend_to_padding` takes the mask of padding away."""

    def headed(samples: np.ndarray, keys: np.ndarray, width: int) -> Batch:
        batch = collate(samples, keys, width).replace(head=head)
        return batch.replace(padding=None) if attend_to_padding else batch

    return headed


def masked_texts(rows: SentenceRows, masking: Masking) -> Rows:
    """Return the texts of a labelled set, one sample a row, masked; the labels are left out."""

    def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
        batch = rows.batch(samples, keys, width)
        assert batch.segments is not None
        tokens, segments = batch.tokens.numpy(), batch.segments.numpy()
        return masked_rows(tokens, rows.lengths[samples], segments, keys, masking)

    return Rows(rows.lengths, collate)


def masked_lines(corpus: Corpus, count: int, masking: Masking, seed: int, name: str) -> Rows:
    """Return `count` lines of a corpus in break mode eos, drawn without replacement; 0 takes all.

    A line is a row, and of one that is too long the rest is cut off. Raises UsageError if there
    are fewer.
    """
    chosen = drawn_lines(corpus, count, seed, name)

    def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> TokenBatch:
        return masked_batch(corpus, masking, chosen[samples], keys, width)

    return Rows(corpus.row_lengths[chosen], collate)


def drawn_lines(corpus: Corpus, count: int, seed: int, name: str) -> np.ndarray:
    """Return which samples of the corpus are the beginnings of `count` of its lines, ascending."""
    filled = corpus.data.starts[corpus.data.sizes > 0]
    if count > len(filled):
        raise UsageError(
            f"task.lines_per_example asks for {count:,} lines of '{name}', which has {len(filled):,}; "
            "lower it, or 0 takes all"
        )
    if count:
        drawn = random_streams.generator(seed, "lines", name).permutation(len(filled))[:count]
        filled = filled[np.sort(drawn)]
    # Longer lines are several windows; the first begins where the line does.
    return np.searchsorted(corpus.starts, filled)
