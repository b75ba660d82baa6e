"""Words as vectors: an embedding of the word and a convolution over its characters.

Facts follow the code of Clark et al. 2018. Shapes: B rows, S positions, M characters of a word, W
width of the word embeddings, E width of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.words.vocabulary import CHARACTERS, UNKNOWN
from metaseq_lm.models.layers import Dropout, ScalarMix

# Of random embeddings of words, about that of GloVe's.
SPREAD = 0.3
# Rows of a table of embeddings that are worked on together, so that they stay in the processor's cache.
BLOCK = 2048


@dataclass
class WordEmbeddingConfig:
    """Word embeddings and the character CNN (defaults: Clark et al. 2018)."""

    word_embed_dim: int = option(
        300, "width of word embeddings, that of the vectors if there are", at_least=1
    )
    word_vectors: bool = option(
        True, "start from the data folder's word vectors, if it has some; false: at random"
    )
    normalize_words: bool = option(
        False,
        "give the embeddings mean 0 and variance 1 over the words of the text, by their frequency "
        "(Miyato et al. 2017); a norm of criterion vat means something only then",
    )
    char_embed_dim: int = option(50, "width of character embeddings", at_least=1)
    char_filters: int = option(
        100, "filters of each width of the character CNN (0 = no CNN)", at_least=0
    )
    char_widths: list[int] = option(
        [2, 3, 4],
        "widths of the filters in characters, of which a word with its padding has that many at most",
        at_least=1,
        at_most=CHARACTERS,
    )
    combine: str = option(
        "concat",
        "word and characters side by side (the code), or their sum",
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
        """E, the width of an embedded word."""
        extra = self.char_filters * len(self.char_widths) if self.combine == "concat" else 0
        return self.word_embed_dim + extra


def different_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different rows of an integer table (N, M) on a CPU, and which of them each row is.

    As torch.unique(dim=0) in another order, in a fifth of its time.
    """
    rows = np.ascontiguousarray(table.numpy())
    whole = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, where = np.unique(whole, return_index=True, return_inverse=True)
    return table[torch.from_numpy(first)], torch.from_numpy(where)


class CharacterCNN(nn.Module):
    """Convolutions without padding, ReLU, the maximum over places; padding counts like any character.

    Each different word is computed once on a CPU: most words of a batch occur several times.
    """

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
        if characters.device.type == "cpu":
            words, where = different_rows(words)
            return F.embedding(where, self._words(words)).view(*characters.shape[:-1], -1)
        return self._words(words).view(*characters.shape[:-1], -1)

    def _words(self, words: Tensor) -> Tensor:
        # ReLU is monotone: after the maximum there is less to do.
        return torch.cat(
            [self._filtered(layer, words).amax(1) for layer in self.filters], -1
        ).relu()

    def _filtered(self, layer: Any, words: Tensor) -> Tensor:
        """Return the convolution of words (N, M) at each place, (N, M - width + 1, filters).

        It is a sum over the places of a filter of what the character there adds. Characters are few,
        so that is multiplied out for each of them, not for each place of a text.
        """
        adds = torch.einsum("ce,fek->kcf", self.embedding.weight, layer.weight)
        places = words.shape[1] - len(adds) + 1
        parts = [F.embedding(words[:, k : k + places], add) for k, add in enumerate(adds)]
        filtered: Tensor = sum(parts[1:], parts[0]) + layer.bias
        return filtered


def full_width(config: WordEmbeddingConfig, mix: ScalarMix | None) -> int:
    """Return the width of an embedded word with what a mix of a language model's states adds."""
    return config.embedded_width + (0 if mix is None else mix.width)


class Moments(torch.autograd.Function):
    """Mean and variance (W,) of the rows of a table (V, W) with shares (V,), which sum to 1.

    The table is much larger than what is looked up of it: each operation that writes another one of
    its size would cost as much as a layer.
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
        # share * (to_mean + 2 to_variance (row - mean)); through the mean the variance has no slope.
        slope = 2 * to_variance
        start = to_mean - slope * mean
        gradient = torch.empty_like(table)
        blocks = zip(table.split(BLOCK), shares.split(BLOCK), gradient.split(BLOCK))
        for rows, share, out in blocks:
            torch.addcmul(start, rows, slope, out=out).mul_(share.unsqueeze(1))
        return gradient, None


class WordEmbedding(nn.Module):
    """Words (B, S) with characters (B, S, M) to vectors (B, S, E).

    A word embedding passes dropout and is multiplied by a learned number that starts at 1. `vectors`
    (V, W) are what word embeddings start from; else they are random, but for padding and <unk>, which
    are 0: where the vocabulary has all words of the training text nothing trains <unk>, and a random
    row would be noise at test time. With normalize_words the caller must set `frequencies`. With a
    `mix` the states of a language model, mixed, stand beside them; `width` counts both.
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
        self.width = full_width(config, mix)
        self.combine, self.normalize = config.combine, config.normalize_words
        width = config.word_embed_dim
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=SPREAD)
        with torch.no_grad():
            self.words.weight[: UNKNOWN + 1] = 0.0
            if vectors is not None and config.word_vectors:
                self._check_vectors(vectors, words, width)
                self.words.weight.copy_(torch.from_numpy(vectors))
        if self.normalize:
            self.register_buffer("frequencies", torch.full((words,), 1.0 / words))
        self.scale = nn.Parameter(torch.ones(()))
        self.characters = CharacterCNN(config, characters) if config.char_filters else None
        self.dropout = dropout
        self.mix = mix

    @staticmethod
    def _check_vectors(vectors: np.ndarray, words: int, width: int) -> None:
        if vectors.shape != (words, width):
            raise UsageError(
                f"model.word_embed_dim is {width}, but the data folder's word vectors have "
                f"{vectors.shape[1]} numbers; make them equal, or set model.word_vectors=false"
            )

    def looked_up(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of words (B, S), normalised if the config says so: (B, S, W)."""
        weight = self.words.weight
        x = F.embedding(tokens, weight)
        if not self.normalize:
            return x
        mean, variance = Moments.apply(weight, self.frequencies)  # type: ignore[no-untyped-call]
        normalized: Tensor = (x - mean) / (variance + 1e-6).sqrt()
        return normalized

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the vectors; `shift` (B, S, W) is added to word embeddings after their dropout.

        `layers` are the states of a language model, (B, S, X) each, for the mix.
        """
        x = self._embedded(tokens, characters, shift)
        return x if self.mix is None else torch.cat([x, self.mix(layers)], -1)

    def _embedded(self, tokens: Tensor, characters: Tensor, shift: Tensor | None) -> Tensor:
        x: Tensor = self.dropout(self.looked_up(tokens))
        x = (x if shift is None else x + shift) * self.scale
        if self.characters is None:
            return x
        spelled = self.dropout(self.characters(characters))
        return x + spelled if self.combine == "sum" else torch.cat([x, spelled], -1)
