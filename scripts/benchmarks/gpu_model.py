"""Operations of an update on a GPU, counted without one, and predicted time and memory.

The update is the trainer's own, on tensors without values: its operations are listed with the bytes
that they read and write and their FLOPs. A prediction sums over kernels the longer time on a card
of FLOPs and bytes, times a factor between such sums and measured updates; it is at least the time
that the host takes to launch the kernels. It is not a measurement.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import build, configured, fetched, real_tokens, train

from metaseq_lm.data.streams import Shard
from metaseq_lm.forward import passes
from metaseq_lm.models import layers
from metaseq_lm.models.transformer import attention
from metaseq_lm.runs.flops import Counter
from metaseq_lm.training.parts import build_task

# These change no bytes: views that torch does not declare as such, and memory without values.
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
LOOKUPS = ("embedding", "gather", "index", "index_select")  # they read only what they return
# A compiler fuses the operations between two of these into one kernel.
BORDERS = ("embedding_dense_backward", "scatter_add", "sort", "topk", "searchsorted", "cumsum")

library = torch.library.Library("metaseq_benchmark", "DEF")
library.define("dropout(Tensor x, Tensor? residual, Tensor keys, ScalarType dtype) -> Tensor")


@torch.library.register_fake("metaseq_benchmark::dropout", lib=library)
def dropout_shape(x: Tensor, residual: Tensor | None, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor like the fused kernel's allocation."""
    kind = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    return torch.empty(x.shape, dtype=kind, device=x.device)


class Dropout(torch.autograd.Function):
    """Stands for the fused kernel of forward/cuda_noise.py, with the same reads and writes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, keys: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.dtype = dtype
        return torch.ops.metaseq_benchmark.dropout(x, residual, keys, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = Dropout.apply(grad, None, *ctx.saved_tensors, ctx.dtype)
        return grad_x, grad if ctx.needs_input_grad[1] else None, None, None


class Kernels:
    """Stands for the module of kernels."""

    @staticmethod
    def dropout(
        x: Tensor, residual: Tensor | None, keys: Tensor, start: int, threshold: int
    ) -> Tensor:
        dropped: Tensor = Dropout.apply(x, residual, keys, x.dtype)
        return dropped

    @staticmethod
    def uniforms(keys: Tensor, start: int, numbers: int) -> Tensor:
        return torch.zeros(len(keys), numbers, dtype=torch.float64)


@dataclass
class Kernel:
    """An operation.

    Attributes:
        name: Its name in torch.
        flops: Its FLOPs in matrix products and attention.
        reads: Bytes that it reads, by number of the storage.
        writes: Bytes that it writes, in the same form.
    """

    name: str
    flops: int
    reads: dict[int, int]
    writes: dict[int, int]

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


class Tracer(TorchDispatchMode):
    """Lists the kernels of a with block, and tracks the memory that they allocate.

    Attributes:
        kernels: The operations, without views.
        peak: Most bytes allocated at once in the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.peak = self.live = 0
        self._rules = Counter().rules
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def _number(self, tensor: Tensor, is_new: bool = False) -> int:
        """Return the number of a tensor's storage; a new storage counts as allocated."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = len(self._numbers) + len(self.kernels) * 1000
            if is_new:
                size = storage.nbytes()
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, size)
        return self._numbers[storage]

    def _free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        inputs, targets = arguments(func, args, kwargs)
        if is_view or name in FREE or not (outputs or targets):
            for tensor in outputs:
                self._number(tensor, is_new=not is_view)
            return result
        reads = {self._number(t): touched(t) for t in inputs}
        new = [t for t in outputs if not any(t is target for target in targets)]
        writes = {self._number(t): touched(t) for t in targets}
        writes |= {self._number(t, is_new=True): touched(t) for t in new}
        if name in LOOKUPS and inputs:
            reads[self._number(inputs[0])] = sum(map(touched, new))
        rule = self._rules.get(func.overloadpacket)
        flops = 0 if rule is None else rule(*args, **kwargs, out_val=result)
        self.kernels.append(Kernel(name.rstrip("_"), flops, reads, writes))
        return result


def arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list, list]:
    """Return the tensors that an operation reads, and the arguments that it writes."""
    inputs, targets = [], []
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if number >= len(args) else args[number]
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        targets += tensors * writes
        fills = func._schema.name in ("aten::zero_", "aten::fill_", "aten::copy_") and not number
        inputs += tensors * (not (writes and (argument.is_out or fills)))
    return inputs, targets


def touched(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers, counting expanded ones once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride]
    return math.prod(sizes) * tensor.element_size()


def fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that a compiler would make, fusing all operations between two products.

    A fused kernel reads results of earlier kernels and writes what later ones read; other values
    stay in registers.
    """
    last_read = {n: at for at, kernel in enumerate(kernels) for n in kernel.reads}
    merged: list[Kernel] = []
    group = Kernel("fused", 0, {}, {})
    for at, kernel in enumerate(kernels):
        if kernel.flops or kernel.name in BORDERS or "fused" in kernel.name:
            merged += [ended(group, at, last_read), kernel]
            group = Kernel("fused", 0, {}, {})
            continue
        group.reads |= {n: s for n, s in kernel.reads.items() if n not in group.writes}
        group.writes |= kernel.writes
    merged.append(ended(group, len(kernels), {}))
    return [kernel for kernel in merged if kernel.bytes]


