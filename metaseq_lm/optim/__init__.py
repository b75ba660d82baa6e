"""An optimizer with its schedule and its clip, as the engine steps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from metaseq_lm.core.config import build, typed_options
from metaseq_lm.core.registry import OPTIMIZERS
from metaseq_lm.distributed import process_group
from metaseq_lm.optim import (
    optimizers,
    schedules,
)
from metaseq_lm.optim.layers import layer_multipliers
from metaseq_lm.optim.optimizers import OptimizerConfig
from metaseq_lm.optim.schedules import Schedule


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
        self.owners: Optional[list[int]] = None  # of a sharded optimizer: who keeps what

    @property
    def lr(self) -> float:
        """The rate of the next step; with rates by layer that of the heads, the largest."""
        return max(self.base) * self.schedule(self.updates + 1)

    @property
    def last_lr(self) -> float:
        """The rate of the last step, as `lr`; 0 before the first."""
        return max(self.base) * self.schedule(self.updates) if self.updates else 0.0

    def shard(self) -> None:
        """Keep the moments of a share of the parameters only, and step only those.

        ZeRO stage 1 (Rajbhandari et al. 2020); after a step the owners give out their parameters.
        Results are the same bit for bit.
        """
        if process_group.world_size() > 1:
            sizes = [p.numel() for p in self.parameters]
            self.owners = owners(sizes, process_group.world_size())

    def _owned(self) -> list[nn.Parameter]:
        if self.owners is None:
            return self.parameters
        mine = process_group.rank()
        return [p for p, owner in zip(self.parameters, self.owners) if owner == mine]

    def step(self) -> None:
        """Apply the gradients in `.grad` at the scheduled rate; parameters without one stay."""
        factor = self.schedule(self.updates + 1)
        for group, base in zip(self.inner.param_groups, self.base):
            group["lr"] = base * factor
        if self.owners is None:
            self.inner.step()
        else:
            moved = [p.grad is not None for p in self.parameters]
            owned = {id(p) for p in self._owned()}
            for p in self.parameters:
                p.grad = p.grad if id(p) in owned else None
            self.inner.step()
            chosen = [(p.data, o) for p, o, m in zip(self.parameters, self.owners, moved) if m]
            process_group.share([p for p, _ in chosen], [owner for _, owner in chosen])
        self.updates += 1

    def slots(self, name: str) -> list[Tensor]:
        """Return one moment of every parameter, zeros where no step was taken yet."""
        found = [self.inner.state.get(p) for p in self.parameters]
        moments = [s[name] if s else torch.zeros_like(p) for s, p in zip(found, self.parameters)]
        if self.owners is not None:
            moments = [m.clone() for m in moments]
            process_group.share(moments, self.owners)
        return moments

    def local_state(self) -> dict[str, Any]:
        """Return step count and the moments that this replica keeps; rates come from the config."""
        return {"updates": self.updates, "state": self.inner.state_dict()["state"]}

    def state_dict(self) -> dict[str, Any]:
        """Return step count and moments; of a sharded optimizer all of them, on the first replica only."""
        state = self.local_state()
        if self.owners is not None:
            parts = process_group.gather_to_first(state["state"])
            state["state"] = dict(sorted(item for part in parts for item in part.items()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take step count and moments, of a sharded optimizer this replica's share of them.

        Raises KeyError if one is missing, ValueError if one does not fit its parameter.
        """
        groups = self.inner.state_dict()["param_groups"]
        order = [p for group in self.inner.param_groups for p in group["params"]]
        numbers = [n for group in groups for n in group["params"]]
        owned = {id(p) for p in self._owned()}
        kept = {}
        for number, parameter in zip(numbers, order):
            moments = state["state"].get(number, {})
            for name, value in moments.items():
                if value is not None and value.dim() and value.shape != parameter.shape:
                    raise ValueError(f"{name} of parameter {number}, {tuple(value.shape)}")
            if moments and id(parameter) in owned:
                kept[number] = moments
        self.updates = state["updates"]
        self.inner.load_state_dict({"state": kept, "param_groups": groups})


def owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Return which replica keeps each parameter: the largest first, each to the least loaded."""
    load = [0] * replicas
    chosen = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[at] = load.index(min(load))
        load[chosen[at]] += sizes[at]
    return chosen


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    decay_norms_and_biases: bool,
    rates: Mapping[str, float] | None = None,
) -> list[dict]:
    """Split parameters into groups of one weight decay and one rate each.

    Vectors (norms, biases) may be spared the decay; `rates` are the rates of the parameters by
    name, without them the groups have none of their own.
    """
    groups: dict[tuple[float, bool], dict] = {}  # by rate, and whether spared
    for name, p in named:
        spared = not (decay_norms_and_biases or p.dim() > 1)
        rate = rates[name] if rates else 0.0
        group: dict = {"params": [], "weight_decay": 0.0 if spared else weight_decay}
        group |= {"lr": rate} if rates else {}
        groups.setdefault((rate, spared), group)["params"].append(p)
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], key[1]))]


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Mapping, schedule: Mapping
) -> Optimizer:
    """Build an optimizer with its schedule from the config nodes `optimizer` and `schedule`.

    Parameters that need no gradient are left out.
    """
    config: OptimizerConfig = typed_options("optimizer", optimizer)
    named = [(name, p) for name, p in parameters if p.requires_grad]
    rates = None
    if config.layer_decay != 1.0:
        scales = layer_multipliers(
            [name for name, _ in named], config.layer_decay, config.layer_decay_legacy
        )
        rates = {name: config.lr * scale for name, scale in scales.items()}
    groups = parameter_groups(named, config.weight_decay, config.decay_norms_and_biases, rates)
    inner = OPTIMIZERS.build(optimizer["_name"], config, groups)
    return Optimizer(inner, build("schedule", schedule), [p for _, p in named], config.clip_norm)
