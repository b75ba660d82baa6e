"""A body that all tasks share, a head for each, and the logits of the tasks' weights.

`encoder` is the body, `heads` the heads by name; `task_logits` (T,) is a buffer, so that checkpoints
hold it. Shapes: T tasks, K classes.
"""

import math

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import ImageBatch
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.methods.tartan.data import StateBatch, TaskBatch
from metaseq_lm.models.layers import Dropout, full_precision
from metaseq_lm.models.transformer.encoder import SentenceHead, TransformerLM
from metaseq_lm.tasks.finetuning import encoder_sizes

LM = "lm"
SENTENCE = "sentence"
META = "meta"


def build_text_model(
    config: DictConfig, vocabulary: Vocabulary, lm_heads: tuple[str, ...]
) -> TransformerLM:
    """Return an encoder of the configured model's sizes with these LM heads and no others.

    Raises UsageError for a model without a Transformer encoder.
    """
    return TransformerLM(encoder_sizes(config), len(vocabulary), vocabulary.pad, lm_heads)


def sentence_head(width: int, classes: int, dropout: float) -> SentenceHead:
    """Return dropout, linear, tanh, dropout, linear on the first state, with torch's own start."""
    return SentenceHead(width, classes, dropout, pooled=True, pooler_dropout=True)


def states_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    """Return the body's states of a batch of texts or images."""
    if isinstance(batch, StateBatch):
        return batch.states
    encoder = model.get_submodule("encoder")
    states: Tensor
    if isinstance(batch, ImageBatch):
        states = encoder(batch.images)
    else:
        states = encoder(batch.tokens, batch.padding, batch.segments)
    return states


def scores_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    """Return the scores (B, K) of a batch of texts or images from the head that it names."""
    head = model.get_submodule(f"heads.{batch.head}")
    return full_precision(head(states_of(model, batch)))


def has_dropout(net: nn.Module) -> bool:
    """Return whether two training passes of a network may differ."""
    return any(isinstance(layer, Dropout) and layer.p > 0 for layer in net.modules())


def probabilities(scores: Tensor) -> Tensor:
    """Return the probabilities (B, K) of scores, in float64."""
    return scores.double().softmax(-1)


@torch.no_grad()
def redraw(head: nn.Module, generator: np.random.Generator) -> None:
    """Draw all linear layers of a head afresh, as torch starts them: uniform within 1 / sqrt(inputs)."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                drawn = generator.uniform(-bound, bound, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(drawn))
