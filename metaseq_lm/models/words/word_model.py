"""An encoder of words with the heads of one or several labelled sets, and their moving averages.

Shapes: B rows, S positions, C classes, X width of the states of both directions of a language
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import WordBatch
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.layers import AveragedWeights, Heads, ScalarMix
from metaseq_lm.models.words.prediction_modules import Views, ViewsEncoder


class WordNet(nn.Module):
    """An `encoder`, and for each labelled set by name its `heads`, which are modules by name.

    `mixes`, by the name of the set, mix the layers of a language model for its heads.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        heads: Mapping[str, nn.ModuleDict],
        mixes: Mapping[str, ScalarMix] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = Heads(heads)
        self.mixes = nn.ModuleDict(mixes)

    def views(self, batch: WordBatch, shift: Tensor | None = None) -> Views:
        """Return the views of the rows of a batch; `shift` is added to the embeddings of words."""
        layers = batch.layers or ()
        views: Views = self.encoder(batch.tokens, batch.characters, batch.layout, shift, layers)
        return views._replace(layers=layers)

    def scores(self, views: Views, scored: Tensor, name: str, module: str) -> Tensor:
        """Return the scores (B, S, C) of a module of the set `name`."""
        if name in self.mixes:
            views = views._replace(extra=self.mixes[name](views.layers))
        scores: Tensor = self.module(name, module)(views, scored)
        return scores

    def module(self, name: str, module: str) -> nn.Module:
        """Return a module of the set `name`."""
        return cast(nn.ModuleDict, self.heads[name])[module]

    def auxiliary_modules(self, name: str) -> list[str]:
        """Return the names of the auxiliary modules of a set."""
        return list(cast(nn.ModuleDict, self.heads[name]))[1:]

    def label(self, name: str, metric: str) -> str:
        """Return the log name of a metric of a set, with the set's name if there are several."""
        return metric if len(self.heads) == 1 else f"{name}_{metric}"

    def shift_of(self, name: str, module: str) -> int:
        """Return the shift of a module: at t it predicts the class of t + shift."""
        return cast(int, self.module(name, module).shift)


class WordModel(WordNet):
    """A WordNet and, with a `decay` above 0, the moving average of its weights, `average`.

    A `language_model` is part of the model and its checkpoints, but neither trained nor averaged:
    both nets read the same states of it.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        heads: Mapping[str, nn.ModuleDict],
        decay: float = 0.0,
        mixes: Mapping[str, ScalarMix] | None = None,
        language_model: BiLSTM | None = None,
    ) -> None:
        super().__init__(encoder, heads, mixes)
        self.average = None
        if decay:
            self.average = AveragedWeights(WordNet(encoder, heads, mixes), decay)
        self.language_model = language_model
        if language_model is not None:
            language_model.requires_grad_(False)

    @torch.no_grad()
    def read(self, batch: WordBatch) -> WordBatch:
        """Return the batch with `layers`, the states of the language model, if there is one.

        The averaged net needs such a batch; `views` of this model calls `read` itself.
        """
        if self.language_model is None or batch.layers is not None:
            return batch
        states = self.language_model.states(batch.tokens, batch.layout)
        return batch.replace(layers=[torch.cat(pair, -1) for pair in zip(*states)])

    def views(self, batch: WordBatch, shift: Tensor | None = None) -> Views:
        return super().views(self.read(batch), shift)

    @property
    def averaged(self) -> WordNet:
        """The net of averaged weights, or this net without them."""
        if self.average is None:
            return self
        return self.average.net  # type: ignore[return-value]
