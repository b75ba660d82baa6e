"""Models of words: an encoder's views, the modules that predict tags or trees, moving averages.

Details follow Clark et al. 2018 and its code. In a treebank the class of a word is a pair of a head
and a relation: relation r to ROOT is class r, relation r to the word at position j is class
(1 + j) L + r. There are (1 + S) L classes.

Shapes: B rows, S positions, H hidden units, P parser units, C classes, L relations, X width of the
states of both directions of a language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import Layout, WordBatch
from metaseq_lm.models.bilstm import BiLSTM
from metaseq_lm.models.layers import AveragedWeights, Dropout, Heads, ScalarMix
from metaseq_lm.models.words.word_embedding import WordEmbedding

FULL, AHEAD, BACK = "full", "ahead", "back"


class Views(NamedTuple):
    """The states that prediction modules can see.

    Attributes:
        ahead: Position t depends on the words up to t, (B, S, D).
        back: Position t depends on the words from t on, (B, S, D).
        merged: Position t depends on all words; states of the upper layer, (B, S, F).
        layers: States of the layers of a separate language model, if there is one.
        extra: The mix of these layers for the current module, (B, S, X).
    """

    ahead: Tensor
    back: Tensor
    merged: Tensor
    layers: Sequence[Tensor] = ()
    extra: Tensor | None = None

    def of(self, name: str) -> list[Tensor]:
        """Return the states of a view; "full" is [ahead, back] concatenated, `merged` and `extra`.

        States of width 0 are left out.
        """
        if name == FULL:
            every = [torch.cat([self.ahead, self.back], -1), self.merged]
            if self.extra is not None:
                every.append(self.extra)
            return [states for states in every if states.shape[-1]]
        return [{AHEAD: self.ahead, BACK: self.back}[name]]


class ViewsEncoder(nn.Module):
    """Base class of encoders of words that give views.

    Attributes:
        width, full_width: Widths D and F of the states in `Views`, 0 if there are none.
        dropout: The dropout that prediction modules may use.
        extra_width: Width of `Views.extra`, 0 if there is none.
    """

    width: int
    full_width: int
    dropout: Dropout
    embedding: WordEmbedding
    extra_width: int = 0

    def widths(self, name: str) -> list[int]:
        """Return the widths of the states of a view."""
        if name != FULL:
            return [self.width]
        every = (2 * self.width, self.full_width, self.extra_width)
        return [width for width in every if width]

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        layout: Layout,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Views:
        """Return the views of sentences; padding at the end of a row does not change them.

        Args:
            tokens: Word ids (B, S).
            characters: Character ids of each word (B, S, M).
            layout: Padding of the rows, at their ends.
            shift: Added to the word embeddings, (B, S, W).
            layers: States of a language model, (B, S, X) each, which are mixed and concatenated to
                the embeddings if the encoder has a mix. They depend on the whole sentence, so no
                view is restricted then.
        """
        return self.encode(self.embedding(tokens, characters, shift, layers), layout)

    def encode(self, x: Tensor, layout: Layout) -> Views:
        """Return the views of embedded words x (B, S, E)."""
        raise NotImplementedError(f"{type(self).__name__} must define encode")


PRIMARY = "primary"
IMPOSSIBLE = -100.0  # added to the scores of impossible classes


class _Projection(nn.Module):
    """The sum of linear maps, to H units, of the states of a view, without a nonlinearity."""

    def __init__(self, encoder: ViewsEncoder, view: str, hidden: int) -> None:
        super().__init__()
        self.view = view
        self.maps = nn.ModuleList(nn.Linear(width, hidden) for width in encoder.widths(view))
        _glorot(self)

    def forward(self, views: Views) -> Tensor:
        """Return (B, S, H)."""
        parts: list[Tensor] = [
            layer(x) for layer, x in zip(self.maps, views.of(self.view), strict=True)
        ]
        return sum(parts[1:], parts[0])


def _glorot(module: nn.Module) -> None:
    """Initialise the linear layers of a module as TensorFlow does: Glorot uniform, zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def shift_positions(x: Tensor, shift: int) -> Tensor:
    """Shift x (B, S, ...): position t of the result is t + shift (1 or -1) of x, 0 at the end."""
    out = x.roll(-shift, 1)
    out[:, -1 if shift > 0 else 0] = 0
    return out


