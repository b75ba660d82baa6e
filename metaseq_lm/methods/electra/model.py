"""A main encoder with its heads and the noise model that corrupts its input.

Shapes: B batch, S length, M chosen positions, V vocabulary, D hidden width, E embedding width, G the
generator's hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_model
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.noise import FixedNoise, MaskedGenerator, TwoTowers
from metaseq_lm.models.layers import Linear
from metaseq_lm.models.transformer.encoder import (
    BinaryHead,
    Encoder,
    LMHead,
    TransformerConfig,
    initialise,
)

NOISES = ("mlm", "two_tower", "unigram", "uniform")


@dataclass
class ElectraConfig(TransformerConfig):
    """An encoder and its noise model (Clark 2021, sections 5.1.5, 5.3.1 and 5.3.2)."""

    noise: str = option(
        "mlm", "mlm, two_tower, unigram (corpus frequencies) or uniform", choices=NOISES
    )
    generator_size: float = option(
        0.25, "the noise model's width as a share of the encoder's", above=0
    )
    generator_layers: float = option(
        1.0, "the noise model's depth as a share of the encoder's", above=0
    )
    generator_embed_dim: int = option(
        0, "width of embeddings that the noise model does not share (0 = its own width)", at_least=0
    )
    sharing: str = option(
        "embeddings",
        "shared with the noise model: embeddings, none or all",
        choices=("embeddings", "none", "all"),
    )
    freeze_generator: bool = option(False, "the noise model is not trained (two-stage training)")

    def check(self) -> None:
        """Raise UsageError for sizes that are too small or cannot be shared."""
        same = self.generator_size == 1 and self.generator_layers == 1 and self.noise == "mlm"
        if self.sharing == "all" and not same:
            raise UsageError(
                "model.sharing=all makes generator and discriminator one encoder; it needs "
                "model.noise=mlm, model.generator_size=1 and model.generator_layers=1"
            )
        for name, size in (
            ("generator_size", round(self.encoder_embed_dim * self.generator_size)),
            ("generator_layers", round(self.encoder_layers * self.generator_layers)),
        ):
            if size < 1:
                raise UsageError(
                    f"model.{name} is {getattr(self, name)}, which makes a width or depth of {size}; "
                    "make it larger"
                )
        if self.freeze_generator and self.sharing != "none":
            raise UsageError("model.freeze_generator needs model.sharing=none: a copy of its own")

    def generator(self) -> TransformerConfig:
        """Return the sizes of the noise model: width, heads and feed-forward width scale, depth apart."""
        whole = self.encoder_embed_dim
        width = round(whole * self.generator_size)
        # A frozen noise model is a copy of what the first stage trained, embeddings included.
        own = self.sharing == "none" and not self.freeze_generator
        return replace(
            self,
            encoder_layers=round(self.encoder_layers * self.generator_layers),
            encoder_embed_dim=width,
            encoder_ffn_embed_dim=round(self.encoder_ffn_embed_dim * width / whole),
            encoder_attention_heads=self.heads_for(width),
            token_embed_dim=self.generator_embed_dim if own else self.embed_dim,
        )


def check_noise(criterion: str, known: Sequence[str], noise: str) -> None:
    """Raise UsageError if a criterion cannot train with a kind of noise."""
    if noise not in known:
        choices = " or ".join(f"model.noise={name}" for name in known)
        raise UsageError(f"{criterion} cannot be trained with model.noise={noise}; set {choices}")


@register_model("electra", dataclass=ElectraConfig)
class Electra(nn.Module):
    """The main `encoder`, its `heads`, and the `generator` of the noise.

    `heads` names what the criterion needs: rtd, lm, copy, contrast, baseline. Without any there is
    no main encoder: a noise model alone. `frequencies` (V,) are those of the unigram noise.
    """

    def __init__(
        self,
        config: ElectraConfig,
        vocab_size: int,
        padding_idx: int = 0,
        heads: tuple[str, ...] = ("rtd",),
        frequencies: Tensor | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.noise = config.noise
        small = config.generator()
        width, embed = config.encoder_embed_dim, config.embed_dim
        self.encoder = Encoder(config, vocab_size, padding_idx) if heads else None
        made: dict[str, Callable[[], nn.Module]] = {
            "rtd": lambda: BinaryHead(width),
            "lm": lambda: LMHead(width, embed, vocab_size, True, config.norm_eps),
            "copy": lambda: Linear(width, 1),
            "contrast": lambda: Linear(width, 1),
            "baseline": lambda: Linear(small.encoder_embed_dim, 1),
        }
        self.heads = nn.ModuleDict({name: made[name]() for name in heads})
        self.glorot = [head for head in self.heads.values() if isinstance(head, Linear)]
        # With tied embeddings the generator reads the main encoder's table.
        own = self.encoder is None or config.sharing == "none"
        sizes = (small, vocab_size, padding_idx)
        self.generator: MaskedGenerator | TwoTowers | FixedNoise
        if config.noise == "mlm":
            self.generator = MaskedGenerator(*sizes, own, stack=config.sharing != "all")
        elif config.noise == "two_tower":
            self.generator = TwoTowers(*sizes, own)
        else:
            uniform = torch.full((vocab_size,), 1 / vocab_size)
            self.generator = FixedNoise(uniform if config.noise == "uniform" else frequencies)
        initialise(self, config.init)
        if config.freeze_generator:
            self.generator.requires_grad_(False)

    def hidden(self, tokens: Tensor, batch: TokenBatch) -> Tensor:
        """Return the main encoder's states (B, S, D) of `tokens` (B, S) in the place of the batch's."""
        assert self.encoder is not None
        states: Tensor = self.encoder(tokens, batch.padding, batch.segments)
        return states

    def token_table(self) -> Tensor:
        """Return the main encoder's token embeddings, (V, E)."""
        assert self.encoder is not None
        return self.encoder.embeddings.tokens.weight

    def train(self, mode: bool = True) -> Electra:
        """Set the mode; a frozen generator stays in evaluation mode (its noise is then a constant)."""
        super().train(mode)
        if not any(p.requires_grad for p in self.generator.parameters()):
            self.generator.eval()
        return self

    def masked_noise(self, batch: ElectraBatch) -> tuple[Tensor, Tensor]:
        """Return logits (B, M, V) of the masked-LM generator at the chosen positions, and its states."""
        assert isinstance(self.generator, MaskedGenerator)
        noise: tuple[Tensor, Tensor] = self.generator(self.encoder, batch)
        return noise

    def cloze_noise(self, batch: TokenBatch) -> Tensor:
        """Return logits (B, S, V) of the two towers: position t given all tokens but t."""
        assert isinstance(self.generator, TwoTowers)
        logits: Tensor = self.generator(self.encoder, batch)
        return logits
