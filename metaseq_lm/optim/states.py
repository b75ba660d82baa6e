"""Which parts of an optimizer's state of a parameter checkpoints store, and how.

A class of optimizers declares the form of each key of its state in a table `state_form`, such as
`{"step": NUMBER, "exp_avg": LIKE, "sides": WHOLE}`; torch's classes have none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.distributed import vectors
from metaseq_lm.runs.tensor_files import CODES, StoredTensor, map_tensors, rows_like

__all__ = ["LIKE", "NUMBER", "ROWS", "WHOLE", "Table"]


class _StateForm(Enum):
    """The form of a tensor, or of all tensors in a container, in the state of a parameter."""

    NUMBER = "no axes; all processes have the same"
    LIKE = "the parameter's shape; shards have their rows of it"
    ROWS = "as many rows as the parameter; shards have theirs"
    WHOLE = "any shape, computed from all rows, so that shards are refused"


# Forms of tensors in the state of an optimizer.
NUMBER, LIKE, ROWS, WHOLE = _StateForm
PLAIN = (type(None), bool, int, float)

# The form of each key of the state of a parameter.
Table = Mapping[str, _StateForm]
_Forms = Mapping[str, list[int]]  # strides by the path of a tensor in a state


def table_of(inner: Any) -> Table:
    """Return the table that an optimizer declares; an empty one if it declares none."""
    table: Table = getattr(inner, "state_form", {})
    return table


def _has_form(name: str, value: Tensor | StoredTensor, like: Tensor, table: Table) -> bool:
    """Return whether a tensor has the form of its key, of a parameter's shape if it has none."""
    form = table.get(name.partition("/")[0])
    rows = len(like) if like.dim() else 1
    if form is None:
        return not value.dim() or value.shape == like.shape
    fits = {NUMBER: not value.dim(), LIKE: value.shape == like.shape, WHOLE: True}
    return fits.get(form, value.dim() > 0 and value.shape[0] == rows)


def why_not_stored(slots: Any, parameter: Tensor, is_sharded: bool, table: Table) -> str:
    """Name a part of a parameter's state that a checkpoint cannot restore bitwise; "" if none.

    A state without a declared form has to have the parameter's shape on shards.
    """
    unknown = [key for key in slots if key not in table]
    if table and unknown:
        return f"the state {unknown[0]}, which its state_form lacks,"
    pending = [(str(name), value) for name, value in slots.items()]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            is_odd = is_sharded and _has_own_type(name, value, parameter)
            if table or is_sharded:
                is_odd |= not _has_form(name, value, parameter, table)
            if is_odd or value.layout != torch.strided or value.dtype not in CODES:
                kind = f"{value.dtype} of shape {tuple(value.shape)}"
                return f"the state {name}, {kind.removeprefix('torch.')},"
        elif type(value) in (dict, OrderedDict, list, tuple) and (table or not is_sharded):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}/{key}", item) for key, item in items]
        elif type(value) not in PLAIN:
            return f"the state {name}, a {type(value).__name__},"
    return ""


def _has_own_type(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor keeps its type when the precision of a run changes."""
    # As in torch, "step" is not a moment.
    return value.is_floating_point() and name != "step" and value.dtype != parameter.dtype


def odd_forms(slots: Mapping[str, Any], parameter: Tensor) -> dict[str, list[int]]:
    """Return the strides of tensors that keep their own type or are not contiguous."""
    forms: dict[str, list[int]] = {}

    def note(name: str, value: Tensor) -> None:
        # Products of matrices with other strides may differ in the last bit.
        if _has_own_type(name, value, parameter) or not value.is_contiguous():
            dense = value if all(value.stride()) else value.contiguous()
            forms[name] = list(dense.stride())

    map_tensors(note, slots)
    return forms


def read_state(slots: Mapping[str, Any], forms: _Forms, parameter: Tensor, table: Table) -> Any:
    """Return a stored state in its forms; for a sharded parameter, only its local rows.

    Raises ValueError for a tensor that does not have the form of its key.
    """
    is_strict = table or vectors.is_dtensor(parameter)

    def read(name: str, value: Tensor | StoredTensor) -> Tensor:
        if is_strict and not _has_form(name, value, parameter, table):
            raise ValueError(f"{name}, {tuple(value.shape)}")
        if isinstance(value, Tensor) and not value.dim():
            tensor = value
        else:
            tensor = rows_like(value, parameter)
        if name in forms:
            return torch.empty_strided(tensor.shape, forms[name], dtype=tensor.dtype).copy_(tensor)
        if _has_own_type(name, tensor, parameter):
            return tensor.to(parameter.dtype)
        return tensor

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
