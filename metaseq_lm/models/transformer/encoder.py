"""Transformer encoder with LM heads, pre-LN (Xiong et al. 2020) or post-LN (Devlin et al. 2019).

Shapes: B batch, S length, D width, E embedding width, V vocabulary, M selected positions; any
leading axes before S.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_model
from metaseq_lm.forward.context import apply_block
from metaseq_lm.models.layers import (
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    gelu_linear,
    linear,
    lookup,
    select,
)
from metaseq_lm.models.transformer.attention import (
    SelfAttention,
    Visibility,
    document_positions,
)

INITS = ("xavier_attention", "truncated_normal")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
}


@dataclass
class TransformerConfig:
    """Sizes and dropout of an encoder; the defaults are a 12-layer, 256-wide one."""

    encoder_layers: int = option(12, "layers", at_least=1)
    encoder_embed_dim: int = option(256, "width of the hidden states", at_least=1)
    encoder_ffn_embed_dim: int = option(1024, "width inside the feed-forward networks", at_least=1)
    encoder_attention_heads: int = option(4, "attention heads", at_least=1)
    encoder_normalize_before: bool = option(True, "layer norms come first (pre-LN); false: as BERT")
    token_embed_dim: int = option(0, "width of the embeddings (0 = encoder_embed_dim)", at_least=0)
    segments: int = option(0, "number of segment embeddings", at_least=0)
    max_positions: int = option(128, "longest row", at_least=1)
    dropout: float = option(0.1, "dropout of embeddings and of sublayers", at_least=0, below=1)
    attention_dropout: float = option(
        0.0, "dropout of attention weights; above 0 without the fused kernel", at_least=0, below=1
    )
    activation_dropout: float = option(0.0, "dropout in feed-forward networks", at_least=0, below=1)
    norm_eps: float = option(1e-5, "epsilon of the layer norms", above=0)
    init: str = option(
        "xavier_attention",
        "initial weights: xavier_attention (normal; attention Xavier "
        "uniform) or truncated_normal (BERT, ELECTRA)",
        choices=INITS,
    )

    @property
    def embed_dim(self) -> int:
        """The width of the embeddings."""
        return self.token_embed_dim or self.encoder_embed_dim

    @property
    def width(self) -> int:
        """The width of the states that a head sees."""
        return self.encoder_embed_dim

    def heads_for(self, width: int) -> int:
        """Return how many heads of the same size a net of another width has, at least 1."""
        return max(1, width * self.encoder_attention_heads // self.encoder_embed_dim)


class Layer(nn.Module):
    """An encoder layer: attention and a two-layer GELU network, each with a residual connection."""

    is_gathered_alone = True  # of a sharded model: see distributed/layers.py

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        self.normalize_before = config.encoder_normalize_before
        self.attention = SelfAttention(
            width, config.encoder_attention_heads, config.attention_dropout
        )
        self.attention_norm = LayerNorm(width, config.norm_eps)
        self.fc1 = Linear(width, config.encoder_ffn_embed_dim)
        self.fc2 = Linear(config.encoder_ffn_embed_dim, width)
        self.ffn_norm = LayerNorm(width, config.norm_eps)
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)

    def ffn(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.training and self.activation_dropout.p:
            states: Tensor = self.fc2(self.activation_dropout(F.gelu(x)))
            return states
        return gelu_linear(x, self.fc2.weight, self.fc2.bias)

    def forward(self, x: Tensor, visibility: Visibility) -> Tensor:
        if self.normalize_before:
            x = x + self.dropout(self.attention(self.attention_norm(x), visibility))
            x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        else:
            x = self.attention_norm(x + self.dropout(self.attention(x, visibility)))
            x = self.ffn_norm(x + self.dropout(self.ffn(x)))
        return x


class Embeddings(nn.Module):
    """The sum of token, position and segment embeddings, normalised in a post-LN encoder."""

    def __init__(self, config: TransformerConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        width = config.embed_dim
        self.max_positions = config.max_positions
        self.tokens = Embedding(vocab_size, width, padding_idx=padding_idx)
        self.positions = nn.Embedding(config.max_positions, width)
        self.segments = Embedding(config.segments, width) if config.segments else None
        self.one_segment = config.segments == 1  # RoBERTa: that of every token
        post = not config.encoder_normalize_before
        self.norm = LayerNorm(width, config.norm_eps) if post else None
        self.dropout = Dropout(config.dropout)

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return (..., S, E) of ids (..., S) or probabilities (..., S, V).

        Positions are those in the row, or in the documents of packed rows. `segments` (..., S) is 0
        throughout if not given, or if there is just one. Raises ValueError for S > max_positions.
        """
        x = self.tokens(tokens)
        length = x.shape[-2]
        if length > self.max_positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's {self.max_positions} "
                "positions; raise model.max_positions or cut the text with task.tokens_per_sample"
            )
        if layout.documents is not None:
            x = x + lookup(document_positions(layout.documents), self.positions.weight)
        else:
            positions = self.positions.weight[..., :length, :]
            x = x + (positions if positions.dim() == 2 else positions.unsqueeze(1))
        if self.segments is not None:
            if segments is None or self.one_segment:
                segments = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
            x = x + self.segments(segments)
        embeddings: Tensor = self.dropout(x if self.norm is None else self.norm(x))
        return embeddings


