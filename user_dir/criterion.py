"""Masked-LM loss in which each target counts by the length of its span to a power.

Shapes: B batch, M targets (padded with -1), V vocabulary.
"""

from dataclasses import dataclass

from torch import nn

from metaseq_lm.config import option
from metaseq_lm.criterions import Batch, Criterion, Term, Terms
from metaseq_lm.criterions.masked_lm import cross_entropy, row_accuracy
from metaseq_lm.registry import register_criterion


@dataclass
class SpanWeightedConfig:
    """How much long spans count."""

    power: float = option(0.0, "a target in a span of n tokens weighs n ** power")


@register_criterion("span_weighted_lm", dataclass=SpanWeightedConfig)
class SpanWeightedLM(Criterion):
    """Cross-entropy of hidden tokens, weighted by the length of their span."""

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        logits = model(batch["tokens"], batch["padding"], batch["positions"])  # (B, M, V)
        losses = cross_entropy(logits, batch["targets"])  # (B, M)
        # Logits may be in bfloat16, losses never are.
        loss = (losses * batch["span_lengths"].to(losses.dtype) ** self.power).sum()
        right = row_accuracy(logits, batch["targets"]).sum()
        return {"span": Term(loss, "targets"), "accuracy": Term(right, "rows", weight=0.0)}
