"""Moving averages of the weights, which a run then validates, saves, scores and exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.distributed.vectors import local_part
from metaseq_lm.models.layers import move_averages
from metaseq_lm.runs.tensor_files import rows_like


class MovingAverage:
    """Exponential moving averages of the trained weights of a model; none with a decay of 0.

    They start at the weights, without bias correction, and `move` after each update. Each process
    averages its own part of a sharded weight. Buffers, such as running statistics, are not
    averaged.

    Args:
        model: The model; its parameters hold the trained weights, and their averages inside
            `shown`.
        decay: The decay of trainer.average_decay, from 0 to below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Inside `shown` these are the trained weights.
        self.averages: dict[str, Tensor] = {}
        if decay:
            self.averages = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def move(self, skips: Tensor | None = None) -> None:
        """Move the averages by a step: a <- decay a + (1 - decay) w.

        If only the device knows whether it has refused the update, `skips` is a boolean scalar on
        it; a refused update leaves the averages unchanged.
        """
        averages = [local_part(average) for average in self.averages.values()]
        weights = [local_part(self.weights[name]) for name in self.averages]
        if skips is None:
            move_averages(averages, weights, self.decay)
            return
        for average, weight in zip(averages, weights):
            share = torch.where(skips, 0.0, 1 - self.decay).to(average)
            average.lerp_(weight, share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give the model its averaged weights inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.averages.items():
            weight, other = local_part(self.weights[name]), local_part(average)
            copy = weight.clone()
            weight.copy_(other)
            other.copy_(copy)

    def hidden_weights(self) -> dict[str, Any]:
        """Return the state that a checkpoint made inside `shown` needs besides the model's."""
        if not self.averages:
            return {}
        return {"trained_weights": dict(self.averages)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load `hidden_weights` from a checkpoint's state; the model must have its weights already.

        If the checkpoint has no averages, they start at its weights. If this run has none, the
        model continues with the checkpoint's trained weights. Raises KeyError if one is missing,
        ValueError for another shape.
        """
        trained = state.get("trained_weights")
        for name, weight in self.weights.items():
            if name in self.averages:
                local_part(self.averages[name]).copy_(local_part(weight))
            if trained is None:
                continue
            if trained[name].shape != weight.shape:
                raise ValueError(f"the trained weight {name}, {tuple(trained[name].shape)}")
            local_part(weight).copy_(rows_like(trained[name], weight))
