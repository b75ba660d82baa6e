"""Random and adversarial perturbations of a student's input (Miyato et al. 2017).

Shapes: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from metaseq_lm.models.layers import current_context


def unit(x: Tensor) -> Tensor:
    """Return x (B, ...) with rows scaled to norm 1; a row of zeros stays."""
    # In fp32 the squares of tiny entries would be 0.
    norms = x.flatten(1).double().norm(dim=1)
    norms = torch.where(norms > 0, norms, 1.0)
    return (x.double() / norms.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def gaussian(like: Tensor) -> Tensor:
    """Return normal numbers shaped as `like` (B, ...), drawn by row (see models.layers.Noise)."""
    noise = current_context().noise
    if noise is None:
        return torch.randn_like(like)
    # Box and Muller 1958; 1 - u is never 0.
    radius, angle = (noise.uniform(like.shape, like.dtype) for _ in range(2))
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)


def adversarial_direction(start: Tensor, xi: float, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient (B, ...) of a loss, a sum over rows, at a step of norm `xi` towards `start`.

    From a random `start` this is one step of power iteration for the direction that raises the loss
    most. Parameters get no gradient.
    """
    step = (xi * unit(start)).requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(step), step)
    return gradient