class TaggingModule(nn.Module):
    """A hidden layer on a view, with ReLU unless `linear`, and a linear output layer.

    The scores at position t predict the class at t + `shift`.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        classes: int,
        hidden: int,
        view: str = FULL,
        shift: int = 0,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.shift, self.linear = shift, linear
        self.hidden = _Projection(encoder, view, hidden)
        self.out = nn.Linear(hidden, classes)
        _glorot(self.out)

    def forward(self, views: Views, scored: Tensor) -> Tensor:
        """Return scores (B, S, C); `scored` (B, S), true at words, is not used."""
        x = self.hidden(views)
        scores: Tensor = self.out(x if self.linear else x.relu())
        return scores


class ParsingModule(nn.Module):
    """Scores of heads and relations, bilinear in the candidate head and the dependent.

    Both have a hidden layer with ReLU and dropout. The dependent is mapped to P units, the
    candidate by one matrix (H, P) per relation plus a shared one; each is divided by a learned
    number that starts at P^(1/4). With root "linear" (the authors' code) a linear layer on the
    dependent's units scores ROOT; with "vector" (the dissertation) ROOT is a learned vector (H,)
    scored like a candidate. `views` are the views of the candidate and of the dependent.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        relations: int,
        dropout: Dropout,
        hidden: int,
        width: int,
        root: str,
        views: tuple[str, str] = (FULL, FULL),
    ) -> None:
        super().__init__()
        self.shift, self.relations = 0, relations
        self.candidate = _Projection(encoder, views[0], hidden)
        self.dependent = _Projection(encoder, views[1], hidden)
        self.dropout = dropout
        self.unit = nn.Linear(hidden, width)
        self.by_relation = nn.Parameter(torch.empty(hidden, relations, width))
        self.shared = nn.Parameter(torch.empty(hidden, width))
        self.scale = nn.Parameter(torch.tensor(float(width) ** 0.25))
        self.root_scores = nn.Linear(width, relations) if root == "linear" else None
        self.root = nn.Parameter(torch.empty(hidden)) if root == "vector" else None
        _glorot(self)
        nn.init.xavier_uniform_(self.shared)
        # Glorot as TensorFlow computes it for three axes: much smaller than the shared matrix.
        bound = (6 / (hidden * (relations + width))) ** 0.5
        nn.init.uniform_(self.by_relation, -bound, bound)
        if self.root is not None:
            # Nonnegative, like hidden units.
            nn.init.uniform_(self.root, 0.0, 2 * hidden**-0.5)

    def forward(self, views: Views, scored: Tensor) -> Tensor:
        """Return scores (B, S, (1 + S) L); `scored` (B, S) is true at words.

        Only words can be heads, and only relation 0 leads to ROOT.
        """
        rows, length = scored.shape
        candidates = self.dropout(self.candidate(views).relu())
        if self.root is not None:
            first = self.root.expand(rows, 1, -1)
            candidates = torch.cat([first, candidates], 1)
        dependents = self.dropout(self.dependent(views).relu())
        units = self.unit(dependents) / self.scale  # (B, S, P)
        weight = (self.by_relation + self.shared.unsqueeze(1)) / self.scale
        contracted = (candidates @ weight.flatten(1)).view(rows, -1, units.shape[-1])
        scores: Tensor = units @ contracted.mT  # (B, S, S L), or ROOT too
        if self.root_scores is not None:
            scores = torch.cat([self.root_scores(units), scores], -1)
        return scores + self._penalties(scored, scores.dtype).unsqueeze(1)

    def _penalties(self, scored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the penalty of each class, (B, (1 + S) L): 0, or IMPOSSIBLE."""
        heads = torch.cat([scored[:, :1], scored], 1)
        allowed = heads.unsqueeze(-1).repeat(1, 1, self.relations)
        allowed[:, 0] = False
        allowed[:, 0, 0] = True
        return (~allowed).flatten(1).to(dtype) * IMPOSSIBLE


def classes_of(heads: Tensor, labels: Tensor, relations: int) -> Tensor:
    """Return the class of each word (B, S) of heads (0 for ROOT, else a position) and relations."""
    return torch.where(heads > 0, (1 + heads) * relations, 0) + labels


def heads_of(classes: Tensor, relations: int) -> tuple[Tensor, Tensor]:
    """Return heads and relations of classes, the inverse of `classes_of`."""
    heads = torch.div(classes, relations, rounding_mode="floor")
    return (heads - 1).clamp(min=0), classes - heads * relations


class WordNet(nn.Module):
    """An `encoder`, and `heads`: for each labelled set, its modules by name.

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
    both nets read its states.
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