def ended(group: Kernel, at: int, last_read: dict[int, int]) -> Kernel:
    """Return a fused group of operations before index `at`, without writes that are never read."""
    writes = {n: size for n, size in group.writes.items() if last_read.get(n, -1) >= at}
    return Kernel(group.name, 0, group.reads, writes)


@dataclass(frozen=True)
class Counts:
    """Counts of the work of an update.

    Attributes:
        tokens: Tokens other than padding.
        kernels: Each kind of kernel with its FLOPs, bytes and number.
        peak: Most bytes allocated at once, including weights and moments.
    """

    tokens: int
    kernels: list[list[int]]
    peak: int

    @property
    def flops(self) -> int:
        return sum(flops * count for flops, _, count in self.kernels)

    @property
    def bytes(self) -> int:
        return sum(size * count for _, size, count in self.kernels)

    @property
    def launches(self) -> int:
        return sum(count for _, _, count in self.kernels)


@dataclass(frozen=True)
class Card:
    """The rates of a card and its host.

    Attributes:
        name: Its name.
        rate: FLOPs per second of a large bf16 matrix product.
        bandwidth: Bytes per second of a large copy, read and written.
        launch: Seconds that the host takes for a small operation.
    """

    name: str
    rate: float
    bandwidth: float
    launch: float

    def floor(self, counts: Counts) -> float:
        """Return the seconds of an update in which every kernel runs at the card's full rates."""
        return sum(
            count * max(flops / self.rate, size / self.bandwidth)
            for flops, size, count in counts.kernels
        )

    def seconds(self, counts: Counts, factor: float) -> float:
        """Return the predicted seconds of an update; `factor` comes from `fitted`."""
        return max(factor * self.floor(counts), counts.launches * self.launch)


# The rate comes from the archive; bandwidth and launches are assumed until a run measures them:
# bandwidth as nine tenths of the 3.35 TB/s of the data sheet.
H100 = Card("NVIDIA H100 80GB HBM3", 726.6e12, 3.0e12, 6e-6)


def fitted(card: Card, measured: Sequence[tuple[Counts, float]]) -> float:
    """Return the median factor between measured seconds and floors over (counts, tokens/s)."""
    ratios = [counts.tokens / speed / card.floor(counts) for counts, speed in measured]
    return statistics.median(ratios)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Compute only shapes, and choose kernels and types as on a GPU."""
    layer_norm = F.layer_norm

    def full_layer_norm(x: Tensor, *args: Any) -> Tensor:
        return layer_norm(x.float(), *args)  # as under autocast on CUDA

    def fused_attention(q: Tensor, k: Tensor, v: Tensor, visibility: Any) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visibility.mask, is_causal=visibility.is_causal
        )

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (passes, "cuda_kernels", lambda kind: Kernels),
            (layers, "BLOCK", 1 << 62),
            (attention, "_takes_sequences", lambda device: True),
            (attention, "_fused_attention", fused_attention),
            (attention._Unpacking, "of", lambda *args: None),
            (F, "layer_norm", full_layer_norm),
            (nn.init, "trunc_normal_", lambda weight, **options: weight),  # would look at values
            (nn.Module, "to", lambda module, **options: module),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def count(folder: Path, overrides: list[str], is_compiled: bool = False) -> Counts:
    """Return the counts of the second update of a run."""
    streams = build_task(configured(folder, overrides)).build_streams("train").values()
    tokens = sum(real_tokens(b) for stream in streams for b in stream.micro_batches(1, Shard()))
    with as_on_a_gpu():
        run = build(folder, overrides)
        run.model.train()
        run.engine.finite_check.defers = True  # as on a GPU: nothing is read
        source = fetched(run)
        train(run, *next(source), count=False)
        update, batches = next(source)
        with Tracer() as tracer:
            train(run, update, batches, count=False)
        state = [run.engine.optimizers[name].local_state() for name in run.engine.optimizers]
        held = [*run.model.state_dict().values(), *tree_leaves(state)]
        resting = sum(touched(t) for t in held if isinstance(t, Tensor))
    kernels = fused(tracer.kernels) if is_compiled else tracer.kernels
    kinds: dict[tuple[int, int], int] = {}
    for kernel in kernels:
        kinds[kernel.flops, kernel.bytes] = kinds.get((kernel.flops, kernel.bytes), 0) + 1
    listed = [[flops, size, number] for (flops, size), number in sorted(kinds.items())]
    return Counts(tokens, listed, tracer.peak + resting)