class Stack(nn.Module):
    """A projection if the embeddings have another width, the layers, the final norm if pre-LN."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, before = config.encoder_embed_dim, config.encoder_normalize_before
        other = config.embed_dim != width
        self.project = Linear(config.embed_dim, width) if other else None
        self.glorot = [self.project] if self.project is not None else []
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.encoder_layers))
        self.norm = LayerNorm(width, config.norm_eps) if before else None

    def forward(
        self, x: Tensor, layout: Layout = ALL_VISIBLE, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Return hidden states (..., S, D) of embeddings (..., S, E).

        The states that each layer ends with are appended to `outputs`, the last as returned.
        """
        visibility = Visibility.of(layout, x.shape[-2], x.device)
        if self.project is not None:
            x = self.project(x)
        for layer in self.layers:
            x = apply_block(layer, x, visibility)
            if outputs is not None:
                outputs.append(x)
        x = x if self.norm is None else self.norm(x)
        if outputs is not None:
            outputs[-1] = x
        return x


class Encoder(nn.Module):
    """Embeddings and a stack of layers."""

    def __init__(self, config: TransformerConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, vocab_size, padding_idx)
        self.stack = Stack(config)

    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (..., S, D) of ids (..., S) or probabilities (..., S, V).

        `segments` (..., S) numbers the segments.
        """
        states: Tensor = self.stack(self.embeddings(tokens, layout, segments), layout)
        return states

    def layer_states(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> list[Tensor]:
        """Return the embeddings (..., S, E), and the states (..., S, D) that each layer ends with.

        Arguments are those of `forward`, which returns the last of them.
        """
        states: list[Tensor] = [self.embeddings(tokens, layout, segments)]
        self.stack(states[0], layout, states)
        return states


def initialise(model: nn.Module, init: str) -> None:
    """Initialise all linear and embedding weights of `model` and zero the biases.

    "xavier_attention": N(0, 0.02), but Xavier uniform for the attention input projection, as in
    torch's attention. "truncated_normal": N(0, 0.02) cut at two standard deviations (Devlin et al.
    2019), but Glorot uniform for the layers a module lists as `glorot`, as ELECTRA's code has it.
    """
    draw = nn.init.normal_ if init == "xavier_attention" else truncated_normal
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            draw(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, LMHead) and module.weight is not None:
            draw(module.weight, std=0.02)
    # After the loop: modules() visits an attention before its projections.
    for module in model.modules():
        if isinstance(module, SelfAttention) and init == "xavier_attention":
            nn.init.xavier_uniform_(module.in_proj.weight)
        if init == "truncated_normal":
            for layer in getattr(module, "glorot", []):
                nn.init.xavier_uniform_(layer.weight)


def truncated_normal(weight: Tensor, std: float) -> None:
    """Fill `weight` from N(0, std) cut at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@register_model("transformer", dataclass=TransformerConfig)
