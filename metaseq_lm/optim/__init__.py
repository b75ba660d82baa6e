"""An optimizer with its schedule and its clip, as the engine steps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.config.optimizers import (
    ConstantConfig,
    CosineConfig,
    DampedInverseSqrtConfig,
    InverseSqrtConfig,
    LinearConfig,
    PolynomialConfig,
    WsdConfig,
)
from metaseq_lm.core.config import build
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import OPTIMIZERS, SCHEDULES
from metaseq_lm.core.roles import role_of
from metaseq_lm.distributed import shards, vectors
from metaseq_lm.distributed.vectors import Vector, is_dtensor, is_sharded
from metaseq_lm.optim.states import (
    WHOLE,
    odd_forms,
    read_state,
    table_of,
    why_not_stored,
    with_types_of,
)
from metaseq_lm.optim.trial import check_kind, check_resumable, check_schedule
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.runs.tensor_files import map_tensors


class Optimizer:
    """A torch optimizer whose rate is base * schedule(n) at its n-th step, counted from 1.

    `clip_norm` is the global norm to which the engine clips this optimizer's gradient; 0 means
    never. `local` are the parameters of `inner` if `parameters` are shards, see distributed.shards.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        clip_norm: float = 0.0,
        local: Sequence[nn.Parameter] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.inner = inner
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.updates = 0
        self.base = [float(group["lr"]) for group in inner.param_groups]
        # In the model's order, whatever the groups: vectors of gradients have this order.
        self.parameters = list(parameters)
        # The tensors that `inner` updates: the local rows of sharded parameters.
        self.local = list(parameters if local is None else local)
        self.names = names or [f"parameter {i}" for i in range(len(self.local))]
        self.is_sharded = any(map(is_dtensor, self.parameters))

    @property
    def takes_found_inf(self) -> bool:
        """Whether the device can skip a step in `step`, as torch's fused optimizers do."""
        return bool(self.inner.defaults.get("fused"))

    @property
    def step_flops(self) -> float:
        """The FLOPs of a step, given by the class of `inner`; 0 if it gives none."""
        return getattr(self.inner, "step_flops", 0.0)

    @property
    def lr(self) -> float:
        """The rate of the next step; with rates by layer, the largest one, of the heads."""
        return max(self.base) * self.schedule(self.updates + 1)

    @property
    def last_lr(self) -> float:
        """The rate of the last step, like `lr`; 0 before the first."""
        if not self.updates:
            return 0.0
        return max(self.base) * self.schedule(self.updates)

    def describe_rules(self) -> str:
        """Describe how many parameters of which roles each rule updates; "" for a single rule.

        The class of `inner` may name the rule of a group by `rule_of`; otherwise the group's
        non-default keys do.
        """
        defaults = self.inner.defaults.keys() | {"params", "is_spared"}
        rules: dict[str, list[Tensor]] = {}
        for group in self.inner.param_groups:
            if hasattr(self.inner, "rule_of"):
                rule = self.inner.rule_of(group)
            else:
                rule = ", ".join(sorted(group.keys() - defaults)) or "the defaults"
            rules.setdefault(rule, []).extend(group["params"])
        parts = []
        for rule, parameters in rules.items():
            roles = {role.name.lower() for p in parameters if (role := role_of("", p).role)}
            parts.append(f"{len(parameters)} parameters ({', '.join(sorted(roles))}) by {rule}")
        if len(parts) < 2:
            return ""
        return ", ".join(parts)

    def load_gradient(self, gradient: Vector) -> Tensor:
        """Set the `.grad` of `local` and return the gradient's norm.

        Its tensors, in the order of `parameters`, are whole or placed like them. The norm is over
        the parts of all processes.
        """
        if self.is_sharded:
            gradient = vectors.place_like(gradient, self.parameters)
            norm = vectors.norm(gradient)
            gradient = [None if grad is None else vectors.local_part(grad) for grad in gradient]
        else:
            norm = torch.nn.utils.get_total_norm([grad for grad in gradient if grad is not None])
        for parameter, grad in zip(self.local, gradient, strict=True):
            parameter.grad = grad
        return norm

    def nonfinite(self) -> str:
        """Return the name of the first parameter with a `.grad` that is not finite here, or ""."""
        gradients = zip(self.names, (p.grad for p in self.local))
        return next((n for n, g in gradients if g is not None and not g.isfinite().all()), "")

    def forget_gradient(self) -> None:
        """Reset the `.grad` of `local`."""
        for parameter in self.local:
            parameter.grad = None

    def step(self, found_inf: Tensor | None = None) -> None:
        """Step the parameters that have a `.grad` in `local`, at the scheduled rate.

        If `found_inf`, a scalar on the device, is 1.0, parameters and moments do not change; the
        host does not read it. Only for an optimizer that `takes_found_inf`.
        """
        factor = self.schedule(self.updates + 1)
        for group, base in zip(self.inner.param_groups, self.base):
            group["lr"] = base * factor
        # torch's fused optimizers read this attribute, as torch.amp.GradScaler sets it.
        self.inner.found_inf = found_inf  # type: ignore[attr-defined]
        self.inner.step()
        self.updates += 1

    def slots(self, name: str) -> list[Tensor]:
        """Return one moment of every parameter, whole, zeros where no step was taken yet.

        A collective call.
        """
        if not self.is_sharded:
            return self._slots(name)
        return shards.gather_whole(self.placed_slots(name))

    def placed_slots(self, name: str) -> list[Tensor]:
        """Return the same moments, each in the placement of its parameter."""
        moments = zip(self._slots(name), self.parameters)
        return [vectors.like_shard(m, p) if is_dtensor(p) else m for m, p in moments]

    def _slots(self, name: str) -> list[Tensor]:
        """Return this process's part of one moment of every parameter."""
        states = [self.inner.state.get(p) for p in self.local]
        return [s[name] if s else torch.zeros_like(p) for s, p in zip(states, self.local)]

    def _placed(self, index: int, _: str, moment: Tensor) -> Tensor:
        """Return a process's part of a moment in the placement of its parameter."""
        parameter = self.parameters[index]
        if is_dtensor(parameter) and moment.dim() and parameter.dim():
            return vectors.like_shard(moment, parameter)
        return moment

    def _numbers(self) -> dict[int, int]:
        """Return, by torch's number of each parameter, its index in `parameters`."""
        index = {id(p): i for i, p in enumerate(self.local)}
        numbers: dict[int, int] = {}
        groups = zip(self.inner.state_dict()["param_groups"], self.inner.param_groups)
        for numbered, group in groups:
            numbers |= zip(numbered["params"], [index[id(p)] for p in group["params"]])
        return numbers

    def local_state(self) -> dict[str, Any]:
        """Return step count and local moments; rates come from the configuration."""
        return {"updates": self.updates, "state": self.inner.state_dict()["state"]}

    def load_local_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of `local_state`; torch's method would change the types of its tensors."""
        self.updates = state["updates"]
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state["state"], "param_groups": groups})
        for number, index in self._numbers().items():
            if slots := state["state"].get(number):
                parameter = self.local[index]
                loaded = self.inner.state[parameter]
                self.inner.state[parameter] = with_types_of(slots, loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return step count and moments, placed like their parameters.

        "forms" has the strides of tensors that have another type than their parameter, or are not
        contiguous. Raises CheckpointError for a state that could not be loaded again.
        """
        numbers = self._numbers()
        state: dict[int, dict[str, Any]] = {}
        forms: dict[int, dict[str, list[int]]] = {}
        for number, slots in self.local_state()["state"].items():
            if number not in numbers:
                raise CheckpointError(f"the optimizer's state {number} is of no parameter")
            index = numbers[number]
            if reason := why_not_stored(
                slots, self.local[index], self.is_sharded, table_of(self.inner)
            ):
                raise CheckpointError(f"the optimizer has {reason} which cannot be saved")
            state[number] = map_tensors(partial(self._placed, index), slots)
            if not self.is_sharded and (odd := odd_forms(slots, self.local[index])):
                forms[number] = odd
        content = {"updates": self.updates, "state": state}
        if forms:
            content["forms"] = forms
        return content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load step count and full moments; of these, each process reads its own rows.

        Raises KeyError if one is missing, ValueError if one does not fit its parameter.
        """
        table = table_of(self.inner)
        parts: dict[int, dict[str, Any]] = {}
        for number, index in self._numbers().items():
            forms = state.get("forms", {}).get(number, {})
            if slots := state["state"].get(number, {}):
                try:
                    parts[number] = read_state(slots, forms, self.parameters[index], table)
                except ValueError as error:
                    raise ValueError(f"parameter {number}: {error}") from error
        self.load_local_state({"updates": state["updates"], "state": parts})


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: Any,
    schedule: Any,
) -> Optimizer:
    """Build an optimizer with its schedule from sections of the run's configuration.

    Parameters that need no gradient are left out. Raises UsageError for an optimizer that needs
    whole matrices if the parameters are sharded, for one with a state that cannot be stored, and
    for a schedule that is not a function of the step.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad]
    local = [(name, shards.local_parameter(p)) for name, p in named]
    inner = build("optimizer", config, local)
    is_plug_in = not OPTIMIZERS.entry(config._name).is_of_package
    if is_plug_in:
        check_kind(config._name, inner, local)
    if any(is_sharded(p) for _, p in named) and (need := _why_whole(inner)):
        raise UsageError(
            f"optimizer {config._name} needs whole matrices{need}, but engine.parallel=shard or "
            "hybrid leaves each process some of their rows; use engine.parallel=replicate, or "
            "another optimizer"
        )
    if is_plug_in:
        check_resumable(config, local, any(is_sharded(p) for _, p in named))
    factor = build("schedule", schedule)
    if not SCHEDULES.entry(schedule._name).is_of_package:
        check_schedule(schedule._name, factor)
    return Optimizer(
        inner,
        factor,
        [p for _, p in named],
        config.clip_norm,
        [p for _, p in local],
        [name for name, _ in named],
    )


def _why_whole(inner: torch.optim.Optimizer) -> str:
    """Return why a step on some rows of a matrix differs from these rows of a whole step.

    "" if it does not.
    """
    keys = [key for key, form in table_of(inner).items() if form is WHOLE]
    # torch's Muon cannot declare it.
    if keys or getattr(inner, "needs_whole_matrices", isinstance(inner, torch.optim.Muon)):
        return f" for its {', '.join(keys) or 'steps'}"
    return ""


Schedule = Callable[[int], float]


def _warmup(step: int, warmup_updates: float) -> float:
    """Increase linearly from 1/W at step 1 to 1 at step W, then stay constant."""
    if not warmup_updates:
        return 1.0
    return min(1.0, step / warmup_updates)


def _warmup_length(warmup_updates: int, warmup_ratio: float, total_updates: int) -> float:
    """Return the larger of `warmup_updates` and `warmup_ratio` of all updates, not rounded."""
    return max(warmup_updates, warmup_ratio * total_updates)


def constant(config: ConstantConfig) -> Schedule:
    """Return a schedule with warm-up to a constant 1."""
    return lambda step: _warmup(step, config.warmup_updates)


def inverse_sqrt(config: InverseSqrtConfig) -> Schedule:
    """Return step^-1/2 after the warm-up, times W^1/2 if the peak at step W is to be 1."""
    warmup_updates = config.warmup_updates
    scale: float = warmup_updates**0.5 if config.lr_is_peak else 1.0

    def factor(step: int) -> float:
        decay: float = max(step, warmup_updates) ** -0.5
        return scale * _warmup(step, warmup_updates) * decay

    return factor


def damped_inverse_sqrt(config: DampedInverseSqrtConfig) -> Schedule:
    """Return min(1, step / W) / (1 + damping sqrt(step))."""
    return lambda step: _warmup(step, config.warmup_updates) / (1.0 + config.damping * step**0.5)


def polynomial(config: PolynomialConfig) -> Schedule:
    """Return warm-up(step) * (end + (1 - end) * (1 - step / total)^power).

    It is `end` after the last step. With `zero_based` the first step is number 0, as in ELECTRA's
    code. Without `decay_in_warmup` the second factor is left out in the first W steps, so that the
    rate drops from nearly 1 to 1 - W / total after them, as in BERT's and BAM's code; W is then a
    whole number, rounded down.
    """
    total, end = config.total_updates, config.end
    _check_length(total)
    rising = _warmup_length(config.warmup_updates, config.warmup_ratio, total)
    if not config.decay_in_warmup:
        rising = int(rising)

    def factor(step: int) -> float:
        step -= config.zero_based
        if step < rising and not config.decay_in_warmup:
            return _warmup(step, rising)
        decay: float = max(0.0, 1.0 - step / total) ** config.power
        return _warmup(step, rising) * (end + (1.0 - end) * decay)

    return factor


def _check_length(total: int) -> None:
    if total < 1:
        raise UsageError(f"schedule.total_updates must be at least 1, got {total}")


def cosine(config: CosineConfig) -> Schedule:
    """Return min(1, step / W) * (end + (1 - end) (1 + cos(pi p)) / 2).

    p is the share of the updates after the warm-up, (step - W) / (total - W), and 0 during it. The
    factor is `end` from the last step on, if the warm-up is over by then. With a cooldown of C
    updates it is end (total - step) / C in the last C, and 0 from the last step on (Charpentier and
    Samuel 2024, code, which counts steps from 0).
    """
    total, end = config.total_updates, config.end
    _check_length(total)
    rising = _warmup_length(config.warmup_updates, config.warmup_ratio, total)
    falling = total - rising if total > rising else 1.0
    cooling = config.cooldown_ratio * total

    def factor(step: int) -> float:
        left = max(0, total - step)
        if cooling and left <= cooling:
            return _warmup(step, rising) * end * left / cooling
        share = min(1.0, max(0.0, (step - rising) / falling))
        return _warmup(step, rising) * (end + (1.0 - end) * (1.0 + math.cos(math.pi * share)) / 2)

    return factor


# Factors that decay from 1 to 0, as functions of the share of the decay that is left.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
}


def wsd(config: WsdConfig) -> Schedule:
    """Return warm-up(step) * (end + (1 - end) * d(x)), and warm-up(step) before the decay.

    x is the share of the decay that is over, 1 - (total - step) / (decay_ratio * total), d(x) is
    1 - x (Hu et al. 2024, section 4.1; Hägele et al. 2024, equation 1) or 1 - sqrt(x)
    (Hägele et al. 2024, equation 2). The factor is `end` from the last step on.
    """
    total, end, shape = config.total_updates, config.end, _SHAPES[config.decay]
    _check_length(total)
    rising = _warmup_length(config.warmup_updates, config.warmup_ratio, total)
    falling = config.decay_ratio * total

    def factor(step: int) -> float:
        left = max(0, total - step)
        if left >= falling:  # exact, without rounding: runs of all lengths have these rates
            return _warmup(step, rising)
        return _warmup(step, rising) * (end + (1.0 - end) * shape(left / falling))

    return factor


def linear(config: LinearConfig) -> Schedule:
    """Return min(step / W, (total - step) / (total - W)), not below 0; step / W if W >= total."""
    total = config.total_updates
    _check_length(total)
    rising = _warmup_length(config.warmup_updates, config.warmup_ratio, total)

    def factor(step: int) -> float:
        rate = _warmup(step, rising)
        if total <= rising:
            return rate
        return max(0.0, min(rate, (total - step) / (total - rising)))

    return factor
