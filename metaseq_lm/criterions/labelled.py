"""Losses of labelled sets: classes, candidates and real values of rows, spans that answer, images.

Shapes: B samples, K classes or candidates, S length, D width, T tokens of a candidate, V
vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.core.batch import ImageBatch, Term, Terms, TokenBatch, number_of
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.data.labelled.cloze_rows import ClozeBatch
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch
from metaseq_lm.data.squad.windows import AnswerBatch
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.layers import cross_entropy

_ANSWERABILITY_WEIGHT = 0.5  # of its loss; the span's is 1 (Clark et al. 2020, code)


def is_batch_sum(config: BatchSumConfig, model: nn.Module) -> bool:
    """Return whether a pass of `model` differentiates the sum over a batch, not the mean."""
    return config.batch_sum and model.training


def class_terms(logits: Tensor, targets: Tensor, is_summed: bool = False) -> Terms:
    """Return the loss and the accuracy of logits (B, K) and targets (B,)."""
    return {
        "cross_entropy": Term(cross_entropy(logits, targets).sum(), "rows", is_summed=is_summed),
        "accuracy": Term(number_of(logits.argmax(-1) == targets), "rows", weight=0.0),
    }


class ImageClassification(Criterion):
    """The loss of a network's primary head on labelled images: supervised learning alone."""

    general = False

    def __call__(self, model: nn.Module, batch: ImageBatch) -> Terms:
        assert batch.targets is not None
        return class_terms(model(batch.images), batch.targets)


class SentencePrediction(Criterion):
    """The loss of a SentencePredictor: single label, multi-label, candidates or real values."""

    exported = Exported(heads=("sentence",))
    tasks = ("sentence_prediction",)

    config: BatchSumConfig

    def __call__(self, model: nn.Module, batch: SentenceBatch) -> Terms:
        assert batch.targets is not None
        return self.terms(model, self.scores(model, batch), batch.targets)

    def scores(self, model: nn.Module, batch: SentenceBatch) -> Tensor:
        """Return the scores (B, K) of a batch, in full precision; -inf for absent candidates."""
        scores = full_precision(model(batch.tokens, batch.layout, batch.segments, batch.spans))
        if batch.absent is None:
            return scores
        return scores.masked_fill(batch.absent, -torch.inf)

    def terms(self, model: nn.Module, scores: Tensor, targets: Tensor) -> Terms:
        """Return the terms of scores (B, K) and targets (B,): classes, or floats for regression.

        Boolean targets (B, K) say which classes each row has; the loss is the mean over classes.
        """
        is_summed = is_batch_sum(self.config, model)
        if targets.dim() == 2:
            losses = F.binary_cross_entropy_with_logits(
                scores, targets.to(scores.dtype), reduction="none"
            )
            return {
                "binary_cross_entropy": Term(losses.mean(-1).sum(), "rows", is_summed=is_summed)
            }
        if targets.is_floating_point():
            errors = (scores.squeeze(-1) - model.scaled(targets)) ** 2  # type: ignore[operator]
            return {"squared_error": Term(errors.sum(), "rows", is_summed=is_summed)}
        return class_terms(scores, targets, is_summed)


class TokenClassification(Criterion):
    """The loss of a TokenClassifier at the first token of each word."""

    exported = Exported(heads=("token",))
    tasks = ("token_classification",)

    config: BatchSumConfig

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        return self.terms(model, self.scores(model, batch), batch)

    def scores(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Return the scores (B, S, K) of a batch, in full precision."""
        return full_precision(model(batch.tokens, batch.layout, batch.segments))

    def terms(self, model: nn.Module, scores: Tensor, batch: TokenBatch) -> Terms:
        """Return the terms of scores (B, S, K)."""
        assert batch.targets is not None
        loss = cross_entropy(scores, batch.targets).sum()
        return {
            "cross_entropy": Term(loss, "words", is_summed=is_batch_sum(self.config, model)),
            "accuracy": Term(number_of(scores.argmax(-1) == batch.targets), "words", weight=0.0),
        }


class Cloze(Criterion):
    """The loss of candidates for a blank, scored by a masked language model at its [MASK]."""

    exported = Exported(heads=("lm",))
    tasks = ("cloze",)

    config: BatchSumConfig

    def __call__(self, model: nn.Module, batch: ClozeBatch) -> Terms:
        assert batch.targets is not None
        is_summed = is_batch_sum(self.config, model)
        return class_terms(self.scores(model, batch), batch.targets, is_summed)

    def scores(self, model: nn.Module, batch: ClozeBatch) -> Tensor:
        """Return the mean logit (B, K) of candidates' tokens in full precision; -inf if none."""
        logits = full_precision(model(batch.tokens, batch.layout, batch.positions))  # (B, 1, V)
        inside = batch.candidates >= 0  # (B, K, T)
        logits = logits.expand(-1, inside.shape[1], -1)
        values = logits.gather(-1, batch.candidates.clamp(min=0)).masked_fill(~inside, 0)
        counts = inside.sum(-1)
        return (values.sum(-1) / counts.clamp(min=1)).masked_fill(counts == 0, -torch.inf)


class SquadCriterion(Criterion):
    """Mean cross-entropy of start and end, plus that of the answerability head.

    A question without an answer has start and end at position 0.
    """

    exported = Exported(heads=("span", "answerability"))
    tasks = ("squad",)

    config: BatchSumConfig

    def __call__(self, model: nn.Module, batch: AnswerBatch) -> Terms:
        x = model(batch.tokens, batch.layout, batch.segments)
        return self.terms(model, x, batch)

    def terms(self, model: nn.Module, x: Tensor, batch: AnswerBatch) -> Terms:
        """Return the terms for states x (B, S, D) of the rows of `batch`."""
        is_summed = is_batch_sum(self.config, model)
        heads: nn.ModuleDict = model.heads  # type: ignore[assignment]
        starts, ends = heads["span"](x, batch.answer_mask, batch.starts)
        losses = cross_entropy(starts, batch.starts) + cross_entropy(ends, batch.ends)
        terms = {"span": Term(losses.sum() / 2, "rows", is_summed=is_summed)}
        if "answerability" in heads:
            logits = heads["answerability"](x, starts)
            wrong = F.binary_cross_entropy_with_logits(
                logits, batch.impossible.to(logits.dtype), reduction="sum"
            )
            terms["answerability"] = Term(wrong, "rows", _ANSWERABILITY_WEIGHT, is_summed)
        return terms
