"""Optimizer steps as pure functions of vectors, for steps that are only imagined.

All are elementwise and differentiable, so the transpose of a step is one autograd call on vectors.
Shapes: any, equal for all arguments up to broadcasting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metaseq_lm.core.errors import UsageError
from metaseq_lm.optim import Optimizer

INSTEAD = "criterion.pretrain_step=sgd (soft labels), criterion.reward_decay=true (hard)"


@dataclass
class Moments:
    """Adam's running moments, and the settings of its next step."""

    first: Tensor
    second: Tensor
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: Tensor | float


def moments_of(optimizer: Optimizer) -> Moments:
    """Return copies of an AdamW optimizer's moments as vectors (P,), and its present rate.

    Raises UsageError for another optimizer, and for one with several rates.
    """
    weight_decay = decoupled_decay(optimizer)

    def flat(name: str) -> Tensor:
        return torch.cat([moment.reshape(-1) for moment in optimizer.slots(name)])

    group = optimizer.inner.param_groups[0]
    return Moments(
        flat("exp_avg"),
        flat("exp_avg_sq"),
        optimizer.updates,
        optimizer.lr,
        tuple(group["betas"]),
        group["eps"],
        weight_decay,
    )


def decoupled_decay(optimizer: Optimizer) -> Tensor | float:
    """Return the weight decay of an AdamW optimizer: one for all parameters, or of each, (P,).

    Raises UsageError for another optimizer, and for one with several rates.
    """
    inner = optimizer.inner
    if not isinstance(inner, torch.optim.AdamW):
        raise UsageError(
            f"a virtual AdamW step, or the weight decay of a step, needs optimizer=adamw, this run has "
            f"{type(inner).__name__}; choose {INSTEAD}"
        )
    if len(set(optimizer.base)) > 1:
        raise UsageError(
            f"a virtual AdamW step has one rate; optimizer.layer_decay must be 1. Or choose {INSTEAD}"
        )
    decay = {id(p): g["weight_decay"] for g in inner.param_groups for p in g["params"]}
    decays: list[float] = [decay[id(p)] for p in optimizer.parameters]
    if all(d == decays[0] for d in decays):
        return decays[0]
    return torch.cat(
        [torch.full_like(p, d).reshape(-1) for p, d in zip(optimizer.parameters, decays)]
    )


def adamw(theta: Tensor, grad: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """Return the parameters after one AdamW step (decoupled decay), and the moments after it.

    The derivative of the root at a second moment of 0 is taken as 0: there the gradient is 0 too
    and the parameter does not move.
    """
    beta1, beta2 = moments.betas
    step = moments.step + 1
    first = beta1 * moments.first + (1 - beta1) * grad
    second = beta2 * moments.second + (1 - beta2) * grad * grad
    moved = second > 0
    root = torch.where(moved, torch.where(moved, second, 1.0).sqrt(), 0.0)
    denominator = root / (1 - beta2**step) ** 0.5 + moments.eps
    size = moments.lr / (1 - beta1**step)
    theta = theta * (1 - moments.lr * moments.weight_decay) - size * first / denominator
    after = Moments(
        first, second, step, moments.lr, moments.betas, moments.eps, moments.weight_decay
    )
    return theta, after


def sgd(theta: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return the parameters after one plain gradient step."""
    return theta - lr * grad
