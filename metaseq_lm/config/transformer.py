"""Options of encoders, and the differences between classic and modern blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from metaseq_lm.core.options import WEIGHTS, option, with_default
from metaseq_lm.core.registry import ATTENTIONS, FEED_FORWARDS, NORMS, POSITIONS, NoOptions

__all__ = ["EncoderConfig", "ModernConfig", "TransformerConfig"]

XAVIER_ATTENTION = "xavier_attention"
TRUNCATED_NORMAL = "truncated_normal"
DEPTH_SCALED = "depth_scaled"
_INITS = (XAVIER_ATTENTION, TRUNCATED_NORMAL)  # of the classic encoder
LAYER = "layer"
RMS = "rms"
NO_GATE = "none"
ACTIVATED = ("gelu", "silu")
_GATES = (*ACTIVATED, NO_GATE)
ROTARY, LEARNED = "rotary", "learned"
SOFTMAX, GELU_NETWORK = "softmax", "gelu_network"

_PATH = "metaseq_lm.models.transformer"
ATTENTIONS.declare(SOFTMAX, NoOptions, f"{_PATH}.attention.softmax_attention")
FEED_FORWARDS.declare(GELU_NETWORK, NoOptions, f"{_PATH}.encoder.GELUNetwork")
NORMS.declare(LAYER, NoOptions, f"{_PATH}.parts.layer_norm")
NORMS.declare(RMS, NoOptions, f"{_PATH}.parts.rms_norm")
POSITIONS.declare(ROTARY, NoOptions, f"{_PATH}.attention.RotaryPositions")
POSITIONS.declare(LEARNED, NoOptions, f"{_PATH}.attention.LearnedPositions")

C = TypeVar("C", bound="EncoderConfig")


class Scope(NamedTuple):
    """How far an attention layer sees, and how it distinguishes positions.

    Attributes:
        window: Largest number of keys that a query sees on both sides together, besides itself; 0
            for all.
        theta: Base of the wavelengths of rotary positions; 0 for none.
    """

    window: int = 0
    theta: float = 0.0


@dataclass(frozen=True)
class _Style:
    """The parts of the blocks, embeddings and LM heads of an encoder.

    Attributes:
        pre_norm: Whether norms come before attention and feed-forward networks.
        embedding_norm: Whether the embeddings are normalised.
        bias: Whether linear layers and norms have biases.
        norm: Registered name of the norms.
        gate: Activation of the first half of a gated feed-forward network ("gelu": GeGLU, "silu":
            SwiGLU; Shazeer 2020); "" for a two-layer GELU network.
        qk_norm: Whether queries and keys are normalised.
        positions: Registered name of the positions.
        depth: Number of layers by which initial output weights are scaled; 0 for no scaling.
    """

    pre_norm: bool
    embedding_norm: bool
    bias: bool = True
    norm: str = LAYER
    gate: str = ""
    qk_norm: bool = False
    positions: str = LEARNED
    depth: int = 0


@dataclass
class EncoderConfig:
    """Sizes and dropout of an encoder; the defaults are a 12-layer, 256-wide one."""

    encoder_layers: int = option(12, "layers", at_least=1, affects=WEIGHTS)
    encoder_embed_dim: int = option(256, "width of the hidden states", at_least=1, affects=WEIGHTS)
    encoder_ffn_embed_dim: int = option(
        1024, "width inside the feed-forward networks", at_least=1, affects=WEIGHTS
    )
    encoder_attention_heads: int = option(4, "attention heads", at_least=1)
    token_embed_dim: int = option(
        0, "width of the embeddings (0 = encoder_embed_dim)", at_least=0, affects=WEIGHTS
    )
    segments: int = option(0, "number of segment embeddings", at_least=0, affects=WEIGHTS)
    max_positions: int = option(128, "longest row", at_least=1, affects=WEIGHTS)
    dropout: float = option(
        0.1, "dropout of embeddings and of sublayers", at_least=0, below=1, affects=WEIGHTS
    )
    attention_dropout: float = option(
        0.0,
        "dropout of attention weights; above 0 it rules out the fused kernel",
        at_least=0,
        below=1,
        affects=WEIGHTS,
    )
    activation_dropout: float = option(
        0.0, "dropout in feed-forward networks", at_least=0, below=1, affects=WEIGHTS
    )
    norm_eps: float = option(1e-5, "epsilon of the norms", above=0)
    attention: str = option(SOFTMAX, "self-attention of the layers", choices=ATTENTIONS)
    feed_forward: str = option(
        GELU_NETWORK, "feed-forward networks of the layers", choices=FEED_FORWARDS
    )
    part_options: dict[str, Any] = option(
        {}, "options of attention and other parts, such as part_options.kv_heads=2"
    )

    @property
    def embed_dim(self) -> int:
        """The width of the embeddings."""
        return self.token_embed_dim or self.encoder_embed_dim

    @property
    def width(self) -> int:
        """The width of the states that a head sees."""
        return self.encoder_embed_dim

    @property
    def style(self) -> _Style:
        """The parts of the blocks."""
        raise NotImplementedError

    @property
    def init(self) -> str:
        """The initialisation of weights, see `encoder.initialise`."""
        raise NotImplementedError

    @property
    def has_usual_parts(self) -> bool:
        """Whether attention and feed-forward networks are the package's."""
        return (self.attention, self.feed_forward) == (SOFTMAX, GELU_NETWORK)

    @property
    def width_ratio(self) -> float:
        """The width relative to the one that rates and initial weights are for; 1: no scaling."""
        return 1.0

    def heads_for(self, width: int) -> int:
        """Return how many heads of the same size a network of another width has, at least 1."""
        return max(1, width * self.encoder_attention_heads // self.encoder_embed_dim)

    def resized(self: C, width: int, layers: int, embed_dim: int) -> C:
        """Return the sizes of a network of another width, depth and width of the embeddings.

        Heads keep their size, and feed-forward networks keep their width relative to the states.
        """
        return replace(
            self,
            encoder_layers=layers,
            encoder_embed_dim=width,
            encoder_ffn_embed_dim=round(
                self.encoder_ffn_embed_dim * width / self.encoder_embed_dim
            ),
            encoder_attention_heads=self.heads_for(width),
            token_embed_dim=embed_dim,
        )

    def scope(self, layer: int) -> Scope:
        """Return what attention of a layer, counted from 0, sees."""
        return Scope()

    def rows(self, vocab_size: int) -> int:
        """Return the rows of the embedding for a vocabulary: its size, perhaps rounded up."""
        return vocab_size


@dataclass
class TransformerConfig(EncoderConfig):
    """Sizes and dropout of an encoder with learned positions (Devlin et al. 2019)."""

    encoder_normalize_before: bool = option(
        True, "put layer norms first (pre-LN); false: as BERT does"
    )
    init: str = option(
        XAVIER_ATTENTION,
        "initial weights: xavier_attention (normal; attention Xavier "
        "uniform) or truncated_normal (BERT, ELECTRA)",
        choices=_INITS,
        affects=WEIGHTS,
    )

    @property
    def style(self) -> _Style:
        before = self.encoder_normalize_before
        return _Style(pre_norm=before, embedding_norm=not before)


@dataclass
class ModernConfig(EncoderConfig):
    """Sizes and parts of a pre-norm encoder with rotary positions and gated networks (Warner et al.
    2025, ModernBERT); linear layers and norms have no biases.
    """

    encoder_ffn_embed_dim: int = with_default(
        EncoderConfig,
        "encoder_ffn_embed_dim",
        384,
        "inner width of the gated feed-forward networks, whose first layer is twice as wide",
    )
    dropout: float = with_default(EncoderConfig, "dropout", 0.0)
    gate: str = option(
        "gelu",
        "activation of the gate: gelu (GeGLU) or silu (SwiGLU); none: GELU networks without a gate",
        choices=_GATES,
    )
    positions: str = option(ROTARY, "rotary, or learned embeddings as in BERT", choices=POSITIONS)
    norm: str = option(LAYER, "norms: layer (LayerNorm) or rms (RMSNorm)", choices=NORMS)
    qk_norm: bool = option(False, "RMS norms of queries and keys, before they are rotated")
    global_every: int = option(
        3, "one in so many layers, the first included, attends to whole rows (1 = all)", at_least=1
    )
    local_window: int = option(
        128, "keys on both sides that a query sees in the other layers, besides itself", at_least=2
    )
    global_theta: float = option(
        10_000.0, "base of the wavelengths of rotary positions in global layers", above=0
    )
    local_theta: float = option(10_000.0, "base of the wavelengths in local layers", above=0)
    vocab_multiple: int = option(
        1,
        "round the rows of the embedding up to a multiple of this",
        at_least=1,
        affects=WEIGHTS,
    )
    base_width: int = option(
        0,
        "width at which optimizer.lr was tuned: initial weights, rates and logits are scaled so "
        "that it suits encoder_embed_dim too (Yang et al. 2021); heads should be as wide (0 = "
        "unused)",
        at_least=0,
    )

    @property
    def style(self) -> _Style:
        return _Style(
            pre_norm=True,
            embedding_norm=True,
            bias=False,
            norm=self.norm,
            gate="" if self.gate == NO_GATE else self.gate,
            qk_norm=self.qk_norm,
            positions=self.positions,
            depth=self.encoder_layers,
        )

    @property
    def init(self) -> str:
        return DEPTH_SCALED

    @property
    def width_ratio(self) -> float:
        if not self.base_width:
            return 1.0
        return self.encoder_embed_dim / self.base_width

    def scope(self, layer: int) -> Scope:
        """Return what attention of a layer, counted from 0, sees."""
        window, theta = self.local_window, self.local_theta
        if layer % self.global_every == 0:
            window, theta = 0, self.global_theta
        if self.positions == LEARNED:
            theta = 0.0
        return Scope(window, theta)

    def rows(self, vocab_size: int) -> int:
        """Return the rows of the embedding for a vocabulary: its size, rounded up."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple
