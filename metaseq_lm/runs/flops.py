"""FLOPs of a run. Each shape of batch is counted once, then looked up.

The count must therefore depend only on shapes. Attention counts all pairs of tokens of a row, as in
flops_rules.py, even if a CPU computes only pairs inside the documents of packed rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from metaseq_lm.core.batch import Batch, Layout
from metaseq_lm.core.random_streams import key
from metaseq_lm.distributed import process_group


def _shape_signature(value: Any) -> Any:
    """Return what determines the FLOPs: the shapes of all tensors in nested containers, and texts.

    A text names the computing part, such as a head.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return tuple((name, _shape_signature(part)) for name, part in value.items())
    if isinstance(value, Batch | Layout):
        names = [item.name for item in dataclasses.fields(value) if item.name != "sizes"]
        return tuple((name, _shape_signature(getattr(value, name))) for name in names)
    if isinstance(value, (list, tuple)):
        return tuple(_shape_signature(v) for v in value)
    return None


def _matrices(inputs: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    return 2 * prod(inputs[:-1]) * sum(prod(w) for w in weights if len(w) == 2)


def _fused(
    inputs: Sequence[int], first: Any, second: Any, *rest: Any, out_shape: Any = None
) -> int:
    return _matrices(inputs, (first, second))


def _cudnn(inputs: Sequence[int], weights: Any, *rest: Any, out_shape: Any = None) -> int:
    return _matrices(inputs, weights)


# Fused LSTM operations, which torch's counter does not know; backward is twice forward.
LSTMS = {
    torch.ops.aten.mkldnn_rnn_layer: _fused,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *a, **k: 2 * _fused(*a, **k),
    torch.ops.aten._cudnn_rnn: _cudnn,
    torch.ops.aten._cudnn_rnn_backward: lambda *a, **k: 2 * _cudnn(*a, **k),
}


def attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **kwargs: Any
) -> int:
    """Return the FLOPs of attention of queries to keys and values, given their shapes."""
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(grad: Any, *inputs: Any, **kwargs: Any) -> int:
    return 2 * attention_flops(*inputs)


# Torch's counter does not know the CPU's fused attention. Backward is twice forward, as without
# fusion: recomputation in a kernel to save memory, which torch counts, depends on the device.
_ATTENTION: dict[Any, Any] = {}
for _kernel in (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
):
    _name = f"_scaled_dot_product_{_kernel}"
    _ATTENTION[getattr(torch.ops.aten, _name)] = attention_flops
    _ATTENTION[getattr(torch.ops.aten, f"{_name}_backward")] = _attention_backward


def _sequences(q: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention in whole rows: their length is the declared longest length."""
    # Torch's own rule reads the lengths of the sequences instead.
    longest = rest[5]
    return attention_flops(q, (longest, q[-1]), (longest, q[-1]))


def _sequences_backward(grad: Any, q: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    # After keys and values come the output, its log-sum-exp and twice the starts.
    return 2 * _sequences(q, *rest[:2], *rest[4:])


_VARIABLE = {
    torch.ops.aten._flash_attention_forward: _sequences,
    torch.ops.aten._flash_attention_backward: _sequences_backward,
}
_RULES = LSTMS | _ATTENTION | _VARIABLE


class Counter(TorchDispatchMode):
    """Adds up the FLOPs of operations by the rules of torch's FlopCounterMode.

    FlopCounterMode itself would take a fifth of the time of a small model with batches of many
    different lengths, because it tracks modules and tries to decompose every operation.
    """

    supports_higher_order_operators = True
    # Operations that do not decompose, or that have their own kernel and decompose into operations
    # that round differently: the counter must not change what is computed.
    indivisible: ClassVar[set[Any]] = {torch.ops.aten.silu_backward.default}
    paused: ClassVar[bool] = False
    active: ClassVar[list[Counter]] = []  # the active counters

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo, a second of every start

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules = FlopCounterMode(display=False, custom_mapping=_RULES).flop_registry
        self.total = 0

    def __enter__(self) -> Counter:
        Counter.active.append(self)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        Counter.active.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def add(self, flops: int) -> None:
        """Add FLOPs to the total."""
        self.total += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or the operations that it decomposes into, and count the FLOPs."""
        kwargs = kwargs or {}
        if Counter.paused:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            with FlopCounterMode(display=False, custom_mapping=_RULES) as counter:
                result = func(*args, **kwargs)
            self.add(counter.get_total_flops())
            return result
        if func not in self.indivisible:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.indivisible.add(func)
        result = func(*args, **kwargs)
        rule = self.rules.get(func.overloadpacket)
        if rule is not None:
            self.add(rule(*args, **kwargs, out_val=result))
        return result


# The import of `eval_frame` is for this: a higher-order operator compiles the function that it
# calls, but must not compile the counter.
set_code_exec_strategy(
    Counter.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)


def count_more(output: Tensor, flops: int) -> None:
    """Count further FLOPs for `output`, and twice as many in its derivative."""
    if not Counter.active:
        return
    counter = Counter.active[-1]
    if not Counter.paused:
        counter.add(flops)
    if output.requires_grad:
        output.register_hook(lambda grad: counter.add(2 * flops))


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the FLOPs of the with block: recomputation, which only saves memory."""
    Counter.paused = True
    try:
        yield
    finally:
        Counter.paused = False


def _shapes_of(work: Any) -> str:
    return f"{key(repr(_shape_signature(work))):016x}"


class FlopMeter:
    """Adds up the FLOPs (2 per multiply-add, matrix products and attention) of repeated work."""

    def __init__(self) -> None:
        self.total = 0.0
        self.known: dict[str, float] = {}

    def total_with(self, work: Any) -> float:
        """Return the total after `work`; NaN if its shapes are new."""
        return self.total + self.known.get(_shapes_of(work), math.nan)

    @contextlib.contextmanager
    def count(self, work: Any) -> Iterator[None]:
        """Add the FLOPs of the with block, which must depend only on the shapes in `work`."""
        name = _shapes_of(work)
        if name not in self.known:
            with Counter() as counter:
                yield
            self.known[name] = float(counter.total)
        else:
            yield
        self.total += self.known[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the total over all replicas and the table of shapes; a collective call."""
        total = sum(process_group.gather_objects(self.total))
        return {"total": total, "known": dict(self.known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the table, and on the first replica the total: the number of replicas may change."""
        self.total = state["total"] if process_group.rank() == 0 else 0.0
        self.known = dict(state["known"])
