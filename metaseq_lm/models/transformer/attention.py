"""Self-attention: which tokens see each other, the kernels, positions.

The `Layout` of a batch says which tokens see each other. `Visibility.of` converts it to arguments
of the kernels, once per forward pass of a stack and window width. On a CPU, packed rows are
unpacked to one document per row, so that attention costs the square of the documents' lengths. On a
GPU, the flash kernel in half precision takes padded and packed rows as sequences of any length, and
windows; if it cannot, they use a boolean mask. FLOPs are always counted for whole rows.

No flash kernel has dropout by rows, so with dropout, as for second derivatives, the attention
weights are tensors. Compiled passes use masks.

A layer with a window w of keys is local: a token sees another one at a distance of at most w // 2,
and in one direction (causal rows, or before itself and after the prefix) of less than w // 2, as in
ModernBERT and ModernBertDecoder of the transformers library. With ranks, tokens of the same rank
count as seen on both sides, tokens of lower ranks as seen in one direction.

Shapes: N rows (copies and rows of the batch flattened), S length, D width, H heads.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import REACHES, Layout
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import NoOptions
from metaseq_lm.core.roles import Role
from metaseq_lm.forward.passes import current_context
from metaseq_lm.models.layers import Dropout, Linear, RMSNorm, lookup
from metaseq_lm.models.transformer.parts import Part
from metaseq_lm.runs.flops import attention_flops, count_more

__all__ = ["Attention", "Positions", "Rotation", "Visibility", "mix_values"]

_BOTH, _CAUSAL, _ANTICAUSAL, _PREFIX, _RANKED = range(len(REACHES))


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys visible to the queries of rows, in the form that attention kernels take.

    Attributes:
        mask: True where a key is seen, boolean (N or 1, 1, S or 1, S); None if nothing is hidden,
            or only by `is_causal`.
        is_causal: Whether a query sees only itself and earlier keys, which the fused kernel
            supports without a mask. Then `mask` is None.
        unpacking: The places of the documents of packed rows, if the fused kernel takes them one by
            one; `mask` is the equivalent for whole rows.
        sequences: The equivalent for the flash kernel, if it takes the rows.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    unpacking: _Unpacking | None = None
    sequences: _Sequences | None = None

    @classmethod
    def of_keys(cls, layout: Layout, length: int) -> Visibility:
        """Return the visibility of all tokens of rows of `length` to queries of other rows."""
        if layout.padding is None:
            return cls()
        padding = layout.padding.reshape(-1, length)
        seen = ~padding | padding.all(-1, keepdim=True)
        return cls(seen[:, None, None])

    @classmethod
    def of(cls, layout: Layout, length: int, device: torch.device, distance: int = 0) -> Visibility:
        """Return the visibility of rows of `length` tokens up to a distance, 0 for any.

        The keys that padding sees do not matter, but there must be some: softmax over nothing is
        NaN.
        """
        padding = None if layout.padding is None else layout.padding.reshape(-1, length)
        reach = layout.reach if isinstance(layout.reach, str) else "by row"
        is_one = layout.documents is None and not distance
        if is_one and padding is None and reach in ("both", "causal"):
            return cls(is_causal=reach == "causal")
        is_plain = reach in ("both", "causal") and not torch.compiler.is_compiling()
        sequences = None
        if is_plain and _takes_sequences(device):
            sequences = _Sequences.of(layout, length, reach == "causal", distance)
        if is_one and reach == "both":
            return replace(cls.of_keys(layout, length), sequences=sequences)
        seen = _reach_mask(layout, length, device, distance)
        unpacking = None
        if layout.documents is not None:
            documents = layout.documents.reshape(-1, length)
            seen = seen & (documents[:, :, None] == documents[:, None, :])
            if is_plain and device.type == "cpu":
                unpacking = _Unpacking.of(documents, padding, reach == "causal", distance)
        if padding is not None:
            itself = torch.eye(length, dtype=torch.bool, device=device)
            seen = (seen & ~padding[:, None, :]) | itself
        return cls(seen[:, None], unpacking=unpacking, sequences=sequences)

    def hide(self, scores: Tensor) -> Tensor:
        """Return scores (N, H, S, S) with -inf where a query does not see a key."""
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            return scores
        return scores.masked_fill(~mask, float("-inf"))


def _takes_sequences(device: torch.device) -> bool:
    """Return whether torch has a flash kernel on a device for sequences of any length."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@dataclass(frozen=True, eq=False)
