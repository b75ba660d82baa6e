"""Views of a sentence: states that know its beginning, its end, or all of it (Clark et al. 2018).

Shapes: B rows, S positions, D width of the states of one direction, F of those of both.
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
