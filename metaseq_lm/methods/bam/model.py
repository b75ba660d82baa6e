"""One encoder, BERT's pooler on [CLS], and a linear head for each labelled set.

Shapes: B rows, S length, D width, K_k outputs of set k: its classes, or 1 for real values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from metaseq_lm.models.layers import Dropout, Linear
from metaseq_lm.models.transformer import Encoder, TransformerConfig, initialise

POOLER = "heads.pooler."
# Not the bare name of the set: a module cannot have a child called "values" or "type".
ON = "on_"
SETS = f"heads.sets.{ON}"


class SetHeads(nn.Module):
    """BERT's tanh layer on the first state, if `pooled`, dropout, and a linear layer for each set."""

    def __init__(
        self, width: int, outputs: Mapping[str, int], dropout: float, pooled: bool
    ) -> None:
        super().__init__()
        self.pooler = Linear(width, width) if pooled else None
        self.dropout = Dropout(dropout)
        self.names = list(outputs)
        self.sets = nn.ModuleDict({ON + n: Linear(width, count) for n, count in outputs.items()})
        self.glorot = list(self.sets.values())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of every head for states (B, S, D)."""
        first = x[:, 0]
        if self.pooler is not None:
            first = torch.tanh(self.pooler(first))
        first = self.dropout(first)
        return {name: self.sets[ON + name](first) for name in self.names}


class MultiTaskModel(nn.Module):
    """Outputs of every head for every row; which of them counts is the criterion's business.

    So no row has to be picked out, which on a GPU would wait for the counts; a head without rows in
    a batch has a gradient of zero, as in the authors' code, and AdamW still moves it by its momentum.
    `ranges` are, of the sets with real values, (least, scale) of the training labels: such a head
    predicts (y - least) / scale. They are a buffer, so that they come with the weights. The
    encoder's weights have the names that pre-trained models give theirs.
    """

    label_ranges: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        vocab: tuple[int, int],
        heads: SetHeads,
        ranges: Mapping[str, tuple[float, float]],
    ) -> None:
        super().__init__()
        size, padding_idx = vocab
        self.encoder = Encoder(config, size, padding_idx)
        self.heads = heads
        self.regression = frozenset(ranges)
        known = [ranges.get(name, (0.0, 1.0)) for name in heads.names]
        self.register_buffer("label_ranges", torch.tensor(known))
        initialise(self, config.init)

    def forward(
        self, tokens: Tensor, padding: Tensor | None, segments: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of every set's head for rows (B, S)."""
        return self.heads(self.encoder(tokens, padding, segments))

    def scaled(self, number: int, labels: Tensor) -> Tensor:
        """Return real-valued labels of the set at place `number` as its head predicts them."""
        return (labels - self.label_ranges[number, 0]) / self.label_ranges[number, 1]

    def unscaled(self, number: int, values: Tensor) -> Tensor:
        """Return what the head of the set at place `number` predicts, on the scale of the labels."""
        return values * self.label_ranges[number, 1] + self.label_ranges[number, 0]
