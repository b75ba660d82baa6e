"""Masked language modelling: cross-entropy of the original tokens at the chosen positions.

Shapes: B batch, S length, M chosen positions (padded with target -1), V vocabulary; C copies may
lead.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import ScoredBatch, Term, Terms, TokenBatch
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.models.layers import full_precision

IGNORE = -1
TOKENS_PER_PASS = 8192


def copy_sums(items: Tensor, batch: TokenBatch) -> Tensor:
    """Sum `items`, whose leading axes are those of batch.tokens, to a scalar or to (C,)."""
    return items.flatten(1).sum(1) if batch.tokens.dim() == 3 else items.sum()


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each position, 0 where the target is -1; logits (..., V), targets (...).

    With label smoothing e the target is 1 - e of the label and e spread evenly over all V.
    """
    losses = F.cross_entropy(
        full_precision(logits.flatten(0, -2)),
        targets.flatten(),
        ignore_index=IGNORE,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(targets.shape)


@torch.no_grad()
def row_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each row's share of correct positions, 1 for a row without targets; (..., M) -> (...).

    In float64 whatever the logits are in, as `number_of` counts.
    """
    counted = targets != IGNORE
    hits = ((logits.argmax(-1) == targets) & counted).sum(-1)
    wanted = counted.sum(-1)
    return torch.where(wanted > 0, hits.double() / wanted.clamp(min=1), 1.0)


def labelled_terms(logits: Tensor, batch: TokenBatch) -> Terms:
    """Return the mean loss over targets and the mean over rows of the rows' accuracy."""
    assert batch.targets is not None
    losses, accuracies = cross_entropy(logits, batch.targets), row_accuracy(logits, batch.targets)
    return {
        "mlm": Term(copy_sums(losses, batch), "targets"),
        "accuracy": Term(copy_sums(accuracies, batch), "rows", weight=0.0),
    }


@register_criterion("masked_lm")
class MaskedLM(Criterion):
    """The masked-LM loss of a model (Devlin et al. 2019) on batches of masked rows (data.corpus.rows)."""

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        logits = model(  # (B, M, V)
            batch.tokens, batch.padding, batch.positions, segments=batch.segments
        )
        return labelled_terms(logits, batch)

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """One pass per scored token, which alone is [MASK] in it (Salazar et al. 2020, section 2).

        The hidden rows of the micro-batch go through the model in chunks of about batch_tokens.
        """
        tokens, padding, segments = batch.tokens, batch.padding, batch.segments
        rows, columns = batch.scored.nonzero(as_tuple=True)
        step = max(1, batch.batch_tokens // tokens.shape[1])
        parts = [torch.zeros(0, device=tokens.device)]
        for row, column in zip(rows.split(step), columns.unsqueeze(1).split(step)):
            targets = tokens[row].gather(1, column)  # (R, 1)
            logits = model(
                tokens[row].scatter(1, column, batch.mask_id),
                None if padding is None else padding[row],
                column,
                segments=None if segments is None else segments[row],
            )
            parts.append(-cross_entropy(logits, targets).squeeze(1))
        log_probs = torch.cat(parts)
        return log_probs.new_zeros(tokens.shape).masked_scatter(batch.scored, log_probs)
