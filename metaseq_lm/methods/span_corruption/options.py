"""Options of the span_corruption methods."""

from dataclasses import dataclass

from metaseq_lm.config.criterions import TokenLossConfig
from metaseq_lm.config.tasks import RowsConfig, UnpackedConfig
from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.options import WEIGHTS, option, with_default
from metaseq_lm.core.registry import CRITERIONS, MODELS, TASKS


@dataclass
class DecoderConfig(EncoderConfig):
    """The decoder, with all other sizes from the encoder."""

    decoder_layers: int = option(
        0, "layers of the decoder (0 = encoder_layers)", at_least=0, affects=WEIGHTS
    )

    @property
    def decoder_depth(self) -> int:
        """The number of layers of the decoder."""
        return self.decoder_layers or self.encoder_layers


# The encoder comes first, so that its defaults win for options that both define.
@dataclass
class _TransformerDecoderConfig(TransformerConfig, DecoderConfig):
    """An encoder with learned positions and its decoder."""


@dataclass
class _ModernDecoderConfig(ModernConfig, DecoderConfig):
    """A modern encoder and its decoder, with decoder layers that see whole rows."""


@dataclass
class SpanCorruptionConfig(UnpackedConfig):
    """Rows of the corpus and their corruption, with T5's defaults."""

    tokens_per_sample: int = with_default(
        RowsConfig,
        "tokens_per_sample",
        112,
        "tokens of a text and two; rows of inputs and targets are longer, see model.max_positions",
    )
    noise_density: float = option(0.15, "share of the tokens that are noise", above=0, below=1)
    mean_span: float = option(3.0, "mean tokens of a span of noise", at_least=1)
    denoisers: list[str] = option(
        [],
        "a mixture instead of these, MODE:DENSITY:MEAN_SPAN or S:DENSITY each, such as "
        "[R:0.15:3,S:0.25,X:0.5:8]; rows begin with a token of the mode (UL2 has task=ul2)",
    )
    inputs_length: int = option(
        0,
        "longest inputs with [SEP], from which tokens_per_sample follows by T5's rule (0 = give "
        "tokens_per_sample)",
        at_least=0,
    )
    random_roll: bool = option(
        False,
        "rotate the spans of a text by a random offset, so that it need not end with noise; "
        "without it a single span is the end of the text",
    )


TASKS.declare(
    "span_corruption",
    SpanCorruptionConfig,
    "metaseq_lm.methods.span_corruption.task.SpanCorruptionTask",
    takes=("span_corruption",),
)
CRITERIONS.declare(
    "span_corruption",
    TokenLossConfig,
    "metaseq_lm.methods.span_corruption.criterion.SpanCorruption",
)
MODELS.declare(
    "encoder_decoder",
    _TransformerDecoderConfig,
    "metaseq_lm.methods.span_corruption.model.EncoderDecoder",
)
MODELS.declare(
    "modern_encoder_decoder",
    _ModernDecoderConfig,
    "metaseq_lm.methods.span_corruption.model.ModernEncoderDecoder",
)
