"""Layers whose parameters may carry a leading axis of independent copies of the model.

With ordinary parameters these are torch's own layers. Called through `torch.func.functional_call`
with parameters of one more dimension they compute all copies at once: parameters (copies, ...),
activations (copies, batch, length, width). Virtual students of one update are such copies.

Shapes: C copies, B batch, S length, D width, H heads, V vocabulary.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from metaseq_lm.core.batch import on_device
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.random_streams import FACTORS, GOLDEN, SHIFTS, row_keys, uniforms, words
from metaseq_lm.distributed.vectors import is_dtensor, local
from metaseq_lm.runs.flops import uncounted


def select(x: Tensor, positions: Tensor) -> Tensor:
    """Return the states (..., M, D) of x (..., S, D) at `positions` (..., M)."""
    return x.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, x.shape[-1]))


def reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x (B, S, D) with the first `lengths` (B,) positions of each row in reverse order."""
    at = torch.arange(x.shape[1], device=x.device)
    turned = lengths.unsqueeze(1) - 1 - at
    return select(x, torch.where(turned >= 0, turned, at))


def full_precision(x: Tensor) -> Tensor:
    """Return x in fp32 if it is in half precision, in which a softmax over many classes drowns."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Linear):
    """`nn.Linear` that also takes weights (C, out, in)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x W^T + b for weights (out, in) or (C, out, in)."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    copies = weight.shape[0]
    flat = torch.baddbmm(bias.unsqueeze(1), x.reshape(copies, -1, x.shape[-1]), weight.mT)
    return flat.view(*x.shape[:-1], -1)


class GELULinear(torch.autograd.Function):
    """gelu(x) W^T + b, which stores x and computes gelu(x) again in the backward pass.

    gelu(x) is as wide as the feed-forward network, four times the states as a rule.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not by autocast, whose copy would have no graph in other uses of the weight.
        return F.linear(F.gelu(x), weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        into_x, into_weight, into_bias = ctx.needs_input_grad
        flat, of_x, of_weight, of_bias = grad.reshape(-1, grad.shape[-1]), None, None, None
        if into_x:
            of_x = torch.ops.aten.gelu_backward(grad @ weight.to(grad.dtype), x)
        if into_weight:
            of_weight = (flat.mT @ F.gelu(x).reshape(-1, x.shape[-1])).to(weight.dtype)
        if into_bias:
            of_bias = flat.sum(0).to(weight.dtype)
        return of_x, of_weight, of_bias


# Numbers of activations from which on the backward pass stores less than torch's functions do. With fewer
# of them more operations, and functions in Python, take longer, and memory does not matter.
MANY = 1 << 18


def saves_memory(x: Tensor) -> bool:
    """Return whether operations on x store as little as possible; a compiler decides for itself."""
    return not torch.compiler.is_compiling() and x.numel() >= MANY


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x) W^T + b for weights (out, in) or (C, out, in)."""
    if weight.dim() == 3 or not (saves_memory(x) and torch.is_grad_enabled()):
        return linear(F.gelu(x), weight, bias)
    output: Tensor = GELULinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last axis that also takes weights (C, D)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        scale, shift = self.weight[:, None, None], self.bias[:, None, None]
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps) * scale + shift


