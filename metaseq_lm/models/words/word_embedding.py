"""Words as vectors: an embedding of the word and a convolution over its characters.

Details follow the code of Clark et al. 2018. Shapes: B rows, S positions, M characters of a word, W
width of the word embeddings, E width of the result.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from metaseq_lm.config.models import WordEmbeddingConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.words.vocabulary import UNKNOWN
from metaseq_lm.models.layers import Dropout, ScalarMix

# Standard deviation of random word embeddings, about GloVe's.
SPREAD = 0.3
# Rows of an embedding table processed at a time, so that they stay in the processor's cache.
BLOCK = 2048


def _unique_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows of an integer table (N, M) on a CPU, and each row's index in them.

    Like torch.unique(dim=0), but in another order and in a fifth of the time.
    """
    rows = np.ascontiguousarray(table.numpy())
    as_bytes = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, inverse = np.unique(as_bytes, return_index=True, return_inverse=True)
    return table[torch.from_numpy(first)], torch.from_numpy(inverse)


class _CharacterCNN(nn.Module):
    """Convolutions, ReLU, and the maximum over positions; padding counts like any character."""

    def __init__(self, config: WordEmbeddingConfig, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, config.char_embed_dim)
        nn.init.xavier_uniform_(self.embedding.weight)
        layers = [
            nn.Conv1d(config.char_embed_dim, config.char_filters, width)
            for width in config.char_widths
        ]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        self.filters = nn.ModuleList(layers)

    def forward(self, characters: Tensor) -> Tensor:
        """Return one vector for each word of characters (B, S, M)."""
        words = characters.reshape(-1, characters.shape[-1])
        if characters.device.type == "cpu" and not torch.compiler.is_compiling():
            # Most words of a batch occur several times.
            words, inverse = _unique_rows(words)
            vectors = F.embedding(inverse, self._encode(words))
        else:
            vectors = self._encode(words)
        return vectors.view(*characters.shape[:-1], -1)

    def _encode(self, words: Tensor) -> Tensor:
        # ReLU is monotone, so it can follow the maximum, where there is less to compute.
        maxima = [self._convolve(layer, words).amax(1) for layer in self.filters]
        return torch.cat(maxima, -1).relu()

    def _convolve(self, layer: Any, words: Tensor) -> Tensor:
        """Return the convolution of words (N, M) at each position, (N, M - width + 1, filters)."""
        # There are few different characters, so each filter position is multiplied with every
        # character and not with every position of the text.
        products = torch.einsum("ce,fek->kcf", self.embedding.weight, layer.weight)
        length = words.shape[1] - len(products) + 1
        parts = [F.embedding(words[:, k : k + length], table) for k, table in enumerate(products)]
        filtered: Tensor = sum(parts[1:], parts[0]) + layer.bias
        return filtered


class _MeanVariance(torch.autograd.Function):
    """Mean and variance (W,) of the rows of a table (V, W), weighted by shares (V,) that sum to 1.

    A batch looks up a small part of the table: every operation that writes another table of its
    size would cost as much as a layer.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        mean = shares @ table
        variance = torch.zeros_like(mean)
        for rows, share in zip(table.split(BLOCK), shares.split(BLOCK)):
            variance += share @ (rows - mean).square_()
        ctx.save_for_backward(table, shares, mean)
        return mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_mean: Tensor, to_variance: Tensor) -> tuple[Tensor, None]:
        table, shares, mean = ctx.saved_tensors
        # share * (to_mean + 2 to_variance (row - mean)); the variance has no slope by the mean.
        slope = 2 * to_variance
        start = to_mean - slope * mean
        gradient = torch.empty_like(table)
        blocks = zip(table.split(BLOCK), shares.split(BLOCK), gradient.split(BLOCK))
        for rows, share, out in blocks:
            torch.addcmul(start, rows, slope, out=out).mul_(share.unsqueeze(1))
        return gradient, None


class WordEmbedding(nn.Module):
    """Words (B, S) with characters (B, S, M) to vectors (B, S, E).

    A word embedding goes through dropout and is multiplied by a learned number that starts at 1. It
    starts from `vectors` (V, W), or at random, except padding and <unk>, which are 0: if the
    vocabulary has all words of the training text, nothing trains <unk>, and a random row would be
    noise at test time. With normalize_words the caller must set `frequencies`. With a `mix`, the
    mixed states of a language model are concatenated, and `width` (E) includes them.
    """

    frequencies: Tensor

    def __init__(
        self,
        config: WordEmbeddingConfig,
        words: int,
        characters: int,
        dropout: Dropout,
        vectors: np.ndarray | None = None,
        mix: ScalarMix | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.width = config.embedded_width + (0 if mix is None else mix.width)
        self.combine, self.normalize = config.combine, config.normalize_words
        width = config.word_embed_dim
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=SPREAD)
        with torch.no_grad():
            self.words.weight[: UNKNOWN + 1] = 0.0
            if vectors is not None and config.word_vectors:
                if vectors.shape != (words, width):
                    raise UsageError(
                        f"model.word_embed_dim is {width}, but the data folder's word vectors have "
                        f"{vectors.shape[1]} numbers; make them equal, or set "
                        "model.word_vectors=false"
                    )
                self.words.weight.copy_(torch.from_numpy(vectors))
        if self.normalize:
            self.register_buffer("frequencies", torch.full((words,), 1.0 / words))
        self.scale = nn.Parameter(torch.ones(()))
        self.characters = _CharacterCNN(config, characters) if config.char_filters else None
        self.dropout = dropout
        self.mix = mix

    def embed_words(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (B, S, W) of words, normalised if normalize_words is set."""
        weight = self.words.weight
        x = F.embedding(tokens, weight)
        if not self.normalize:
            return x
        mean, variance = _MeanVariance.apply(weight, self.frequencies)  # type: ignore[no-untyped-call]
        normalized: Tensor = (x - mean) / (variance + 1e-6).sqrt()
        return normalized

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the vectors; `shift` (B, S, W) is added to word embeddings after their dropout."""
        x: Tensor = self.dropout(self.embed_words(tokens))
        if shift is not None:
            x = x + shift
        x = x * self.scale
        if self.characters is not None:
            states = self.dropout(self.characters(characters))
            x = x + states if self.combine == "sum" else torch.cat([x, states], -1)
        if self.mix is not None:
            x = torch.cat([x, self.mix(layers)], -1)
        return x
