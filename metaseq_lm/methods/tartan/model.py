"""The encoder that all tasks share, a head for each task, and the logits of the task weights.

`encoder` is the shared network and `heads` are the heads by name. `task_logits` (T,) is a buffer, so
that checkpoints contain it. Shapes: B rows, T tasks, K classes.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ImageBatch
from metaseq_lm.methods.tartan.data import TaskBatch
from metaseq_lm.models.layers import full_precision

META = "meta"  # the meta head


def scores_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    """Return the scores (B, K) of a batch of texts or images from the head `batch.head`."""
    encoder, head = model.get_submodule("encoder"), model.get_submodule(f"heads.{batch.head}")
    if isinstance(batch, ImageBatch):
        states = encoder(batch.images)
    else:
        states = encoder(batch.tokens, batch.padding, batch.segments)
    return full_precision(head(states))


@torch.no_grad()
def redraw(head: nn.Module, generator: np.random.Generator) -> None:
    """Initialise the linear layers of a head as torch does: uniform within 1 / sqrt(inputs)."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                values = generator.uniform(-bound, bound, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))
