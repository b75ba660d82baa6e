"""An encoder-decoder Transformer in T5's form, built from the encoder's blocks.

Encoder and decoder share the token embedding, which is also the output weight (Raffel et al. 2020,
section 2.1). Positions follow the kind of encoder and are not T5's relative biases. Shapes: S
source and T target positions, D width.
"""

from torch import Tensor, nn

from metaseq_lm.core.batch import Layout
from metaseq_lm.methods.span_corruption.options import DecoderConfig
from metaseq_lm.models.layers import Heads
from metaseq_lm.models.transformer.decoder import Decoder
from metaseq_lm.models.transformer.encoder import Encoder, LMHead, initialise


class EncoderDecoder(nn.Module):
    """An encoder, a decoder and named language-model heads on the decoder's states.

    The encoder is named `encoder`, as in TransformerLM, so that fine-tuning and probes find it.
    """

    def __init__(
        self, config: DecoderConfig, vocab_size: int, padding_idx: int, heads: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.decoder = Decoder(config, config.decoder_depth)
        self.heads = Heads({name: LMHead(config, vocab_size) for name in heads})
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


class ModernEncoderDecoder(EncoderDecoder):
    """An encoder-decoder with the layers of ModernBERT (Warner et al. 2025)."""
