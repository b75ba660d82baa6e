"""Tries a plug-in's optimizer before the first update: could a run with it be resumed?"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.config.groups import NamedParameters
from metaseq_lm.core import interfaces
from metaseq_lm.core.config import build
from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.registry import OPTIMIZERS, SCHEDULES, Registry, abbreviated
from metaseq_lm.optim.states import PLAIN, table_of, why_not_stored
from metaseq_lm.runs.tensor_files import map_tensors

_STEPS = 2  # some optimizers create a part of their state at the second
_TRIED = (1, 2, 3, 1000)  # steps of a schedule


def check_resumable(config: Any, parameters: NamedParameters, is_sharded: bool) -> None:
    """Raise UsageError if a run with the configured optimizer could not be resumed."""
    # The optimizer updates stand-ins for the parameters. In each group, the smallest local
    # parameter of each number of dimensions has memory and a gradient; the others have neither.
    stand_ins = [(name, _without_memory(p)) for name, p in parameters]
    devices = {p.device for _, p in parameters if p.is_cuda}
    with torch.random.fork_rng(devices):
        inner: torch.optim.Optimizer = build("optimizer", config, stand_ins)
        before = _numbers_outside(inner)
        try:
            for _ in range(_STEPS):
                _set_gradients(inner)
                inner.step()
        except Exception as error:  # a plug-in's step may raise anything, here or in the run
            text = (
                f"optimizer {config._name}: whether its state can be saved was not tried, because "
                f"a step of stand-ins raised {type(error).__name__}: {error}"
            )
            if is_sharded and not table_of(inner):
                raise UsageError(f"{text}; give its class a table state_form") from error
            say(text)
            return
    names: dict[Tensor, str] = {p: name for name, p in stand_ins}
    reasons = [f"has {key}, which is of no parameter," for key in inner.state if key not in names]
    for p, slots in inner.state.items():
        if p in names and (reason := why_not_stored(slots, p, is_sharded, table_of(inner))):
            reasons.append(f"has {reason} of parameter {names[p]} {tuple(p.shape)}")
    after = _numbers_outside(inner)
    changed = [key for key in after if after[key] != before.get(key)]
    reasons += [f"changes its {key}, which is outside its state," for key in changed]
    if not reasons:
        reasons += _shared_memory(inner, names)
    if reasons:
        advice = "; use engine.parallel=replicate" if is_sharded else ""
        raise UsageError(
            f"optimizer {config._name} {reasons[0]} so that a run with it could not be resumed. "
            "Its state may hold numbers, tensors, and lists, tuples and dicts of these by "
            "parameter, as its table state_form says; on shards, tensors without an entry there "
            f"have the parameter's shape{advice}"
        )


def check_kind(name: str, inner: Any, parameters: NamedParameters) -> None:
    """Raise UsageError for an optimizer that the engine cannot step; print parameters left out."""
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            f"{_place(OPTIMIZERS, name)}: optimizer {name} is a {type(inner).__name__}; the "
            "function that is registered has to return a torch.optim.Optimizer"
        )
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"optimizer {name} computes the loss several times a step ({type(inner).__name__}), "
            "which a training run does not do; use another one"
        )
    interfaces.check_call(f"the step of optimizer '{name}'", inner.step, [])
    stepped = {id(p) for group in inner.param_groups for p in group["params"]}
    if left := [key for key, p in parameters if id(p) not in stepped]:
        say(
            f"optimizer {name} leaves out {len(left)} of {len(parameters)} parameters, which stay "
            f"as they are: {abbreviated(left)}"
        )


def check_schedule(name: str, schedule: Callable[[int], float]) -> None:
    """Raise UsageError if a schedule returns no number, or depends on more than the step."""
    at, place = SCHEDULES.entry(name).value, _place(SCHEDULES, name)
    interfaces.check_call(f"what schedule '{name}' returns", schedule, ["step"], at=at)
    first, second = list(map(schedule, _TRIED)), list(map(schedule, _TRIED))
    for step, *factors in zip(_TRIED, first, second):
        if not all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in factors):
            raise UsageError(
                f"{place}: schedule {name}: the factor of step {step} is {factors[0]!r}, not a "
                "number of at least 0"
            )
        if factors[0] != factors[1]:
            raise UsageError(
                f"{place}: schedule {name}: the factor of step {step} is {factors[0]:g} and, when "
                f"asked again, {factors[1]:g}, so that a run with it could not be resumed. Compute "
                "it from the step alone"
            )


def _place(registry: Registry[Any], name: str) -> str:
    return interfaces.place_of(registry.entry(name).value)


def _shared_memory(inner: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Yield the tensors of a state that share memory with another one, unlike restored copies."""
    owners = {p.data_ptr(): f"the parameter {name}" for p, name in names.items()}
    for p, slots in inner.state.items():
        tensors: dict[str, Tensor] = {}
        map_tensors(tensors.__setitem__, slots)
        for key, tensor in tensors.items():
            entry = f"the state {key} of parameter {names[p]}"
            if tensor.numel() and (owner := owners.setdefault(tensor.data_ptr(), entry)) != entry:
                yield f"has {entry} in the memory of {owner}"


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    stand_in = nn.Parameter(zero.expand(parameter.shape))
    stand_in.role = getattr(parameter, "role", None)  # type: ignore[attr-defined]
    return stand_in


def _set_gradients(inner: torch.optim.Optimizer) -> None:
    """Give memory and a random gradient to the smallest stand-in of each kind."""
    for group in inner.param_groups:
        smallest: dict[int, nn.Parameter] = {}
        for p in sorted((p for p in group["params"] if p.numel()), key=Tensor.numel):
            smallest.setdefault(p.dim(), p)
        for p in smallest.values():
            p.data = p.data.clone(memory_format=torch.contiguous_format)
            p.grad = torch.randn_like(p, memory_format=torch.contiguous_format)


def _numbers_outside(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers that an optimizer keeps in groups and attributes, outside its state."""
    options: list[tuple[str, Any]] = []
    for group in inner.param_groups:
        options += [(f"groups/{key}", value) for key, value in group.items() if key != "params"]
    numbers: dict[str, Any] = {}
    others = {"state": inner.state, "param_groups": inner.param_groups, "defaults": inner.defaults}
    attributes = [(key, value) for key, value in vars(inner).items() if key not in others]
    for key, value in [*options, *attributes]:
        if key.startswith("_") or (content := _content(value)) is None:
            continue
        numbers[key] = [*numbers.get(key, []), content]
    return numbers


def _content(value: Any) -> Any:
    """Return the numbers in a value, also in containers and generators; None for other values."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, Mapping):
        return [_content(item) for item in value.values()]
    if isinstance(value, list | tuple | set | deque):
        return [_content(item) for item in value]
    if type(value) in PLAIN:
        return value
    return None
