"""Electric: an energy for every token by noise-contrastive estimation (Clark 2021, section 5.1.5).

Shapes: B batch, S length, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ScoredBatch, Term, Terms, number_of
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.methods.electra.criterion import (
    Corrupting,
    NoiseConfig,
    Noised,
    binary_losses,
    cloze_term,
    detection_terms,
    log_prob_of,
    noise_log_probs,
    real_tokens,
)
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import Electra, check_noise


@dataclass
class ElectricConfig(NoiseConfig):
    """Noise-contrastive estimation of token energies."""

    discriminator_weight: float = option(50.0, "weight of the contrastive loss", at_least=0)
    exact_counts: bool = option(
        False, "log(k / (n - k)) from each row's counts; false: from noise_rate"
    )
    legacy_specials: bool = option(
        False, "the loss includes [CLS] and [SEP], as in the authors' code"
    )


@register_criterion("electric_nce", dataclass=ElectricConfig)
class Electric(Corrupting):
    """P(noise) = sigmoid(E + log q + log(k / (n - k))), where every chosen token counts as noise.

    It does so even if the sample is the original: then exp(-E) is, at the optimum, the data's
    probability of the token given the others, normalised (Clark 2021, section 5.1.3). The noise model
    must see all tokens but the one it predicts.
    """

    noises = ("two_tower", "unigram", "uniform")

    config: ElectricConfig

    def __init__(self, config: ElectricConfig) -> None:
        super().__init__(config)
        self.check_sampling("electric_nce")

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("electric_nce", self.noises, model.noise)
        noised = self.corrupt(model, batch)
        assert noised.log_q is not None
        included, size = batch.candidates, "candidates"
        if self.config.legacy_specials:
            included, size = real_tokens(batch), "tokens"
        energy = model.heads["rtd"](model.hidden(noised.tokens, batch))  # (B, S)
        logits = energy + noised.log_q + self.log_odds(included, noised)
        losses = binary_losses(logits, noised.chosen) * included
        terms = noised.terms | {
            "discriminator": Term(losses.sum(), size, self.config.discriminator_weight)
        }
        return terms | detection_terms(logits, noised.chosen, real_tokens(batch))

    def log_odds(self, included: Tensor, noised: Noised) -> float | Tensor:
        """Return log(k / (n - k)), a number, or (B, 1) with exact_counts.

        Of the n tokens that the loss includes, (B, S), k are noise.
        """
        if not self.config.exact_counts:
            return math.log(self.config.noise_rate / (1 - self.config.noise_rate))
        k = noised.chosen.sum(-1, keepdim=True)
        n = included.sum(-1, keepdim=True)
        # A row without either is no evidence, and log 0 would be NaN.
        odds = torch.log(k.clamp(min=1).double() / (n - k).clamp(min=1))
        return odds if noised.log_q is None else odds.to(noised.log_q)

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return -E of each token of the uncorrupted rows, (B, S), in one pass."""
        assert isinstance(model, Electra)
        energy = model.heads["rtd"](model.hidden(batch.tokens, batch))
        log_probs: Tensor = -energy * batch.scored
        return log_probs


@register_criterion("two_tower_cloze")
class TwoTowerCloze(Criterion):
    """The two towers alone, trained on every token given all others (Clark 2021, section 5.4.5)."""

    tasks = ("electra",)
    heads: tuple[str, ...] = ()
    noises = ("two_tower",)

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("two_tower_cloze", self.noises, model.noise)
        log_probs = noise_log_probs(model, batch)
        with torch.no_grad():
            correct = (log_probs.argmax(-1) == batch.tokens) & batch.candidates
        return {
            "cloze": cloze_term(log_probs, batch, 1.0),
            "accuracy": Term(number_of(correct), "candidates", 0.0),
        }

    @torch.no_grad()
    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return log q of each token given the others, (B, S), in one pass."""
        assert isinstance(model, Electra)
        return log_prob_of(noise_log_probs(model, batch), batch.tokens) * batch.scored
