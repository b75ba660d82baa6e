"""FLOPs of a run: each shape of batch is counted once, then looked up."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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
            counter = FlopCounterMode(display=False)
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved total and table."""
        self.total, self.known = state["total"], dict(state["known"])
