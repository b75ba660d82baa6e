"""Every process holds all parameters; gradients are summed during the backward pass."""

from metaseq_lm.distributed.placement.protocol import Placement
from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors, differentiate


class Replicated(Placement):
    """Full parameters in every process; nothing is gathered."""

    gathers = False

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        return differentiate(losses, leaves, wrt, low, overlaps=True)
