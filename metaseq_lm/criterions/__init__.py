"""What a criterion is: one batch in, named sums out."""

from __future__ import annotations

from typing import Any

from torch import nn

from metaseq_lm.core.batch import Terms


class Criterion:
    """Turn the outputs of a model on one batch into terms, without optimizer, collective or memory.

    One that gives probabilities of tokens has `token_log_probs`, see tasks.protocols.ScoresTokens.

    Args:
        config: An instance of the dataclass that it is registered with.

    Attributes:
        tasks: Names of the tasks whose batches and models it needs; empty if it names none.
        general: Whether any task can use it. If not, only a task whose `criterions` has its class,
            or a base class of it, which is how a task says that its batches and models fit.
    """

    tasks: tuple[str, ...] = ()
    general: bool = True

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __call__(self, model: nn.Module, batch: Any) -> Terms:
        """Return the terms of one micro-batch, a Batch of the kind that it needs, by name."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(model, batch)")