class Embedding(nn.Embedding):
    """Token embedding of ids (..., S) or of probabilities (..., S, V); weights (V, D) or (C, V, D).

    No gradient reaches the padding row from the input side; it may be trained through a tied head.
    A `padding_row` (D,), given through functional_call, stands for that constant when the weights
    are displaced: finite differences cannot see a detached tensor.
    """

    padding_row: Tensor | None

    def __init__(self, size: int, width: int, padding_idx: int | None = None) -> None:
        super().__init__(size, width, padding_idx=padding_idx)
        self.register_buffer("padding_row", None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        if tokens.is_floating_point():
            # As one product per copy: broadcast over rows, its derivative would be a table per row.
            flat = tokens.flatten(0 if weight.dim() == 2 else 1, -2)
            embedded = (flat @ weight).view(*tokens.shape[:-1], -1)
            if self.padding_idx is None:
                return embedded
            # Adds zero; it only takes the padding row out of the derivative.
            row = weight[..., self.padding_idx : self.padding_idx + 1, :]
            row = row if weight.dim() == 2 else row.unsqueeze(1)
            constant = row.detach() if self.padding_row is None else self.padding_row
            return embedded + tokens[..., self.padding_idx, None] * (constant - row)
        if weight.dim() == 2:
            return F.embedding(tokens, weight, self.padding_idx)
        copies, size, width = weight.shape
        offsets = torch.arange(copies, device=tokens.device) * size
        rows = tokens + offsets.view(-1, *[1] * (tokens.dim() - 1))
        embedded = F.embedding(rows, weight.reshape(-1, width))
        if self.padding_idx is None:
            return embedded
        return embedded.where((tokens != self.padding_idx).unsqueeze(-1), embedded.detach())


class Dropout(nn.Module):
    """Dropout whose masks belong to the rows of the batch, not to the order of calls (see Noise)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise UsageError(
                f"a dropout probability (model.dropout and its like) must be at least 0 and below 1, got {p}"
            )
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        this = current_context()
        if this.noise is None:
            return F.dropout(x, self.p)
        if not saves_memory(x):
            return x * this.noise.keep(x.shape, self.p, x.dtype, this.ahead)
        mask = this.noise.keep(x.shape, self.p, torch.bool, this.ahead)
        return torch.where(mask, x, 0.0).mul_(scale_of(self.p))  # stores a byte a number

    def extra_repr(self) -> str:
        return f"p={self.p}"


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017) with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(
                f"encoder_embed_dim {width} is not divisible by {heads} attention heads"
            )
        self.heads = heads
        self.in_proj = Linear(width, 3 * width)
        self.out_proj = Linear(width, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return (..., S, D); `mask` is boolean (N, 1, 1 or S, S), true where a key may be seen."""
        *lead, length, width = x.shape
        qkv = self.in_proj(x).view(-1, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, S, D/H)
        # The fused kernel has no second derivative, and dropout inside it would follow torch's
        # global generator instead of the rows.
        explicit = current_context().double_backward or (self.training and self.dropout.p > 0)
        if explicit:
            scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.mT
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            mixed = self.dropout(scores.softmax(-1)) @ v
        else:
            mixed = fused_attention(q, k, v, mask)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(*lead, length, width))
        return projected


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return torch's fused attention, computed in fp32 on a CPU."""
    # In bf16 the CPU kernel's derivative takes five times as long as in fp32.
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch.autocast("cpu", enabled=False):
        mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    return mixed.to(q.dtype)


