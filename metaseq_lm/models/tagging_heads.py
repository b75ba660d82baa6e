"""Modules that give every word a class, each with its own view of the sentence (Clark et al. 2018).

Shapes: B rows, S positions, C classes.
"""

from torch import Tensor, nn

from metaseq_lm.models.prediction_modules import HIDDEN, Projection, glorot
from metaseq_lm.models.views import FULL, Views, ViewsEncoder


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
        return self.out(x if self.linear else x.relu())