class _Sequences:
    """Rows as sequences of any length, one after the other, for the flash kernel.

    A sequence is a document, the padding of a row, or a row without any.

    Attributes:
        starts: Index of each sequence's first token among the tokens of all rows, then the number
            of tokens, int32 (K + 1,); None if the rows are the sequences.
        length: Length of the rows, which no sequence exceeds.
        is_causal: Whether a query sees only itself and earlier keys.
        distance: Largest distance between tokens that see each other; 0 for any.
        rows: Number of rows that `starts` belongs to; 0 for any.
    """

    starts: Tensor | None
    length: int
    is_causal: bool
    distance: int
    rows: int = 0

    @classmethod
    def of(cls, layout: Layout, length: int, is_causal: bool, distance: int) -> _Sequences | None:
        """Return the sequences of rows of a length; None if their number is not known here.

        A layout with more sequences than it says is an error, on a GPU a later one.
        """
        starts, rows = None, 0
        if layout.documents is not None or layout.padding is not None:
            if not layout.sequences:
                return None
            changes = [
                part.reshape(-1, length).diff(dim=-1) != 0
                for part in (layout.documents, layout.padding)
                if part is not None
            ]
            is_first = F.pad(reduce(operator.or_, changes), (1, 0))
            is_first[:, 0] = True
            rows = len(is_first)
            number = is_first.flatten().cumsum(0)
            torch._assert_async(number[-1] <= layout.sequences)
            counts = torch.arange(1, layout.sequences + 2, device=number.device)
            # Empty sequences follow the last one, so that the host need not read their number.
            starts = torch.searchsorted(number, counts, out_int32=True)
        return cls(starts, length, is_causal, distance, rows)

    def take(self, q: Tensor) -> bool:
        """Return whether the kernel takes queries (N, H, S, E), by type, width and rows."""
        is_half = q.dtype in (torch.float16, torch.bfloat16)
        return is_half and q.shape[-1] % 8 == 0 and self.rows in (0, len(q))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention (N, H, S, E) of queries to keys and values (N, H, S, E)."""
        rows, tokens = len(q), len(q) * self.length
        starts = self.starts
        if starts is None:
            starts = torch.arange(0, tokens + 1, self.length, dtype=torch.int32, device=q.device)
        before, after = self.distance or -1, self.distance or -1
        if self.is_causal:
            before, after = self.distance - 1, 0
        # torch.nn.attention.varlen also calls it, but has another signature in each version.
        mixed: Tensor = torch.ops.aten._flash_attention_forward(
            *(part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)),
            starts,
            starts,
            self.length,
            self.length,
            0.0,
            self.is_causal and not self.distance,
            False,
            window_size_left=before,
            window_size_right=after,
        )[0]
        return mixed.view(rows, self.length, *mixed.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Unpacking:
    """The places of documents in packed rows: M documents of at most L tokens, without padding.

    For example, documents [[1, 1, 2]] have M = 2 and L = 2: tokens [[0, 1], [2, 0]], slots
    [0, 1, 2].

    Attributes:
        tokens: Index of each document's tokens among the tokens of all rows, (M, L); 0 past its
            end.
        slots: Index of each token of the rows (N S,) into `tokens` flattened; M L at padding.
        visibility: Which tokens of a document see each other.
    """

    tokens: Tensor
    slots: Tensor
    visibility: Visibility

    @classmethod
    def of(
        cls, documents: Tensor, padding: Tensor | None, is_causal: bool, distance: int = 0
    ) -> _Unpacking | None:
        """Return the places of the documents of rows (N, S); None if it would save no computation.

        Tokens see up to a `distance` in their row, 0 for any.
        """
        rows, length = documents.shape
        is_first = (_document_positions(documents) == 0).flatten()
        is_real = torch.ones_like(is_first) if padding is None else ~padding.flatten()
        number = is_first.cumsum(0) - 1
        before = is_real.cumsum(0) - is_real.long()  # number of real tokens before each token
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
        # Positions past an end are later than every token.
        visibility = Visibility(is_causal=True)
        if not is_causal:
            is_token = is_token[:-1].view(shape)
            # Softmax over nothing is NaN.
            seen = is_token | ~is_token.any(-1, keepdim=True)
            visibility = Visibility(seen[:, None, None])
        tokens = tokens[:-1].view(shape)
        if 0 < distance < longest:
            # By places in the rows, which differ from places in `tokens` if padding lies inside.
            near = _near_mask(tokens[:, :, None] - tokens[:, None, :], distance)
            seen = near[_BOTH]
            if visibility.mask is not None:
                seen = seen & visibility.mask[:, 0]
            if is_causal:
                seen = near[_CAUSAL] & torch.ones(longest, longest, dtype=torch.bool).tril()
            itself = torch.eye(longest, dtype=torch.bool)
            visibility = Visibility((seen | itself)[:, None])
        return cls(tokens, slots, visibility)

    def unpack(self, x: Tensor) -> Tensor:
        """Return the documents (M, H, L, D/H) of rows (N, H, S, D/H)."""
        return x.transpose(1, 2).flatten(0, 1)[self.tokens].transpose(1, 2)

    def pack(self, x: Tensor, rows: int) -> Tensor:
        """Return rows (N, H, S, D/H) of documents (M, H, L, D/H), 0 at padding."""
        flat = F.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        packed: Tensor = flat[self.slots].unflatten(0, (rows, -1)).transpose(1, 2)
        return packed


def _near_mask(offset: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Return the masks of offsets within a distance on both sides, and below it in one."""
    far = offset.abs()
    return far <= distance, far < distance


