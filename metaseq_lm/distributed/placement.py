"""Sharded parameters, gathered for each pass.

Between passes a sharded parameter is a DTensor: each process holds its rows, and the moments of its
optimizer are as large. For the duration of a pass (`Placement.whole`) the modules hold ordinary
leaves: collectives are called at the two ends of the pass only, so that replicas may do different
work inside. A pass without second derivatives can have the layers of a Transformer put together one
at a time instead (`Placement.by_layer`); in one with second derivatives (`Placement.in_graph`) the
graph itself gathers what it needs (see distributed.gathering).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.gathering import ShardedWeights, Slots, UnitPool, use_weights
from metaseq_lm.distributed.layers import LayerwiseGather, Order, Slot, empty_without_storage
from metaseq_lm.distributed.vectors import (
    is_dtensor,
    is_sharded,
    like_shard,
    local,
    part,
    rows_each,
    rows_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 << 20  # of one message
ALIGNMENT = 8  # bytes, of each tensor in a message of several dtypes


def build_mesh(parallel: str, device: str) -> DeviceMesh | None:
    """Return the mesh (replicas, shards) of engine.parallel; None without sharding.

    "shard" divides every parameter among all processes, "hybrid" among those of a node
    (LOCAL_WORLD_SIZE), with a replica on each node. Raises UsageError if nodes differ in processes.
    """
    world = process_group.world_size()
    if parallel == "replicate" or world == 1:
        return None
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if parallel == "hybrid" else world
    if set(process_group.gather_objects(shards)) != {shards} or world % shards:
        raise UsageError(
            f"engine.parallel=hybrid needs as many processes on every node; there are {world} in "
            f"all and {shards} on this node"
        )
    shape = (world // shards, shards)
    with process_group.together():
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def build_placement(
    model: nn.Module, parallel: str, device: str, layers: bool = False
) -> Placement | None:
    """Shard a model's parameters as engine.parallel says; None without sharding.

    With `layers`, passes can put together those modules one at a time whose class sets
    `is_gathered_alone`. Raises UsageError as `build_mesh`.
    """
    mesh = build_mesh(parallel, device)
    return None if mesh is None else Placement(model, mesh, layers)


class Placement:
    """The sharded parameters of a model.

    All methods but `leaf` are calls of all replicas.

    Attributes:
        layers: The modules that `by_layer` puts together one at a time (those whose class sets
            `is_gathered_alone`), with the slots of the parameters that no other module has.
        order: What passes by layer have shown of the order in which the layers are called.
        pool: The units that passes with second derivatives gather: the layers, and what any other
            module has itself; without `layers` all parameters are one unit.
        rounded: The ids of the shards that autocast rounds wherever they are used, those of linear
            maps; passes with `low` gather them in bfloat16.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, layers: bool = False) -> None:
        self.slots: list[Slot] = []
        self.layers: list[tuple[nn.Module, list[Slot]]] = []
        self.leaves: dict[int, nn.Parameter] = {}  # by the id of the shard, during a pass
        self.order: Order = {}
        self.rounded: set[int] = set()
        self._shard(model, mesh)
        if layers:
            self._find_layers(model)
            # Not the mesh's, in which a gather would queue after reductions of gradients.
            self.gathers = process_group.new_group(mesh.mesh.tolist())
        self.pool = UnitPool(self._units(), mesh["shard"].get_group())

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        shards: dict[int, nn.Parameter] = {}  # a tied parameter has several slots
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in shards:
                    shard = to_shard(parameter.detach(), mesh)
                    shards[id(parameter)] = nn.Parameter(shard, parameter.requires_grad)
                self.slots.append((module, name, shards[id(parameter)]))
            if module._parameters:
                module._parameters = Slots(module._parameters)
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(read_flat_weights)
                module.register_forward_hook(forget_flat_weights, always_call=True)
        elsewhere = {id(s) for module, _, s in self.slots if not isinstance(module, nn.Linear)}
        singles = {id(s) for s in self.shards if s.dtype == torch.float32}
        self.rounded = singles - elsewhere
        self._install({id(shard): shard for shard in shards.values()})

    def _find_layers(self, model: nn.Module) -> None:
        for module in model.modules():
            if getattr(module, "is_gathered_alone", False):
                inside = {id(m) for m in module.modules()}
                outside = {id(shard) for owner, _, shard in self.slots if id(owner) not in inside}
                slots = [s for s in self.slots if id(s[0]) in inside and id(s[2]) not in outside]
                # A layer that shares weights with other modules is not gathered separately.
                if any(is_sharded(shard) for _, _, shard in slots):
                    self.layers.append((module, slots))

    def _units(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each unit of `pool`."""
        if not self.layers:
            return [self.shards]
        units: dict[int, dict[int, nn.Parameter]] = {}  # by the id of the layer or module
        layer_of = {id(s): id(layer) for layer, slots in self.layers for _, _, s in slots}
        units_of: dict[int, int] = {}
        for module, _, shard in self.slots:  # a tied parameter belongs to its first owner
            key = units_of.setdefault(id(shard), layer_of.get(id(shard), id(module)))
            units.setdefault(key, {})[id(shard)] = shard
        return [list(unit.values()) for unit in units.values()]

    @property
    def shards(self) -> list[nn.Parameter]:
        """The sharded parameters, a tied one once."""
        return list({id(shard): shard for _, _, shard in self.slots}.values())

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the gathered leaf of a parameter during a pass, or the parameter itself."""
        return self.leaves.get(id(parameter), parameter)

    def refresh(self, parameters: Iterable[Tensor]) -> None:
        """Copy changed shards to the leaves of the current pass, if any."""
        stale = [p for p in parameters if id(p) in self.leaves]
        with torch.no_grad():
            for shard, tensor in zip(stale, whole(stale)):
                self.leaves[id(shard)].copy_(tensor)

    @contextlib.contextmanager
    def whole(self, write: bool = False, low: bool = False) -> Iterator[None]:
        """Gather full parameters inside the context; `write` copies changes back to the shards.

        With `low`, for a pass under autocast, those that it rounds to bfloat16 are rounded already.
        """
        if self.leaves:
            yield
            return
        with self._holding(self.shards, low):
            leaves = self.leaves
            yield
        if write:
            with torch.no_grad():
                for shard in self.shards:
                    local(shard).copy_(rows_of(leaves[id(shard)], shard))

    @contextlib.contextmanager
    def by_layer(self, low: bool = False) -> Iterator[None]:
        """Gather full parameters inside the context, those of a layer only while it computes.

        With `low`, for a pass under autocast, those of layers that it rounds are bfloat16 tensors.
        For passes without second derivatives in which all replicas call the same layers in the same
        order.
        """
        in_turn = {id(shard): shard for _, slots in self.layers for _, _, shard in slots}
        with self._holding([s for s in self.shards if id(s) not in in_turn], low):
            for number, shard in in_turn.items():
                empty = empty_without_storage(shard.shape, shard.device, self._sent_as(shard, low))
                self.leaves[number] = nn.Parameter(empty, shard.requires_grad)
            with LayerwiseGather(self.layers, self.leaves, self._gather_layer, self.order):
                yield

    @contextlib.contextmanager
    def in_graph(self) -> Iterator[ShardedWeights]:
        """Let modules read weights that the graph gathers, for passes with second derivatives.

        All replicas must run the same graph. Raises MetaseqError if they do not.
        """
        assert not self.leaves, "second derivatives are not taken inside Engine.whole"
        leaves, parts = {}, {}
        for shard in self.shards:
            leaf = local(shard.detach()).requires_grad_(shard.requires_grad)
            leaves[id(shard)] = leaf
            parts[id(shard)] = leaf if shard.dim() else leaf.reshape(1)[: len(part(shard))]
        weights = ShardedWeights(self.pool, parts, leaves)
        with use_weights(weights), self.pool.in_pass():
            yield weights

    def _sent_as(self, shard: Tensor, low: bool) -> torch.dtype:
        return torch.bfloat16 if low and id(shard) in self.rounded else shard.dtype

    def _gather_layer(self, shards: Sequence[Tensor], number: int) -> Callable[[], list[Tensor]]:
        """Start gathering the shards of layer `number`; the result waits for the full tensors."""
        sharded = [shard for shard in shards if is_sharded(shard)]
        dtypes = [self.leaves[id(shard)].dtype for shard in sharded]
        wait = start_gather(sharded, dtypes, self.gathers, number)

        def values() -> list[Tensor]:
            rows = iter(wait())
            return [next(rows) if is_sharded(s) else local(s.detach()) for s in shards]

        return values

    @contextlib.contextmanager
    def _holding(self, shards: Sequence[nn.Parameter], low: bool) -> Iterator[None]:
        """Replace some shards in the modules by full leaves."""
        tensors = whole(shards, [self._sent_as(shard, low) for shard in shards])
        self.leaves = {
            # In float32 even where it was rounded: gradients of micro-batches are added up in it.
            id(shard): nn.Parameter(tensor, shard.requires_grad)
            for shard, tensor in zip(shards, tensors)
        }
        self._install(self.leaves)
        try:
            yield
        finally:
            self.leaves = {}
            self._install({id(shard): shard for shard in shards})

    def _install(self, parameters: dict[int, nn.Parameter]) -> None:
        for module, name, shard in self.slots:
            if id(shard) in parameters:
                # Not module._parameters: an LSTM keeps a list of its weights beside them.
                setattr(module, name, parameters[id(shard)])


def read_flat_weights(module: nn.RNNBase, args: Any) -> None:
    """Give a recurrent layer the weights of this call: it computes with a list of its own."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def forget_flat_weights(module: nn.RNNBase, args: Any, output: Any) -> None:
    """Reset that list to what the layer holds between calls."""
    # get, unlike an attribute, gathers nothing: see Slots.
    module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


# ---------------------------------------------------------------- shards


def to_shard(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this process's rows of a replicated tensor; scalars are not sharded.

    Those of a tensor on the meta device are not initialised.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # late: see is_dtensor

    placements = [Replicate(), Shard(0) if tensor.dim() else Replicate()]
    like = DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    rows = rows_of(tensor, like)
    if rows.is_meta:
        return like_shard(torch.empty_like(rows, device=mesh.device_type), like)
    return like_shard(rows.clone(), like)


def part_number(shard: Tensor) -> int | None:
    """Return which part of a sharded tensor this process writes; None if another replica does."""
    assert is_dtensor(shard)
    mesh = shard.device_mesh
    return None if mesh["replicate"].get_local_rank() else mesh["shard"].get_local_rank()


def first_row(shard: Tensor) -> int:
    """Return which row of a sharded tensor is the first that this process holds."""
    assert is_dtensor(shard)
    mesh = shard.device_mesh["shard"]
    return min(rows_each(shard.shape, mesh.size()) * mesh.get_local_rank(), shard.shape[0])


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this process holds, as an optimizer steps it."""
    if not is_dtensor(parameter):
        return parameter
    return nn.Parameter(local(parameter.detach()), parameter.requires_grad)


def whole(tensors: Sequence[Tensor], sent_as: Sequence[torch.dtype] | None = None) -> list[Tensor]:
    """Return the full tensors of shards; ordinary tensors are unchanged. A collective call.

    They travel, rounded, as the dtypes `sent_as`.
    """
    result = [t.detach() for t in tensors]
    sharded = [i for i, t in enumerate(tensors) if is_sharded(t)]
    for i, t in enumerate(tensors):
        if is_dtensor(t) and not t.dim():
            result[i] = local(t.detach()).clone()
    for bucket in buckets(sharded, tensors):
        like = tensors[bucket[0]]
        assert is_dtensor(like)
        group = like.device_mesh["shard"].get_group()
        dtypes = [tensors[i].dtype if sent_as is None else sent_as[i] for i in bucket]
        for i, rows in zip(bucket, start_gather([tensors[i] for i in bucket], dtypes, group)()):
            result[i] = rows.to(tensors[i].dtype).contiguous()
    return result


def start_gather(
    shards: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> Callable[[], list[Tensor]]:
    """Start gathering shards, as `dtypes`, in one message; the result waits for the full tensors.

    Those are views. It raises MetaseqError if another replica sends a message of another `tag`; on
    a GPU, where looking at it would wait for the device, the tensors are NaN then.
    """
    count = dist.get_world_size(group)
    parts = [local(shards[0]).new_full((1,), tag, dtype=torch.int64)]
    parts += [
        padded(local(t.detach()).to(dtype), t.shape, count) for t, dtype in zip(shards, dtypes)
    ]
    flat = torch.cat([aligned_bytes(p) for p in parts])
    gathered = flat.new_empty(count * flat.numel())
    wait = process_group.start_gather(gathered, flat, group)
    sizes = [p.numel() * p.element_size() for p in parts]
    kinds = [torch.int64, *dtypes]

    def whole_tensors() -> list[Tensor]:
        wait()
        columns, start, table = [], 0, gathered.view(count, -1)
        for kind, size in zip(kinds, sizes):
            columns.append(table[:, start : start + size].view(kind))
            start += size + -size % ALIGNMENT
        agree = (columns[0] == tag).all()
        if gathered.is_cuda:
            gathered.masked_fill_(~agree, 255)  # NaN in every type
        elif not agree:
            raise MetaseqError(
                "the replicas do not compute the same layers in the same order, so a sharded model "
                "cannot be put together layer by layer; start with engine.gather=model"
            )
        return [c.reshape(-1, *t.shape[1:])[: t.shape[0]] for c, t in zip(columns[1:], shards)]

    return whole_tensors


def aligned_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, with zeros up to a multiple of ALIGNMENT."""
    data = tensor.reshape(-1).view(torch.uint8)
    missing = -data.numel() % ALIGNMENT
    return torch.cat([data, data.new_zeros(missing)]) if missing else data


def padded(rows: Tensor, shape: torch.Size, shards: int) -> Tensor:
    """Return a shard with rows of zeros up to the number that every shard sends."""
    missing = rows_each(shape, shards) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *shape[1:])]) if missing else rows


def buckets(numbers: Iterable[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return `numbers`, in order, in groups of about BUCKET_BYTES of their tensors.

    The tensors of a group have one dtype, and are all sharded or all whole.
    """
    result: list[list[int]] = []
    filled, kind = 0, None
    for number in numbers:
        tensor = tensors[number]
        if not result or filled >= BUCKET_BYTES or kind != (tensor.dtype, is_sharded(tensor)):
            result.append([])
            filled, kind = 0, (tensor.dtype, is_sharded(tensor))
        result[-1].append(number)
        filled += tensor.numel() * tensor.element_size()
    return result
