"""Differential attention: the difference of two softmax maps (Ye et al. 2025).

A head h has queries and keys of two maps and values twice as wide (equations 1 to 3):

    (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
    lambda = exp(q1 . k1) - exp(q2 . k2) + start,   start = 0.8 - 0.6 exp(-0.3 number)

with learned vectors q1, k1, q2, k2 that all heads of a layer share. Each head's output is
normalised (RMSNorm) and multiplied by 1 - start. `model.encoder_attention_heads` counts maps, so
there are half as many heads.

Shapes: N rows, H heads, S length, E width of a map.
"""

import math

import torch
from torch import Tensor, nn

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import NoOptions, register_attention
from metaseq_lm.core.roles import Role
from metaseq_lm.models.layers import Dropout, Linear, RMSNorm
from metaseq_lm.models.transformer.attention import Attention, Rotation, Visibility, mix_values


@register_attention("differential")
class DifferentialAttention(Attention):
    """Attention by the difference of two softmax maps (Ye et al. 2025)."""

    inputs, outputs = ("in_proj",), ("out_proj",)

    def __init__(self, options: NoOptions, sizes: EncoderConfig, number: int) -> None:
        super().__init__(options, sizes, number)
        width, self.maps = sizes.encoder_embed_dim, sizes.encoder_attention_heads
        if self.maps % 2 or width % self.maps:
            raise UsageError(
                f"differential attention pairs the {self.maps} heads of "
                f"model.encoder_attention_heads, an even divisor of the width {width}"
            )
        self.parameter_roles = {"in_proj": Role.HIDDEN, "out_proj": Role.HIDDEN}
        self.parameter_pieces = {"in_proj": 3}
        self.in_proj = Linear(width, 3 * width, sizes.style.bias)
        self.out_proj = Linear(width, width, sizes.style.bias)
        self.q1, self.k1, self.q2, self.k2 = (
            nn.Parameter(torch.zeros(width // self.maps)) for _ in range(4)
        )
        self.start = 0.8 - 0.6 * math.exp(-0.3 * number)
        self.norm = RMSNorm(2 * width // self.maps, sizes.norm_eps)
        self.dropout = Dropout(sizes.attention_dropout)
        # Each map meets both halves of its values.
        self.pair_flops = 2 * 4 * width

    def initialise(self, init: str, depth: int) -> None:
        super().initialise(init, depth)
        for vector in (self.q1, self.k1, self.q2, self.k2):
            nn.init.normal_(vector, std=0.1)

    def forward(
        self, x: Tensor, visibility: Visibility, rotation: Rotation | None = None
    ) -> Tensor:
        *lead, length, width = x.shape
        q, k, v = self.in_proj(x).view(*lead, length, 3, self.maps, -1).unbind(-3)
        q, k, v = (part.reshape(-1, *part.shape[-3:]).transpose(1, 2) for part in (q, k, v))
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        # The kernels take values as wide as keys, so that each map is there for both halves.
        q, k = (part.repeat(1, 2, 1, 1) for part in (q, k))
        heads = self.maps // 2
        first, second = v.unflatten(1, (heads, 2)).unbind(2)  # halves of the values, (N, H, S, E)
        v = torch.cat([first, first, second, second], 1)
        mixed = mix_values(q, k, v, visibility, self.dropout).unflatten(1, (2, 2, heads))
        mixed = mixed[:, :, 0] - self.weight(len(mixed)) * mixed[:, :, 1]  # (N, half, H, S, E)
        mixed = mixed.permute(0, 3, 2, 1, 4).reshape(*lead, length, heads, -1)
        normal = self.norm(mixed) * (1 - self.start)
        projected: Tensor = self.out_proj(normal.reshape(*lead, length, width))
        return projected

    def weight(self, rows: int) -> Tensor:
        """Return lambda of each row, (N, 1, 1, 1, 1); copies of the model have their own."""
        first, second = (self.q1 * self.k1).sum(-1), (self.q2 * self.k2).sum(-1)
        weight = (first.exp() - second.exp() + self.start).reshape(-1)
        return weight.repeat_interleave(rows // len(weight)).view(-1, 1, 1, 1, 1)