def _reach_mask(layout: Layout, length: int, device: torch.device, distance: int = 0) -> Tensor:
    """Return the visibility by reach and distance (0 for any), boolean (N or 1, query S, key S)."""
    at = torch.arange(length, device=device)
    before = (at[:, None] >= at)[None]
    around = near = torch.ones_like(before)
    if distance:
        around, near = _near_mask((at[:, None] - at)[None], distance)
    before, after = before & near, before.mT & near
    if layout.prefix is None:
        prefix = before
    else:
        key = at if layout.documents is None else _document_positions(layout.documents)
        key = key.reshape(-1, 1, length)
        limit = layout.prefix.reshape(-1, 1, length if layout.prefix_by_document else 1)
        prefix = before | (around & (key < limit))
    ranked = before
    if layout.ranks is not None:
        query, key = layout.ranks.reshape(-1, length, 1), layout.ranks.reshape(-1, 1, length)
        ranked = (around & (key == query)) | (near & (key < query))
    by_reach = (around, before, after, prefix, ranked)
    if isinstance(layout.reach, str):
        return by_reach[REACHES.index(layout.reach)]
    reach = layout.reach.reshape(-1, 1, 1)
    seen = by_reach[_BOTH] & (reach == _BOTH)
    for number in (_CAUSAL, _ANTICAUSAL, _PREFIX, _RANKED):
        seen = seen | (by_reach[number] & (reach == number))
    return seen


def _document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, for document numbers (..., S).

    For example, [[1, 1, 2, 2, 2, 3]] gives [[0, 1, 0, 1, 2, 0]].
    """
    at = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    start = torch.where(is_first, at, 0).cummax(-1).values
    return at - start


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions (Su et al. 2021): queries and keys turn by angles of their positions.

    The dimensions k and k + E/2 of a head of width E turn together, by position * theta ** (-2k /
    E), so that the product of a query and a key depends on the distance between them.

    Attributes:
        cos: Cosines of the angles (N or 1, 1, S, E).
        sin: Sines of the angles, negative for the first half of a head, (N or 1, 1, S, E).
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, layout: Layout, x: Tensor, theta: float, head_width: int) -> Rotation:
        """Return the rotation of states x (..., S, D); positions start at 0 in each document."""
        # In bf16 the angles of neighbouring positions would coincide.
        dtype = torch.promote_types(x.dtype, torch.float32)
        if layout.documents is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        else:
            positions = _document_positions(layout.documents)
        pairs = torch.arange(0, head_width, 2, device=x.device, dtype=dtype)
        frequencies = 1.0 / theta ** (pairs / head_width)
        angles = positions.reshape(-1, 1, x.shape[-2], 1).to(dtype) * frequencies
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def __call__(self, x: Tensor) -> Tensor:
        """Return queries or keys (N, H, S, E), rotated."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return (x * self.cos + swapped * self.sin).to(x.dtype)


