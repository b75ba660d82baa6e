"""Classification of images by cross-entropy."""

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ImageBatch, Term, Terms, number_of
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import cross_entropy


def class_terms(logits: Tensor, targets: Tensor) -> Terms:
    """Return the mean loss and the accuracy of logits (B, K) and targets (B,)."""
    with torch.no_grad():
        correct = number_of(logits.argmax(-1) == targets)
    return {
        "cross_entropy": Term(cross_entropy(logits, targets).sum(), "rows"),
        "accuracy": Term(correct, "rows", weight=0.0),
    }


@register_criterion("image_classification")
class ImageClassification(Criterion):
    """The loss of a network's primary head on labelled images: supervised learning alone."""

    general = False

    def __call__(self, model: nn.Module, batch: ImageBatch) -> Terms:
        assert batch.targets is not None
        return class_terms(model(batch.images), batch.targets)
