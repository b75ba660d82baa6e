"""An optimizer with its schedule and its clip, as the engine steps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from metaseq_lm.optim import optimizers, schedules  # noqa: F401  (fill the registries)
from metaseq_lm.optim.schedules import Schedule
from metaseq_lm.registry import OPTIMIZERS, SCHEDULES


class Optimizer:
    """A torch optimizer whose rate is base * schedule(n) at its n-th step, counted from 1.

    `clip_norm` is the global norm the engine clips this optimizer's gradient to; 0 means never.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        clip_norm: float = 0.0,
    ) -> None:
        self.inner = inner
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.updates = 0
        self.base = [float(group["lr"]) for group in inner.param_groups]
        # In the order of the model, whatever the groups: vectors of gradients are in this order.
        self.parameters = list(parameters)

    @property
    def lr(self) -> float:
        """The rate of the next step (of the first group)."""
        return self.base[0] * self.schedule(self.updates + 1)

    def step(self) -> None:
        """Apply the gradients in `.grad` at the scheduled rate; parameters without one stay."""
        factor = self.schedule(self.updates + 1)
        for group, base in zip(self.inner.param_groups, self.base):
            group["lr"] = base * factor
        self.inner.step()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return moments and step count; rates and groups come from the config."""
        return {"updates": self.updates, "state": self.inner.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take moments and step count; raises KeyError if one is missing."""
        self.updates = state["updates"]
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state["state"], "param_groups": groups})


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, decay_norms_and_biases: bool
) -> list[dict]:
    """Split parameters into decayed and undecayed groups; vectors (norms, biases) may be spared."""
    named = list(named)
    decayed = [p for _, p in named if decay_norms_and_biases or p.dim() > 1]
    spared = [p for _, p in named if not (decay_norms_and_biases or p.dim() > 1)]
    groups = [(decayed, weight_decay), (spared, 0.0)]
    return [{"params": ps, "weight_decay": decay} for ps, decay in groups if ps]


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Mapping, schedule: Mapping
) -> Optimizer:
    """Build from the config nodes `optimizer` and `schedule` (each with its `_name`)."""
    options = {str(k): v for k, v in optimizer.items() if k != "_name"}
    clip_norm = options.pop("clip_norm")
    decay, everywhere = options.pop("weight_decay"), options.pop("decay_norms_and_biases")
    named = [(name, p) for name, p in parameters if p.requires_grad]
    groups = parameter_groups(named, decay, everywhere)
    inner = OPTIMIZERS.build(optimizer["_name"], groups, **options)
    shape = SCHEDULES.build(
        schedule["_name"], **{k: v for k, v in schedule.items() if k != "_name"}
    )
    return Optimizer(inner, shape, [p for _, p in named], clip_norm)
