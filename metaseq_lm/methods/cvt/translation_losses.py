"""Criterions of semi-supervised translation; labelled batches go to the primary head in all of them.

Source text without translations comes with those that beam search found (see the task), as hard
targets. Shapes: B rows, S source and T target positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import cross_entropy
from metaseq_lm.criterions.translation import Translation
from metaseq_lm.data.parallel.rows import TranslationBatch
from metaseq_lm.data.parallel.sets import UNLABELLED
from metaseq_lm.models.layers import current_context
from metaseq_lm.models.seq2seq.lstm_encoder_decoder import PRIMARY, LSTMEncoderDecoder
from metaseq_lm.models.words.word_model import dropout_at

ATTENTION, FUTURE, FULL = "attention", "future", "full"
AUXILIARY = (ATTENTION, FUTURE, FULL)


@dataclass
class SemiSupervisedConfig:
    """Dropout and smoothing of unlabelled batches."""

    # Not 0.2 where the primary head is the student: see the criterions on words.
    unlabelled_dropout: float | None = option(
        None,
        "dropout of encoder and decoder on unlabelled batches (null = model.dropout)",
        at_least=0,
        below=1,
    )
    label_smoothing: float = option(
        0.1, "of the translations found on unlabelled batches", at_least=0, below=1
    )
    gold_smoothing: float = option(
        0.0, "label smoothing of labelled batches, in training", at_least=0, below=1
    )


@dataclass
class CVTTranslationConfig(SemiSupervisedConfig):
    """Which auxiliary heads learn, and how much of the source is hidden from the first."""

    unlabelled_dropout: float | None = option(
        0.2,
        "dropout of encoder and decoder on unlabelled batches (null = model.dropout)",
        at_least=0,
        below=1,
    )
    auxiliary: list[str] = option(
        [ATTENTION, FUTURE],
        "heads: attention, future, and full, which sees all, with dropout",
        choices=AUXILIARY,
    )
    attention_dropout: float = option(
        0.5, "share of the weights of attention that is hidden", at_least=0, below=1
    )


@dataclass
class WordDropoutConfig(SemiSupervisedConfig):
    """How much of the source is hidden."""

    rate: float = option(0.1, "share of the source words that are hidden", at_least=0, at_most=1)


class SemiSupervisedTranslation(Translation):
    """The primary head's loss on labelled batches, `student_terms` on unlabelled ones."""

    tasks = ("cvt_translation",)
    auxiliary: tuple[str, ...] = ()
    attention_dropout = 0.0

    config: SemiSupervisedConfig

    @property
    def gold_smoothing(self) -> float:
        return self.config.gold_smoothing

    def __call__(self, model: nn.Module, batch: TranslationBatch) -> Terms:
        if batch.stream != UNLABELLED:
            return super().__call__(model, batch)
        with dropout_at(body(model), self.config.unlabelled_dropout):
            return self.student_terms(model.net, batch)  # type: ignore[arg-type]

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        """Return the terms of an unlabelled batch with the translations that were found."""
        raise NotImplementedError(f"{type(self).__name__} must define student_terms")


def body(model: nn.Module) -> nn.Module:
    """Return what holds the dropout of encoder and decoder, and no head's."""
    return model.net.dropout  # type: ignore[union-attr,return-value]


@register_criterion("cvt_translation", dataclass=CVTTranslationConfig)
class CVTTranslation(SemiSupervisedTranslation):
    """The sum of the auxiliary heads' losses, each per target token (Clark 2021, section 4.2.4).

    The primary head takes no part in unlabelled batches, so it gets no gradient there.
    """

    def __init__(self, config: CVTTranslationConfig) -> None:
        super().__init__(config)
        if not config.auxiliary or len(set(config.auxiliary)) < len(config.auxiliary):
            raise UsageError(
                f"criterion.auxiliary is {list(config.auxiliary)}; name one or more different heads"
            )
        self.auxiliary = tuple(config.auxiliary)
        self.attention_dropout = config.attention_dropout

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        assert batch.inputs is not None and batch.targets is not None
        memory = net.encode(batch.tokens, batch.padding)
        states, _ = net.decode(batch.inputs, memory.first)
        terms = {}
        for name in self.auxiliary:
            seen, targets, per = states, batch.targets, "targets"
            if name == FUTURE:
                # The word at t from the attention vector at t - 1, which does not know word t - 1.
                seen, targets, per = states[:, :-1], targets[:, 1:], "later_targets"
            losses = cross_entropy(
                net.heads[name](seen, memory), targets, self.config.label_smoothing
            )
            terms[f"cvt_{name}"] = Term(losses.sum(), per)
        return terms


@register_criterion("word_dropout_translation", dataclass=WordDropoutConfig)
class WordDropoutTranslation(SemiSupervisedTranslation):
    """The baseline with the primary head alone, which reads a source with words hidden by [MASK]."""

    config: WordDropoutConfig

    def student_terms(self, net: LSTMEncoderDecoder, batch: TranslationBatch) -> Terms:
        assert batch.inputs is not None and batch.targets is not None and batch.words is not None
        tokens = batch.tokens.masked_fill(self.hidden(batch.tokens, batch.words), batch.mask_id)
        memory = net.encode(tokens, batch.padding)
        logits = net.heads[PRIMARY](net.decode(batch.inputs, memory.first)[0], memory)
        losses = cross_entropy(logits, batch.targets, self.config.label_smoothing)
        return {"word_dropout": Term(losses.sum(), "targets")}

    def hidden(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Return which of the `words` (B, S) are hidden; drawn by row."""
        noise = current_context().noise
        drawn = torch.rand(tokens.shape) if noise is None else noise.uniform(tokens.shape)
        return words & (drawn.to(tokens.device) < self.config.rate)
