"""The encoder of the Two Moons models, written with torch's own layers.

Parameter names equal those of metaseq_lm.models.transformer.encoder, so weights can be copied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.in_proj(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    """A pre-LN layer."""

    def __init__(self, width: int, ffn: int, heads: int, dropout: float, attention: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, attention)
        self.attention_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, ffn)
        self.fc2 = nn.Linear(ffn, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        attended = self.attention(self.attention_norm(x), padding)
        x = x + F.dropout(attended, self.dropout, self.training)
        hidden = self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class Encoder(nn.Module):
    """Embeddings, layers, final norm; takes ids (B, S) or probabilities (B, S, V)."""

    def __init__(
        self,
        vocab: int,
        layers: int,
        width: int,
        ffn: int,
        heads: int,
        positions: int,
        dropout: float,
        attention: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width, padding_idx=PAD)
        self.positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(
            Layer(width, ffn, heads, dropout, attention) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        if tokens.is_floating_point():
            weight = self.tokens.weight
            # The padding row gets no gradient from the input, as in nn.Embedding.
            x = tokens @ torch.cat([weight[:1].detach(), weight[1:]])
        else:
            x = self.tokens(tokens)
        x = x + self.positions.weight[: x.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, padding)
        return self.norm(x)


class Head(nn.Module):
    """Linear, GELU, LayerNorm, projection to the vocabulary."""

    def __init__(self, vocab: int, width: int, tied: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, width))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        return F.linear(self.norm(F.gelu(self.dense(x))), weight, self.bias)


class Student(nn.Module):
    """Encoder and one tied head on all positions."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        vocab, width = encoder.tokens.weight.shape
        self.heads = nn.ModuleDict({"lm": Head(vocab, width, tied=True)})

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.heads["lm"](self.encoder(tokens, padding), self.encoder.tokens.weight)


class Teacher(nn.Module):
    """Encoder and two untied heads, for the generated input and for the target."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        vocab, width = encoder.tokens.weight.shape
        self.heads = nn.ModuleDict({name: Head(vocab, width, tied=False) for name in "xy"})

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden, embedding = self.encoder(tokens, padding), self.encoder.tokens.weight
        return self.heads["x"](hidden, embedding), self.heads["y"](hidden, embedding)
