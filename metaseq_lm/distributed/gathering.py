"""Sharded weights that autograd gathers, and differentiates twice.

In a pass for second derivatives the leaves of the graph are the rows that a process holds. When a
module reads a parameter, `_Gather` gathers its unit (the parameters of a Transformer layer, or the
direct parameters of another module). The backward of `_Gather` is `_ScatteredSum`, and the other
way round, so gradients, vectors and Hessian products are shards from the start. The graph saves a
description of a gathered weight (`_SavedWeight`) and gathers it again in the backward pass: at most
the size of the two largest units is whole at a time.

Every gather and sum is a collective inside a graph, so all processes must run the same graph.
Before each collective, processes therefore announce which one they are about to run: a difference
is an error, not a wrong sum or an endless wait.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.shards import OTHER_ORDER
from metaseq_lm.distributed.vectors import is_dtensor, local_part, rows_each

_GATHER, SUM, END = range(3)  # the next operation of a process


class _Agreement:
    """Checks that the processes of a group are about to run the same operation.

    Args:
        group: The processes that hold the rows of the parameters.
        width: Largest number of flags that they exchange.
        device: The device of the parameters.
    """

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device) -> None:
        self.group, self.width, self.device = group, width, device
        self.count, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def __call__(self, kind: int, unit: int = -1, flags: Sequence[bool] = ()) -> list[bool]:
        """Return the flags that are set in any process.

        Raises MetaseqError in all of them if their operations differ.
        """
        # On the host, which reads the result without waiting for a GPU.
        mine = torch.zeros(2 + self.width, dtype=torch.int64, device="cpu")
        mine[: 2 + len(flags)] = torch.tensor([kind, unit, *flags])
        everyone = mine.new_empty(self.count * mine.numel())
        process_group.start_gather(everyone, mine, self.group)()
        table = everyone.view(self.count, -1)
        if (table[:, :2] != mine[:2]).any():
            raise MetaseqError(OTHER_ORDER)
        return table[:, 2 : 2 + len(flags)].any(0).tolist()


@dataclass(frozen=True)
class _Unit:
    """Parameters that are gathered together, in one message for each of their dtypes.

    Attributes:
        number: Its number, by which processes compare their operations.
        shapes: The full shapes; (1,) for a scalar, held by the first process.
        dtypes: The dtypes.
        lead: Leading axes of copies before the shapes.
        agree: The agreement of the processes.
    """

    number: int
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    lead: torch.Size
    agree: _Agreement

    @property
    def bytes(self) -> int:
        """The size of the full tensors, with the padding rows of the last parts."""
        count, copies = self.agree.count, math.prod(self.lead)
        rows = [count * rows_each(shape, count) * math.prod(shape[1:]) for shape in self.shapes]
        return copies * sum(size * dtype.itemsize for size, dtype in zip(rows, self.dtypes))

    def gather(self, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the full tensors from each process's `parts`; None where all have None."""
        count, axis = self.agree.count, len(self.lead)
        result: list[Tensor | None] = [None] * len(parts)
        for chosen, device in self._messages(_GATHER, parts):
            rows = [self._padded(parts[i], i, 1, device) for i in chosen]
            flat = torch.cat([row.reshape(-1) for row in rows])
            gathered = flat.new_empty(count * flat.numel())
            process_group.start_gather(gathered, flat, self.agree.group)()
            columns = gathered.view(count, -1).split([row.numel() for row in rows], dim=1)
            for i, row, column in zip(chosen, rows, columns):
                table = column.reshape(count, *row.shape).movedim(0, axis).flatten(axis, axis + 1)
                full = table.narrow(axis, 0, self.shapes[i][0]).contiguous()
                is_view = full.untyped_storage().data_ptr() == gathered.data_ptr()
                if is_view and len(chosen) > 1:
                    # A view would keep the tensors of the whole message in memory.
                    full = full.clone()
                result[i] = full
        return result

    def scattered_sum(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this process's rows of the sums of full tensors; None where all have None."""
        count, axis = self.agree.count, len(self.lead)
        result: list[Tensor | None] = [None] * len(tensors)
        for chosen, device in self._messages(SUM, tensors):
            tables = []
            for i in chosen:
                padded = self._padded(tensors[i], i, count, device)
                tables.append(padded.unflatten(axis, (count, -1)).movedim(axis, 0))
            flat = torch.cat([table.reshape(count, -1) for table in tables], dim=1)
            part = flat.new_empty(flat.shape[1])
            process_group.start_scattered_sum(part, flat.reshape(-1), self.agree.group)()
            pieces = part.split([table[0].numel() for table in tables])
            for i, table, piece in zip(chosen, tables, pieces):
                first = self.agree.rank * table.shape[axis + 1]
                rows = min(max(self.shapes[i][0] - first, 0), table.shape[axis + 1])
                # A copy: a view would keep the whole message in memory.
                result[i] = piece.view(table.shape[1:]).narrow(axis, 0, rows).clone()
        return result

    def _messages(
        self, kind: int, tensors: Sequence[Tensor | None]
    ) -> Iterator[tuple[list[int], torch.device]]:
        """Yield the indices of the tensors in each message: the tensors that any process has."""
        present = self.agree(kind, self.number, [tensor is not None for tensor in tensors])
        device = next((t.device for t in tensors if t is not None), self.agree.device)
        for dtype in dict.fromkeys(self.dtypes):
            chosen = [i for i, d in enumerate(self.dtypes) if d == dtype and present[i]]
            if chosen:
                yield chosen, device

    def _padded(self, tensor: Tensor | None, i: int, parts: int, device: torch.device) -> Tensor:
        """Return `parts` parts of tensor i, each padded with zero rows to the number it sends."""
        shape, axis = self.shapes[i], len(self.lead)
        rows = parts * rows_each(shape, self.agree.count)
        if tensor is None:
            full = (*self.lead, rows, *shape[1:])
            return torch.zeros(full, dtype=self.dtypes[i], device=device)
        missing = rows - tensor.shape[axis]
        if not missing:
            return tensor
        return torch.cat([tensor, tensor.new_zeros(*self.lead, missing, *shape[1:])], dim=axis)


class _Gather(torch.autograd.Function):
    """Gathers the parts of a unit; `values` are the full tensors if they are gathered already."""

    @staticmethod
    def forward(
        ctx: Any, unit: _Unit, values: Sequence[Tensor] | None, *parts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        if values is None:
            return tuple(unit.gather(parts))
        outputs = tuple(value.detach() for value in values)
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*[o for o, need in zip(outputs, needed) if not need])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        parts = _ScatteredSum.apply(ctx.unit, *grads)  # type: ignore[no-untyped-call]
        return None, None, *_needed_of(parts, ctx.needs_input_grad[2:])


class _ScatteredSum(torch.autograd.Function):
    """Sums full tensors over the processes and gives each its rows."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(unit.scattered_sum(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors = _Gather.apply(ctx.unit, None, *grads)  # type: ignore[no-untyped-call]
        return None, *_needed_of(tensors, ctx.needs_input_grad[1:])


def _needed_of(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of inputs that need one; another process may have more inputs."""
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


class ShardedWeights:
    """Weights that modules read, given by the rows that this process holds.

    In a pass they are the parameters themselves; while a virtual model is called, its weights
    replace them.

    Args:
        pool: The units of the model.
        parts: This process's rows by the id of the parameter, possibly with leading axes of copies;
            for a scalar, (1,) on the first process and (0,) on the others.
        leaves: The leaves of the graph that are parts of parameters, by the parameters' ids.
    """

    def __init__(
        self,
        pool: UnitPool,
        parts: Mapping[int, Tensor],
        leaves: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.pool, self.leaves = pool, leaves or {}
        self.units: dict[int, _Unit] = {}
        self.parts: dict[int, list[Tensor]] = {}  # by the number of the unit
        self.places: dict[int, tuple[int, int]] = {}  # unit and index in it, by id
        for number, shards in enumerate(pool.shards):
            self._add(number, [shard for shard in shards if id(shard) in parts], parts)

    def _add(self, number: int, shards: Sequence[Tensor], parts: Mapping[int, Tensor]) -> None:
        if not shards:
            return
        tensors = [parts[id(shard)] for shard in shards]
        lead = tensors[0].shape[: tensors[0].dim() - max(shards[0].dim(), 1)]
        self.units[number] = self.pool.unit(number, shards, lead)
        self.parts[number] = tensors
        self.places |= {id(shard): (number, i) for i, shard in enumerate(shards)}

    def leaf(self, tensor: Tensor) -> Tensor:
        """Return the leaf of the graph for a parameter, or for a vector of a virtual model."""
        return self.leaves.get(id(tensor), local_part(tensor))

    def read(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a parameter, or of its copies, for a module's computation."""
        number, i = self.places[id(parameter)]
        full = self.pool.linked(self, number)[i]
        if not parameter.dim():
            return full.squeeze(-1)
        return full


_active: tuple[ShardedWeights, ...] = ()  # a parameter's value comes from the last one that has it


def active_weights() -> tuple[ShardedWeights, ...]:
    """Return the weights that modules read now."""
    return _active


@contextlib.contextmanager
def use_weights(*weights: ShardedWeights) -> Iterator[None]:
    """Let modules read these weights inside the context; later ones take precedence."""
    global _active
    outer, _active = _active, weights
    try:
        yield
    finally:
        _active = outer


class Slots(dict[str, Any]):
    """The parameters of a module; reading a shard returns its value in the active weights.

    Attribute access of a module looks here, so that modules need not know about shards. Iteration
    gives the shards.
    """

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if _active and is_dtensor(value):
            for weights in reversed(_active):
                if id(value) in weights.places:
                    return weights.read(value)
        return value


@dataclass
class _Gathered:
    """The full tensors of a unit, also as outputs of `_Gather` once a graph needs them."""

    weights: ShardedWeights
    number: int
    values: list[Tensor]
    linked: Sequence[Tensor] | None = None

    @property
    def bytes(self) -> int:
        """The memory of the tensors."""
        return sum(value.untyped_storage().nbytes() for value in self.values)


@dataclass(frozen=True)
class _SavedWeight:
    """A tensor saved for a backward pass, as size, strides and offset of a view of a weight."""

    weights: ShardedWeights
    number: int
    index: int
    view: tuple[torch.Size, tuple[int, ...], int]


class UnitPool:
    """The units of a model, and the currently gathered ones.

    The gathered ones have at most the bytes of the two largest units: one may still be in use when
    another is read.

    Args:
        shards: The sharded parameters of each unit.
        group: The processes that hold their rows.
    """

    def __init__(self, shards: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
        self.shards = shards
        self.agree = _Agreement(group, max(map(len, shards)), local_part(shards[0][0]).device)
        sizes = sorted(self.unit(number, unit).bytes for number, unit in enumerate(shards))
        self.most = sum(sizes[-2:])
        self.gathered: dict[tuple[int, int], _Gathered] = {}  # least recently read first
        # By the storage of a full tensor. While an entry exists, no other storage has its address.
        self.storages: dict[int, tuple[_Gathered, int]] = {}

    def unit(self, number: int, shards: Sequence[Tensor], lead: Sequence[int] = ()) -> _Unit:
        """Return some parameters of a unit, with `lead` axes of copies."""
        shapes = tuple(shard.shape or torch.Size([1]) for shard in shards)
        dtypes = tuple(shard.dtype for shard in shards)
        return _Unit(number, shapes, dtypes, torch.Size(lead), self.agree)

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Save weights for the backward pass by description, and release all units at the end."""
        # In one thread, nodes of equal graphs run in the same order on every process.
        with (
            saved_tensors_hooks(self._pack, self._unpack),
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                yield
            finally:
                self.gathered.clear()
                self.storages.clear()
        self.agree(END)

    def linked(self, weights: ShardedWeights, number: int) -> Sequence[Tensor]:
        """Return the full tensors of a unit, with a graph if gradients are enabled."""
        gathered = self._gather(weights, number)
        if not torch.is_grad_enabled():
            return gathered.values
        if gathered.linked is None:
            gathered.linked = _Gather.apply(  # type: ignore[no-untyped-call]
                weights.units[number], gathered.values, *weights.parts[number]
            )
        return gathered.linked

    def _gather(self, weights: ShardedWeights, number: int) -> _Gathered:
        key = id(weights), number
        gathered = self.gathered.pop(key, None)
        if gathered is None:
            unit = weights.units[number]
            self._make_room(unit)
            with torch.no_grad():
                tensors = unit.gather(weights.parts[number])
            values = [tensor for tensor in tensors if tensor is not None]
            gathered = _Gathered(weights, number, values)
            for i, value in enumerate(values):
                self.storages[value.untyped_storage()._cdata] = gathered, i
        self.gathered[key] = gathered
        return gathered

    def _make_room(self, unit: _Unit) -> None:
        """Release the least recently read units if another one would exceed the limit."""
        held = sum(gathered.bytes for gathered in self.gathered.values())
        while self.gathered and held + unit.bytes > self.most * math.prod(unit.lead):
            oldest = self.gathered.pop(next(iter(self.gathered)))
            held -= oldest.bytes
            for value in oldest.values:
                self.storages.pop(value.untyped_storage()._cdata, None)

    def _pack(self, tensor: Tensor) -> Tensor | _SavedWeight:
        if tensor.layout != torch.strided:
            return tensor
        gathered_and_index = self.storages.get(tensor.untyped_storage()._cdata)
        if gathered_and_index is None:
            return tensor
        gathered, index = gathered_and_index
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _SavedWeight(gathered.weights, gathered.number, index, view)

    def _unpack(self, saved: Tensor | _SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        gathered = self._gather(saved.weights, saved.number)
        return gathered.values[saved.index].as_strided(*saved.view)
