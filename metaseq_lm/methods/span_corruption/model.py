"""An encoder-decoder Transformer in T5's form, of the encoder's blocks.

Encoder and decoder share the token embedding, which is the output weight too (Raffel et al. 2020,
section 2.1). Positions are those of the encoder's kind, not T5's relative biases. Shapes: S source
and T target positions, D width.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from metaseq_lm.core.batch import Layout
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_model
from metaseq_lm.models.transformer.configs import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.models.transformer.decoder import Decoder
from metaseq_lm.models.transformer.encoder import Encoder, LMHead, initialise


@dataclass
class DecoderConfig(EncoderConfig):
    """The decoder, whose other sizes are those of the encoder."""

    decoder_layers: int = option(0, "layers of the decoder (0 = encoder_layers)", at_least=0)

    @property
    def decoder_depth(self) -> int:
        """The layers of the decoder."""
        return self.decoder_layers or self.encoder_layers


# The encoder comes first, so that its defaults are those of the options that it has again.
@dataclass
class TransformerDecoderConfig(TransformerConfig, DecoderConfig):
    """An encoder with learned positions and its decoder."""


@dataclass
class ModernDecoderConfig(ModernConfig, DecoderConfig):
    """A modern encoder and its decoder, whose layers see whole rows."""


@register_model("encoder_decoder", dataclass=TransformerDecoderConfig)
class EncoderDecoder(nn.Module):
    """An encoder, a decoder and named language-model heads on the decoder's states.

    The encoder is `encoder`, as in TransformerLM, so that fine-tuning and probes take it.
    """

    def __init__(
        self, config: DecoderConfig, vocab_size: int, padding_idx: int, heads: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.decoder = Decoder(config, config.decoder_depth)
        self.heads = nn.ModuleDict({name: LMHead(config, vocab_size) for name in heads})
        initialise(self, config.init)

    def decode(self, tokens: Tensor, layout: Layout, inputs: Tensor) -> Tensor:
        """Return the states (..., T, D) after each of the decoder's `inputs` (..., T).

        The encoder reads `tokens` (..., S).
        """
        memory = self.encoder(tokens, layout)
        states: Tensor = self.decoder(self.encoder.embeddings(inputs), memory, layout)
        return states

    def predict(self, x: Tensor, head: str) -> Tensor:
        """Return the logits (..., V) of one head for states (..., D)."""
        logits: Tensor = self.heads[head](x, self.encoder.embeddings.tokens.weight)
        return logits


@register_model("modern_encoder_decoder", dataclass=ModernDecoderConfig)
class ModernEncoderDecoder(EncoderDecoder):
    """An encoder-decoder with the layers of ModernBERT (Warner et al. 2025)."""
