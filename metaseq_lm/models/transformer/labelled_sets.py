"""One encoder with a head for each of several labelled sets.

Shapes: B rows, S length, D width, K_k outputs of set k: its classes, or 1 for real values.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from metaseq_lm.models.layers import Dropout, Linear
from metaseq_lm.models.transformer.encoder import Encoder, TransformerConfig, initialise

POOLER = "heads.pooler."
SETS = "heads.sets."


def module_name(name: str) -> str:
    """Return the name of a module of a set: a module cannot have a child called "values" or "type"."""
    return f"set_{name}"


def set_of(weight: str, folder: str) -> str:
    """Return the set whose module below `folder` has this weight, "" if none has.

    The inverse of `module_name`; sets have no dots in their names.
    """
    module = weight.removeprefix(folder).partition(".")[0]
    return module.removeprefix(module_name("")) if weight.startswith(folder) else ""


class SetHeads(nn.Module):
    """BERT's tanh layer on the first state, if `pooled`, dropout, and a linear layer for each set."""

    def __init__(
        self, width: int, outputs: Mapping[str, int], dropout: float, pooled: bool
    ) -> None:
        super().__init__()
        self.names = list(outputs)
        self.pooler = Linear(width, width) if pooled else None
        self.dropout = Dropout(dropout)
        self.sets = nn.ModuleDict(
            {module_name(name): Linear(width, count) for name, count in outputs.items()}
        )
        self.glorot = list(self.sets.values())

    def forward(self, x: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of the heads `names`, or of all, for states (B, S, D)."""
        first = x[:, 0]
        if self.pooler is not None:
            first = torch.tanh(self.pooler(first))
        first = self.dropout(first)
        chosen = self.names if names is None else names
        return {name: self.sets[module_name(name)](first) for name in chosen}


class LabelledSetsModel(nn.Module):
    """An encoder and its `heads`, of which a pass takes some or all.

    All of them, where rows of several sets are mixed: which output counts is then the criterion's
    business, and no row has to be picked out, which on a GPU would wait for the counts. The
    encoder's weights have the names that pre-trained models give theirs.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, padding_idx: int, heads: SetHeads
    ) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size, padding_idx)
        self.heads = heads
        initialise(self, config.init)

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None,
        segments: Tensor | None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs (B, K_k) of the heads `names`, or of all, for rows (B, S)."""
        scores: dict[str, Tensor] = self.heads(self.encoder(tokens, padding, segments), names)
        return scores
