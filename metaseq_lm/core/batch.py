"""Batches, and the terms that a criterion makes of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

Batch = dict[str, Any]


@dataclass
class Term:
    """A summand of a loss: a sum over items, the name of its denominator in batch["sizes"], its weight.

    The engine divides `sum` by the size summed over all micro-batches and replicas; with `per` None
    by nothing, the term is the sum over the global batch. `sum` is a scalar, or (C,) for C
    independent copies, each with a size of its own; `weight` is a number or (C,). A weight of 0
    means logged only.
    """

    sum: Tensor
    per: Optional[str]
    weight: float | Tensor = 1.0

    @property
    def is_loss(self) -> bool:
        """Whether it counts in the loss; a weight that is a tensor always does."""
        return isinstance(self.weight, Tensor) or self.weight != 0


Terms = dict[str, Term]


def number_of(which: Tensor) -> Tensor:
    """Return how many items of a boolean tensor are true, for a term that is logged: a float64 scalar.

    Not in the precision of logits: under autocast that is bfloat16, which keeps 8 bits.
    """
    return which.sum().double()
