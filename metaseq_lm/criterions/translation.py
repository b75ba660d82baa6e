"""Translation by an encoder-decoder: cross-entropy of each target token given those before it."""

import torch
from torch import nn

from metaseq_lm.core.batch import Term, Terms
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.parallel.rows import TranslationBatch
from metaseq_lm.models.layers import IGNORE, cross_entropy


class Translation(Criterion):
    """The loss of the primary head on targets that are known (teacher forcing).

    Targets are smoothed in training only.
    """

    general = False

    @property
    def gold_smoothing(self) -> float:
        """The label smoothing of true targets."""
        return float(self.config.label_smoothing)

    def __call__(self, model: nn.Module, batch: TranslationBatch) -> Terms:
        targets = batch.targets  # (B, T)
        assert targets is not None
        smoothing = self.gold_smoothing if model.training else 0.0
        logits = model(batch.tokens, batch.layout, batch.inputs)  # (B, T, V)
        with torch.no_grad():
            hits = ((logits.argmax(-1) == targets) & (targets != IGNORE)).sum()
        losses = cross_entropy(logits, targets, smoothing)
        return {
            "cross_entropy": Term(losses.sum(), "targets"),
            "accuracy": Term(hits.to(losses.dtype), "targets", weight=0.0),
        }
