"""Vectors of parameters: lists of tensors, with None for a missing gradient.

The tensors may be shards: DTensors of which a process holds some rows, see distributed.shards.
Numbers such as a norm are always over the whole vector.
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
    from typing import TypeGuard

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

Vector = Sequence[Tensor | None]
REPLICAS, SHARDS = "replicate", "shard"  # axes of a mesh; one without replicas has only SHARDS

# ---------------------------------------------------------------- shards


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor, without importing the class."""
    # The import takes half a second, and a run without shards does not need it.
    defined = sys.modules.get("torch.distributed.tensor")
    return defined is not None and isinstance(tensor, defined.DTensor)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether the processes hold different rows of a tensor."""
    return is_dtensor(tensor) and tensor.dim() > 0


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; it shares the tensor's memory."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def like_shard(part: Tensor, like: DTensor) -> DTensor:
    """Wrap this process's part of a tensor as a DTensor with the rows and placement of `like`."""
    shape = torch.Size([*like.shape[:1], *part.shape[1:]])
    return _from_local(part, like, like.placements, shape)


def _from_local(
    part: Tensor, like: DTensor, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    # torch takes a shape only together with strides; a tensor on the meta device has no memory.
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        part, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def placements_on(mesh: DeviceMesh, axis: int | None) -> list[Placement]:
    """Return the placements of a tensor whose `axis` is sharded; None for none."""
    from torch.distributed.tensor import Replicate, Shard  # late: see is_dtensor

    placed = Replicate() if axis is None else Shard(axis)
    return [*(Replicate() for _ in range(mesh.ndim - 1)), placed]


def replicas_of(shard: DTensor) -> ProcessGroup | None:
    """Return the group of processes with the same rows of a sharded tensor; None for just one."""
    mesh = shard.device_mesh
    if mesh.ndim == 1:
        return None
    return mesh[REPLICAS].get_group()


def rows_each(shape: torch.Size, shards: int) -> int:
    """Return how many rows of a tensor each shard has; the last ones may have fewer."""
    return math.ceil(shape[0] / shards)


def rows_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this process holds of a tensor placed like `like`."""
    if not is_dtensor(like) or is_dtensor(tensor) or not like.dim():
        return local_part(tensor)
    mesh = like.device_mesh[SHARDS]
    rows = rows_each(like.shape, mesh.size())
    return tensor[rows * mesh.get_local_rank() :][:rows]


def place_like(
    vector: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return a vector of whole tensors or shards in the placement of the parameters."""
    placed: list[Tensor | None] = []
    for tensor, parameter in zip(vector, parameters, strict=True):
        if tensor is None or is_dtensor(tensor) or not is_dtensor(parameter):
            placed.append(tensor)
        else:
            placed.append(like_shard(rows_of(tensor, parameter), parameter))
    return placed


# ---------------------------------------------------------------- arithmetic


def _elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return an elementwise `function` of tensors with equal placements."""
    like = tensors[0]
    if not is_dtensor(like):
        return function(*tensors)
    return like_shard(function(*map(local_part, tensors)), like)


def add(a: Vector, b: Vector, scale: float = 1.0) -> Vector:
    """Return a + scale * b; None counts as zero, and the result is None where both are."""
    total: list[Tensor | None] = []
    for x, y in zip(a, b, strict=True):
        if y is None:
            total.append(x)
        elif x is None:
            total.append(_elementwise(lambda y: y * scale, y))
        else:
            total.append(_elementwise(lambda x, y: torch.add(x, y, alpha=scale), x, y))
    return total


def scale(a: Vector, factor: float | Tensor) -> Vector:
    """Return factor * a."""
    return [None if x is None else _elementwise(lambda x: x * factor, x) for x in a]


def flat(a: Sequence[Tensor | None]) -> Tensor:
    """Return the entries of `a` except None as one vector.

    For shards it is a DTensor of this process's entries, for `_elementwise`, `dot` and `norm`.
    """
    present = [x for x in a if x is not None]
    return place_flat(torch.cat([part(x).reshape(-1) for x in present]), present)


def place_flat(vector: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Return vectors (..., P) of this process's entries of tensors `like`, placed like them."""
    first = next((x for x in like if is_dtensor(x)), None)
    if first is None:
        return vector
    shape = torch.Size([*vector.shape[:-1], sum(x.numel() for x in like)])
    return _from_local(vector, first, placements_on(first.device_mesh, vector.dim() - 1), shape)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, placed like `like`, of a vector (P,) of `flat`."""
    tensors: list[Tensor] = []
    pieces = local_part(vector).split([part(x).numel() for x in like])
    for piece, x in zip(pieces, like):
        if not is_dtensor(x):
            tensors.append(piece.view_as(x))
        elif x.dim():
            tensors.append(like_shard(piece.view_as(local_part(x)), x))
        else:  # only the first process holds scalars
            tensors.append(like_shard(_summed(piece.sum(), [x]), x))
    return tensors


def part(x: Tensor) -> Tensor:
    """Return the rows of a tensor that this process contributes to a sum: the ones it holds.

    A scalar, which all processes hold, is contributed by the first.
    """
    if x.dim() or not is_dtensor(x):
        return local_part(x)
    return local_part(x).reshape(1)[: int(not x.device_mesh[SHARDS].get_local_rank())]


def gather_row(tensor: Tensor, index: int) -> Tensor:
    """Return a copy of a row of a tensor; for a shard, a collective call of its processes."""
    if not is_dtensor(tensor):
        return tensor[index].detach().clone()
    mesh = tensor.device_mesh[SHARDS]
    at = index - rows_each(tensor.shape, mesh.size()) * mesh.get_local_rank()
    rows = local_part(tensor.detach())
    term = rows.new_zeros(rows.shape[1:])
    if 0 <= at < len(rows):
        term.copy_(rows[at])
    return _summed(term, [tensor])


def _summed(term: Tensor, a: Sequence[Tensor]) -> Tensor:
    """Return the sum of each process's `term` over the shards of `a`."""
    for x in a:
        if is_dtensor(x):
            process_group.sum_within(term, x.device_mesh[SHARDS].get_group())
            break
    return term


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product over the tensors that are None in neither."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    product = torch.dot(local_part(flat(left)), local_part(flat(right)))
    return _summed(product, left)


def norm(a: Vector) -> Tensor:
    """Return the global Euclidean norm."""
    present = [x for x in a if x is not None]
    size = torch.nn.utils.get_total_norm([part(x) for x in present])
    if not any(is_dtensor(x) for x in present):
        return size
    # The square of a large norm would overflow in float32.
    return _summed(size.double().square(), present).sqrt().to(size.dtype)


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine of the angle between a and b, over all entries flattened together."""
    return dot(a, b) / (norm(a) * norm(b))


def clip(a: Vector, max_norm: float) -> Vector:
    """Return `a` scaled down to a global norm of at most `max_norm` (0 = never)."""
    if not max_norm:
        return a
    factor = (max_norm / (norm(a) + 1e-6)).clamp(max=1.0)
    # On a GPU the host would wait for the factor.
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return a
    return scale(a, factor)
