"""Every process holds all parameters; gradients are summed during the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors, differentiate

T = TypeVar("T")


class Replicated:
    """Full parameters in every process; nothing is gathered."""

    gathers = False
    has_second_derivatives = True
    is_whole = True

    def prepare(self) -> None: ...

    def refresh(self, parameters: Iterable[Tensor]) -> None: ...

    def whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def in_pass(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def take_calls(self) -> list[int]:
        return []

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        return differentiate(losses, leaves, wrt, low, overlaps=True)

    def bind(self, module: nn.Module) -> Callable[..., Any]:
        names = [name for name, _ in module.named_parameters()]
        # The search for ties takes a twentieth of the update of a small model.
        is_tied = len(list(module.named_parameters(remove_duplicate=False))) > len(names)

        def call(values: Tensors, constants: dict[str, Tensor], *inputs: Any) -> Any:
            weights = dict(zip(names, values)) | constants
            return functional_call(module, weights, *inputs, tie_weights=is_tied)

        return call