class TransformerLM(nn.Module):
    """An encoder with one or more named language-model heads.

    `heads` names the heads; with `tied` they share the input embedding as output weights.
    """

    exported = True

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        padding_idx: int = 0,
        heads: tuple[str, ...] = ("lm",),
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        sizes = (config.encoder_embed_dim, config.embed_dim, vocab_size)
        self.heads = nn.ModuleDict({name: LMHead(*sizes, tied, config.norm_eps) for name in heads})
        initialise(self, config.init)
        if not tied:
            # A tied padding row is an output weight too and keeps its random start.
            with torch.no_grad():
                self.encoder.embeddings.tokens.weight[padding_idx].zero_()

    def forward(
        self,
        tokens: Tensor,
        layout: Layout = ALL_VISIBLE,
        positions: Tensor | None = None,
        head: str | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Return logits (..., S, V), or (..., M, V) of the selected `positions` (..., M) only.

        `head` may be left out when there is just one.
        """
        return self.predict(self.encoder(tokens, layout, segments), positions, head)

    def predict(
        self, x: Tensor, positions: Tensor | None = None, head: str | None = None
    ) -> Tensor:
        """Return the logits of one head for hidden states (..., S, D)."""
        if positions is not None:
            x = select(x, positions)
        name = head if head is not None else next(iter(self.heads))
        logits: Tensor = self.heads[name](x, self.encoder.embeddings.tokens.weight)
        return logits


class LMHead(nn.Module):
    """Linear (D to E), GELU, LayerNorm, then a projection to the vocabulary, tied or separate."""

    def __init__(
        self, width: int, embed_dim: int, vocab_size: int, tied: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.dense = Linear(width, embed_dim)
        self.norm = LayerNorm(embed_dim, eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, embed_dim))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Return logits (..., V); `embedding` (V, E) is the output weight of a tied head."""
        weight = embedding if self.weight is None else self.weight
        return linear(self.norm(F.gelu(self.dense(x))), weight, self.bias)


class BinaryHead(nn.Module):
    """Linear (D to D), GELU, Linear to one logit: ELECTRA's discriminator head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.out = Linear(width, 1)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per state, (...)."""
        logits: Tensor = self.out(F.gelu(self.dense(x))).squeeze(-1)
        return logits


class SentenceHead(nn.Module):
    """Dropout and a linear layer on the first state; with `pooled`, BERT's tanh layer before them.

    `pooler_dropout` puts dropout before the tanh layer too, as RoBERTa's head has it; `activation`
    replaces tanh: "gelu" is ELECTRA's, "relu" DistilBERT's.
    """

    def __init__(
        self,
        width: int,
        outputs: int,
        dropout: float,
        pooled: bool,
        pooler_dropout: bool = False,
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        self.pooler = Linear(width, width) if pooled else None
        self.activation = ACTIVATIONS[activation]
        self.pooler_dropout = pooler_dropout
        self.out = Linear(width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (..., K) of rows (..., S, D)."""
        first = x[..., 0, :]
        if self.pooler is not None:
            first = self.dropout(first) if self.pooler_dropout else first
            first = self.activation(self.pooler(first))
        logits: Tensor = self.out(self.dropout(first))
        return logits


class TokenHead(nn.Module):
    """Dropout and a linear layer on every state."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.out = Linear(width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (..., S, K) of rows (..., S, D)."""
        logits: Tensor = self.out(self.dropout(x))
        return logits


class SpanPairHead(nn.Module):
    """Dropout and a linear layer on the concatenated first state and mean states of two spans."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.out = Linear(3 * width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor, spans: Tensor) -> Tensor:
        """Return scores (B, K) of rows (B, S, D); `spans` (B, 2, 2) are first and last + 1."""
        at = torch.arange(x.shape[1], device=x.device)
        inside = (at >= spans[..., :1]) & (at < spans[..., 1:])  # (B, 2, S)
        means = inside.to(x.dtype) @ x / inside.sum(-1, keepdim=True).to(x.dtype)
        logits: Tensor = self.out(self.dropout(torch.cat([x[:, 0], means.flatten(1)], -1)))
        return logits
