"""FLOPs of a run: each shape of batch is counted once, then looked up."""

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from metaseq_lm import distributed
from metaseq_lm.randomness import key


def signature(value: Any) -> Any:
    """Return the shapes of all tensors in nested containers; equal signatures cost equal FLOPs."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((k, signature(v)) for k, v in value.items() if k not in ("rows", "sizes"))
    if isinstance(value, (list, tuple)):
        return tuple(signature(v) for v in value)
    return None


def _matrices(inputs: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    return 2 * prod(inputs[:-1]) * sum(prod(w) for w in weights if len(w) == 2)


def _fused(
    inputs: Sequence[int], first: Any, second: Any, *rest: Any, out_shape: Any = None
) -> int:
    return _matrices(inputs, (first, second))


def _cudnn(inputs: Sequence[int], weights: Any, *rest: Any, out_shape: Any = None) -> int:
    return _matrices(inputs, weights)


# LSTMs that are one operation, of which torch's counter knows nothing; backward is twice forward.
LSTMS = {
    torch.ops.aten.mkldnn_rnn_layer: _fused,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *a, **k: 2 * _fused(*a, **k),
    torch.ops.aten._cudnn_rnn: _cudnn,
    torch.ops.aten._cudnn_rnn_backward: lambda *a, **k: 2 * _cudnn(*a, **k),
}


class Untracked(contextlib.nullcontext):
    """Stands for torch's tracker of modules and knows of one place only."""

    parents = {"Global"}


class FlopMeter:
    """Adds up the FLOPs (2 per multiply-add, matrix products and attention) of repeated work."""

    def __init__(self) -> None:
        self.total = 0.0
        self.known: dict[str, float] = {}

    @contextlib.contextmanager
    def count(self, work: Any) -> Iterator[None]:
        """Add the FLOPs of the with block, whose cost is a function of the shapes in `work`."""
        name = f"{key(repr(signature(work))):016x}"
        if name not in self.known:
            counter = FlopCounterMode(display=False, custom_mapping=LSTMS)
            # Nobody asks which module they belong to, and torch's hooks for that break second
            # derivatives where a module is given a parameter.
            counter.mod_tracker = Untracked()  # type: ignore[assignment]
            with counter:
                yield
            self.known[name] = float(counter.get_total_flops())
        else:
            yield
        self.total += self.known[name]

    def state_dict(self) -> dict[str, Any]:
        """Return total and table; the table keeps a resumed run from counting a shape again."""
        return {"total": self.total, "known": dict(self.known)}

    def of_all(self) -> dict[str, Any]:
        """Return the total of all replicas and this one's table; a call of all of them."""
        return {**self.state_dict(), "total": sum(distributed.gather_objects(self.total))}

    def load_state_dict(self, state: dict[str, Any], share: bool = True) -> None:
        """Take a saved table, and its total or, without a `share` in it, none."""
        self.total, self.known = state["total"] * share, dict(state["known"])
