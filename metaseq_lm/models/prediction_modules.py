"""What prediction modules of words share: which view they see, and how a view becomes hidden units.

Shapes: B rows, S positions, H hidden units.
"""

import torch
from torch import Tensor, nn

from metaseq_lm.models.views import Views, ViewsEncoder

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
        parts = [layer(x) for layer, x in zip(self.maps, views.of(self.view), strict=True)]
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
