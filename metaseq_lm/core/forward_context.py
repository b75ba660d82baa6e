"""What the layers of a model must know about the forward pass they are in: noise, double backward."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from metaseq_lm.core.random_streams import FACTORS, GOLDEN, SHIFTS, row_keys, uniforms, words

# Words generated ahead per refill at most; more only costs cache misses.
BLOCK_WORDS = 1 << 17


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _torch_words(keys: Tensor, start: int, count: int) -> Tensor:
    """The same words as `words`, as int64 on the device of `keys`."""
    counters = torch.arange(start + 1, start + count + 1, device=keys.device) * _signed(GOLDEN)
    z = keys[:, None] + counters
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
        self._masks: dict[tuple, Tensor] = {}

    def _take(self, shape: Sequence[int], per_word: int) -> tuple[int, int]:
        """Return (numbers, words) that a tensor of `shape` needs from each row."""
        total = int(np.prod(shape))
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
            keys = torch.from_numpy(self.keys.view(np.int64)).to(self.device)
            z = _torch_words(keys, self.position, count)
            lanes16 = torch.stack([(z >> s) & 0xFFFF for s in (0, 16, 32, 48)], dim=-1)
            self._lanes = (lanes16.flatten(1) - 0x8000).to(torch.int16)
        self._block = (self.position, self.position + count)
        self._masks = {}

    def keep(self, shape: Sequence[int], p: float, dtype: torch.dtype, ahead: int = 0) -> Tensor:
        """Return a dropout multiplier: 0 with probability `p`, else 1 / (1 - p).

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
            mask = (self._lanes >= threshold - 32768).to(dtype).mul_(65536 / (65536 - threshold))
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
            keys = torch.from_numpy(self.keys.view(np.int64)).to(self.device)
            top = (_torch_words(keys, self.position, count) >> 11) & ((1 << 53) - 1)
            drawn = top.double() * 2.0**-53
        self.position += count
        self._lanes = None
        # Rounding to a shorter type may reach 1.
        return drawn[:, :numbers].reshape(shape).to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


class ForwardContext:
    """What the layers of a model need to know about the forward pass that they are in; set by the engine."""

    def __init__(
        self, noise: Noise | None = None, double_backward: bool = False, ahead: int = 0
    ) -> None:
        self.noise = noise
        self.double_backward = double_backward
        self.ahead = ahead


_default = ForwardContext()  # never changed: a context is set anew for each forward pass
_current: ContextVar[ForwardContext] = ContextVar("metaseq_lm_context", default=_default)


def current_context() -> ForwardContext:
    """Return the context that the calling layer runs in."""
    return _current.get()


@contextlib.contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one inside the with block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
