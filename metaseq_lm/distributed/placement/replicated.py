"""Every process holds all parameters; gradients are summed during the backward pass."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors, differentiate


class Replicated(Placement):
    """Full parameters in every process; nothing is gathered."""

    gathers = False

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
