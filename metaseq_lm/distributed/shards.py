"""Sharded tensors, of which each process holds some rows, and messages of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from metaseq_lm.distributed import process_group
from metaseq_lm.distributed.vectors import (
    SHARDS,
    is_dtensor,
    is_sharded,
    like_shard,
    local_part,
    placements_on,
    rows_each,
    rows_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 << 20  # size of one message
OTHER_ORDER = (
    "the replicas do not compute the same layers in the same order, so sharded parameters cannot "
    "be gathered layer by layer; start with engine.gather=model"
)


def to_shard(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this process's rows of a replicated tensor; scalars are not sharded.

    The rows of a tensor on the meta device are not initialised.
    """
    from torch.distributed.tensor import DTensor  # late: see is_dtensor

    placements = placements_on(mesh, 0 if tensor.dim() else None)
    like = DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    rows = rows_of(tensor, like)
    if rows.is_meta:
        return like_shard(torch.empty_like(rows, device=mesh.device_type), like)
    return like_shard(rows.clone(), like)


def part_number(shard: Tensor) -> int | None:
    """Return the number of this process's part of a sharded tensor; None if a replica writes it."""
    assert is_dtensor(shard)
    mesh = shard.device_mesh[SHARDS]
    return mesh.get_local_rank() if 0 in mesh.mesh else None


def first_row(shard: Tensor) -> int:
    """Return the index of the first row of a sharded tensor that this process holds."""
    assert is_dtensor(shard)
    mesh = shard.device_mesh[SHARDS]
    return min(rows_each(shard.shape, mesh.size()) * mesh.get_local_rank(), shard.shape[0])


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this process holds, for its optimizer."""
    if not is_dtensor(parameter):
        return parameter
    part = nn.Parameter(local_part(parameter.detach()), parameter.requires_grad)
    part.role = getattr(parameter, "role", None)  # type: ignore[attr-defined]
    return part


def gather_whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the full tensors of shards; ordinary tensors are unchanged. A collective call."""
    result = [t.detach() for t in tensors]
    sharded = [i for i, t in enumerate(tensors) if is_sharded(t)]
    for i, t in enumerate(tensors):
        if is_dtensor(t) and not t.dim():
            result[i] = local_part(t.detach()).clone()
    for bucket in group_into_buckets(sharded, tensors):
        like = tensors[bucket[0]]
        assert is_dtensor(like)
        group = like.device_mesh[SHARDS].get_group()
        shards = [tensors[i] for i in bucket]
        count = dist.get_world_size(group)
        rows = [_padded(local_part(shard.detach()), shard.shape, count) for shard in shards]
        flat = torch.cat([part.reshape(-1) for part in rows])
        gathered = flat.new_empty(count * flat.numel())
        process_group.start_gather(gathered, flat, group)()
        columns = gathered.view(count, -1).split([part.numel() for part in rows], dim=1)
        for i, shard, column in zip(bucket, shards, columns):
            table = column.reshape(-1, *shard.shape[1:])
            result[i] = table[: shard.shape[0]].contiguous()
    return result


def _padded(rows: Tensor, shape: torch.Size, shards: int) -> Tensor:
    """Return a shard padded with zero rows to the number of rows that every shard sends."""
    missing = rows_each(shape, shards) - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *shape[1:])])


def group_into_buckets(numbers: Iterable[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group `numbers`, in order, so that the tensors of a group have about BUCKET_BYTES.

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
