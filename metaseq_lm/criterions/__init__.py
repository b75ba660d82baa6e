"""What a criterion is: one batch in, named sums out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass
class Term:
    """A summand of a loss: a sum over items, the name of its denominator in batch["sizes"], its weight.

    The engine divides `sum` by the size summed over all micro-batches and replicas. `sum` is a
    scalar, or (C,) for C independent copies, each with a size of its own; `weight` is a number or
    (C,). A weight of 0 means logged only.
    """

    sum: Tensor
    per: str = "tokens"
    weight: float | Tensor = 1.0


Terms = dict[str, Term]


class Criterion:
    """Turns the outputs of a model on one batch into terms; it has no optimizer, collective or memory."""

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the terms of one micro-batch by name."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(model, batch)")
