"""The data of an update: C micro-steps of B samples each, as arrays with leading axes (C, B).

A micro-step has unlabelled rows, the same rows masked, and a support and a query batch of one
labelled task. All rows are pure functions of (seed, number of the sample), so they can be cut along
B in any way.

Shapes: C micro-steps of an update, B batch, S length, M targets per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import CopiesBatch, Layout, TokenBatch, as_tensor, count_targets
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.masking import Masking, mask_tokens
from metaseq_lm.data.corpus.rows import Corpus, layout_of
from metaseq_lm.data.labelled.token_labels import TokenLabels
from metaseq_lm.data.streams import Shard, Words, draw_below, noise_rows
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.methods.meta_pseudo_label.options import MetaPseudoLabelConfig

# The common format of labelled rows: x, lengths, positions of targets, targets (-1 = none).
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
UNLABELLED, MLM = 0, 1  # numbers of the task tokens; labelled sets follow


@dataclass(kw_only=True)
class UnlabelledBatch(CopiesBatch):
    """Unlabelled texts; `tokens`, `positions` and `targets` belong to the masked rows.

    Attributes:
        original: The texts x with [CLS0] (C, B, S).
        sampled_x: Inputs sampled by the teacher (C, B, S); None before sampling.
        sampled_y: Targets sampled by the teacher (C, B, S); None before sampling.
    """

    original: Tensor
    sampled_x: Tensor | None = None
    sampled_y: Tensor | None = None


class _WindowStream:
    """A stream with a global batch per update: rows (C, B), numbered through the run.

    Args:
        name: Name of the stream.
        copies: C.
        batch_size: B.
        collate: Makes the batch of samples (C, B).
        words: The words of a corpus's texts, None if the stream reads no corpus.
        texts: Returns the numbers of those texts for samples (C * B,).
    """

    def __init__(
        self,
        name: str,
        copies: int,
        batch_size: int,
        collate: Callable[[np.ndarray], CopiesBatch],
        words: Words | None = None,
        texts: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.name = name
        self.copies = copies
        self.batch_size = batch_size
        self.collate = collate
        self.words, self.texts = words, texts

    def micro_batches(self, number: int, shard: Shard) -> list[CopiesBatch]:
        """Return this replica's part of update `number`, cut along B."""
        within = np.arange(self.copies * self.batch_size).reshape(self.copies, -1)  # (C, B)
        samples = self._samples(number)
        # Collate the whole and then cut, so that all parts have one width (see streams.Stream).
        whole = self.collate(samples).replace(
            rows=noise_rows(self.name, within), samples=samples, stream=self.name
        )
        batches = []
        for columns in shard.parts(self.batch_size):
            part = whole.map_arrays(itemgetter((slice(None), columns)))
            batches.append(part.replace(sizes=_sizes_of(part)))
        return batches

    def _samples(self, number: int) -> np.ndarray:
        """Return the numbers of the samples of update `number`, (C, B)."""
        size = self.copies * self.batch_size
        return np.arange(number * size, (number + 1) * size).reshape(self.copies, -1)

    def count_words(self, number: int) -> int:
        assert self.words is not None and self.texts is not None
        texts = self.texts(self._samples(number).ravel())
        return self.words.count(texts, np.zeros(0, np.uint64), 0)

    @property
    def smallest_batch(self) -> int:
        """The rows of a micro-step, which replicas divide among themselves."""
        return self.batch_size


class UnlabelledRows:
    """Draws unlabelled rows and masks them (CLS and SEP can be targets; CLS is never hidden)."""

    def __init__(self, corpus: Corpus, masking: Masking, seed: int) -> None:
        self.corpus = corpus
        self.masking = masking
        self.seed = seed
        self.total = len(corpus.data.tokens)

    def mask(self, texts: np.ndarray, keys: np.ndarray, width: int = 0) -> Rows:
        """Return masked rows of the texts with task token [CLS1], and their targets."""
        tokens, lengths = self.corpus.rows(texts, MLM, width)
        masked, positions, targets = mask_tokens(tokens, lengths, keys, self.masking)
        masked[:, 0] = self.corpus.vocabulary.cls(MLM)
        return masked, lengths, positions, targets

    def draw(self, samples: np.ndarray) -> np.ndarray:
        """Return a text for each sample number, through a token drawn uniformly with replacement.

        Texts are therefore weighted by length, as in the author's code, which draws a character.
        """
        root = random_streams.key(self.seed, "unlabelled")
        return self.text_at(draw_below(root, samples, self.total))

    def text_at(self, tokens: np.ndarray) -> np.ndarray:
        """Return the text that holds each token of the stream; texts are disjoint and in order."""
        return self.corpus.windows.sample_at(tokens)

    def draw_other(self, samples: np.ndarray, query: bool) -> np.ndarray:
        """Return another text for each sample; the query's text differs from the support's."""
        root = random_streams.key(self.seed, "texts", "support")
        support = self.text_at(draw_below(root, samples, self.total))
        if not query or len(self.corpus) == 1:
            return support
        # A token outside the support text: later tokens move up by its length.
        left = self.total - self.corpus.windows[support]
        other = draw_below(random_streams.key(self.seed, "texts", "query"), samples, left)
        behind = other >= self.corpus.windows.starts(support)
        return self.text_at(other + np.where(behind, self.corpus.windows[support], 0))

    def __call__(self, samples: np.ndarray) -> UnlabelledBatch:
        """Return the texts of samples (C, B), and their masked form with its targets."""
        shape, flat = samples.shape, samples.ravel()
        texts = self.draw(flat)
        masked, lengths, positions, targets = self.mask(
            texts, random_streams.row_keys(random_streams.key(self.seed, "masks"), flat)
        )
        original, _ = self.corpus.rows(texts, cls=UNLABELLED)
        rows = _common_format(shape, (masked, lengths, positions, targets))
        batch = UnlabelledBatch(**rows, original=as_tensor(original.reshape(*shape, -1)))
        return batch.replace(sizes=_sizes_of(batch))


