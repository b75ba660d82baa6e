"""What a criterion is: one batch in, named sums out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from metaseq_lm.core.batch import Batch, Terms
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS


class Criterion:
    """Turns the outputs of a model on one batch into terms; it has no optimizer, collective or memory.

    `tasks` names the tasks whose batches and models it needs; empty if any will do.
    """

    tasks: tuple[str, ...] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the terms of one micro-batch by name."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(model, batch)")

    def token_log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the (pseudo-)log-probability of each token given the others, (B, S), in nats.

        0 where a position is not scored. `batch` has tokens (B, S), nothing hidden, padding (B, S)
        or None, scored (B, S), boolean, the positions to score, mask_id, the id of [MASK], and,
        optional, segments (B, S) and batch_tokens, about how many tokens a forward pass may take.
        The model is in eval mode. Raises UsageError if the objective gives no such probabilities.
        """
        names = [
            name
            for name, entry in sorted(CRITERIONS.entries.items())
            if getattr(entry.value, "token_log_probs", None) is not Criterion.token_log_probs
        ]
        own = [n for n, entry in CRITERIONS.entries.items() if entry.value is type(self)]
        raise UsageError(
            f"the criterion {(own or [type(self).__name__])[0]} gives no probabilities of tokens, so "
            f"its runs cannot score sentences; runs of these can: {', '.join(names)}"
        )
