"""Row noise by Triton kernels: the bits of SplitMix64 computed where they are used.

torch's own operations on int64 write every intermediate word of the generator to memory, eight
bytes for each two-byte lane that a mask needs: two thirds of a base-size update on an H100. Here
dropout reads its input and writes its output, no mask, and the backward pass draws the same bits
again. Triton comes with torch's CUDA builds; this module is imported on a CUDA device only.

Compiled passes do not use these kernels: torch.compile fuses the operations of TracedNoise with
their neighbours, and a separate kernel would prevent that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found"
# Triton reads the source of a kernel; its arguments have no Python types.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_WORDS = 256  # words of a program; each has the bits of four numbers
_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _words(key, first):
    """Return the words `first` (BLOCK,) of the row with `key`; see core.random_streams."""
    z = key.to(tl.uint64, bitcast=True) + (first + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["start", "threshold"])
def _dropout_kernel(
    x,
    residual,
    out,
    keys,
    start,
    numbers,
    threshold,
    blocks,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row, block = (program // blocks).to(tl.int64), (program % blocks).to(tl.int64)
    word, lane = tl.arange(0, BLOCK), tl.arange(0, 4)
    z = _words(tl.load(keys + row), start.to(tl.int64) + block * BLOCK + word)
    lanes = (z[:, None] >> (16 * lane)[None, :].to(tl.uint64)) & 0xFFFF
    offset = row * numbers + block * (4 * BLOCK)
    at = word[:, None] * 4 + lane[None, :]
    inside = at < numbers - block * (4 * BLOCK)
    # Divide in float64, as Python does.
    scale = (65536.0 / (65536 - threshold).to(tl.float64)).to(WIDE)
    value = tl.load(x + offset + at, mask=inside, other=0.0).to(DTYPE).to(WIDE) * scale
    value = tl.where(lanes.to(tl.int32) >= threshold, value, 0.0).to(DTYPE)
    if residual is not None:
        added = tl.load(residual + offset + at, mask=inside, other=0.0)
        value = added.to(SUM) + value.to(SUM)
    tl.store(out + offset + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["start"])
def _uniform_kernel(keys, out, start, numbers, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, block = (program // blocks).to(tl.int64), program % blocks
    word = block * BLOCK + tl.arange(0, BLOCK)
    z = _words(tl.load(keys + row), (start + word).to(tl.int64))
    value = (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out + row * numbers + word, value, mask=word < numbers)


class _Dropout(torch.autograd.Function):
    """residual + dropout(x as dtype); its graph keeps only the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        keys: Tensor,
        start: int,
        threshold: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.draw = start, threshold, dtype
        kind = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        if not out.numel():
            return out
        numbers = out.numel() // len(keys)
        blocks = triton.cdiv(numbers, 4 * _BLOCK_WORDS)
        with torch.cuda.device_of(keys):
            _dropout_kernel[len(keys) * blocks,](
                x.contiguous(),
                None if residual is None else residual.contiguous(),
                out,
                keys,
                start,
                numbers,
                threshold,
                blocks,
                _TRITON_TYPES[dtype],
                _computing_type(dtype),
                _computing_type(kind),
                _BLOCK_WORDS,
                # A fused product and sum would round once where the CPU rounds twice.
                enable_fp_fusion=False,
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        needs_x, needs_residual, *_ = ctx.needs_input_grad
        # Dropout is linear: this is its derivative, and can itself be differentiated.
        grad_x = _Dropout.apply(grad, None, keys, *ctx.draw) if needs_x else None
        return grad_x, grad if needs_residual else None, None, None, None, None


def _computing_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which torch computes products and sums of `dtype`."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dropout(x: Tensor, residual: Tensor | None, keys: Tensor, start: int, threshold: int) -> Tensor:
    """Return dropout of x, added to a `residual` of its shape if there is one.

    The numbers of x (rows, ...), spread over the rows, are 0 where their 16 random bits, from word
    `start` of their row on, are below `threshold`, else multiplied by 65536 / (65536 - threshold).
    `keys` (rows,) are the int64 keys of the rows, on the device. Raises ValueError for another
    shape.
    """
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"a residual of shape {tuple(residual.shape)} for x {tuple(x.shape)}")
    dropped: Tensor = _Dropout.apply(x, residual, keys, start, threshold, x.dtype)
    return dropped


def uniforms(keys: Tensor, start: int, numbers: int) -> Tensor:
    """Return float64 numbers (rows, numbers) in [0, 1) from word `start` of each row on."""
    drawn = torch.empty(len(keys), numbers, dtype=torch.float64, device=keys.device)
    blocks = triton.cdiv(numbers, _BLOCK_WORDS)
    with torch.cuda.device_of(keys):
        _uniform_kernel[len(keys) * blocks,](keys, drawn, start, numbers, blocks, _BLOCK_WORDS)
    return drawn
