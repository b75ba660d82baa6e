"""FLOPs by the counting rules of the ELECTRA paper; runs/flops.py measures them.

One operation is one FLOP (an exponential counts as an addition), a matrix-vector product of m x n
counts 2 m n, a backward pass as much as a forward pass (so training is twice the forward pass,
where the measured count has three times), embedding look-ups count as dense products. The constants
are per element: dropout 4, layer norm 5, GELU 8, softmax 5. Clark et al. 2020, section 3.1 and
code.

The paper has no rules for a modern encoder, which is counted as by torch's counter: only the
products of matrices, attention with all pairs of tokens, training three times the forward pass. Its
parts declare them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.registry import MODELS
from metaseq_lm.models.transformer.encoder import Layer

_DROPOUT, _NORM, _ACTIVATION, _SOFTMAX = 4, 5, 8, 5
# 20 of 128: the share of positions with an output softmax in the authors' script.
OUTPUT_SHARE = 20 / 128


def has_rule(options: Any) -> bool:
    """Return whether tasks of one encoder have a rule for a model, by its options."""
    entry = MODELS.entry(options._name)
    is_encoder = entry.is_of_package and entry.dataclass in (TransformerConfig, ModernConfig)
    return is_encoder and has_ruled_parts(options)


def has_ruled_parts(config: EncoderConfig) -> bool:
    """Return whether the rules know the parts of an encoder; the paper's know only its own."""
    return isinstance(config, ModernConfig) or config.has_usual_parts


def _layer_flops(config: EncoderConfig, length: int) -> int:
    """Return the forward FLOPs of a layer on one row, as its parts declare them."""
    with torch.device("meta"):
        parts = Layer(config).parts()
    return sum(part.flops(length) for part in parts)


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine a Transformer's FLOPs on one row of `length` tokens."""

    layers: int
    width: int
    ffn: int
    heads: int
    embed: int
    vocab: int
    length: int
    passes: ClassVar[int] = 2  # of training, in units of a forward pass

    @classmethod
    def of(cls, config: EncoderConfig, vocab: int, length: int) -> Sizes:
        """Return the sizes of an encoder."""
        sizes = Sizes(
            config.encoder_layers,
            config.encoder_embed_dim,
            config.encoder_ffn_embed_dim,
            config.encoder_attention_heads,
            config.embed_dim,
            config.rows(vocab),
            length,
        )
        if isinstance(config, ModernConfig):
            return _ModernSizes(**vars(sizes), layer=_layer_flops(config, length))
        return sizes

    def blocks(self) -> int:
        """Return the forward FLOPs of all layers on one row."""
        h, i, s = self.width, self.ffn, self.length
        attention = 6 * h * h + 3 * h + 4 * h * s + (_SOFTMAX + _DROPOUT + 1) * s * self.heads
        # The script counts one norm of each layer as 5, not 5 h; kept, to reproduce its totals.
        output = 2 * h * h + h + _DROPOUT * h + h + _NORM
        network = 4 * h * i + (_ACTIVATION + 1) * i + h + _DROPOUT * h + h + _NORM * h
        return self.layers * s * (attention + output + network)

    def cross_attention(self, memory: int) -> int:
        """Return the forward FLOPs of attention to `memory` tokens of an encoder, in all layers."""
        h, s = self.width, self.length
        keys = 4 * h * h + 2 * h
        attention = 2 * h * h + h + 4 * h * memory + (_SOFTMAX + _DROPOUT + 1) * memory * self.heads
        output = 2 * h * h + h + _DROPOUT * h + h + _NORM
        return self.layers * (memory * keys + s * (attention + output))

    def inputs(self) -> int:
        """Return the forward FLOPs of the embeddings of one row, and of their projection."""
        e, s = self.embed, self.length
        per_token = 2 * e * self.vocab + 2 * e * (s + 2) + 2 * e + (_DROPOUT + _NORM) * e
        return s * per_token + self.projection()

    def projection(self) -> int:
        """Return the forward FLOPs of projecting the embeddings of one row, 0 if not projected."""
        e, h = self.embed, self.width
        if e == h:
            return 0
        return self.length * (2 * h * e + h)

    def softmax_head(self, share: float = OUTPUT_SHARE) -> float:
        """Return the forward FLOPs of a language-model head on `share` of one row's positions."""
        e, v = self.embed, self.vocab
        per_token = 2 * e * v + 2 * self.width * e + e + (_ACTIVATION + _NORM) * e
        return share * self.length * (per_token + (_SOFTMAX + 2) * v)

    def binary_head(self) -> int:
        """Return the forward FLOPs of a discriminator's head on one row."""
        h = self.width
        return self.length * (2 * h * h + (_ACTIVATION + 3) * h)


@dataclass(frozen=True)
class _ModernSizes(Sizes):
    """The sizes of a modern encoder, of which only the matrices count."""

    passes = 3
    layer: int = 0  # FLOPs of a layer on one row

    def blocks(self) -> int:
        return self.layers * self.layer

    def cross_attention(self, memory: int) -> int:
        h, s = self.width, self.length
        return self.layers * (4 * h * h * (memory + s) + 4 * h * s * memory)

    def inputs(self) -> int:
        return self.projection()

    def projection(self) -> int:
        e, h = self.embed, self.width
        if e == h:
            return 0
        return self.length * 2 * h * e

    def softmax_head(self, share: float = OUTPUT_SHARE) -> float:
        e, v = self.embed, self.vocab
        return share * self.length * (2 * self.width * e + 2 * e * v)

    def binary_head(self) -> int:
        h = self.width
        return self.length * (2 * h * h + 2 * h)


def masked_lm(sizes: Sizes, share: float = OUTPUT_SHARE) -> float:
    """Return the training FLOPs of one row of a masked LM that predicts a `share` of its tokens."""
    return sizes.passes * (sizes.blocks() + sizes.inputs() + sizes.softmax_head(share))


def encoder_decoder(encoder: Sizes, decoder: Sizes, share: float) -> float:
    """Return the training FLOPs of one row that predicts a `share` of the decoder's tokens."""
    forward = encoder.blocks() + encoder.inputs() + decoder.blocks() + decoder.inputs()
    forward += decoder.cross_attention(encoder.length)
    return encoder.passes * (forward + decoder.softmax_head(share))


def classifier_flops(sizes: Sizes) -> float:
    """Return the forward FLOPs of one row with a binary head: the paper's cost of inference."""
    return sizes.blocks() + sizes.inputs() + sizes.binary_head()


def _electra_flops(discriminator: Sizes, generator: Sizes) -> float:
    """Return the training FLOPs of one row of ELECTRA."""
    return discriminator.passes * classifier_flops(discriminator) + masked_lm(generator)


def two_towers(tower: Sizes) -> float:
    """Return the training FLOPs of one row of two causal towers with a softmax at every position.

    The authors' script does not model them; the embeddings are read once and projected twice.
    """
    joined = replace(tower, width=2 * tower.width).softmax_head(1.0)
    return tower.passes * (2 * tower.blocks() + tower.inputs() + tower.projection() + joined)