class Positions:
    """How an encoder distinguishes positions, by default not at all.

    Args:
        options: Its own options.
        sizes: The options of the encoder.
    """

    def __init__(self, options: Any, sizes: EncoderConfig) -> None:
        self.sizes = sizes

    def embedding(self) -> nn.Module | None:
        """Return a module that returns embeddings (..., S, E) of a layout with positions added."""
        return None

    def rotation(self, layout: Layout, x: Tensor, theta: float) -> Rotation | None:
        """Return the rotation of queries and keys of states (..., S, D), see `Rotation.of`."""
        return None


class LearnedPositions(Positions):
    """Learned embeddings (Devlin et al. 2019)."""

    def embedding(self) -> nn.Module:
        return _PositionTable(self.sizes.max_positions, self.sizes.embed_dim)


class _PositionTable(nn.Embedding):
    """Learned positions (P, E), or (C, P, E), in a row or in each document of packed rows."""

    def forward(self, x: Tensor, layout: Layout) -> Tensor:  # type: ignore[override]
        if layout.documents is not None:
            return x + lookup(_document_positions(layout.documents), self.weight)
        positions = self.weight[..., : x.shape[-2], :]
        return x + (positions if positions.dim() == 2 else positions.unsqueeze(1))


class RotaryPositions(Positions):
    """Rotary positions (Su et al. 2021), without embeddings."""

    def __init__(self, options: Any, sizes: EncoderConfig) -> None:
        super().__init__(options, sizes)
        self.head_width = sizes.encoder_embed_dim // sizes.encoder_attention_heads
        if self.head_width % 2:
            raise UsageError(
                f"rotary positions turn pairs of dimensions, but heads are {self.head_width} wide; "
                "change model.encoder_embed_dim or model.encoder_attention_heads"
            )

    def rotation(self, layout: Layout, x: Tensor, theta: float) -> Rotation | None:
        if not theta:
            return None
        return Rotation.of(layout, x, theta, self.head_width)


class Attention(Part):
    """Self-attention of a layer, which adds the residual connection.

    Attributes:
        pair_flops: Forward FLOPs for each pair of tokens; by default of softmax attention.
        has_qk_norm: Whether it has norms of queries and keys with model.qk_norm.
    """

    has_qk_norm = False

    def __init__(self, options: Any, sizes: EncoderConfig, number: int) -> None:
        super().__init__(options, sizes, number)
        self.pair_flops = 4 * sizes.encoder_embed_dim

    def forward(
        self, x: Tensor, visibility: Visibility, rotation: Rotation | None = None
    ) -> Tensor:
        """Return (..., S, D) for states (..., S, D)."""
        raise NotImplementedError

    def flops(self, length: int) -> int:
        return super().flops(length) + self.pair_flops * length**2


def softmax_attention(options: NoOptions, sizes: EncoderConfig, number: int) -> SelfAttention:
    """Multi-head attention (Vaswani et al. 2017)."""
    norm_eps = sizes.norm_eps if sizes.style.qk_norm else 0.0
    heads, dropout = sizes.encoder_attention_heads, sizes.attention_dropout
    return SelfAttention(sizes.encoder_embed_dim, heads, dropout, sizes.style.bias, norm_eps)


