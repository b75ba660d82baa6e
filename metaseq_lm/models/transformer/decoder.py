"""Decoder of an encoder-decoder Transformer: the encoder's layers with attention to its states.

Shapes: S source and T target positions, D width, E embedding width; any leading axes before S and
T.
"""

from torch import Tensor, nn

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.registry import POSITIONS
from metaseq_lm.core.roles import Role
from metaseq_lm.forward.passes import apply_block
from metaseq_lm.models.layers import Linear
from metaseq_lm.models.transformer.attention import CrossAttention, Rotation, Visibility
from metaseq_lm.models.transformer.encoder import Layer
from metaseq_lm.models.transformer.parts import Part, build_part, make_norm

_CAUSAL = Layout(reach="causal")
_ALL_SEEN = Visibility()


class _DecoderLayer(Layer):
    """A layer with attention to the states of an encoder after its self-attention."""

    def __init__(self, config: EncoderConfig, number: int = 0) -> None:
        super().__init__(config, number)
        width, heads = config.encoder_embed_dim, config.encoder_attention_heads
        self.cross_attention = CrossAttention(
            width, heads, config.attention_dropout, config.style.bias
        )
        self.cross_norm = make_norm(width, config)

    def parts(self) -> list[Part]:
        return [*super().parts(), self.cross_attention]

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        rotation: Rotation | None = None,
        memory: Tensor | None = None,
        of_memory: Visibility = _ALL_SEEN,
    ) -> Tensor:
        """Return the states (..., T, D) after the layer for the states before it.

        `memory` (..., S, D) are the encoder's states, `of_memory` is their visibility.
        """
        assert memory is not None
        states = memory
        x = self.add(x, self.attention_norm, lambda y: self.attention(y, visibility, rotation))
        x = self.add(x, self.cross_norm, lambda y: self.cross_attention(y, states, of_memory))
        return self.add(x, self.ffn_norm, self.ffn)


class Decoder(nn.Module):
    """A projection if the embeddings have another width, the layers, the final norm if pre-norm.

    Each token sees itself and all earlier ones in every layer, and all states of the encoder.
    """

    def __init__(self, config: EncoderConfig, layers: int) -> None:
        super().__init__()
        width, style = config.encoder_embed_dim, config.style
        other = config.embed_dim != width
        self.project = Linear(config.embed_dim, width, style.bias) if other else None
        self.parameter_roles = {"project": Role.EMBEDDING}
        self.glorot = [self.project] if self.project is not None else []
        self.layers = nn.ModuleList(_DecoderLayer(config, number) for number in range(layers))
        self.norm = make_norm(width, config) if style.pre_norm else None
        self.theta = config.scope(0).theta
        self.positions = build_part(POSITIONS, style.positions, config)

    def forward(self, x: Tensor, memory: Tensor, layout: Layout) -> Tensor:
        """Return states (..., T, D) of embeddings (..., T, E).

        `memory` (..., S, D) are the encoder's states, `layout` describes the encoder's rows.
        """
        visibility = Visibility.of(_CAUSAL, x.shape[-2], x.device)
        of_memory = Visibility.of_keys(layout, memory.shape[-2])
        rotation = self.positions.rotation(_CAUSAL, x, self.theta)
        if self.project is not None:
            x = self.project(x)
        for layer in self.layers:
            x = apply_block(layer, x, visibility, rotation, memory, of_memory)
        if self.norm is not None:
            x = self.norm(x)
        return x
