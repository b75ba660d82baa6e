"""Prediction heads on hidden states (..., D) of an encoder.

Shapes: D hidden width, E embedding width, V vocabulary, K outputs; parameters of the language-model
head may carry a leading axis of copies (see layers).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.models.layers import Dropout, LayerNorm, Linear, linear


class LMHead(nn.Module):
    """Linear (D to E), GELU, LayerNorm, then a projection to the vocabulary, tied or its own."""

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
        return self.out(F.gelu(self.dense(x))).squeeze(-1)


class SentenceHead(nn.Module):
    """Dropout and a linear layer on the first state; with `pooled`, BERT's tanh layer before them.

    `pooler_dropout` puts dropout before the tanh layer too, as RoBERTa's head has it.
    """

    def __init__(
        self,
        width: int,
        outputs: int,
        dropout: float,
        pooled: bool,
        pooler_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.pooler = Linear(width, width) if pooled else None
        self.pooler_dropout = pooler_dropout
        self.out = Linear(width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (..., K) of rows (..., S, D)."""
        first = x[..., 0, :]
        if self.pooler is not None:
            first = self.dropout(first) if self.pooler_dropout else first
            first = torch.tanh(self.pooler(first))
        return self.out(self.dropout(first))


class SpanPairHead(nn.Module):
    """Dropout and a linear layer on the first state and the mean states of two spans, side by side."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.out = Linear(3 * width, outputs)
        self.dropout = Dropout(dropout)
        self.glorot = [self.out]

    def forward(self, x: Tensor, spans: Tensor) -> Tensor:
        """Return scores (B, K) of rows (B, S, D); `spans` (B, 2, 2) are begins and ends (exclusive)."""
        at = torch.arange(x.shape[1], device=x.device)
        inside = (at >= spans[..., :1]) & (at < spans[..., 1:])  # (B, 2, S)
        means = inside.to(x.dtype) @ x / inside.sum(-1, keepdim=True).to(x.dtype)
        return self.out(self.dropout(torch.cat([x[:, 0], means.flatten(1)], -1)))
