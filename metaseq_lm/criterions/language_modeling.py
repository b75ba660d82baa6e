"""Language modelling: cross-entropy of the next token, or of the next and of the previous one.

Shapes: B rows, S length, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ScoredBatch, Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import CAUSAL_NLL
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.criterions.masked_lm import smoothing_of, z_terms
from metaseq_lm.data.corpus.predictions import at_tokens, next_targets
from metaseq_lm.models.bilstm import BiLSTMLM
from metaseq_lm.models.layers import IGNORE, cross_entropy

__all__ = ["CausalLM", "next_tokens"]


class CausalLM(Criterion):
    """The mean loss of each token given those before it (Radford et al. 2018, equation 1).

    In a row `[CLS] x [SEP]` these are x and [SEP].
    """

    exported = Exported(heads=("lm",), reach="causal")
    calls = ("tokens", "layout")
    general = False

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        return self.terms(model, batch, self.logits(model, batch))

    def terms(self, model: nn.Module, batch: TokenBatch, logits: Tensor) -> Terms:
        """Return the terms of a batch, given its logits (B, S, V)."""
        targets = next_tokens(batch)
        loss = cross_entropy(logits, targets, smoothing_of(self.config, model)).sum()
        terms = {"next_token": Term(loss, "targets", kind=CAUSAL_NLL)}
        return terms | z_terms(self.config, model, logits, batch.replace(targets=targets))

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token given [CLS] and earlier ones, in one pass."""
        losses = cross_entropy(self.logits(model, batch), next_tokens(batch))
        return at_tokens(-losses).masked_fill(~batch.scored, 0.0)

    def logits(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Return the logits (B, S, V) of the next token at each position."""
        logits: Tensor = model(batch.tokens, replace(batch.layout, reach="causal"))
        return logits


def next_tokens(batch: TokenBatch) -> Tensor:
    """Return the next token of each position (B, S), IGNORE at the end of a row or document."""
    targets, padding = batch.tokens, batch.layout.padding
    if padding is not None:
        targets = targets.masked_fill(padding, IGNORE)
    return next_targets(targets, batch.layout)


def _without_padding(targets: Tensor, padding: Tensor | None) -> Tensor:
    """Return targets (B, S - 1), IGNORE where the position or the next one is padding (B, S)."""
    if padding is None:
        return targets
    return targets.masked_fill(padding[:, 1:], IGNORE)


class LanguageModeling(Criterion):
    """The mean of the forward and the backward loss per token (Peters et al. 2018, section 3.1).

    In a row `[CLS] x [SEP]` the forward direction predicts x and [SEP], the backward one x and
    [CLS]. The model is a BiLSTMLM; UsageError for another.
    """

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        if not isinstance(model, BiLSTMLM):
            raise UsageError("criterion language_modeling needs --model bilstm_lm")
        tokens, padding = batch.tokens, batch.padding
        forward, backward = model.directions(tokens, batch.layout)
        known = model.encoder.known(tokens)
        following = _without_padding(known[:, 1:], padding)
        previous = _without_padding(known[:, :-1], padding)
        return {
            "forward": Term(
                cross_entropy(forward, following).sum(), "targets", 0.5, kind=CAUSAL_NLL
            ),
            "backward": Term(
                cross_entropy(backward, previous).sum(), "targets", 0.5, kind=CAUSAL_NLL
            ),
        }
