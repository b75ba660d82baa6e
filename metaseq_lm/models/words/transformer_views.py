"""Encoder of words made of the project's Transformer, with views by attention masks.

In the place of CNNBiLSTM: a stack in which position t attends to positions up to t, one in which it
attends to those from t on, and above the two one that attends to all. Not in the paper.
Shapes: B rows, S positions, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_model
from metaseq_lm.models.layers import Dropout, Linear, ScalarMix
from metaseq_lm.models.transformer.encoder import Stack, TransformerConfig, initialise
from metaseq_lm.models.words.prediction_modules import Views, ViewsEncoder
from metaseq_lm.models.words.word_embedding import WordEmbedding, WordEmbeddingConfig, full_width


@dataclass
class TransformerViewsConfig(WordEmbeddingConfig, TransformerConfig):
    """Sizes and dropout; encoder_layers are those that see everything."""

    encoder_layers: int = option(2, "layers that see all words", at_least=1)
    directed_layers: int = option(2, "layers below them in each direction", at_least=1)
    dropout: float = option(
        0.1,
        "of embeddings, attention and feed-forward outputs, parser's heads",
        at_least=0,
        below=1,
    )

    def check(self) -> None:
        super().check()
        if self.segments or self.token_embed_dim:
            raise UsageError(
                "model transformer_views has neither segments nor token_embed_dim; leave them 0"
            )


@register_model("transformer_views", dataclass=TransformerViewsConfig)
class TransformerViews(ViewsEncoder):
    """Embedded words and learned positions, a stack for each direction, one for both.

    Positions start as sinusoids (Vaswani et al. 2017, section 3.5): a few hundred labelled sentences do not
    teach random ones which words are neighbours.
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
        self.project = Linear(full_width(config, mix), width)
        self.positions = nn.Embedding(config.max_positions, width)
        directed = replace(config, encoder_layers=config.directed_layers)
        self.ahead, self.back = Stack(directed), Stack(directed)
        self.merge = Linear(2 * width, width)
        self.full = Stack(config)
        initialise(self, config.init)
        with torch.no_grad():
            self.positions.weight.copy_(sinusoids(config.max_positions, width))
        # Last: it draws its own weights.
        self.embedding = WordEmbedding(config, words, characters, self.dropout, vectors, mix)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        padding: Tensor,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Views:
        length = tokens.shape[1]
        if length > self.max_positions:
            raise MetaseqError(
                f"a sentence of {length - 2} words is longer than model.max_positions "
                f"({self.max_positions}) less 2; raise it"
            )
        x = self.project(self.embedding(tokens, characters, shift, layers))
        x = self.dropout(x + self.positions.weight[:length])
        at = torch.arange(length, device=tokens.device)
        past = at[:, None] >= at  # query, key
        seen = (~padding)[:, None, None]
        # Padding sees itself: softmax over nothing is NaN.
        itself = past & past.mT
        ahead = self.ahead(x, past)  # padding is last, nobody before it sees it
        back = self.back(x, (past.mT & seen) | itself)
        both = self.full(self.merge(torch.cat([ahead, back], -1)), seen)
        return Views(ahead, back, both)


def sinusoids(positions: int, width: int) -> Tensor:
    """Return sin(t / 10000^(2i / width)) in column 2i of row t, the cosine in 2i + 1: (positions, width).

    Vaswani et al. 2017, section 3.5. An odd width ends with a sine.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.double) / width)
    angles = torch.arange(positions, dtype=torch.double)[:, None] * frequencies
    pairs = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return pairs[:, :width].float()
