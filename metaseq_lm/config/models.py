"""Options of the models, except the Transformer's."""

from dataclasses import dataclass, field

from metaseq_lm.config.transformer import ModernConfig, TransformerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import WEIGHTS, option
from metaseq_lm.core.registry import MODELS

LONGEST_WORD = 20  # characters read from a word
# Padding, word start, the characters, word end, padding. The width is constant, because the result
# of a convolution and a maximum over the padding must not depend on the batch's other words.
CHARACTERS = LONGEST_WORD + 4
POSITIONAL, _BATCH = "positional", "batch"
ROOTS = ("linear", "vector")


@dataclass
class BiLSTMConfig:
    """Sizes and dropout; the defaults are ELMo's."""

    encoder_layers: int = option(
        2, "LSTMs in the stack of each direction", at_least=1, affects=WEIGHTS
    )
    encoder_embed_dim: int = option(
        512, "width of embeddings and of each direction", at_least=1, affects=WEIGHTS
    )
    encoder_hidden_dim: int = option(
        4096, "cells of an LSTM before its projection", at_least=1, affects=WEIGHTS
    )
    dropout: float = option(
        0.1, "dropout of the inputs of LSTMs and heads", at_least=0, below=1, affects=WEIGHTS
    )

    @property
    def width(self) -> int:
        """The width of the states that a head sees, of both directions."""
        return 2 * self.encoder_embed_dim


@dataclass
class _InheritConfig:
    """Options that replace the checkpoint's."""

    changes: list[str] = field(
        default_factory=list,
        metadata={"help": "options that differ from the checkpoint's, such as ['dropout=0.2']"},
    )


@dataclass
class AveragingConfig:
    """Options of averaged weights."""

    average_decay: float = option(0.998, "decay of weight averages (0 = none)", at_least=0, below=1)
    score_raw: bool = option(False, "also score the weights without averaging, as raw_*")


@dataclass
class EncoderDecoderConfig:
    """Sizes and dropout; the paper does not describe its decoder: these follow its other LSTMs."""

    layers: int = option(
        2, "LSTM layers of the encoder and of the decoder", at_least=1, affects=WEIGHTS
    )
    embed_dim: int = option(
        300, "width of the embeddings of both sides", at_least=1, affects=WEIGHTS
    )
    hidden_dim: int = option(
        1024, "decoder cells; an encoder direction has half", at_least=2, affects=WEIGHTS
    )
    output_dim: int = option(
        512, "width of the states; an encoder direction has half", at_least=2, affects=WEIGHTS
    )
    dropout: float = option(
        0.5, "dropout of embeddings and LSTM outputs", at_least=0, below=1, affects=WEIGHTS
    )

    def check(self) -> None:
        """Raise UsageError for sizes that do not fit together."""
        cells, width = self.hidden_dim, self.output_dim
        if cells % 2 or width % 2 or width > cells:
            raise UsageError(
                "model.hidden_dim and model.output_dim must be even numbers, the second no larger "
                f"than the first; got {cells} and {width}"
            )


@dataclass
class WideResNetConfig:
    """Options of a wide ResNet; the defaults are WRN-16-2 with the dropout of Dery et al. 2021."""

    depth: int = option(16, "number of layers with weights, 6 n + 4", affects=WEIGHTS)
    width: int = option(
        2, "factor of the numbers of channels, 16, 32 and 64", at_least=1, affects=WEIGHTS
    )
    channels: int = option(3, "channels of the images", at_least=1, affects=WEIGHTS)
    dropout: float = option(
        0.1, "dropout between the convolutions of a block", at_least=0, below=1, affects=WEIGHTS
    )
    norm: str = option(
        "batch",
        "batch: batch norm, which needs whole batches in one process; group: group "
        "norm of each image",
        choices=("batch", "group"),
    )


@dataclass
class ConvLargeConfig:
    """Options of Conv-Large. The layers follow the authors' code, reproduced from memory."""

    width: float = option(
        1.0, "factor of the numbers of channels, 128, 256 and 512", above=0, affects=WEIGHTS
    )
    channels: int = option(3, "channels of the images", at_least=1, affects=WEIGHTS)
    dropout: float = option(0.5, "dropout after each pooling", at_least=0, below=1, affects=WEIGHTS)
    norm: str = option(
        POSITIONAL,
        "positional: over the channels of each position; batch: batch norm, which "
        "needs whole batches in one process",
        choices=(POSITIONAL, _BATCH),
    )


