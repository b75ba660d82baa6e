"""Counts, on a CPU, of operations for which a host would wait for its GPU."""

import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# These read values, or make a tensor with a size that depends on values.
READS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}


class HostReads(TorchDispatchMode):
    """Counts such operations by the function of the package that causes them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_function: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        chosen = function is aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if chosen or function in READS:
            frames = [f for f in traceback.extract_stack() if "/metaseq_lm/" in f.filename]
            last = frames[-1]
            self.by_function[f"{last.filename.split('/metaseq_lm/')[-1]}:{last.name}"] += 1
        return function(*args, **(kwargs or {}))
