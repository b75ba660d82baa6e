"""Which parts of an optimizer's state of a parameter checkpoints store, and how."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.runs.tensor_files import CODES, StoredTensor, map_tensors, rows_like

PLAIN = (type(None), bool, int, float)
_Forms = Mapping[str, list[int]]  # strides by the path of a tensor in a state


def why_not_stored(slots: Any, parameter: Tensor, is_sharded: bool) -> str:
    """Name a part of a parameter's state that a checkpoint cannot restore bitwise; "" if none."""
    pending = [(str(name), value) for name, value in slots.items()]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            is_odd = is_sharded and (
                (value.dim() and value.shape != parameter.shape)
                or _has_own_type(name, value, parameter)
            )
            if is_odd or value.layout != torch.strided or value.dtype not in CODES:
                kind = f"{value.dtype} of shape {tuple(value.shape)}"
                return f"the state {name}, {kind.removeprefix('torch.')},"
        elif type(value) in (dict, OrderedDict, list, tuple) and not is_sharded:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}/{key}", item) for key, item in items]
        elif type(value) not in PLAIN:
            return f"the state {name}, a {type(value).__name__},"
    return ""


def _has_own_type(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor keeps its type when the precision of a run changes.

    As in torch, "step" is not a moment.
    """
    return value.is_floating_point() and name != "step" and value.dtype != parameter.dtype


def odd_forms(slots: Mapping[str, Any], parameter: Tensor) -> dict[str, list[int]]:
    """Return the strides of tensors that keep their own type or are not contiguous.

    Products of matrices with other strides may differ in the last bit.
    """
    forms: dict[str, list[int]] = {}

    def note(name: str, value: Tensor) -> None:
        if _has_own_type(name, value, parameter) or not value.is_contiguous():
            dense = value if all(value.stride()) else value.contiguous()
            forms[name] = list(dense.stride())

    map_tensors(note, slots)
    return forms


def read_state(slots: Mapping[str, Any], forms: _Forms, parameter: Tensor, is_strict: bool) -> Any:
    """Return a stored state in its forms; for a sharded parameter, only its local rows.

    Raises ValueError if `is_strict` and a tensor does not have the parameter's shape.
    """

    def read(name: str, value: Tensor | StoredTensor) -> Tensor:
        if is_strict and value.dim() and value.shape != parameter.shape:
            raise ValueError(f"{name}, {tuple(value.shape)}")
        tensor = (
            value if isinstance(value, Tensor) and not value.dim() else rows_like(value, parameter)
        )
        if name in forms:
            return torch.empty_strided(tensor.shape, forms[name], dtype=tensor.dtype).copy_(tensor)
        return tensor.to(parameter.dtype) if _has_own_type(name, tensor, parameter) else tensor

    return map_tensors(read, slots)


def with_types_of(slots: Any, loaded: Any) -> Any:
    """Return `slots` on the devices of `loaded`, torch's copy; `loaded` if no type differs."""
    copies: dict[str, Tensor] = {}
    map_tensors(copies.__setitem__, loaded)
    tensors: dict[str, Tensor] = {}
    map_tensors(tensors.__setitem__, slots)
    if all(name not in copies or copies[name].dtype == t.dtype for name, t in tensors.items()):
        return loaded
    return map_tensors(lambda name, tensor: tensor.to(copies[name].device), slots)
