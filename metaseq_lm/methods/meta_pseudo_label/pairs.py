"""What a teacher makes of unlabelled text, in words (paper tables 1 and 3).

Shapes: N texts, S length.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.batch import as_tensor
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.methods.meta_pseudo_label.criterion import HardLabels, SoftLabels, teacher_logits
from metaseq_lm.methods.meta_pseudo_label.episodes import UNLABELLED, UnlabelledBatch
from metaseq_lm.models.transformer.encoder import TransformerLM


def texts_of(corpus: Corpus, count: int) -> UnlabelledBatch:
    """Return `count` texts spread evenly over a corpus as a micro-step (1, N, S)."""
    chosen = np.unique(np.linspace(0, len(corpus) - 1, count).round().astype(np.int64))
    original, lengths = corpus.rows(chosen, cls=UNLABELLED)
    padding = np.arange(original.shape[1]) >= lengths[:, None]
    return UnlabelledBatch(
        tokens=as_tensor(original[None]),
        padding=as_tensor(padding[None]),
        original=as_tensor(original[None]),
        rows=np.arange(len(chosen), dtype=np.uint64),
    )


@torch.no_grad()
def pair_of(
    criterion: Criterion, teacher: TransformerLM, batch: UnlabelledBatch
) -> tuple[Tensor, Tensor]:
    """Return the teacher's pair (1, N, S) each: a sample (hard), or the likeliest tokens (soft)."""
    if isinstance(criterion, HardLabels):
        return criterion.sample(teacher, batch)
    x, y = (scores.argmax(-1) for scores in teacher_logits(teacher, batch))
    fixed = isinstance(criterion, SoftLabels) and criterion.config.fixed_y
    return x, batch.original if fixed else y


def written(batch: UnlabelledBatch, pair: tuple[Tensor, Tensor], tokenizer: Tokenizer) -> list[str]:
    """Return three lines for each text: x, the teacher's input x̂ and its target ŷ."""
    assert batch.padding is not None
    pages = []
    for row in range(batch.original.shape[1]):
        inside = ~batch.padding[0, row]
        lines = [
            f"{name}  {readable(tokens[0, row][inside].tolist(), tokenizer)}"
            for name, tokens in (
                ("x", batch.original),
                ("x\u0302", pair[0]),
                ("y\u0302", pair[1]),
            )
        ]
        pages.append("\n".join(lines))
    return pages


def readable(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """Return tokens as text on one line, special symbols by name."""
    vocabulary = tokenizer.vocabulary
    hidden = set(vocabulary.unwritten)
    parts = []
    for special, run in groupby(tokens, key=lambda token: token in hidden):
        if special:
            parts += [vocabulary.symbols[token] for token in run]
        else:
            parts += tokenizer.decode(run).split()
    return " ".join(parts)
