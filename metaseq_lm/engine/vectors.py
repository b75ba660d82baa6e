"""Arithmetic on vectors of parameters: lists of tensors, where None means that there is no gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

Vector = Sequence[Tensor | None]


def add(a: Vector, b: Vector, scale: float = 1.0) -> Vector:
    """Return a + scale * b; None counts as zero, and stays None where both are."""
    total: list[Tensor | None] = []
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            total.append(x if y is None else y * scale)
        else:
            total.append(torch.add(x, y, alpha=scale))
    return total


def scale(a: Vector, factor: float | Tensor) -> Vector:
    """Return factor * a."""
    return [None if x is None else x * factor for x in a]


def flat(a: Sequence[Tensor | None]) -> Tensor:
    """Return the entries of `a` in one vector, without those that are None."""
    return torch.cat([x.reshape(-1) for x in a if x is not None])


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product over the entries that both have."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return torch.dot(flat([x for x, _ in pairs]), flat([y for _, y in pairs]))


def norm(a: Vector) -> Tensor:
    """Return the global Euclidean norm."""
    return torch.nn.utils.get_total_norm([x for x in a if x is not None])


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine of the angle between a and b, over all entries flattened together."""
    return dot(a, b) / (norm(a) * norm(b))


def clip(a: Vector, max_norm: float) -> Vector:
    """Return `a` scaled down to a global norm of at most `max_norm` (0 = never)."""
    if not max_norm:
        return a
    factor = (max_norm / (norm(a) + 1e-6)).clamp(max=1.0)
    return a if factor.device.type == "cpu" and factor.item() == 1.0 else scale(a, factor)