class ScalarMix(nn.Module):
    """scale * sum_j softmax(weights)_j h_j (their equation 1), then dropout; at first the plain mean.

    `layers` is how many h_j there are, the embeddings among them, `width` is X. Without the layer
    norms and the penalty of the weights that they name as options.
    """

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.weights = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = Dropout(dropout)

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the mix (B, S, X) of `layers`, (B, S, X) each."""
        shares = self.scale * self.weights.softmax(0)
        parts = [share * states for share, states in zip(shares, layers, strict=True)]
        embeddings: Tensor = self.dropout(torch.stack(parts).sum(0))
        return embeddings


# Words generated ahead per refill at most; more only costs cache misses.
BLOCK_WORDS = 1 << 17


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


COUNTER_STEP = _signed(GOLDEN)


def _torch_words(keys: Tensor, at: Tensor, golden: int | Tensor = COUNTER_STEP) -> Tensor:
    """The words of `words` with the numbers `at` (N,), as int64 (rows, N)."""
    z = keys[:, None] + (at + 1) * golden
    for shift, factor in zip(SHIFTS, (*FACTORS, None)):
        # torch shifts int64 arithmetically; the mask makes it the logical shift of the definition.
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            z = z * _signed(factor)
    return z


class Noise:
    """The random numbers of one pass of one micro-batch, drawn in the order the model asks for them.

    Each row has its own sequence, so a row sees the same numbers in whatever batch it stands. A
    tensor that asks must hold the rows in its leading dimensions.
    """

    def __init__(self, root: int, rows: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.rows = int(np.size(rows))
        self.keys = row_keys(root, np.ravel(rows))
        self.device = torch.device(device)
        self.position = 0  # in words
        self._block: tuple[int, int] = (0, 0)
        self._lanes: Tensor | None = None
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self) -> Tensor:
        """Return the keys of the rows (rows,), as int64 on the device."""
        return on_device(torch.from_numpy(self.keys.view(np.int64)), self.device)

    def traced_keys(self) -> Tensor:
        """Return what TracedNoise needs."""
        keys = self.tensor()
        return torch.cat([keys, keys.new_full((1,), COUNTER_STEP)])

    def _take(self, shape: Sequence[int], per_word: int) -> tuple[int, int]:
        """Return (numbers, words) that a tensor of `shape` needs from each row."""
        total = math.prod(shape)
        if total % self.rows:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} cannot be spread over the {self.rows} rows of this "
                "pass; give the batch a 'rows' entry with one number per row of what the model sees"
            )
        numbers = total // self.rows
        return numbers, -(-numbers // per_word)

    def _refill(self, count: int, ahead: int) -> None:
        count = max(count, min(ahead, BLOCK_WORDS // max(self.rows, 1)))
        if self.device.type == "cpu":
            lanes = words(self.keys, self.position, count).view(np.uint16)
            # torch compares int16 faster than uint16; the offset keeps the order.
            self._lanes = torch.from_numpy((lanes ^ np.uint16(0x8000)).view(np.int16))
        else:
            keys = self.tensor()
            at = torch.arange(self.position, self.position + count, device=self.device)
            z = _torch_words(keys, at)
            lanes16 = torch.stack([(z >> s) & 0xFFFF for s in (0, 16, 32, 48)], dim=-1)
            self._lanes = (lanes16.flatten(1) - 0x8000).to(torch.int16)
        self._block = (self.position, self.position + count)
        self._masks = {}

    def at(self, position: int) -> "Noise":
        """Return the numbers from `position` on: a copy, unless this one is there."""
        if position == self.position:
            return self
        noise = copy.copy(self)
        noise.position, noise._lanes = position, None
        return noise

    def keep(self, shape: Sequence[int], p: float, dtype: torch.dtype, ahead: int = 0) -> Tensor:
        """Return a dropout multiplier: 0 with probability `p`, else 1 / (1 - p).

        With torch.bool it is a mask instead, false with probability `p`.

        `p` is rounded to 1/65536. `ahead` is how many words the pass is expected to need; it
        changes speed only.
        """
        numbers, count = self._take(shape, per_word=4)
        if self._lanes is None or self.position + count > self._block[1]:
            self._refill(count, ahead)
        threshold = round(p * 65536)
        mask = self._masks.get((threshold, dtype))
        if mask is None:
            assert self._lanes is not None
            mask = scaled(self._lanes >= threshold - 32768, p, dtype)
            self._masks[threshold, dtype] = mask
        at = (self.position - self._block[0]) * 4
        self.position += count
        return mask[:, at : at + numbers].reshape(shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers in [0, 1), spread over the rows like `keep`."""
        numbers, count = self._take(shape, per_word=1)
        if self.device.type == "cpu":
            drawn = torch.from_numpy(uniforms(self.keys, self.position, count))
        else:
            keys = self.tensor()
            at = torch.arange(self.position, self.position + count, device=self.device)
            drawn = _torch_uniforms(keys, at)
        self.position += count
        self._lanes = None
        return _below_1(drawn[:, :numbers].reshape(shape), dtype)


def scale_of(p: float) -> float:
    """Return 1 / (1 - p), p rounded to 1/65536."""
    return 65536 / (65536 - round(p * 65536))


