"""Next-latent prediction with a causal LM (Teoh et al. 2025, arXiv 2511.05963, version 4).

A state h_t and the next token x_(t+1) predict the next state h_(t+1), as in a recurrent network, so
h_t has to contain what the future depends on. Two terms are added to the next-token loss (equations
3 to 5), as means over t of

    latent_weight / d * sum over i = 1..d of SmoothL1(h_(t+i), ĥ_(t+i))
    kl_weight     / d * sum over i = 1..d of KL(p(.|h_(t+i)) || p(.|ĥ_(t+i)))

where ĥ_(t+i) is predicted from ĥ_(t+i-1) and x_(t+i), and ĥ_t = h_t. The h_(t+i) are constants, and
so is the head p in the second term: gradients flow only through ĥ (algorithm 1). The defaults
follow algorithm 1 and table 5, in which the inner width is 1 to 4 times D. The paper leaves the
following choices open: the smooth L1 loss is a mean over the D dimensions, with a threshold of 1;
steps beyond the end of a document count as 0 in the mean over t; the last state of a document is
also predicted, but has no KL term, since the head predicts nothing there.

Shapes: B rows, S length, D width of the states, E of the embeddings, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.config.criterions import ZLossConfig
from metaseq_lm.config.tasks import LanguageModelingConfig
from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_criterion, register_task
from metaseq_lm.criterions import Exported
from metaseq_lm.criterions.language_modeling import CausalLM, next_tokens
from metaseq_lm.criterions.masked_lm import LM
from metaseq_lm.data.corpus.predictions import next_targets
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.layers import LayerNorm, Linear
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.tasks.language_modeling import CausalLMTask
from metaseq_lm.tasks.masked_lm import build_lm

DYNAMICS = "dynamics"


class LatentDynamics(nn.Module):
    """A step of the states: ĥ_(t+1) = h_t + f(h_t, x_(t+1)), f of three layers (equation 9)."""

    def __init__(self, config: EncoderConfig, inner: int) -> None:
        super().__init__()
        width, bias = config.encoder_embed_dim, config.style.bias
        self.norm = LayerNorm(width + config.embed_dim, config.norm_eps, bias=bias)
        self.first = Linear(width + config.embed_dim, inner, bias)
        self.second = Linear(inner, inner, bias)
        self.out = Linear(inner, width, bias)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """Return the states (B, S, D) after states (B, S, D) and embedded tokens (B, S, E)."""
        x = self.norm(torch.cat([state, token], -1))
        step: Tensor = self.out(F.gelu(self.second(F.gelu(self.first(x)))))
        return state + step


@dataclass
class NextLatentConfig(ZLossConfig):
    """The horizon of the predicted states, and the weights of the terms."""

    horizon: int = option(1, "states predicted one from the other (d)", at_least=1)
    latent_weight: float = option(1.0, "weight of the distance between states", at_least=0)
    kl_weight: float = option(1.0, "weight of the distance between predictions", at_least=0)


@register_criterion("next_latent", dataclass=NextLatentConfig)
class NextLatent(CausalLM):
    """Causal LM with states that predict the next one; an evaluation is that of causal LM."""

    exported = Exported(heads=(LM,), reach="causal")
    tasks = ("next_latent",)
    config: NextLatentConfig

    def __init__(self, config: NextLatentConfig | None = None) -> None:
        super().__init__(config or NextLatentConfig())

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        assert isinstance(model, TransformerLM)
        states = model.encoder(batch.tokens, replace(batch.layout, reach="causal"))  # (B, S, D)
        logits = model.predict(states, head=LM)  # (B, S, V)
        terms = self.terms(model, batch, logits)
        if model.training:  # so that evaluated losses and perplexities compare with causal_lm's
            latent, kl = self.distances(model, batch, states, logits)
            terms["next_latent"] = Term(latent, "targets", self.config.latent_weight)
            terms["latent_kl"] = Term(kl, "targets", self.config.kl_weight)
        return terms

    def distances(
        self, model: TransformerLM, batch: TokenBatch, states: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of equations 3 and 4, summed over t and averaged over the horizon."""
        latent = kl = states.new_zeros(())
        future, believed = states.detach(), full_precision(logits.detach()).log_softmax(-1)
        token, state = next_tokens(batch), states  # the token i places ahead, -1 for none; ĥ
        for _ in range(self.config.horizon):
            embedded = model.encoder.embeddings.tokens(token.clamp(min=0))
            state = model.heads[DYNAMICS](state, embedded)
            future, believed = future.roll(-1, 1), believed.roll(-1, 1)
            distance = F.smooth_l1_loss(state, future, reduction="none").mean(-1)  # (B, S)
            latent = latent + distance.masked_fill(token < 0, 0.0).sum()
            token = next_targets(token, batch.layout)
            predicted = full_precision(frozen_logits(model, state)).log_softmax(-1)
            distance = F.kl_div(predicted, believed, reduction="none", log_target=True).sum(-1)
            kl = kl + distance.masked_fill(token < 0, 0.0).sum()
        return latent / self.config.horizon, kl / self.config.horizon


def frozen_logits(model: TransformerLM, states: Tensor) -> Tensor:
    """Return the logits (B, S, V) of states, without a gradient for the head's weights."""
    head, embedding = model.heads[LM], model.encoder.embeddings.tokens.weight.detach()
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    logits: Tensor = functional_call(head, weights, (states, embedding))
    return logits


@dataclass
class NextLatentTaskConfig(LanguageModelingConfig):
    """The rows of the corpus, and the size of the added network."""

    dynamics_dim: int = option(0, "width inside the dynamics (0 = the encoder's)", at_least=0)


@register_task("next_latent", dataclass=NextLatentTaskConfig)
class NextLatentTask(CausalLMTask):
    """Causal LM with a network that predicts states; with criterion causal_lm it has no use."""

    exported = True

    def build_model(self) -> nn.Module:
        model, options = build_lm(self.run_config, self.vocabulary), self.run_config.model
        inner = self.config.dynamics_dim or options.encoder_embed_dim
        model.add_head(DYNAMICS, LatentDynamics(options, inner))
        return model

    def flops_by_rule(self) -> None:
        """Return None, because the rules do not count the dynamics."""