class Labelled:
    """Draws support and query rows: a task every `samples_per_task` samples, rows uniformly.

    With `mlm`, masked unlabelled text is a further task, drawn half of the time (paper section
    4.1).
    """

    def __init__(
        self,
        sets: list[TokenLabels],
        mlm: UnlabelledRows | None,
        samples_per_task: int,
        seed: int,
        mask_by: str,
    ) -> None:
        self.sets = sets
        self.mlm = mlm
        self.samples_per_task = samples_per_task
        self.seed = seed
        self.mask_by = mask_by

    def tasks_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the set of each sample; -1 means masked language modelling."""
        run = samples // self.samples_per_task
        task = draw_below(random_streams.key(self.seed, "task"), run, len(self.sets))
        if self.mlm is not None:
            task = np.where(draw_below(random_streams.key(self.seed, "mlm"), run, 2) == 0, -1, task)
        return task

    def texts(self, query: bool, samples: np.ndarray) -> np.ndarray:
        """Return the unlabelled texts behind the rows of samples (N,)."""
        if self.mlm is None:
            return np.zeros(0, np.int64)
        return self.mlm.draw_other(samples[self.tasks_of(samples) < 0], query)

    def pick(self, samples: np.ndarray, count: int, query: bool, name: str) -> np.ndarray:
        """Return one of `count` rows per sample; a query row differs from its support row."""
        support = draw_below(random_streams.key(self.seed, name, "support"), samples, count)
        if not query or count == 1:
            return support
        other = draw_below(random_streams.key(self.seed, name, "query"), samples, count - 1)
        return other + (other >= support)

    def __call__(self, query: bool, samples: np.ndarray) -> CopiesBatch:
        """Return the support or query rows of samples (C, B)."""
        flat = samples.ravel()
        tasks = self.tasks_of(flat)
        parts: list[tuple[np.ndarray, Rows]] = []
        for task in np.unique(tasks):
            at = np.flatnonzero(tasks == task)
            if task < 0:
                rows = self.mlm_rows(flat[at], query)
            else:
                rows = self.set_rows(task, flat[at], query)
            parts.append((at, rows))
        batch = CopiesBatch(**_common_format(samples.shape, merge(parts, len(flat))))
        return batch.replace(sizes=_sizes_of(batch))

    def set_rows(self, task: int, samples: np.ndarray, query: bool) -> Rows:
        """Return rows of one labelled set, as random windows if long; all tokens are targets."""
        data, name = self.sets[task], f"set {task}"
        root = random_streams.key(self.seed, name, "window", query)
        chosen = self.pick(samples, len(data), query, name)
        windows = data.random_windows(chosen, random_streams.row_keys(root, samples))
        tokens, lengths, targets = data.rows(windows)
        at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        return tokens, lengths, np.where(targets >= 0, at, 0), targets

    def mlm_rows(self, samples: np.ndarray, query: bool) -> Rows:
        """Return freshly masked rows of other unlabelled texts."""
        assert self.mlm is not None
        texts = self.mlm.draw_other(samples, query)
        keys = random_streams.row_keys(
            random_streams.key(self.seed, "labelled masks", query), samples
        )
        masked, lengths, positions, targets = self.mlm.mask(texts, keys)
        if self.mask_by == "y":
            return masked, lengths, positions, targets
        # The authors' code masks by x here, so positions that were not chosen train towards [PAD].
        at = np.broadcast_to(np.arange(masked.shape[1]), masked.shape)
        inside = at < lengths[:, None]
        everywhere = np.where(inside, self.mlm.corpus.vocabulary.pad, -1)
        row, column = np.nonzero(targets >= 0)
        everywhere[row, positions[row, column]] = targets[row, column]
        return masked, lengths, np.where(inside, at, 0), everywhere


def labelled_sets(
    folder: Path, split: str, vocabulary: Vocabulary, options: MetaPseudoLabelConfig
) -> list[TokenLabels]:
    """Return a split of each labelled set in a task's `options`.

    Raises MetaseqError if a set has no labels, UsageError for options that do not fit.
    """
    names = list(options.labelled)
    numbers = list(options.task_tokens) or list(range(MLM + 1, MLM + 1 + len(names)))
    if len(numbers) != len(names):
        raise UsageError(
            f"task.task_tokens has {len(numbers)} entries for {len(names)} labelled sets"
        )
    if len(set(numbers)) < len(numbers) or min(numbers) <= MLM:
        raise UsageError(
            f"task.task_tokens is {numbers}: every set needs its own number, {MLM + 1} or more, "
            f"because [CLS{UNLABELLED}] and [CLS{MLM}] are those of unlabelled and masked text"
        )
    sets = []
    sizes = (options.tokens_per_sample, options.stride)
    for name, number in zip(names, numbers):
        sets.append(TokenLabels(folder / name, split, vocabulary, number, *sizes))
        if sets[-1].labels is None:
            raise MetaseqError(f"{folder / name}: '{split}' has no labels to train on")
    return sets


def merge(parts: list[tuple[np.ndarray, Rows]], count: int) -> Rows:
    """Merge rows of several tasks, by index, into arrays of `count` rows; padding is id 0."""
    width = max(rows[0].shape[1] for _, rows in parts)
    n_targets = max(rows[2].shape[1] for _, rows in parts)
    tokens = np.zeros((count, width), np.int64)
    lengths = np.zeros(count, np.int64)
    positions = np.zeros((count, n_targets), np.int64)
    targets = np.full((count, n_targets), -1, np.int64)
    for at, (part_tokens, part_lengths, part_positions, part_targets) in parts:
        tokens[at, : part_tokens.shape[1]] = part_tokens
        lengths[at] = part_lengths
        positions[at, : part_positions.shape[1]] = part_positions
        targets[at, : part_targets.shape[1]] = part_targets
    return tokens, lengths, positions, targets


def _common_format(shape: tuple[int, ...], rows: Rows) -> dict[str, Any]:
    """Return rows (C*B, ...) as the fields of a CopiesBatch, with axes (C, B, ...)."""
    tokens, lengths, positions, targets = rows
    return {
        "tokens": tokens.reshape(*shape, -1),
        "layout": layout_of(lengths.reshape(shape), tokens.shape[1]),
        "positions": positions.reshape(*shape, -1),
        "targets": targets.reshape(*shape, -1),
    }


def _sizes_of(batch: CopiesBatch) -> dict[str, Tensor]:
    """Return the sizes "targets", "rows" and, for unlabelled rows, "tokens"; (C,) each."""
    assert batch.targets is not None
    copies, rows, width = batch.tokens.shape
    sizes = {**count_targets(batch.targets), "rows": torch.full((copies,), rows)}
    if isinstance(batch, UnlabelledBatch):
        padding = batch.padding
        everything = torch.full((copies,), rows * width)
        sizes["tokens"] = everything if padding is None else (~padding).sum((1, 2))
    return sizes


def streams(
    unlabelled: UnlabelledRows, labelled: Labelled, copies: int, batch_size: int
) -> dict[str, _WindowStream]:
    """Return the three streams of an update."""
    collates: dict[str, Callable[[np.ndarray], CopiesBatch]] = {
        "unlabelled": unlabelled,
        "support": partial(labelled, False),
        "query": partial(labelled, True),
    }
    texts: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "unlabelled": unlabelled.draw,
        "support": partial(labelled.texts, False),
        "query": partial(labelled.texts, True),
    }
    words = unlabelled.corpus.words
    return {
        name: _WindowStream(name, copies, batch_size, collate, words, texts[name])
        for name, collate in collates.items()
    }


def masked_rows(
    unlabelled: UnlabelledRows, samples: np.ndarray, keys: np.ndarray, width: int
) -> TokenBatch:
    """Return masked rows of the corpus in their own order, for validation."""
    masked, lengths, positions, targets = unlabelled.mask(samples, keys, width)
    return TokenBatch(
        tokens=as_tensor(masked),
        layout=layout_of(lengths, masked.shape[1]),
        positions=as_tensor(positions),
        targets=as_tensor(targets),
        sizes={**count_targets(targets), "rows": len(samples)},
    )


# ------------------------------------------------------------------------ parts of an update


def micro_step_of(batch: CopiesBatch, number: int) -> TokenBatch:
    """Return one micro-step of a labelled batch, without the leading axis C."""
    assert batch.positions is not None and batch.targets is not None and batch.rows is not None
    return TokenBatch(
        tokens=batch.tokens[number],
        layout=batch.layout.rows(number),
        positions=batch.positions[number],
        targets=batch.targets[number],
        sizes={name: size[number] for name, size in batch.sizes.items()},
        rows=batch.rows[number],
    )


def pseudo_batch(
    batch: CopiesBatch, tokens: Tensor, targets: Tensor, number: int, pad: int
) -> TokenBatch:
    """Return the sampled pair of one micro-step as a labelled batch."""
    assert batch.rows is not None
    # A sampled [PAD] inside the text becomes padding of the student's input and is not a target.
    padding = tokens == pad
    targets = targets.masked_fill(padding, -1)
    return TokenBatch(
        tokens=tokens,
        layout=Layout(padding),
        targets=targets,
        sizes=count_targets(targets),
        rows=batch.rows[number],
    )
