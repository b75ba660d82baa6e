"""Encoder of words: character CNN and two layers of LSTMs in both directions (Clark et al. 2018).

Shapes: B rows, S positions, M characters of a word, P width of the states of one direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_model
from metaseq_lm.models.bilstm import lengths_of, projected_lstm, reverse
from metaseq_lm.models.layers import Dropout, ScalarMix
from metaseq_lm.models.words.prediction_modules import Views, ViewsEncoder
from metaseq_lm.models.words.word_embedding import WordEmbedding, WordEmbeddingConfig


@dataclass
class CNNBiLSTMConfig(WordEmbeddingConfig):
    """Sizes and dropout; the defaults are the paper's."""

    encoder_hidden_dim: int = option(1024, "cells of each direction of the first layer", at_least=1)
    second_hidden_dim: int = option(512, "cells of each direction of the second layer", at_least=1)
    projection_dim: int = option(
        512, "width cells are projected to, or their number if that is not more", at_least=1
    )
    dropout: float = option(
        0.5,
        "of embeddings, characters, LSTM outputs and the parser's heads",
        at_least=0,
        below=1,
    )

    @property
    def widths(self) -> tuple[int, int]:
        """The width of the states of one direction of each layer."""
        most = self.projection_dim
        return min(self.encoder_hidden_dim, most), min(self.second_hidden_dim, most)


@register_model("cnn_bilstm", dataclass=CNNBiLSTMConfig)
class CNNBiLSTM(ViewsEncoder):
    """Embedded words, a layer of one LSTM in each direction, and another on the states of both.

    Where cells are as many as what they would be projected to there is no projection (the author's
    code has a square one). Dropout after each LSTM, none inside.
    """

    def __init__(
        self,
        config: CNNBiLSTMConfig,
        words: int,
        characters: int,
        vectors: np.ndarray | None = None,
        mix: ScalarMix | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.width, self.full_width = config.widths[0], 2 * config.widths[1]
        self.dropout = Dropout(config.dropout)
        self.embedding = WordEmbedding(config, words, characters, self.dropout, vectors, mix)
        first = (config.widths[0], config.encoder_hidden_dim, self.embedding.width)
        second = (config.widths[1], config.second_hidden_dim, 2 * config.widths[0])
        self.ahead = nn.ModuleList([projected_lstm(*first), projected_lstm(*second)])
        self.back = nn.ModuleList([projected_lstm(*first), projected_lstm(*second)])

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        padding: Tensor,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Views:
        lengths = lengths_of(tokens, padding)
        x = self.embedding(tokens, characters, shift, layers)
        ahead, back = self._layer(0, x, lengths)
        both = self._layer(1, torch.cat([ahead, back], -1), lengths)
        return Views(ahead, back, torch.cat(both, -1))

    def _layer(self, number: int, x: Tensor, lengths: Tensor) -> list[Tensor]:
        # Turned within the lengths, so that padding comes last for both directions.
        ahead = self.ahead[number](x)[0]
        back = reverse(self.back[number](reverse(x, lengths))[0], lengths)
        return [self.dropout(ahead), self.dropout(back)]
