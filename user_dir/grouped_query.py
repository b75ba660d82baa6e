"""Grouped-query attention: several heads of queries share keys and values (Ainslie et al. 2023)."""

from dataclasses import dataclass

from torch import Tensor

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_attention
from metaseq_lm.core.roles import Role
from metaseq_lm.models.layers import Dropout, Linear
from metaseq_lm.models.transformer.attention import Attention, Rotation, Visibility, mix_values


@dataclass
class GroupedQueryConfig:
    """The number of groups."""

    kv_heads: int = option(1, "heads of keys and values (1: multi-query attention)", at_least=1)


@register_attention("grouped_query", dataclass=GroupedQueryConfig)
class GroupedQueryAttention(Attention):
    """Attention with fewer heads of keys and values than of queries (Ainslie et al. 2023)."""

    inputs, outputs = ("q_proj", "kv_proj"), ("out_proj",)

    def __init__(self, options: GroupedQueryConfig, sizes: EncoderConfig, number: int) -> None:
        super().__init__(options, sizes, number)
        width, self.heads = sizes.encoder_embed_dim, sizes.encoder_attention_heads
        self.kv_heads, bias = options.kv_heads, sizes.style.bias
        if width % self.heads or self.heads % self.kv_heads:
            raise UsageError(
                f"kv_heads={self.kv_heads} has to divide the {self.heads} heads of "
                f"model.encoder_attention_heads, and these the width {width}"
            )
        self.parameter_roles = dict.fromkeys(("q_proj", "kv_proj", "out_proj"), Role.HIDDEN)
        self.parameter_pieces = {"kv_proj": 2}
        self.q_proj = Linear(width, width, bias)
        self.kv_proj = Linear(width, 2 * self.kv_heads * width // self.heads, bias)
        self.out_proj = Linear(width, width, bias)
        self.dropout = Dropout(sizes.attention_dropout)

    def forward(
        self, x: Tensor, visibility: Visibility, rotation: Rotation | None = None
    ) -> Tensor:
        *lead, length, width = x.shape
        q = self.q_proj(x).view(*lead, length, self.heads, -1)
        k, v = self.kv_proj(x).view(*lead, length, 2, self.kv_heads, q.shape[-1]).unbind(-3)
        q, k, v = (part.reshape(-1, *part.shape[-3:]).transpose(1, 2) for part in (q, k, v))
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        mixed = mix_values(q, k, v, visibility, self.dropout)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(*lead, length, width))
        return projected
