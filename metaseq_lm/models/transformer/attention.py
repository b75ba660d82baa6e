"""Self-attention: which tokens see each other, the kernels, positions.

A batch says with its `Layout` how its tokens see each other. `Visibility.of` turns that into what
the kernels take, once per forward pass of a stack. Packed rows are unpacked on a CPU, a document a
row, so that attention costs the square of the documents' lengths; elsewhere they use a boolean
mask, since the number of documents would have to be read from the device.

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
        unpacking: Where the documents of packed rows are, if the fused kernel is to take them one
            by one; `mask` says the same of the rows.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    unpacking: Unpacking | None = None

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
        unpacking = None
        if layout.documents is not None:
            documents = layout.documents.reshape(-1, length)
            seen = seen & (documents[:, :, None] == documents[:, None, :])
            is_read = device.type == "cpu" and not torch.compiler.is_compiling()
            if is_read and reach in ("both", "causal"):
                unpacking = Unpacking.of(documents, padding, reach == "causal")
        if padding is not None:
            itself = torch.eye(length, dtype=torch.bool, device=device)
            seen = (seen & ~padding[:, None, :]) | itself
        return cls(seen[:, None], unpacking=unpacking)

    def hide(self, scores: Tensor) -> Tensor:
        """Return scores (N, H, S, S) with -inf where a query does not see a key."""
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


@dataclass(frozen=True, eq=False)
class Unpacking:
    """Where the documents of packed rows are: M documents of at most L tokens, padding left out.

    For example, documents [[1, 1, 2]] have M = 2 and L = 2: tokens [[0, 1], [2, 0]], slots
    [0, 1, 2].

    Attributes:
        tokens: Index of each document's tokens among those of all rows, (M, L); 0 past its end.
        slots: Index of each token of the rows (N S,) into `tokens` flattened; M L at padding.
        visibility: Which tokens of a document see each other.
    """

    tokens: Tensor
    slots: Tensor
    visibility: Visibility

    @classmethod
    def of(cls, documents: Tensor, padding: Tensor | None, is_causal: bool) -> Unpacking | None:
        """Return where the documents of rows (N, S) are; None if that would save no computation."""
        rows, length = documents.shape
        is_first = (document_positions(documents) == 0).flatten()
        is_real = torch.ones_like(is_first) if padding is None else ~padding.flatten()
        number = is_first.cumsum(0) - 1
        before = is_real.cumsum(0) - is_real.long()  # real tokens in front of each token
        position = before - before[is_first][number]
        count = int(number[-1]) + 1
        longest = int(torch.where(is_real, position + 1, 0).max())
        if longest == 0 or count * longest**2 >= rows * length**2:
            return None
        size = count * longest
        slots = torch.where(is_real, number * longest + position, size)
        tokens = torch.zeros(size + 1, dtype=torch.long)
        tokens[slots] = torch.arange(rows * length)
        is_token = torch.zeros(size + 1, dtype=torch.bool)
        is_token[slots] = True
        shape = (count, longest)
        visibility = Visibility(is_causal=True)  # what is past an end is later than every token
        if not is_causal:
            is_token = is_token[:-1].view(shape)
            seen = is_token | ~is_token.any(-1, keepdim=True)  # softmax over nothing is NaN
            visibility = Visibility(seen[:, None, None])
        return cls(tokens[:-1].view(shape), slots, visibility)

    def unpack(self, x: Tensor) -> Tensor:
        """Return the documents (M, H, L, D/H) of rows (N, H, S, D/H)."""
        return x.transpose(1, 2).flatten(0, 1)[self.tokens].transpose(1, 2)

    def pack(self, x: Tensor, rows: int) -> Tensor:
        """Return rows (N, H, S, D/H) of documents (M, H, L, D/H), 0 at padding."""
        flat = F.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        packed: Tensor = flat[self.slots].unflatten(0, (rows, -1)).transpose(1, 2)
        return packed


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
        elif (unpacking := visibility.unpacking) is not None:
            q, k, v = map(unpacking.unpack, (q, k, v))
            mixed = fused_attention(q, k, v, unpacking.visibility)
            mixed = unpacking.pack(mixed, math.prod(lead))
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
