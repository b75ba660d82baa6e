"""Criterions of semi-supervised image classification; labelled images go to the primary head in all.

Shapes: B images, C channels, H height, W width, P places of the features, D their width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ImageBatch, Term, Terms
from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.image_classification import ImageClassification
from metaseq_lm.methods.cvt.perturbation import adversarial_direction, gaussian, unit
from metaseq_lm.models.layers import full_precision
from metaseq_lm.models.vision.conv_large import ConvLarge
from metaseq_lm.models.vision.wide_resnet import frozen_statistics
from metaseq_lm.models.words.word_model import dropout_at

UNLABELLED = "unlabelled"
PLACES = "places"  # the auxiliary heads
NONE, RANDOM, ADVERSARIAL = "none", "random", "adversarial"
PERTURBATIONS = (NONE, RANDOM, ADVERSARIAL)
REDUCTIONS = ("mean", "sum")


@dataclass
class ConsistencyConfig:
    """How the student's images are changed, and who teaches (constants of VAT: from memory)."""

    perturbation: str = option(
        ADVERSARIAL,
        "of the student's images: none, random or adversarial (VAT)",
        choices=PERTURBATIONS,
    )
    radius: float = option(
        8.0, "Euclidean norm of the perturbation of a normalised image", at_least=0
    )
    xi: float = option(
        0.1, "norm of the step at which the adversarial direction is looked for", above=0
    )
    weight: float = option(1.0, "of the consistency loss")
    unlabelled_dropout: float | None = option(
        None,
        "dropout of the student on unlabelled images (null = model.dropout)",
        at_least=0,
        below=1,
    )
    mean_teacher: bool = option(False, "the averaged weights teach, not the present ones")


@dataclass
class CVTVisionConfig(ConsistencyConfig):
    """How the losses of the places come together."""

    perturbation: str = option(
        NONE, "of the student's images: none, random or adversarial (VAT)", choices=PERTURBATIONS
    )
    reduction: str = option(
        "mean", "of the losses of the places of an image: mean or sum", choices=REDUCTIONS
    )
    primary: bool = option(False, "the primary head, too, learns from what it says of clean images")


class ConsistentImages(ImageClassification):
    """The base: a teacher's classes of clean images are what students must say of changed ones.

    The loss of an unlabelled image is the divergence KL(teacher, student), of each student. The
    teacher is the primary head without dropout and without gradient.
    """

    config: ConsistencyConfig

    def __call__(self, model: nn.Module, batch: ImageBatch) -> Terms:
        if batch.stream != UNLABELLED:
            return super().__call__(model, batch)
        images, net = batch.images, model.net
        teacher = model.averaged if self.config.mean_teacher else net
        # Passes on unlabelled images leave no trace in statistics of batch normalisation.
        with torch.no_grad(), frozen_statistics(teacher), dropout_at(teacher, 0.0):  # type: ignore[arg-type]
            target = full_precision(teacher(images)).log_softmax(-1)  # type: ignore[operator]
        dropout = self.config.unlabelled_dropout
        with frozen_statistics(net), dropout_at(net, dropout):  # type: ignore[arg-type]

            def loss(changed: Tensor) -> Tensor:
                return self.losses(net, changed, target)  # type: ignore[arg-type]

            changed = images + self.perturbation(net, images, loss)  # type: ignore[arg-type]
            losses = loss(changed)
        return {"consistency": Term(losses.sum(), UNLABELLED, self.config.weight)}

    def losses(self, net: ConvLarge, images: Tensor, target: Tensor) -> Tensor:
        """Return the student's loss (B,) on images, given the teacher's log-probabilities (B, K)."""
        return divergence(target, net(images))

    def perturbation(
        self, net: nn.Module, images: Tensor, loss: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what is added to the images (B, C, H, W): of norm `radius` for each, or nothing.

        Adversarial: one step of power iteration (Miyato et al. 2017): the gradient of the loss at a
        small random displacement, without dropout, whose noise would drown so small a change.
        """
        if self.config.perturbation == NONE:
            return torch.zeros_like(images)
        direction = gaussian(images)
        if self.config.perturbation == ADVERSARIAL:
            with dropout_at(net, 0.0):
                direction = adversarial_direction(
                    direction, self.config.xi, lambda step: loss(images + step).sum()
                )
        return self.config.radius * unit(direction)


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return KL of log-probabilities (..., K) and the softmax of logits (..., K)."""
    predicted = full_precision(logits).log_softmax(-1)
    return (target.exp() * (target - predicted)).sum(-1)


@register_criterion("vat_vision", dataclass=ConsistencyConfig)
class VATVision(ConsistentImages):
    """Virtual adversarial training (Miyato et al. 2017): the primary head is the student.

    With perturbation random or none, and dropout, it is like the Pi model (Laine and Aila 2017),
    with mean_teacher like the mean teacher (Tarvainen and Valpola 2017).
    """


@register_criterion("cvt_vision", dataclass=CVTVisionConfig)
class CVTVision(ConsistentImages):
    """Cross-view training: the students are heads that see one place of the features each."""

    config: CVTVisionConfig

    def losses(self, net: ConvLarge, images: Tensor, target: Tensor) -> Tensor:
        features = net.features(images)
        each = divergence(target.unsqueeze(1), net.heads[PLACES](features))  # (B, P)
        total = each.mean(1) if self.config.reduction == "mean" else each.sum(1)
        if self.config.primary:
            total = total + divergence(target, net.primary(features))
        return total


class PlaceHeads(nn.Module):
    """A softmax layer of its own for every place of the features."""

    def __init__(self, places: int, width: int, classes: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(places, classes, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(places, classes))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, P, K) of features (B, D, n, n), P = n n, row by row."""
        return torch.einsum("bdp,pkd->bpk", features.flatten(2), self.weight) + self.bias