@dataclass
class WordEmbeddingConfig:
    """Word embeddings and the character CNN (defaults: Clark et al. 2018)."""

    word_embed_dim: int = option(
        300, "width of word embeddings and word vectors", at_least=1, affects=WEIGHTS
    )
    word_vectors: bool = option(
        True, "start from the word vectors of the data folder, if any", affects=WEIGHTS
    )
    normalize_words: bool = option(
        False,
        "normalise the embeddings to mean 0 and variance 1, words weighted by their frequency "
        "(Miyato et al. 2017); criterion vat needs it, because its norm depends on the scale",
    )
    char_embed_dim: int = option(50, "width of character embeddings", at_least=1, affects=WEIGHTS)
    char_filters: int = option(
        100, "filters of each width of characters (0 = none)", at_least=0, affects=WEIGHTS
    )
    char_widths: list[int] = option(
        [2, 3, 4], "filter widths", at_least=1, at_most=CHARACTERS, affects=WEIGHTS
    )
    combine: str = option(
        "concat",
        "word embedding and character CNN: concat (the authors' code) or sum (the paper)",
        choices=("concat", "sum"),
    )

    def check(self) -> None:
        """Raise UsageError for sizes that do not fit together."""
        if self.char_filters and not self.char_widths:
            raise UsageError(
                "model.char_widths is empty; name one or more widths, or give model.char_filters=0"
            )
        filters = self.char_filters * len(self.char_widths)
        if self.combine == "sum" and filters and filters != self.word_embed_dim:
            raise UsageError(
                f"model.combine=sum needs as many filters as model.word_embed_dim "
                f"({self.word_embed_dim}); there are {len(self.char_widths)} x {self.char_filters}"
            )

    @property
    def embedded_width(self) -> int:
        """The width of a word's embedding with its characters."""
        if self.combine != "concat":
            return self.word_embed_dim
        return self.word_embed_dim + self.char_filters * len(self.char_widths)


@dataclass
class CNNBiLSTMConfig(WordEmbeddingConfig):
    """Sizes and dropout; the defaults are the paper's."""

    encoder_hidden_dim: int = option(
        1024, "cells of each direction of the first layer", at_least=1, affects=WEIGHTS
    )
    second_hidden_dim: int = option(
        512, "cells of each direction of the second layer", at_least=1, affects=WEIGHTS
    )
    projection_dim: int = option(
        512, "width to which more cells are projected", at_least=1, affects=WEIGHTS
    )
    dropout: float = option(
        0.5, "dropout of inputs, states and the parser", at_least=0, below=1, affects=WEIGHTS
    )

    @property
    def widths(self) -> tuple[int, int]:
        """The width of the states of one direction of each layer."""
        most = self.projection_dim
        return min(self.encoder_hidden_dim, most), min(self.second_hidden_dim, most)


@dataclass
class TransformerViewsConfig(WordEmbeddingConfig, TransformerConfig):
    """Sizes and dropout; encoder_layers are the layers that see all words."""

    encoder_layers: int = option(2, "layers that see all words", at_least=1, affects=WEIGHTS)
    directed_layers: int = option(
        2, "layers below them in each direction", at_least=1, affects=WEIGHTS
    )
    dropout: float = option(
        0.1, "dropout of inputs, states and the parser", at_least=0, below=1, affects=WEIGHTS
    )

    def check(self) -> None:
        super().check()
        if self.segments or self.token_embed_dim:
            raise UsageError(
                "model transformer_views has neither segments nor token_embed_dim; leave them 0"
            )


@dataclass
class NoEncoderConfig:
    """The dropout of prediction modules."""

    dropout: float = option(
        0.5, "dropout of the parser's hidden units", at_least=0, below=1, affects=WEIGHTS
    )


MODELS.declare(
    "transformer", TransformerConfig, "metaseq_lm.models.transformer.encoder.TransformerLM"
)
MODELS.declare("modern", ModernConfig, "metaseq_lm.models.transformer.encoder.ModernLM")
MODELS.declare("bilstm_lm", BiLSTMConfig, "metaseq_lm.models.bilstm.BiLSTMLM")
MODELS.declare(
    "lstm_encoder_decoder", EncoderDecoderConfig, "metaseq_lm.models.seq2seq.LSTMEncoderDecoder"
)
MODELS.declare("inherit", _InheritConfig, "metaseq_lm.models.inherit.Inherit")
MODELS.declare("wide_resnet", WideResNetConfig, "metaseq_lm.models.vision.WideResNet")
MODELS.declare("conv_large", ConvLargeConfig, "metaseq_lm.models.vision.ConvLarge")
MODELS.declare("cnn_bilstm", CNNBiLSTMConfig, "metaseq_lm.models.words.encoders.CNNBiLSTM")
MODELS.declare(
    "transformer_views", TransformerViewsConfig, "metaseq_lm.models.words.encoders.TransformerViews"
)
MODELS.declare("no_encoder", NoEncoderConfig, "metaseq_lm.models.words.encoders.NoEncoder")
