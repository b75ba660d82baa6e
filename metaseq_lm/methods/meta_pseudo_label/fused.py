"""Cross-entropies over a large vocabulary, whose first and second derivatives are written out.

With 2,048 positions and 30,000 symbols a tensor of logits has 246 MB, and torch's own derivatives of
log_softmax pass over such tensors dozens of times. Here each derivative is one pass in blocks that
stay in the processor's cache, and log-probabilities are never stored. Small logits take torch's own
functions, which are faster there; which of the two it is follows from the micro-batch, so in fp32
its size can change the last digits.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.criterions import masked_lm
from metaseq_lm.models.layers import full_precision

LARGE = 1 << 22  # logits from which on these functions are used
BLOCK = 1 << 18  # numbers of a block


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each position, 0 where the target is -1; logits (..., V), targets (...)."""
    if logits.numel() < LARGE:
        return masked_lm.cross_entropy(logits, targets)
    flat = full_precision(logits.flatten(0, -2))
    losses: Tensor = HardLoss.apply(flat, targets.flatten())  # type: ignore[no-untyped-call]
    return losses.view(targets.shape)


def soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return the cross-entropy of each position with `probabilities` (..., V), which sum to 1."""
    if logits.numel() < LARGE:
        return -(probabilities * logits.log_softmax(-1)).sum(-1)
    flat = full_precision(logits.flatten(0, -2)), probabilities.flatten(0, -2)
    losses: Tensor = SoftLoss.apply(*flat)  # type: ignore[no-untyped-call]
    return losses.view(logits.shape[:-1])


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits (N, V) in blocks."""
    step = max(1, BLOCK // logits.shape[1])
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, (N, 1)."""
    return torch.cat([logits[at].logsumexp(-1, keepdim=True) for at in blocks(logits)])


def softmax_hvp(logits: Tensor, log_sum: Tensor, scale: Tensor, vector: Tensor) -> Tensor:
    """Return scale * (diag p - p p^T) vector of each row, p its softmax: the loss's Hessian on a vector."""
    out = torch.empty_like(logits)
    for at in blocks(logits):
        p = torch.sub(logits[at], log_sum[at]).exp_()
        product = torch.mul(p, vector[at], out=out[at])
        product.sub_(p.mul_(product.sum(-1, keepdim=True))).mul_(scale[at])
    return out


class HardLoss(torch.autograd.Function):
    """Cross-entropy of logits (N, V) with targets (N,), -1 for none; (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum = log_sums(logits)
        ctx.save_for_backward(logits, targets, log_sum)
        chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
        return (log_sum - chosen).squeeze(1).masked_fill(targets < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sum = ctx.saved_tensors
        scale = grads[0].masked_fill(targets < 0, 0.0).unsqueeze(1)
        gradient = HardGradient.apply(logits, targets, log_sum, scale)  # type: ignore[no-untyped-call]
        return gradient, None


class HardGradient(torch.autograd.Function):
    """scale * (softmax - one-hot target), (N, V)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, log_sum: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, targets, log_sum, scale)
        out = torch.empty_like(logits)
        for at in blocks(logits):
            torch.sub(logits[at], log_sum[at], out=out[at]).exp_().mul_(scale[at])
        return out.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        logits, targets, log_sum, scale = ctx.saved_tensors
        hvp = softmax_hvp(logits, log_sum, scale, grads[0])
        if not ctx.needs_input_grad[3]:
            return hvp, None, None, None
        ones = torch.ones_like(scale)
        plain = HardGradient.apply(logits, targets, log_sum, ones)  # type: ignore[no-untyped-call]
        return hvp, None, None, (plain * grads[0]).sum(-1, keepdim=True)


class SoftLoss(torch.autograd.Function):
    """log sum exp - <probabilities, logits>, (N,): the cross-entropy, as probabilities sum to 1.

    Its derivative by the probabilities is -logits, which is that of the cross-entropy but for a
    constant in each row; a softmax does not feel it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor) -> Tensor:
        log_sum = log_sums(logits)
        ctx.save_for_backward(logits, probabilities, log_sum)
        products = [(probabilities[at] * logits[at]).sum(-1) for at in blocks(logits)]
        return log_sum.squeeze(1) - torch.cat(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        logits, probabilities, log_sum = ctx.saved_tensors
        scale = grads[0].unsqueeze(1)
        by_logits = SoftGradient.apply(logits, probabilities, log_sum, scale)  # type: ignore[no-untyped-call]
        return by_logits, -scale * logits if ctx.needs_input_grad[1] else None


class SoftGradient(torch.autograd.Function):
    """scale * (softmax - probabilities), (N, V)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probabilities: Tensor, log_sum: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, probabilities, log_sum, scale)
        out = torch.empty_like(logits)
        for at in blocks(logits):
            part = torch.sub(logits[at], log_sum[at], out=out[at]).exp_()
            part.sub_(probabilities[at]).mul_(scale[at])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        logits, probabilities, log_sum, scale = ctx.saved_tensors
        hvp = softmax_hvp(logits, log_sum, scale, grads[0])
        by_target = -scale * grads[0] if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[3]:
            return hvp, by_target, None, None
        ones = torch.ones_like(scale)
        plain = SoftGradient.apply(logits, probabilities, log_sum, ones)  # type: ignore[no-untyped-call]
        return hvp, by_target, None, (plain * grads[0]).sum(-1, keepdim=True)
