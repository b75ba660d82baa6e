"""Views that an encoder of words gives, and the prediction modules that see them.

Shapes: B rows, S positions, H hidden units.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.words.word_embedding import WordEmbedding

FULL, AHEAD, BACK = "full", "ahead", "back"


class Views(NamedTuple):
    """What an encoder gives to prediction heads.

    `ahead` (B, S, D): position t knows the words up to t; `back` (B, S, D): those from t on; `both`
    (B, S, F): all of them, from a layer above. `layers` are those of a language model beside the
    encoder, if there is one; `extra` (B, S, X) is what a head gets of them.
    """

    ahead: Tensor
    back: Tensor
    both: Tensor
    layers: Sequence[Tensor] = ()
    extra: Tensor | None = None

    def of(self, name: str) -> list[Tensor]:
        """Return the states of a view: of "full" both directions side by side, `both`, and `extra`."""
        if name == FULL:
            extra = [] if self.extra is None else [self.extra]
            return [torch.cat([self.ahead, self.back], -1), self.both, *extra]
        return [{AHEAD: self.ahead, BACK: self.back}[name]]


class ViewsEncoder(nn.Module):
    """Base class of encoders of words that give views; `width` is D, `full_width` F.

    `dropout` is the one that heads may use, `extra_width` the width of what heads with the view "full"
    get of a language model.
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
        return [2 * self.width, self.full_width] + [self.extra_width] * bool(self.extra_width)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor,
        padding: Tensor,
        shift: Tensor | None = None,
        layers: Sequence[Tensor] = (),
    ) -> Views:
        """Return the views of rows of word ids (B, S), characters (B, S, M) and padding (B, S).

        `shift` (B, S, W) is added to the embeddings of the words. What stands at padding, which is
        at the end, changes nothing before it. `layers`, states of a language model (B, S, X) each,
        are mixed and put beside the embeddings of an encoder made for them. They know the whole
        sentence: no view is a restricted one then.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")


PRIMARY = "primary"
HIDDEN = 512


class Projection(nn.Module):
    """The sum of one linear map of each of the states of a view, H units, without a nonlinearity."""

    def __init__(self, encoder: ViewsEncoder, view: str, hidden: int) -> None:
        super().__init__()
        self.view = view
        self.maps = nn.ModuleList(nn.Linear(width, hidden) for width in encoder.widths(view))
        glorot(self)

    def forward(self, views: Views) -> Tensor:
        """Return (B, S, H)."""
        parts: list[Tensor] = [
            layer(x) for layer, x in zip(self.maps, views.of(self.view), strict=True)
        ]
        return sum(parts[1:], parts[0])


def glorot(module: nn.Module) -> None:
    """Draw the linear layers of a module afresh, Glorot uniform, biases zero, as TensorFlow does."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def next_to(x: Tensor, shift: int) -> Tensor:
    """Return x (B, S, ...) in which position t holds what was at t + shift (1 or -1), 0 beyond the end."""
    out = torch.zeros_like(x)
    if shift > 0:
        out[:, :-shift] = x[:, shift:]
    else:
        out[:, -shift:] = x[:, :shift]
    return out


class TaggingModule(nn.Module):
    """A view, projected to hidden units, ReLU unless `linear`, and a linear layer.

    `shift` says whose class the scores at position t are of: that of t + shift.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        classes: int,
        hidden: int = HIDDEN,
        view: str = FULL,
        shift: int = 0,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.shift, self.linear = shift, linear
        self.hidden = Projection(encoder, view, hidden)
        self.out = nn.Linear(hidden, classes)
        glorot(self.out)

    def forward(self, views: Views, scored: Tensor) -> Tensor:
        """Return scores (B, S, C); `scored` (B, S), which positions are words, is not needed."""
        x = self.hidden(views)
        scores: Tensor = self.out(x if self.linear else x.relu())
        return scores
