"""Masked language modelling with spans: chosen start positions are extended to the right.

Shapes: B rows, S length, M chosen positions.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from omegaconf import DictConfig

from metaseq_lm.config import option
from metaseq_lm.criterions import Batch
from metaseq_lm.data.corpus import Corpus, padding_of
from metaseq_lm.data.masking import choose
from metaseq_lm.data.streams import Sequential, Shuffled, Stream
from metaseq_lm.randomness import mix, uniforms
from metaseq_lm.registry import register_task
from metaseq_lm.tasks.masked_lm import MaskedLMConfig, MaskedLMTask, first


@dataclass
class SpanMaskingConfig(MaskedLMConfig):
    """The options of masked_lm, and the mean length of a span."""

    mean_span: float = option(3.0, "mean number of tokens of a span (geometric)")


def spans(
    candidates: np.ndarray, rate: float, mean: float, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which positions are hidden and the length of the span each belongs to, both (B, S)."""
    starts, counted = choose(candidates, rate / mean, keys)
    draw = uniforms(mix(keys ^ np.uint64(99)), 0, starts.shape[1])
    stop = 1.0 / mean
    lengths = 1 if mean <= 1 else 1 + np.floor(np.log1p(-draw) / np.log1p(-stop)).astype(np.int64)
    at = np.arange(candidates.shape[1])
    inside = (at >= starts[..., None]) & (at < (starts + lengths)[..., None]) & counted[..., None]
    length = np.where(inside, np.broadcast_to(lengths, starts.shape)[..., None], 0).max(1)
    hidden = inside.any(1) & candidates
    return hidden, np.where(hidden, length, 0)


def span_batch(
    corpus: Corpus, options: DictConfig, samples: np.ndarray, keys: np.ndarray, width: int
) -> Batch:
    """Return rows with spans hidden, the hidden positions, their tokens and span lengths."""
    rows, lengths = corpus.rows(samples, width=width)
    inside = np.arange(rows.shape[1]) < lengths[:, None]
    candidates = inside & ~np.isin(rows, corpus.vocabulary.specials)
    hidden, length = spans(candidates, options.mask_prob, options.mean_span, keys)
    counts = hidden.sum(1)
    most = max(int(counts.max()), 1)
    # Hidden positions first, in their order: a stable sort of "not hidden".
    positions = np.argsort(~hidden, axis=1, kind="stable")[:, :most]
    counted = np.arange(most) < counts[:, None]
    at_row = np.arange(len(rows))[:, None]
    return {
        "tokens": np.where(hidden, corpus.vocabulary.mask, rows),
        "padding": padding_of(lengths, rows.shape[1]),
        "positions": positions,
        "targets": np.where(counted, rows[at_row, positions], -1),
        "span_lengths": np.where(counted, length[at_row, positions], 0),
        "sizes": {"targets": int(counts.sum()), "rows": len(rows)},
    }


@register_task("span_masking", dataclass=SpanMaskingConfig)
class SpanMaskingTask(MaskedLMTask):
    """The masked_lm task with other masks; model and update are the defaults."""

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.options, self.config.seed
        corpus = Corpus(
            self.data, split, self.vocabulary, options.tokens_per_sample, options.sample_break_mode
        )
        corpus.check_vocabulary()
        train = Shuffled(len(corpus), options.batch_size, seed, "train")
        once = Sequential(first(len(corpus), options.valid_size), options.batch_size)
        order = train if split == "train" else once
        collate = partial(span_batch, corpus, options)
        return {split: Stream(split, order, collate, seed, corpus.row_lengths)}
