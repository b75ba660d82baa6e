"""What a criterion is: one batch in, named sums out."""

from __future__ import annotations

from typing import Any

from torch import nn

from metaseq_lm.core.batch import Terms


class Criterion:
    """Compute the terms of a loss from a model and one batch; it keeps no state between calls.

    A criterion that gives probabilities of tokens has `token_log_probs`, see
    tasks.protocols.ScoresTokens.

    Args:
        config: An instance of the dataclass that it is registered with.

    Attributes:
        tasks: Names of the tasks that can use it; empty for no restriction by name.
        general: Whether any task can use it; otherwise only a task that names its class, or a base
            class of it, in `Task.criterions`.
    """

    tasks: tuple[str, ...] = ()
    general: bool = True

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __call__(self, model: nn.Module, batch: Any) -> Terms:
        """Return the terms of one micro-batch by name."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(model, batch)")