class SelfAttention(Attention):
    """Multi-head self-attention (Vaswani et al. 2017) with a joint projection to q, k and v.

    Args:
        width: Width D of the states.
        heads: Number of heads.
        dropout: Dropout probability of the attention weights.
        bias: Whether the projections have biases.
        norm_eps: Epsilon of RMS norms of each query and key (Henry et al. 2020); 0 for no norms.

    Raises:
        UsageError: The width is not divisible by the number of heads.
    """

    inputs, outputs = ("in_proj",), ("out_proj",)
    has_qk_norm = True

    def __init__(
        self, width: int, heads: int, dropout: float, bias: bool = True, norm_eps: float = 0.0
    ) -> None:
        nn.Module.__init__(self)
        if width % heads:
            raise UsageError(
                f"encoder_embed_dim {width} is not divisible by {heads} attention heads"
            )
        self.heads, self.pair_flops = heads, 4 * width
        self.parameter_roles = {"in_proj": Role.HIDDEN, "out_proj": Role.HIDDEN}
        self.parameter_pieces = {"in_proj": 3}
        self.in_proj = Linear(width, 3 * width, bias)
        self.out_proj = Linear(width, width, bias)
        self.q_norm = RMSNorm(width // heads, norm_eps) if norm_eps else None
        self.k_norm = RMSNorm(width // heads, norm_eps) if norm_eps else None
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Tensor, visibility: Visibility, rotation: Rotation | None = None
    ) -> Tensor:
        *lead, length, width = x.shape
        qkv = self.in_proj(x).view(*lead, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(-3)  # (..., S, H, D/H)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(-1, *part.shape[-3:]).transpose(1, 2) for part in (q, k, v))
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        mixed = mix_values(q, k, v, visibility, self.dropout)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(*lead, length, width))
        return projected


class CrossAttention(Part):
    """Attention of a decoder's states to an encoder's states (Vaswani et al. 2017).

    There are no positions between the two rows. Arguments as for SelfAttention.
    """

    outputs = ("out_proj",)

    def __init__(self, width: int, heads: int, dropout: float, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.parameter_roles = dict.fromkeys(("q_proj", "kv_proj", "out_proj"), Role.HIDDEN)
        self.parameter_pieces = {"kv_proj": 2}
        self.q_proj = Linear(width, width, bias)
        self.kv_proj = Linear(width, 2 * width, bias)
        self.out_proj = Linear(width, width, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, visibility: Visibility) -> Tensor:
        """Return (..., T, D) for states (..., T, D) and the encoder's states (..., S, D)."""
        *lead, length, width = x.shape
        heads = self.heads, width // self.heads
        q = self.q_proj(x).view(*lead, length, *heads)
        k, v = self.kv_proj(memory).view(*lead, memory.shape[-2], 2, *heads).unbind(-3)
        q, k, v = (part.reshape(-1, *part.shape[-3:]).transpose(1, 2) for part in (q, k, v))
        mixed = mix_values(q, k, v, visibility, self.dropout)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(*lead, length, width))
        return projected


def mix_values(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: Dropout) -> Tensor:
    """Return the attention of queries (N, H, T, E) to keys and values (N, H, S, E)."""
    # The fused kernel has no second derivative, and dropout inside it would follow torch's global
    # generator instead of the rows.
    if current_context().double_backward or (dropout.training and dropout.p > 0):
        scores = visibility.hide((q * (1 / math.sqrt(q.shape[-1]))) @ k.mT)
        # Under autocast, softmax would return fp32 with twice the memory of the product's input.
        mixed: Tensor = dropout(scores.softmax(-1, dtype=v.dtype)) @ v
        return mixed
    if (unpacking := visibility.unpacking) is not None:
        rows, in_rows = len(q), attention_flops(q.shape, k.shape, v.shape)
        q, k, v = map(unpacking.unpack, (q, k, v))
        mixed = _fused_attention(q, k, v, unpacking.visibility)
        count_more(mixed, in_rows - attention_flops(q.shape, k.shape, v.shape))
        return unpacking.pack(mixed, rows)
    if (sequences := visibility.sequences) is not None and sequences.take(q):
        return sequences.attend(q, k, v)
    return _fused_attention(q, k, v, visibility)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Return torch's fused attention of (N, H, S, D/H), computed in fp32 on a CPU."""
    mask, is_causal = visibility.mask, visibility.is_causal
    # In bf16, the CPU kernel's derivative takes five times as long as in fp32.
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    with torch.autocast("cpu", enabled=False):
        q, k, v = q.float(), k.float(), v.float()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return mixed.to(torch.bfloat16)
