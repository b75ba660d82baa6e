"""Layers whose parameters may have a leading dimension for independent copies of the model.

With ordinary parameters they behave like torch's layers. Called through
`torch.func.functional_call` with one more dimension, they compute all copies at once: parameters
(copies, ...), activations (copies, batch, length, width). Unrolled students are such copies. Also
the cross-entropy of logits, with hand-written derivatives for large vocabularies.

Shapes: C copies, B batch, S length, D width, V vocabulary.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.roles import Role
from metaseq_lm.distributed.vectors import local_part
from metaseq_lm.forward.passes import current_context, full_precision, scale_of

__all__ = [
    "AveragedWeights",
    "Dropout",
    "Embedding",
    "Heads",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "cross_entropy",
    "dropout_at",
    "select",
]


def select(x: Tensor, positions: Tensor) -> Tensor:
    """Return the states (..., M, D) of x (..., S, D) at `positions` (..., M)."""
    return x.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, x.shape[-1]))


def reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x (B, S, D) with the first `lengths` (B,) positions of each row in reverse order."""
    positions = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths.unsqueeze(1) - 1 - positions
    return select(x, torch.where(mirrored >= 0, mirrored, positions))


class Linear(nn.Linear):
    """`nn.Linear` that also takes weights (C, out, in)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for weights (out, in) or (C, out, in); x W^T if the bias is None."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    flat = x.reshape(weight.shape[0], -1, x.shape[-1])
    if bias is None:
        flat = torch.bmm(flat, weight.mT)
    else:
        flat = torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
    return flat.view(*x.shape[:-1], -1)


class _GELULinear(torch.autograd.Function):
    """gelu(x) W^T + b that saves x and recomputes gelu(x) in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # gelu(x) is usually four times as wide as the hidden states.
        ctx.save_for_backward(x, weight)
        # Not cast by autocast: its cached copy would have no graph in other uses of the weight.
        bias = None if bias is None else bias.to(x.dtype)
        return F.linear(F.gelu(x), weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat, grad_x, grad_weight, grad_bias = grad.reshape(-1, grad.shape[-1]), None, None, None
        if needs_x:
            grad_x = torch.ops.aten.gelu_backward(grad @ weight.to(grad.dtype), x)
        if needs_weight:
            grad_weight = (flat.mT @ F.gelu(x).reshape(-1, x.shape[-1])).to(weight.dtype)
        if needs_bias:
            grad_bias = flat.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


# Tensors of at least this many elements save less for the backward pass than torch's functions do.
# For smaller ones memory does not matter, and recomputation in Python only costs time.
MEMORY_SAVING_NUMEL = 1 << 18


def _saves_memory(x: Tensor) -> bool:
    """Return whether operations on x trade time for memory; torch.compile decides by itself."""
    return not torch.compiler.is_compiling() and x.numel() >= MEMORY_SAVING_NUMEL


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return gelu(x) W^T, plus b unless it is None, for weights (out, in) or (C, out, in)."""
    if weight.dim() == 3 or not (_saves_memory(x) and torch.is_grad_enabled()):
        return linear(F.gelu(x), weight, bias)
    output: Tensor = _GELULinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last axis that also takes weights (C, D)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        scaled = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        scaled = scaled * _of_copies(self.weight, x)
        # nn.LayerNorm(bias=False) has no bias.
        bias: Tensor | None = self.bias
        if bias is None:
            return scaled
        return scaled + _of_copies(bias, x)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last axis that also takes weights (C, D); computed in their precision.

    The result has the precision of x, which under autocast is lower for queries and keys.
    """

    def forward(self, x: Tensor) -> Tensor:
        whole = x.to(self.weight.dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(whole, self.normalized_shape, self.weight, self.eps).to(x.dtype)
        scaled = F.rms_norm(whole, self.normalized_shape, None, self.eps)
        return (scaled * _of_copies(self.weight, x)).to(x.dtype)


def _of_copies(vectors: Tensor, x: Tensor) -> Tensor:
    """Reshape vectors (C, D) to multiply the states x (C, ..., D) of copies."""
    return vectors.view(len(vectors), *[1] * (x.dim() - 2), -1)


class Embedding(nn.Embedding):
    """Token embedding of ids (..., S) or of probabilities (..., S, V); weights (V, D) or (C, V, D).

    The padding row receives no gradient from the input side; a tied head may train it. With finite
    differences, which ignore detach(), pass the undisplaced `padding_row` (D,) as a buffer through
    functional_call: it is used as the constant.
    """

    padding_row: Tensor | None

    def __init__(self, size: int, width: int, padding_idx: int | None = None) -> None:
        super().__init__(size, width, padding_idx=padding_idx)
        self.register_buffer("padding_row", None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        if tokens.is_floating_point():
            # One product per copy: broadcasting over rows would make the gradient a table per row.
            flat = tokens.flatten(0 if weight.dim() == 2 else 1, -2)
            embedded = (flat @ weight).view(*tokens.shape[:-1], -1)
            if self.padding_idx is None:
                return embedded
            # Adds zero: this only removes the gradient of the padding row.
            row = weight[..., self.padding_idx : self.padding_idx + 1, :]
            row = row if weight.dim() == 2 else row.unsqueeze(1)
            constant = row.detach() if self.padding_row is None else self.padding_row
            return embedded + tokens[..., self.padding_idx, None] * (constant - row)
        if weight.dim() == 2:
            return F.embedding(tokens, weight, self.padding_idx)
        embedded = lookup(tokens, weight)
        if self.padding_idx is None:
            return embedded
        return embedded.where((tokens != self.padding_idx).unsqueeze(-1), embedded.detach())


def lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up ids (..., S) in a table (V, D), or ids (C, ..., S) in C tables (C, V, D)."""
    if weight.dim() == 2:
        return F.embedding(ids, weight)
    copies, size, width = weight.shape
    offsets = torch.arange(copies, device=ids.device) * size
    rows = ids + offsets.view(-1, *[1] * (ids.dim() - 1))
    return F.embedding(rows, weight.reshape(-1, width))


class Dropout(nn.Module):
    """Dropout with a mask for each row that does not depend on the order of calls (see Noise)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        # Above it the rate rounds to 1 in units of 1/65536, and 1 / (1 - p) has no value.
        if not 0 <= p <= 1 - 2**-16:
            raise UsageError(
                "a dropout probability (model.dropout and its like) must be at least "
                f"0 and at most 65535/65536, got {p}"
            )
        self.p = p

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return dropout of x, added to a `residual` of its shape if there is one."""
        if not self.training or self.p == 0:
            return x if residual is None else residual + x
        context = current_context()
        if context.noise is not None and context.noise.kernels is not None:
            return context.noise.dropout(x, self.p, residual)
        if context.noise is None:
            dropped = F.dropout(x, self.p)
        elif torch.finfo(x.dtype).bits < 32 or _saves_memory(x):
            # A boolean mask takes one byte per element, and bf16 is too coarse for the scale.
            mask = context.noise.keep(x.shape, self.p, torch.bool, context.ahead)
            dropped = torch.where(mask, x, 0.0).mul_(scale_of(self.p))
        else:
            dropped = x * context.noise.keep(x.shape, self.p, x.dtype, context.ahead)
        return dropped if residual is None else residual + dropped

    def extra_repr(self) -> str:
        return f"p={self.p}"


@contextlib.contextmanager
def dropout_at(net: nn.Module, rate: float | None) -> Iterator[None]:
    """Set every dropout rate of `net` inside the context; None changes nothing."""
    if rate is None:
        yield
        return
    layers = [m for m in net.modules() if isinstance(m, Dropout)]
    before = [layer.p for layer in layers]
    for layer in layers:
        layer.p = rate
    try:
        yield
    finally:
        for layer, p in zip(layers, before):
            layer.p = p


class ScalarMix(nn.Module):
    """scale * sum_j softmax(weights)_j h_j, then dropout; initially the mean of the h_j.

    Equation 1 of Peters et al. 2018, without their optional layer norms and penalty on the weights.

    Args:
        layers: Number of h_j, embeddings included.
        width: Their width X.
        dropout: Dropout probability of the result.
    """

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = Dropout(dropout)

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the mix (B, S, X) of `layers`, (B, S, X) each."""
        coefficients = self.scale * self.weights.softmax(0)
        parts = [
            coefficient * states for coefficient, states in zip(coefficients, layers, strict=True)
        ]
        embeddings: Tensor = self.dropout(torch.stack(parts).sum(0))
        return embeddings


class Heads(nn.ModuleDict):
    """Heads by name; their matrices have the role of heads unless a head declares another."""

    parameter_roles: ClassVar = {"": Role.HEAD}


RAW_PREFIX = "raw_"  # prefix of metrics of the weights without averaging


@torch.no_grad()
def move_averages(averages: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Move averages in place: a <- decay a + (1 - decay) w."""
    if averages:
        torch._foreach_lerp_(list(averages), list(weights), 1 - decay)


class AveragedWeights(nn.Module):
    """A copy of `net` with exponential moving averages of its weights.

    The averages start at the current weights, without bias correction. They are part of the model,
    and so of every checkpoint, but are not trained. Buffers are copied, not averaged.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.net = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, net: nn.Module, decay: float | None = None) -> None:
        """Update the average with the weights of `net`: a <- decay a + (1 - decay) w.

        `net` may have parameters that the average lacks. `decay`, for one that changes in training,
        replaces the constructor's.
        """
        weights, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        averages = dict(self.net.named_parameters())
        move_averages(
            [local_part(average) for average in averages.values()],
            [local_part(weights[name]) for name in averages],
            self.decay if decay is None else decay,
        )
        for name, buffer in self.net.named_buffers():
            buffer.copy_(buffers[name])


# ---------------------------------------------------------------- cross-entropy

IGNORE = -1  # a target that does not count


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each position, 0 where the target is -1; logits (..., V), targets (...).

    With label smoothing e, the target is 1 - e of the label plus e spread evenly over all V. Raises
    TypeError if a plug-in's model returns logits that are not such a tensor.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1].numel() != targets.numel():
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"the logits are {form}, not {(*targets.shape, 'V')} as the targets need")
    flat = full_precision(logits.flatten(0, -2))
    if is_large(flat) and not label_smoothing:
        losses: Tensor = _HardLoss.apply(flat, targets.flatten())  # type: ignore[no-untyped-call]
    else:
        losses = F.cross_entropy(
            flat,
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    return losses.view(targets.shape)


# Cross-entropy over a large vocabulary, with first and second derivatives written out. With 2,048
# positions and 30,000 symbols a tensor of logits has 246 MB, and torch's derivatives of log_softmax
# pass over such tensors several times and store two more. Here each derivative is one pass, on a
# CPU in blocks that stay in the processor's cache, and log-probabilities are never stored. Small
# logits use torch's functions, which are faster for them. The choice depends on the micro-batch, so
# in fp32 its size can change the last digits. Shapes: N positions, V vocabulary.

LARGE = 1 << 22  # smallest number of logits for these functions
BLOCK = 1 << 18  # numbers in a block


def is_large(logits: Tensor) -> bool:
    """Return whether to use the derivatives below; torch.compile derives its own."""
    return logits.numel() >= LARGE and not torch.compiler.is_compiling()


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits (N, V) in blocks."""
    step = len(logits) if logits.is_cuda else max(1, BLOCK // logits.shape[1])
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, (N, 1)."""
    return torch.cat([logits[at].logsumexp(-1, keepdim=True) for at in blocks(logits)])


def softmax_hvp(logits: Tensor, log_sum: Tensor, scale: Tensor, vector: Tensor) -> Tensor:
    """Return the product of the loss's Hessian and a vector, by row.

    It is scale * (diag p - p p^T) vector, where p is the softmax of the row.
    """
    out = torch.empty_like(logits)
    for at in blocks(logits):
        p = torch.sub(logits[at], log_sum[at]).exp_()
        product = torch.mul(p, vector[at], out=out[at])
        product.sub_(p.mul_(product.sum(-1, keepdim=True))).mul_(scale[at])
    return out


class _HardLoss(torch.autograd.Function):
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
        gradient = _HardGradient.apply(logits, targets, log_sum, scale)  # type: ignore[no-untyped-call]
        return gradient, None


class _HardGradient(torch.autograd.Function):
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
        unscaled = _HardGradient.apply(logits, targets, log_sum, ones)  # type: ignore[no-untyped-call]
        return hvp, None, None, (unscaled * grads[0]).sum(-1, keepdim=True)
