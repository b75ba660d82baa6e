"""Exponential moving averages of weights (Clark et al. 2018; Tarvainen and Valpola 2017)."""

import copy

import torch
from torch import nn

RAW = "raw_"  # before the names of scores of the weights themselves


class AveragedWeights(nn.Module):
    """A second net like `net`, in which each weight is the moving average of the other's.

    It starts at the weights that `net` has, without correction of the start. As a part of the model
    it is in every checkpoint; it has no trained parameters. Buffers are copied, not averaged.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.net = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def move(self, net: nn.Module) -> None:
        """Take the weights that `net` has now into the average: a <- decay a + (1 - decay) w.

        `net` may have more weights than the average.
        """
        weights, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        averages = dict(self.net.named_parameters())
        torch._foreach_lerp_(
            list(averages.values()), [weights[name] for name in averages], 1 - self.decay
        )
        for name, buffer in self.net.named_buffers():
            buffer.copy_(buffers[name])
