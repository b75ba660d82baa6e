"""Pointing at the answer of a question: cross-entropy of its start and end, and answerability.

Shapes: B rows, S length, D width.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import cross_entropy
from metaseq_lm.data.squad.windows import AnswerBatch

ANSWERABILITY_WEIGHT = 0.5  # of its loss beside that of the span (Clark et al. 2020, code)


@dataclass
class SquadConfig:
    """How the losses of a batch are put together."""

    batch_sum: bool = option(
        True,
        "clip (optimizer.clip_norm) and apply the gradient of the sum of a batch's losses; "
        "false: of their mean. Logs show the mean",
    )


@register_criterion("squad", dataclass=SquadConfig)
class SquadCriterion(Criterion):
    """Mean of the start's and the end's cross-entropy, plus that of "there is no answer" or is.

    A question without an answer has both at position 0. The sum over the batch is what the
    authors of ELECTRA clip to a norm of 1. An evaluation has no batch: there it is the mean.
    """

    tasks = ("squad",)

    config: SquadConfig

    def __call__(self, model: nn.Module, batch: AnswerBatch) -> Terms:
        x = model(batch.tokens, batch.padding, batch.segments)
        return self.terms(model, x, batch)

    def terms(self, model: nn.Module, x: Tensor, batch: AnswerBatch) -> Terms:
        """Return the terms for states x (B, S, D) of the rows of `batch`."""
        is_summed = self.config.batch_sum and model.training
        heads: nn.ModuleDict = model.heads  # type: ignore[assignment]
        starts, ends = heads["span"](x, batch.answer_mask, batch.starts)
        losses = cross_entropy(starts, batch.starts) + cross_entropy(ends, batch.ends)
        terms = {"span": Term(losses.sum() / 2, "rows", is_summed=is_summed)}
        if "answerability" in heads:
            logits = heads["answerability"](x, starts)
            wrong = F.binary_cross_entropy_with_logits(
                logits, batch.impossible.to(logits.dtype), reduction="sum"
            )
            terms["answerability"] = Term(wrong, "rows", ANSWERABILITY_WEIGHT, is_summed)
        return terms
