"""State of a forward pass: random numbers by row, precision, and recomputation of blocks.

The engine sets it up, models read it: neither imports the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from metaseq_lm.core.batch import on_device
from metaseq_lm.core.random_streams import FACTORS, GOLDEN, SHIFTS, row_keys, uniforms, words
from metaseq_lm.distributed.gathering import active_weights, use_weights
from metaseq_lm.distributed.vectors import is_dtensor
from metaseq_lm.runs.flops import uncounted

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


@functools.cache
def cuda_kernels(device_type: str) -> ModuleType | None:
    """Return the kernels for row noise on a CUDA device; None without a device or Triton."""
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from metaseq_lm.forward import cuda_noise

    return cuda_noise


class Noise:
    """The random numbers of a pass over one micro-batch, drawn in the order of the model's calls.

    Each row has its own sequence, so a row sees the same numbers in whatever batch it stands. A
    tensor that asks must hold the rows in its leading dimensions.

    Attributes:
        kernels: The module whose kernels draw the numbers where they are used; None if torch's
            operations draw them, which is the reference.
        position: Number of words of each row that were drawn.
    """

    def __init__(self, root: int, rows: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.rows = int(np.size(rows))
        self.keys = row_keys(root, np.ravel(rows))
        self.device = torch.device(device)
        self.kernels = cuda_kernels(self.device.type)
        self.position = 0
        self._device_keys: Tensor | None = None
        self._block: tuple[int, int] = (0, 0)
        self._lanes: Tensor | None = None
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self) -> Tensor:
        """Return the keys of the rows (rows,), as int64 on the device."""
        if self._device_keys is None:
            keys = torch.from_numpy(self.keys.view(np.int64))
            self._device_keys = on_device(keys, self.device)
        return self._device_keys

    def traced_keys(self) -> Tensor:
        """Return the argument of TracedNoise, for the numbers from `position` on."""
        keys = self.tensor()
        return torch.cat([keys, keys.new_tensor([COUNTER_STEP, self.position])])

    def _take(self, shape: Sequence[int], per_word: int) -> tuple[int, int]:
        """Return (numbers, words) that a tensor of `shape` needs from each row."""
        total, rows = math.prod(shape), max(self.rows, 1)
        if total % rows:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} cannot be spread over the {self.rows} rows of "
                "this pass; give the batch a 'rows' entry with one number per row "
                "of what the model sees"
            )
        numbers = total // rows
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

    def at(self, position: int) -> Noise:
        """Return the numbers from `position` on, a copy unless it is the current position."""
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
        threshold = round(p * 65536)
        if self._lanes is None or self.position + count > self._block[1]:
            self._refill(count, ahead)
        mask = self._masks.get((threshold, dtype))
        if mask is None:
            assert self._lanes is not None
            mask = scaled(self._lanes >= threshold - 32768, p, dtype)
            self._masks[threshold, dtype] = mask
        at = (self.position - self._block[0]) * 4
        self.position += count
        return mask[:, at : at + numbers].reshape(shape)

    def dropout(self, x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
        """Return x times `keep`, added to a residual, by the kernels; only with `kernels`."""
        assert self.kernels is not None
        _, count = self._take(x.shape, per_word=4)
        start, self.position = self.position, self.position + count
        dropped: Tensor = self.kernels.dropout(x, residual, self.tensor(), start, round(p * 65536))
        return dropped

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers in [0, 1), spread over the rows like `keep`."""
        numbers, count = self._take(shape, per_word=1)
        if self.kernels is not None:
            drawn = self.kernels.uniforms(self.tensor(), self.position, count)
        elif self.device.type == "cpu":
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
    """Return the multiplier, of a dtype, of the entries that a mask keeps."""
    return mask if dtype == torch.bool else mask.to(dtype) * scale_of(p)


def _torch_uniforms(keys: Tensor, at: Tensor, golden: int | Tensor = COUNTER_STEP) -> Tensor:
    return ((_torch_words(keys, at, golden) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _below_1(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    # Rounding to a shorter type may reach 1.
    return drawn.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


class TracedNoise(Noise):
    """The numbers of Noise as operations of a graph that torch.compile traces.

    `keys` (rows + 2,) are its row keys, as int64, GOLDEN (as a constant the compiler would
    multiply it by positions in numbers without a limit), and the number of the first word.

    Attributes:
        position: Number of words of each row that were drawn, from that one on.
    """

    def __init__(self, keys: Tensor) -> None:
        self.row_keys, self.golden, self.first = keys[:-2], keys[-2], keys[-1]
        self.kernels = None
        self.position = 0

    def _advance(self, shape: Sequence[int], per_word: int) -> Tensor:
        """Return the numbers of the next words, and which of them a tensor of `shape` needs."""
        numbers = math.prod(shape) // self.row_keys.shape[0]
        start, self.position = self.position, self.position - (-numbers // per_word)
        at = start * per_word + torch.arange(numbers, device=self.row_keys.device)
        return at + self.first * per_word

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
    """The settings of the current forward pass that layers read; set by the engine.

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


def full_precision(x: Tensor) -> Tensor:
    """Return x in fp32 if it is in half precision, too coarse for a softmax over many classes."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def apply_block(block: nn.Module, *inputs: Any) -> Tensor:
    """Return block(*inputs); with `recompute` the graph keeps no activation but the inputs.

    The backward pass then runs the block again with the weights and the random numbers of the first
    time: those are arguments, as under functional_call, or between passes on sharded parameters,
    the block holds others by then.
    """
    context = current_context()
    if not (context.recompute and torch.is_grad_enabled()):
        output: Tensor = block(*inputs)
        return output
    # Shards are gathered by each call of the block.
    active = active_weights()
    weights = {n: w for n, w in block.named_parameters() if not is_dtensor(w)}
    start = context.noise.position if context.noise is not None else 0
    runs = 0

    def run(*tensors: Any) -> Tensor:
        nonlocal runs
        runs += 1
        noise = context.noise.at(start) if context.noise is not None else None
        named: dict[str, Any] = dict(zip(weights, tensors[len(inputs) :]))
        counting = uncounted() if runs > 1 else contextlib.nullcontext()
        with use_context(replace(context, noise=noise)), use_weights(*active), counting:
            result: Tensor = functional_call(block, named, tensors[: len(inputs)])
        return result

    recomputed: Tensor = checkpoint(
        run, *inputs, *weights.values(), use_reentrant=False, preserve_rng_state=False
    )
    return recomputed
