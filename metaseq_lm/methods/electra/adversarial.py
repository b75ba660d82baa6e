"""ELECTRA with a generator that is rewarded for fooling the discriminator (Clark 2021, section 5.3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.methods.electra.criterion import (
    Corrupting,
    NoiseConfig,
    Noised,
    binary_losses,
    detection_terms,
    generator_terms,
    real_tokens,
)
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import Electra, check_noise
from metaseq_lm.methods.electra.noise import replaced, sample
from metaseq_lm.models.layers import full_precision


@dataclass
class AdversarialConfig(NoiseConfig):
    """Weights; `generator_weight` is that of the policy gradient, there is no masked-LM loss."""

    discriminator_weight: float = option(50.0, "weight of the detection loss", at_least=0)
    baseline_weight: float = option(1.0, "weight of the loss of the reward's baseline", at_least=0)


@register_criterion("electra_adversarial", dataclass=AdversarialConfig)
class AdversarialElectra(Corrupting):
    """REINFORCE on the discriminator's own loss at each chosen position, less a learnt baseline.

    The discriminator's answer at a position is taken to depend on no other sample. The baseline is
    b = -log sigmoid(w h) of the detached state h, trained with cross-entropy towards exp(-reward).
    """

    heads = ("rtd", "baseline")
    noises = ("mlm",)

    config: AdversarialConfig

    def __init__(self, config: AdversarialConfig) -> None:
        super().__init__(config)
        self.check_plain("electra_adversarial")

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        assert isinstance(model, Electra)
        check_noise("electra_adversarial", self.noises, model.noise)
        targets = batch.targets
        slots, states = model.masked_noise(batch)
        samples = sample(slots.detach())
        noised = Noised(*replaced(batch, samples), generator_terms(slots, samples, batch, 0.0))
        logits = model.heads["rtd"](model.hidden(noised.tokens, batch))
        fake, real = noised.fake(batch), real_tokens(batch)
        losses = binary_losses(logits, fake)
        terms = noised.terms | {
            "discriminator": Term((losses * real).sum(), "tokens", self.config.discriminator_weight)
        }
        rewards = losses.detach().gather(1, batch.positions)  # (B, M)
        terms |= self.policy_terms(model, slots, states, samples, (rewards, targets >= 0))
        return terms | detection_terms(logits, fake, real)

    def policy_terms(
        self,
        model: Electra,
        slots: Tensor,
        states: Tensor,
        samples: Tensor,
        rewards: tuple[Tensor, Tensor],
    ) -> Terms:
        """Return the loss of the policy and of the baseline; `rewards` (B, M) and which of them count."""
        reward, counted = rewards
        log_probs = full_precision(slots).log_softmax(-1)
        chosen = log_probs.gather(-1, samples.unsqueeze(-1)).squeeze(-1)
        score = model.heads["baseline"](states.detach()).squeeze(-1).to(log_probs.dtype)
        advantage = (reward - F.softplus(-score)).detach()
        baseline = binary_losses(score, torch.exp(-reward))
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        policy = -(chosen * advantage * counted).sum()
        return {
            "policy": Term(policy, "targets", self.config.generator_weight),
            "baseline": Term((baseline * counted).sum(), "targets", self.config.baseline_weight),
            "reward": Term((reward * counted).sum(), "targets", 0.0),
            "entropy": Term((entropy * counted).sum(), "targets", 0.0),
        }
