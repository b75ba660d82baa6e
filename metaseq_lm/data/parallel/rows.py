"""Parallel text as rows for an encoder-decoder.

Shapes: B rows of a batch, S positions.
"""

import numpy as np

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.corpus.rows import check_ids
from metaseq_lm.data.parallel.sets import ParallelSet
from metaseq_lm.data.tokenizers.base import Tokenizer

IGNORE = -1


class TranslationRows:
    """Rows of a split: the source with [SEP] at its end, the target between [CLS0] and [SEP].

    `vocabularies` are those of source and target. `chosen` are the sentences that count, all if it
    is None; sample i is sentence chosen[i]. Without `with_target` rows have a source only.
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
            # One width serves both sides: what a row's random numbers fall on follows from it.
            self.lengths = np.maximum(self.lengths, self.target.sizes[self.chosen] + 1)

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> Batch:
        """Return tokens and padding (B, S), and with a target inputs and targets (B, S).

        `inputs` are what the decoder reads, [CLS0] first; `targets` what it is to say, [SEP] last,
        -1 behind. Sizes: "rows"; "targets"; "later_targets", the targets but the first of each row.
        """
        chosen = self.chosen[samples]
        width = max(width, int(self.lengths[samples].max()))
        own = self.vocabularies[0]
        tokens, lengths = self.data.source.gather(chosen, own.pad, width)
        tokens[np.arange(len(chosen)), lengths] = own.sep
        batch: Batch = {
            "tokens": tokens,
            "padding": np.arange(width) > lengths[:, None],
            "samples": chosen,
            "sizes": {"rows": len(chosen)},
        }
        if self.target is not None:
            words, lengths = self.target.gather(chosen, self.vocabularies[1].pad, width)
            other = self.vocabularies[1]
            batch |= decoder_rows(words, lengths, other.cls(), other.sep)
            batch["sizes"]["targets"] = int(lengths.sum()) + len(chosen)
            batch["sizes"]["later_targets"] = int(lengths.sum())
        return batch


def decoder_rows(words: np.ndarray, lengths: np.ndarray, start: int, end: int) -> Batch:
    """Return inputs and targets (B, S) of target words (B, S), of which `lengths` (B,) count.

    S must be longer than any row.
    """
    places, rows = np.arange(words.shape[1]), np.arange(len(words))
    inputs = np.roll(words, 1, axis=1)
    inputs[:, 0] = start
    targets = np.where(places < lengths[:, None], words, IGNORE)
    targets[rows, lengths] = end
    return {"inputs": inputs, "targets": targets}


def shorter(data: ParallelSet, most: int, with_target: bool = True) -> np.ndarray:
    """Return the sentences of which no side is longer than `most` tokens (0 = all of them)."""
    sizes = data.source.sizes
    if with_target and data.target is not None:
        sizes = np.maximum(sizes, data.target.sizes)
    found = np.flatnonzero(sizes <= most) if most else np.arange(len(data))
    if not len(found):
        raise MetaseqError(
            f"{data.folder}: every sentence of '{data.split}' is longer than {most} tokens; raise "
            "task.max_length"
        )
    return found
