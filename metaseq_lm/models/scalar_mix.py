"""The layers of a frozen language model as one vector for each word (ELMo, Peters et al. 2018).

Shapes: B rows, S positions, X width of the states of both directions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metaseq_lm.models.layers import Dropout


class ScalarMix(nn.Module):
    """scale * sum_j softmax(weights)_j h_j (their equation 1), then dropout; at first the plain mean.

    `layers` is how many h_j there are, the embeddings among them, `width` is X. Without the layer
    norms and the penalty of the weights that they name as options.
    """

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = Dropout(dropout)

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the mix (B, S, X) of `layers`, (B, S, X) each."""
        shares = self.scale * self.weights.softmax(0)
        parts = [share * states for share, states in zip(shares, layers, strict=True)]
        return self.dropout(torch.stack(parts).sum(0))
