"""A masked LM with masks chosen by a small net (Clark 2021, section 5.5, a negative result).

Shapes: B batch, S length, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms, number_of
from metaseq_lm.core.metric_names import NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.forward.passes import full_precision, uniform
from metaseq_lm.methods.electra.criterion import binary_losses
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import Electra
from metaseq_lm.methods.electra.options import DIFFICULTY, StrategicConfig
from metaseq_lm.models.layers import cross_entropy, select


class StrategicMLM(Criterion):
    """A masked LM on tokens that are predicted to be difficult (Clark 2021, section 5.5).

    A second net reads the original row. The sigmoid of its logit at a token guesses 1 - p, where p
    is the masked LM's probability of that token once it is hidden. Training draws the same number
    of tokens of a row as the batch, without replacement and in proportion to the guess to the power
    `sharpness`; the second net learns by cross-entropy at the drawn tokens. Evaluation uses the
    masks of the batch.

    The dissertation has only one sentence on it. The guessed quantity, the rule of the draw and the
    weight are our choices.
    """

    exported = Exported(heads=("lm",), generator=False)
    tasks = ("electra",)
    heads: tuple[str, ...] = ("lm",)
    noises = (DIFFICULTY,)

    config: StrategicConfig

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        guesses = full_precision(model.difficulty(batch))  # (B, S)
        masked, positions, targets = batch.masked, batch.positions, batch.targets
        if model.training:
            log_weights = self.config.sharpness * nn.functional.logsigmoid(guesses.detach())
            masked, positions, targets = redrawn(batch, log_weights)
        states = select(model.hidden(masked, batch), positions)
        logits = model.heads["lm"](states, model.token_table())  # (B, M, V)
        losses = cross_entropy(logits, targets)
        counted = targets >= 0
        missed = -torch.expm1(-losses.detach())
        guessed = binary_losses(guesses.gather(1, positions), missed)
        with torch.no_grad():
            correct = number_of(logits.argmax(-1) == targets)
        return {
            "mlm": Term(losses.sum(), "targets", kind=NLL),
            "accuracy": Term(correct, "targets", 0.0),
            "difficulty": Term((guessed * counted).sum(), "targets", self.config.difficulty_weight),
            "missed": Term((missed * counted).sum(), "targets", 0.0),
        }


@torch.no_grad()
def redrawn(batch: ElectraBatch, log_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose tokens again, by log-weights (B, S), and mask them as the batch does.

    Each row keeps its number of chosen tokens and their replacements: [MASK], another token, or
    none. Returns masked rows (B, S), positions (B, M), and targets (B, M), -1 where unused.
    """
    u = uniform(log_weights.shape, log_weights.device, torch.double)
    # Exponential clocks with these rates ring in the order of successive draws in proportion to the
    # weights (Efraimidis and Spirakis 2006). Times are in logarithms, so that none is infinite.
    rings = torch.log(-torch.log1p(-u)) - log_weights.double()
    rings = rings.masked_fill(~batch.candidates, float("inf"))
    positions = rings.topk(batch.positions.shape[1], largest=False).indices
    counted = (batch.targets >= 0) & batch.candidates.gather(1, positions)
    originals = batch.tokens.gather(1, positions)
    shown = batch.masked.gather(1, batch.positions)
    is_kept = shown == batch.tokens.gather(1, batch.positions)
    hidden = torch.where(counted & ~is_kept, shown, originals)
    masked = batch.tokens.scatter(1, positions, hidden)
    return masked, positions, torch.where(counted, originals, -1)
