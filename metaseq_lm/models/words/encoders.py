"""Word encoders with views: LSTMs (Clark et al. 2018), a masked Transformer, or none.

Shapes: B rows, S positions, E width of embedded words.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.config.models import (
    CNNBiLSTMConfig,
    NoEncoderConfig,
    TransformerViewsConfig,
)
from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.roles import Role
from metaseq_lm.models.bilstm import projected_lstm
from metaseq_lm.models.layers import Dropout, Linear, ScalarMix, reverse
from metaseq_lm.models.transformer.encoder import Stack, initialise
from metaseq_lm.models.words.word_embedding import WordEmbedding
from metaseq_lm.models.words.word_model import Views, ViewsEncoder


class CNNBiLSTM(ViewsEncoder):
    """Embedded words, one LSTM in each direction, and one more in each on the states of both.

    The paper's encoder. An LSTM with as many cells as projected units has no projection (the
    authors' code has a square one). Dropout follows each LSTM; there is none inside.
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
        self.width, self.full_width = config.widths[0], 2 * config.widths[1]
        self.dropout = Dropout(config.dropout)
        self.embedding = WordEmbedding(config, words, characters, self.dropout, vectors, mix)
        first = (config.widths[0], config.encoder_hidden_dim, self.embedding.width)
        second = (config.widths[1], config.second_hidden_dim, 2 * config.widths[0])
        self.ahead = nn.ModuleList([projected_lstm(*first), projected_lstm(*second)])
        self.back = nn.ModuleList([projected_lstm(*first), projected_lstm(*second)])

    def encode(self, x: Tensor, layout: Layout) -> Views:
        lengths = layout.lengths(x[..., 0])
        ahead, back = self._layer(0, x, lengths)
        upper = self._layer(1, torch.cat([ahead, back], -1), lengths)
        return Views(ahead, back, torch.cat(upper, -1))

    def _layer(self, number: int, x: Tensor, lengths: Tensor) -> list[Tensor]:
        # Reversed within the lengths, so that padding comes last for both directions.
        ahead = self.ahead[number](x)[0]
        back = reverse(self.back[number](reverse(x, lengths))[0], lengths)
        return [self.dropout(ahead), self.dropout(back)]


class TransformerViews(ViewsEncoder):
    """A Transformer stack in place of each LSTM; attention masks make the views. Not in the paper.

    In the first stack a position attends to positions up to its own, in the second to positions
    from its own on, and in the stack above them to all. Learned positions start as sinusoids
    (Vaswani et al. 2017, section 3.5): from random ones, a few hundred labelled sentences do not
    teach which words are neighbours.
    """

    def __init__(
        self,
        config: TransformerViewsConfig,
        words: int,
        characters: int,
        vectors: np.ndarray | None = None,
        mix: ScalarMix | None = None,
    ) -> None:
        super().__init__()
        config.check()
        width = config.encoder_embed_dim
        self.width = self.full_width = width
        self.max_positions = config.max_positions
        self.dropout = Dropout(config.dropout)
        self.parameter_roles = {"project": Role.EMBEDDING}
        self.project = Linear(config.embedded_width + (0 if mix is None else mix.width), width)
        self.positions = nn.Embedding(config.max_positions, width)
        directed = replace(config, encoder_layers=config.directed_layers)
        self.ahead, self.back = Stack(directed), Stack(directed)
        self.merge = Linear(2 * width, width)
        self.full = Stack(config)
        initialise(self, config.init)
        with torch.no_grad():
            self.positions.weight.copy_(_sinusoids(config.max_positions, width))
        # Last, because it draws its own weights.
        self.embedding = WordEmbedding(config, words, characters, self.dropout, vectors, mix)

    def encode(self, x: Tensor, layout: Layout) -> Views:
        length = x.shape[1]
        if length > self.max_positions:
            raise MetaseqError(
                f"a sentence of {length - 2} words is longer than model.max_positions "
                f"({self.max_positions}) less 2; raise it"
            )
        x = self.project(x)
        x = self.dropout(x + self.positions.weight[:length])
        ahead = self.ahead(x, replace(layout, reach="causal"))
        back = self.back(x, replace(layout, reach="anticausal"))
        merged = self.full(self.merge(torch.cat([ahead, back], -1)), layout)
        return Views(ahead, back, merged)


class NoEncoder(ViewsEncoder):
    """No states: prediction modules read the frozen language model of task.elmo, through their mix.

    "ELMo frozen" of Clark 2021, table 4.5. Raises UsageError without a language model.
    """

    width = full_width = 0

    def __init__(
        self,
        config: NoEncoderConfig,
        words: int,
        characters: int,
        vectors: np.ndarray | None = None,
        mix: ScalarMix | None = None,
    ) -> None:
        super().__init__()
        if mix is None:
            raise UsageError(
                "model no_encoder has nothing to predict from but the states of a language model; "
                "give task.elmo=RUN, or another --model"
            )
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        layout: Layout,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Views:
        """Return views of width 0."""
        nothing = layers[0].new_empty(*tokens.shape, 0)
        return Views(nothing, nothing, nothing)


def _sinusoids(positions: int, width: int) -> Tensor:
    """Return a table (positions, width) with sin(t / 10000^(2i / width)) in row t, column 2i.

    Column 2i + 1 has the cosine (Vaswani et al. 2017, section 3.5). An odd width ends with a sine.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.double) / width)
    angles = torch.arange(positions, dtype=torch.double)[:, None] * frequencies
    pairs = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return pairs[:, :width].float()
