"""Masked LM and the span-boundary objective (Joshi et al. 2020, equation 1).

Shapes: B rows, S length, D width, M targets (padded with -1), V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from metaseq_lm.core.batch import ScoredBatch, Term, Terms
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import MaskedLM, labelled_terms
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.models.transformer.encoder import TransformerLM

from .model import BOUNDARY
from .spans import SpanBatch


@dataclass
class SpanBoundaryConfig:
    """The weight of the boundary term."""

    boundary_weight: float = option(1.0, "weight of the span-boundary loss", at_least=0)


@register_criterion("span_boundary", dataclass=SpanBoundaryConfig)
class SpanBoundary(Criterion):
    """The masked-LM loss, and the same targets predicted from the ends of their spans."""

    tasks = ("span_masking",)

    config: SpanBoundaryConfig

    def __call__(self, model: nn.Module, batch: SpanBatch) -> Terms:
        assert isinstance(model, TransformerLM)
        x = model.encoder(batch.tokens, batch.layout, batch.segments)  # (B, S, D)
        logits = model.predict(x, batch.positions, "lm")  # (B, M, V)
        outside = model.heads[BOUNDARY](x, batch, model.encoder.embeddings.tokens.weight)
        loss = cross_entropy(outside, batch.targets).sum()
        return {
            **labelled_terms(logits, batch),
            "boundary": Term(loss, "targets", self.config.boundary_weight),
        }

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the same as masked_lm, since the head "lm" scores sentences."""
        return MaskedLM().token_log_probs(model, batch)
