"""Parallel text as rows for an encoder-decoder. Shapes: B rows of a batch, S positions."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaseq_lm.core.batch import Layout, SequenceBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.corpus.rows import check_ids
from metaseq_lm.data.parallel.sets import ParallelSet
from metaseq_lm.data.tokenizers.base import Tokenizer

IGNORE = -1


@dataclass(kw_only=True)
class TranslationBatch(SequenceBatch):
    """Rows of source text, [SEP] last, and, unless it is unlabelled, of its translation."""

    inputs: Tensor | None = None  # tokens that the decoder reads (B, S), [CLS0] first
    targets: Tensor | None = None  # tokens that it predicts (B, S), [SEP] last, -1 at padding
    words: Tensor | None = None  # source positions that word dropout may hide, boolean (B, S)
    mask_id: int = 0  # the token that hides them
    weight: float = 1.0  # weight of the loss on unlabelled text


class TranslationRows:
    """Rows of a split: the source with [SEP] at its end, the target between [CLS0] and [SEP].

    `vocabularies` are the ones of source and target. `chosen` are the sentences to use, None for
    all; sample i is sentence chosen[i]. Without `with_target` rows have a source only.
    """

    def __init__(
        self,
        data: ParallelSet,
        tokenizers: tuple[Tokenizer, Tokenizer],
        chosen: np.ndarray | None = None,
        with_target: bool = True,
    ) -> None:
        self.data = data
        self.vocabularies = tuple(tokenizer.vocabulary for tokenizer in tokenizers)
        self.chosen = np.arange(len(data)) if chosen is None else chosen
        self.target = data.target if with_target else None
        if with_target and data.target is None:
            raise MetaseqError(f"{data.folder}: '{data.split}' has source text only")
        for side, vocabulary in zip((data.source, self.target), self.vocabularies):
            if side is not None:
                check_ids(side, vocabulary)
        self.lengths = data.source.sizes[self.chosen] + 1
        if self.target is not None:
            # Both sides have one width, because it decides where a row's random numbers fall.
            self.lengths = np.maximum(self.lengths, self.target.sizes[self.chosen] + 1)

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> TranslationBatch:
        """Return the rows of some samples, with both sides of the same width.

        Sizes: "rows"; "targets"; "later_targets", the targets except the first of each row.
        """
        chosen = self.chosen[samples]
        width = max(width, int(self.lengths[samples].max()))
        source, target = self.vocabularies
        tokens, lengths = self.data.source.gather(chosen, source.pad, width)
        tokens[np.arange(len(chosen)), lengths] = source.sep
        batch = TranslationBatch(
            tokens=as_tensor(tokens),
            layout=Layout(as_tensor(np.arange(width) > lengths[:, None])),
            samples=chosen,
            sizes={"rows": len(chosen)},
        )
        if self.target is None:
            return batch
        words, lengths = self.target.gather(chosen, target.pad, width)
        inputs = np.roll(words, 1, axis=1)
        inputs[:, 0] = target.cls()
        targets = np.where(np.arange(width) < lengths[:, None], words, IGNORE)
        targets[np.arange(len(chosen)), lengths] = target.sep
        count = int(lengths.sum())
        sizes = {**batch.sizes, "targets": count + len(chosen), "later_targets": count}
        return batch.replace(inputs=inputs, targets=targets, sizes=sizes)


def drop_long_sentences(data: ParallelSet, most: int, with_target: bool = True) -> np.ndarray:
    """Return the sentences with no side longer than `most` tokens (0 = all of them)."""
    sizes = data.source.sizes
    if with_target and data.target is not None:
        sizes = np.maximum(sizes, data.target.sizes)
    chosen = np.flatnonzero(sizes <= most) if most else np.arange(len(data))
    if not len(chosen):
        raise MetaseqError(
            f"{data.folder}: every sentence of '{data.split}' is longer than {most} tokens; raise "
            "task.max_length"
        )
    return chosen
