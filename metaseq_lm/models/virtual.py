"""A model called with a parameter vector in place of its own parameters."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.models.layers import Embedding


class VirtualModel:
    """Calls `module` with weights taken from a vector (..., P), or from vectors of several copies (C, P).

    The vector holds the parameters in the order of `module.named_parameters()`, a tied one once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = dict(module.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        # What the input side sees of the padding row does not follow a virtual step.
        self.constants = {
            f"{name}.padding_row": layer.weight[layer.padding_idx].detach().clone()
            for name, layer in module.named_modules()
            if isinstance(layer, Embedding) and layer.padding_idx is not None
        }

    def vector(self) -> Tensor:
        """Return a detached copy of the module's present parameters, (P,)."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the views of `vector` (..., P) that stand for the parameters."""
        lead = vector.shape[:-1]
        pieces = vector.split(self.sizes, dim=-1)
        return [piece.view(*lead, *shape) for piece, shape in zip(pieces, self.shapes)]

    def __call__(self, vector: Tensor, *args: object, **kwargs: object) -> Tensor:
        weights = dict(zip(self.names, self.split(vector))) | self.constants
        return functional_call(self.module, weights, args, kwargs)
