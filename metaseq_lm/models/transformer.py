"""Transformer encoder with language-model heads, pre-LN (Xiong et al. 2020) or post-LN (Devlin et al. 2019).

Shapes: B batch, S length, D width, V vocabulary, M selected positions; any leading axes before S.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.models.layers import Dropout, Embedding, LayerNorm, Linear, SelfAttention, linear
from metaseq_lm.registry import register_model


@dataclass
class TransformerConfig:
    """Sizes and dropout of an encoder; the defaults are a 12-layer, 256-wide one."""

    encoder_layers: int = 12
    encoder_embed_dim: int = 256
    encoder_ffn_embed_dim: int = 1024
    encoder_attention_heads: int = 4
    encoder_normalize_before: bool = True
    max_positions: int = 128
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0


class Layer(nn.Module):
    """One encoder layer: attention, then a two-layer GELU network, each with a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        self.normalize_before = config.encoder_normalize_before
        self.attention = SelfAttention(
            width, config.encoder_attention_heads, config.attention_dropout
        )
        self.attention_norm = LayerNorm(width)
        self.fc1 = Linear(width, config.encoder_ffn_embed_dim)
        self.fc2 = Linear(config.encoder_ffn_embed_dim, width)
        self.ffn_norm = LayerNorm(width)
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)

    def ffn(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout(F.gelu(self.fc1(x))))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.normalize_before:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask))
            return x + self.dropout(self.ffn(self.ffn_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


class Encoder(nn.Module):
    """Token and learned position embeddings, layers, and the final (pre-LN) or first (post-LN) norm."""

    def __init__(self, config: TransformerConfig, vocab_size: int, padding_idx: int = 0) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        self.max_positions = config.max_positions
        self.normalize_before = config.encoder_normalize_before
        self.tokens = Embedding(vocab_size, width, padding_idx=padding_idx)
        self.positions = nn.Embedding(config.max_positions, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.encoder_layers))
        self.norm = LayerNorm(width)
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return hidden states (..., S, D) of ids (..., S) or probabilities (..., S, V).

        `padding` is boolean (..., S), true at padding. Raises ValueError for S > max_positions.
        """
        x = self.tokens(tokens)
        length = x.shape[-2]
        if length > self.max_positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's {self.max_positions} positions; "
                "raise model.max_positions or cut the text with task.tokens_per_sample"
            )
        positions = self.positions.weight[..., :length, :]
        x = x + (positions if positions.dim() == 2 else positions.unsqueeze(1))
        if not self.normalize_before:
            x = self.norm(x)
        x = self.dropout(x)
        mask = attention_mask(padding)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x) if self.normalize_before else x


def attention_mask(padding: Tensor | None) -> Tensor | None:
    """Return which keys may be seen, boolean (N, 1, 1, S), or None without padding.

    A row that is padding throughout sees everything: softmax over nothing is NaN.
    """
    if padding is None:
        return None
    padding = padding.reshape(-1, padding.shape[-1])
    seen = ~padding | padding.all(-1, keepdim=True)
    return seen[:, None, None]


class LMHead(nn.Module):
    """Linear, GELU, LayerNorm, then a projection to the vocabulary, tied to the embedding or its own."""

    def __init__(self, width: int, vocab_size: int, tied: bool) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.norm = LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        return linear(self.norm(F.gelu(self.dense(x))), weight, self.bias)


@register_model("transformer", dataclass=TransformerConfig)
class TransformerLM(nn.Module):
    """An encoder with one or more named language-model heads.

    `heads` names the heads; with `tied` they share the input embedding as output weights.
    Initialisation: N(0, 0.02) for linear and embedding weights, Xavier uniform for the attention
    input projection, zero biases (BERT's, with torch's attention).
    """

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
        width = config.encoder_embed_dim
        self.heads = nn.ModuleDict({name: LMHead(width, vocab_size, tied) for name in heads})
        self.initialise(tied)

    def initialise(self, tied: bool) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, LMHead) and module.weight is not None:
                nn.init.normal_(module.weight, std=0.02)
        # After the loop: modules() visits an attention before its projections.
        for module in self.modules():
            if isinstance(module, SelfAttention):
                nn.init.xavier_uniform_(module.in_proj.weight)
        if not tied:
            # A tied padding row is an output weight too and keeps its random start.
            with torch.no_grad():
                self.encoder.tokens.weight[self.encoder.tokens.padding_idx].zero_()

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        positions: Tensor | None = None,
        head: str | None = None,
    ) -> Tensor:
        """Return logits (..., S, V), or (..., M, V) of the selected `positions` (..., M) only.

        `head` may be left out when there is just one.
        """
        return self.predict(self.encoder(tokens, padding), positions, head)

    def predict(
        self, x: Tensor, positions: Tensor | None = None, head: str | None = None
    ) -> Tensor:
        """Return the logits of one head for hidden states (..., S, D)."""
        if positions is not None:
            x = x.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, x.shape[-1]))
        name = head if head is not None else next(iter(self.heads))
        return self.heads[name](x, self.encoder.tokens.weight)