def scaled(mask: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return the multiplier of a dtype that stands for what a mask keeps."""
    return mask if dtype == torch.bool else mask.to(dtype) * scale_of(p)


def _torch_uniforms(keys: Tensor, at: Tensor, golden: int | Tensor = COUNTER_STEP) -> Tensor:
    return ((_torch_words(keys, at, golden) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _below_1(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    # Rounding to a shorter type may reach 1.
    return drawn.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


class TracedNoise(Noise):
    """The numbers of Noise as operations of a graph that torch.compile traces.

    `keys` (rows + 1,) are its row keys, as int64, and GOLDEN: as a constant the compiler would
    multiply it by positions in numbers without a limit.
    """

    def __init__(self, keys: Tensor) -> None:
        self.row_keys, self.golden = keys[:-1], keys[-1]
        self.position = 0

    def _advance(self, shape: Sequence[int], per_word: int) -> Tensor:
        """Return the numbers of the next words, and which of them a tensor of `shape` needs."""
        numbers = math.prod(shape) // self.row_keys.shape[0]
        start, self.position = self.position, self.position - (-numbers // per_word)
        return start * per_word + torch.arange(numbers, device=self.row_keys.device)

    def keep(self, shape: Sequence[int], p: float, dtype: torch.dtype, ahead: int = 0) -> Tensor:
        at = self._advance(shape, per_word=4)
        lanes = (_torch_words(self.row_keys, at // 4, self.golden) >> at % 4 * 16) & 0xFFFF
        return scaled(lanes >= round(p * 65536), p, dtype).reshape(shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        at = self._advance(shape, per_word=1)
        drawn = _torch_uniforms(self.row_keys, at, self.golden)
        return _below_1(drawn.reshape(shape), dtype)


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of a model need to know about the forward pass that they are in; set by the engine.

    Attributes:
        noise: The random numbers of the pass.
        double_backward: Whether the gradient will itself be differentiated.
        ahead: How many random words the pass is expected to need.
        recompute: Whether the activations inside blocks are computed again in the backward pass.
    """

    noise: Noise | None = None
    double_backward: bool = False
    ahead: int = 0
    recompute: bool = False


_current = ForwardContext()  # not a ContextVar, which torch.compile cannot trace


def current_context() -> ForwardContext:
    """Return the context that the calling layer runs in."""
    return _current


@contextlib.contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one inside the with block."""
    global _current
    outer, _current = _current, context
    try:
        yield context
    finally:
        _current = outer


def apply_block(block: nn.Module, *inputs: Tensor | None) -> Tensor:
    """Return block(*inputs); with `recompute` the graph keeps no activation but the inputs.

    The backward pass then runs the block again with the weights and the random numbers of the first
    time: those are arguments, as under functional_call, or between passes on sharded parameters, the
    block holds others by then.
    """
    context = current_context()
    if not (context.recompute and torch.is_grad_enabled()):
        output: Tensor = block(*inputs)
        return output
    # Shards stand for weights that the block's call puts together each time.
    weights = {n: w for n, w in block.named_parameters() if not is_dtensor(w)}
    start = context.noise.position if context.noise is not None else 0
    runs = 0

    def run(*tensors: Tensor | None) -> Tensor:
        nonlocal runs
        runs += 1
        noise = context.noise.at(start) if context.noise is not None else None
        named: dict[str, Any] = dict(zip(weights, tensors[len(inputs) :]))
        counting = uncounted() if runs > 1 else contextlib.nullcontext()
        with use_context(replace(context, noise=noise)), counting:
            result: Tensor = functional_call(block, named, tensors[: len(inputs)])
        return result

    recomputed: Tensor = checkpoint(
        run, *inputs, *weights.values(), use_reentrant=False, preserve_rng_state=False
    )
    return recomputed


RAW = "raw_"  # before the names of scores of the weights themselves


@dataclass
class AveragingConfig:
    """Averaged weights."""

    average_decay: float = option(0.998, "decay of weight averages (0 = none)", at_least=0, below=1)
    score_raw: bool = option(False, "score the weights without averaging too, as raw_*")


class AveragedWeights(nn.Module):
    """A second net like `net`, in which each weight is the moving average of the other's.

    It starts at the weights that `net` has, without correction of the start. As a part of the model
    it is in every checkpoint; it has no trained parameters. Buffers are copied, not averaged.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.net = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def move(self, net: nn.Module) -> None:
        """Take the weights that `net` has now into the average: a <- decay a + (1 - decay) w.

        `net` may have more weights than the average.
        """
        weights, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        averages = dict(self.net.named_parameters())
        torch._foreach_lerp_(
            [local(average) for average in averages.values()],
            [local(weights[name]) for name in averages],
            1 - self.decay,
        )
        for name, buffer in self.net.named_buffers():
            buffer.copy_(buffers[name])
