"""Vectors of parameters: lists of tensors, with None for a missing gradient.

The tensors may be shards, DTensors of which a process holds some rows (see distributed.placement);
numbers such as a norm are those of the whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metaseq_lm.distributed import process_group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Vector = Sequence[Tensor | None]

# ---------------------------------------------------------------- shards


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor, without importing what defines it.

    That takes half a second, and a run without shards needs none of it.
    """
    defined = sys.modules.get("torch.distributed.tensor")
    return defined is not None and isinstance(tensor, defined.DTensor)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the processes hold different rows of a tensor."""
    return is_dtensor(tensor) and tensor.dim() > 0


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; it shares its memory."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def like_shard(part: Tensor, like: DTensor) -> DTensor:
    """Return this process's part of a tensor of the shape and placement of `like`."""
    return type(like).from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def rows_each(shape: torch.Size, shards: int) -> int:
    """Return how many rows of a tensor each shard has; the last ones may have fewer."""
    return math.ceil(shape[0] / shards)


def rows_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this process holds of `like`."""
    if not is_dtensor(like) or is_dtensor(tensor) or not like.dim():
        return local(tensor)
    mesh = like.device_mesh["shard"]
    rows = rows_each(like.shape, mesh.size())
    return tensor[rows * mesh.get_local_rank() :][:rows]


def place_like(
    vector: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return a vector of whole tensors or shards in the placement of the parameters."""
    return [
        like_shard(rows_of(v, p), p) if is_dtensor(p) and v is not None and not is_dtensor(v) else v
        for v, p in zip(vector, parameters, strict=True)
    ]


# ---------------------------------------------------------------- arithmetic


def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return an elementwise `function` of tensors that are placed alike."""
    like = tensors[0]
    if not is_dtensor(like):
        return function(*tensors)
    return like_shard(function(*map(local, tensors)), like)


def add(a: Vector, b: Vector, scale: float = 1.0) -> Vector:
    """Return a + scale * b; None counts as zero, and stays None where both are."""
    total: list[Tensor | None] = []
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            total.append(x if y is None else elementwise(lambda y: y * scale, y))
        else:
            total.append(elementwise(lambda x, y: torch.add(x, y, alpha=scale), x, y))
    return total


def scale(a: Vector, factor: float | Tensor) -> Vector:
    """Return factor * a."""
    return [None if x is None else elementwise(lambda x: x * factor, x) for x in a]


def flat(a: Sequence[Tensor | None]) -> Tensor:
    """Return the entries of `a` except None as one vector.

    Of shards it is a DTensor of this process's entries, for `elementwise`, `dot` and `norm`.
    """
    present = [x for x in a if x is not None]
    vector = torch.cat([x.reshape(-1) for x in counted(present)])
    like = next((x for x in present if is_dtensor(x)), None)
    if like is None:
        return vector
    from torch.distributed.tensor import DTensor, Replicate, Shard  # late: see is_dtensor

    mesh, size = like.device_mesh, torch.Size([sum(x.numel() for x in present)])
    return DTensor.from_local(
        vector, mesh, [Replicate(), Shard(0)], run_check=False, shape=size, stride=(1,)
    )


def counted(a: Sequence[Tensor]) -> list[Tensor]:
    """Return the entries that this process adds to a sum: of a tensor held by all, the first's."""
    return [
        local(x)
        for x in a
        if x.dim() or not is_dtensor(x) or not x.device_mesh["shard"].get_local_rank()
    ]


def summed(part: Tensor, a: Sequence[Tensor]) -> Tensor:
    """Return the sum of a number of each process over the shards of `a`."""
    for x in a:
        if is_dtensor(x):
            process_group.sum_within(part, x.device_mesh["shard"].get_group())
            break
    return part


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product over the entries that both have."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    part = torch.dot(flat(counted(left)), flat(counted(right)))
    return summed(part, left)


def norm(a: Vector) -> Tensor:
    """Return the global Euclidean norm."""
    present = [x for x in a if x is not None]
    part = torch.nn.utils.get_total_norm(counted(present))
    if not any(is_dtensor(x) for x in present):
        return part
    return summed(part.double().square(), present).sqrt().to(part.dtype)


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine of the angle between a and b, over all entries flattened together."""
    return dot(a, b) / (norm(a) * norm(b))


def clip(a: Vector, max_norm: float) -> Vector:
    """Return `a` scaled down to a global norm of at most `max_norm` (0 = never)."""
    if not max_norm:
        return a
    factor = (max_norm / (norm(a) + 1e-6)).clamp(max=1.0)
    return a if factor.device.type == "cpu" and factor.item() == 1.0 else scale(a, factor)
