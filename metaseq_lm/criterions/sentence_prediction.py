"""Classification of rows by cross-entropy, regression by squared error.

Shapes: B samples, K classes or candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import cross_entropy
from metaseq_lm.data.labelled.sentence_rows import SentenceBatch
from metaseq_lm.models.layers import full_precision


@dataclass
class SentencePredictionConfig:
    """How the losses of a batch are put together."""

    batch_sum: bool = option(
        True,
        "clip (optimizer.clip_norm) and apply the gradient of the sum of a batch's losses; "
        "false: of their mean. Logs show the mean",
    )


@register_criterion("sentence_prediction", dataclass=SentencePredictionConfig)
class SentencePrediction(Criterion):
    """The loss of a SentencePredictor: of classes, of candidates, or of real values.

    The sum over the batch is what the authors of ELECTRA clip to a norm of 1, so that nearly every
    step has that norm. An evaluation has no batch: there it is the mean over samples.
    """

    tasks = ("sentence_prediction",)

    config: SentencePredictionConfig

    def __call__(self, model: nn.Module, batch: SentenceBatch) -> Terms:
        assert batch.targets is not None
        return self.terms(model, self.scores(model, batch), batch.targets)

    def scores(self, model: nn.Module, batch: SentenceBatch) -> Tensor:
        """Return the scores (B, K) of a batch, in full precision; -inf for what is not there."""
        scores = full_precision(model(batch.tokens, batch.padding, batch.segments, batch.spans))
        return scores if batch.absent is None else scores.masked_fill(batch.absent, -torch.inf)

    def terms(self, model: nn.Module, scores: Tensor, targets: Tensor) -> Terms:
        """Return the terms of scores (B, K) and targets (B,): classes, or floats for regression."""
        is_summed = self.config.batch_sum and model.training
        if targets.is_floating_point():
            errors = (scores.squeeze(-1) - model.scaled(targets)) ** 2  # type: ignore[operator]
            return {"squared_error": Term(errors.sum(), "rows", is_summed=is_summed)}
        with torch.no_grad():
            right = (scores.argmax(-1) == targets).sum()
        return {
            "cross_entropy": Term(
                cross_entropy(scores, targets).sum(), "rows", is_summed=is_summed
            ),
            "accuracy": Term(right.to(scores.dtype), "rows", weight=0.0),
        }
