"""Row noise by Triton kernels: the bits of SplitMix64 computed where the mask is written.

torch's own operations on int64 write every intermediate word of the generator to memory, eight
bytes for each two-byte lane that a mask needs: two thirds of a base-size update on an H100. Triton
comes with torch's CUDA builds; imported on a CUDA device only.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found"
# Triton reads the source of a kernel, whose arguments have no types of Python.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 256  # of a program; each word makes four numbers of a mask


@triton.jit
def _words(key, first):
    """Return the words `first` (BLOCK,) of the row with `key`; see core.random_streams."""
    z = key.to(tl.uint64, bitcast=True) + (first + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["start", "threshold"])
def _keep_kernel(keys, out, start, numbers, threshold, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, block = (program // blocks).to(tl.int64), program % blocks
    word = block * BLOCK + tl.arange(0, BLOCK)
    z = _words(tl.load(keys + row), (start + word).to(tl.int64))
    lane = tl.arange(0, 4)
    lanes = (z[:, None] >> (16 * lane)[None, :].to(tl.uint64)) & 0xFFFF
    at = word[:, None] * 4 + lane[None, :]
    tl.store(out + row * numbers + at, lanes.to(tl.int32) >= threshold, mask=at < numbers)


@triton.jit(do_not_specialize=["start"])
def _uniform_kernel(keys, out, start, numbers, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, block = (program // blocks).to(tl.int64), program % blocks
    word = block * BLOCK + tl.arange(0, BLOCK)
    z = _words(tl.load(keys + row), (start + word).to(tl.int64))
    value = (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out + row * numbers + word, value, mask=word < numbers)


def keep_masks(keys: Tensor, start: int, numbers: int, threshold: int) -> Tensor:
    """Return boolean masks (rows, numbers) from word `start` of each row on.

    A number is false where its 16 random bits are below `threshold`. `keys` are the keys of the
    rows (rows,), int64, on the device.
    """
    masks = torch.empty(len(keys), numbers, dtype=torch.bool, device=keys.device)
    blocks = triton.cdiv(numbers, 4 * BLOCK_WORDS)
    with torch.cuda.device_of(keys):
        _keep_kernel[len(keys) * blocks,](
            keys, masks, start, numbers, threshold, blocks, BLOCK_WORDS
        )
    return masks


def uniforms(keys: Tensor, start: int, numbers: int) -> Tensor:
    """Return float64 numbers (rows, numbers) in [0, 1) from word `start` of each row on."""
    drawn = torch.empty(len(keys), numbers, dtype=torch.float64, device=keys.device)
    blocks = triton.cdiv(numbers, BLOCK_WORDS)
    with torch.cuda.device_of(keys):
        _uniform_kernel[len(keys) * blocks,](keys, drawn, start, numbers, blocks, BLOCK_WORDS)
    return drawn
