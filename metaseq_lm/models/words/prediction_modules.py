"""What prediction modules of words share: which view they see, and how a view becomes hidden units.

Shapes: B rows, S positions, H hidden units.
"""

import torch
from torch import Tensor, nn

from metaseq_lm.models.words.views import FULL, Views, ViewsEncoder

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
