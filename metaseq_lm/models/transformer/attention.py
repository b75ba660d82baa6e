"""Self-attention: which tokens see each other, the kernels, positions.

A batch says with its `Layout` how its tokens see each other. `Visibility.of` turns that into what
the kernels take, once per forward pass of a stack. Packed rows use a boolean mask; a kernel for
rows of several lengths needs a GPU and is not built in.

Shapes: N rows (copies and rows of the batch flattened), S length, D width, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.batch import REACHES, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.forward.context import current_context
from metaseq_lm.models.layers import Dropout, Linear

BOTH, CAUSAL, ANTICAUSAL, PREFIX = range(len(REACHES))


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys visible to the queries of rows, as attention kernels take them.

    Attributes:
        mask: True where a key is seen, boolean (N or 1, 1, S or 1, S); None if nothing is hidden,
            or by `is_causal` alone.
        is_causal: Whether a query sees itself and earlier keys, which the fused kernel supports
            without a mask. Then `mask` is None.
    """

    mask: Tensor | None = None
    is_causal: bool = False

    @classmethod
    def of(cls, layout: Layout, length: int, device: torch.device) -> Visibility:
        """Return the visibility of rows of `length` tokens.

        What padding sees does not matter, but it sees something: softmax over nothing is NaN.
        """
        padding = None if layout.padding is None else layout.padding.reshape(-1, length)
        reach = layout.reach if isinstance(layout.reach, str) else "by row"
        if layout.documents is None and padding is None and reach in ("both", "causal"):
            return cls(is_causal=reach == "causal")
        if layout.documents is None and padding is not None and reach == "both":
            seen = ~padding | padding.all(-1, keepdim=True)
            return cls(seen[:, None, None])
        seen = reach_mask(layout, length, device)
        if layout.documents is not None:
            documents = layout.documents.reshape(-1, length)
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        if padding is not None:
            itself = torch.eye(length, dtype=torch.bool, device=device)
            seen = (seen & ~padding[:, None, :]) | itself
        return cls(seen[:, None])

    def hide(self, scores: Tensor) -> Tensor:
        """Return scores (N, H, S, S) with -inf where a query does not see a key."""
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def reach_mask(layout: Layout, length: int, device: torch.device) -> Tensor:
    """Return the visibility by reach alone, boolean (N or 1, query S, key S)."""
    at = torch.arange(length, device=device)
    before = (at[:, None] >= at)[None]
    after = before.mT
    if layout.prefix is None:
        prefix = before
    else:
        key = at if layout.documents is None else document_positions(layout.documents)
        key = key.reshape(-1, 1, length)
        prefix = before | (key < layout.prefix.reshape(-1, 1, 1))
    by_reach = (torch.ones_like(before), before, after, prefix)
    if isinstance(layout.reach, str):
        return by_reach[REACHES.index(layout.reach)]
    reach = layout.reach.reshape(-1, 1, 1)
    seen = by_reach[BOTH] & (reach == BOTH)
    for number in (CAUSAL, ANTICAUSAL, PREFIX):
        seen = seen | (by_reach[number] & (reach == number))
    return seen


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, for document numbers (..., S).

    For example, [[1, 1, 2, 2, 2, 3]] gives [[0, 1, 0, 1, 2, 0]].
    """
    at = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    start = torch.where(is_first, at, 0).cummax(-1).values
    return at - start


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017) with a joint projection to q, k and v."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(
                f"encoder_embed_dim {width} is not divisible by {heads} attention heads"
            )
        self.heads = heads
        self.in_proj = Linear(width, 3 * width)
        self.out_proj = Linear(width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, visibility: Visibility) -> Tensor:
        """Return (..., S, D) for states (..., S, D)."""
        *lead, length, width = x.shape
        qkv = self.in_proj(x).view(-1, length, 3, self.heads, width // self.heads)
        # Rotary positions would turn q and k here, by the angles of each token's position.
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, S, D/H)
        # The fused kernel has no second derivative, and dropout inside it would follow torch's
        # global generator instead of the rows.
        explicit = current_context().double_backward or (self.training and self.dropout.p > 0)
        if explicit:
            scores = visibility.hide((q * (1 / math.sqrt(q.shape[-1]))) @ k.mT)
            # Under autocast softmax would return fp32, twice the memory of the product's input.
            mixed = self.dropout(scores.softmax(-1, dtype=v.dtype)) @ v
        else:
            mixed = fused_attention(q, k, v, visibility)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(*lead, length, width))
        return projected


def fused_attention(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Return torch's fused attention of (N, H, S, D/H), computed in fp32 on a CPU."""
    mask, is_causal = visibility.mask, visibility.is_causal
    # In bf16 the CPU kernel's derivative takes five times as long as in fp32.
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    with torch.autocast("cpu", enabled=False):
        q, k, v = q.float(), k.float(), v.float()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return mixed.to(torch.bfloat16)
