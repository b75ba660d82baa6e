"""The encoder that all tasks share, a head for each task, and the logits of the task weights.

`encoder` is the shared network and `heads` has the heads by name. `task_logits` (T,) is a buffer,
so that checkpoints contain it. Shapes: B rows, T tasks, K classes.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ImageBatch, on_device
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.methods.tartan.data import StateBatch, TaskBatch
from metaseq_lm.models.layers import Dropout

META = "meta"  # the meta head


def states_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    """Return the encoder's states of a batch of texts (B, S, D) or images (B, D)."""
    if isinstance(batch, StateBatch):
        return batch.states
    encoder = model.get_submodule("encoder")
    states: Tensor
    if isinstance(batch, ImageBatch):
        states = encoder(batch.images)
    else:
        states = encoder(batch.tokens, batch.layout, batch.segments)
    return states


def scores_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    """Return the scores (B, K) of a batch of texts or images from the head `batch.head`."""
    head = model.get_submodule(f"heads.{batch.head}")
    return full_precision(head(states_of(model, batch)))


def has_dropout(net: nn.Module) -> bool:
    """Return whether two training passes of a network may differ."""
    return any(isinstance(layer, Dropout) and layer.p > 0 for layer in net.modules())


@torch.no_grad()
def redraw(head: nn.Module, generator: np.random.Generator) -> None:
    """Initialise the linear layers of a head as torch does: uniform within 1 / sqrt(inputs)."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                values = generator.uniform(-bound, bound, tuple(parameter.shape))
                parameter.copy_(on_device(torch.from_numpy(values), parameter.device))
