"""Cross-view training of image classification (Clark 2021, section 4.4), with its baselines.

In all criterions labelled images train the primary head. Shapes: B images, C channels, H height, W
width, P places of the features, D their width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaseq_lm.config.models import POSITIONAL
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import ImageBatch, Logs, Term, Terms, as_tensor
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.criterions.labelled import ImageClassification, class_terms
from metaseq_lm.data.images import (
    Images,
    load_images,
    normalise_images,
    require_scale,
    shift_images,
)
from metaseq_lm.data.streams import Sequential, Shuffled, Stream
from metaseq_lm.engine.engine import Engine
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.methods.cvt.model import (
    AveragedNet,
    adversarial_direction,
    check_teacher,
    draw_gaussian,
    normalise_rows,
)
from metaseq_lm.methods.cvt.options import (
    ADVERSARIAL,
    NONE,
    ConsistencyConfig,
    CVTVisionConfig,
    CVTVisionTaskConfig,
)
from metaseq_lm.models.layers import dropout_at
from metaseq_lm.models.vision import ConvLarge, check_whole_batches, feature_size, frozen_statistics
from metaseq_lm.tasks import Batches, Passes, Scored, Task, model_class
from metaseq_lm.tasks.finetuning import labelled_scores
from metaseq_lm.tasks.protocols import Kinds

UNLABELLED = "unlabelled"
POSITION_HEADS = "places"  # name for the auxiliary heads


class _ConsistentImages(ImageClassification):
    """The base: students learn the teacher's class probabilities of unlabelled images.

    The teacher is the primary head on the clean image, without dropout and gradient; students see a
    perturbed image. Their loss is the divergence KL(teacher, student).
    """

    config: ConsistencyConfig

    def __init__(self, config: ConsistencyConfig) -> None:
        super().__init__(config)
        self.differentiates = config.perturbation == ADVERSARIAL

    def __call__(self, model: nn.Module, batch: ImageBatch) -> Terms:
        if batch.stream != UNLABELLED:
            return super().__call__(model, batch)
        images = batch.images
        net: Any = model.net
        teacher: Any = model.averaged if self.config.mean_teacher else net
        # Passes on unlabelled images do not change statistics of batch normalisation.
        with torch.no_grad(), frozen_statistics(teacher), dropout_at(teacher, 0.0):
            target = full_precision(teacher(images)).log_softmax(-1)
        with frozen_statistics(net), dropout_at(net, self.config.unlabelled_dropout):

            def loss(changed: Tensor) -> Tensor:
                return self.losses(net, changed, target)

            losses = loss(images + self.perturbation(net, images, loss))
        return {"consistency": Term(losses.sum(), UNLABELLED, self.config.weight)}

    def losses(self, net: ConvLarge, images: Tensor, target: Tensor) -> Tensor:
        """Return the student's loss (B,) on images, given the teacher's log-probs (B, K)."""
        return _kl_divergence(target, net(images))

    def perturbation(
        self, net: nn.Module, images: Tensor, loss: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the perturbation of the images (B, C, H, W), of norm `radius` each, or zeros."""
        if self.config.perturbation == NONE:
            return torch.zeros_like(images)
        direction = draw_gaussian(images)
        if self.config.perturbation == ADVERSARIAL:
            # One step of power iteration (Miyato et al. 2017): the gradient of the loss at a small
            # random displacement. Without dropout, whose noise would exceed such a change.
            with dropout_at(net, 0.0):
                direction = adversarial_direction(
                    direction, self.config.xi, lambda step: loss(images + step).sum()
                )
        return self.config.radius * normalise_rows(direction)


def _kl_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return KL of log-probabilities (..., K) and the softmax of logits (..., K)."""
    predicted = full_precision(logits).log_softmax(-1)
    return (target.exp() * (target - predicted)).sum(-1)


class VATVision(_ConsistentImages):
    """Virtual adversarial training (Miyato et al. 2017): the primary head is the student.

    With perturbation random or none, and dropout, it is like the Pi model (Laine and Aila 2017),
    with mean_teacher like the mean teacher (Tarvainen and Valpola 2017).
    """


class CVTVision(_ConsistentImages):
    """Cross-view training: the students are heads that each see one position of the features.

    The loss is the mean over the heads; criterion.weight = 36, the number of heads, makes it their
    sum.
    """

    config: CVTVisionConfig

    def losses(self, net: ConvLarge, images: Tensor, target: Tensor) -> Tensor:
        logits = net.heads[POSITION_HEADS](net.features(images))
        return _kl_divergence(target.unsqueeze(1), logits).mean(1)


class PositionHeads(nn.Module):
    """A separate softmax layer for each position of the features."""

    def __init__(self, positions: int, width: int, classes: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(positions, classes, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(positions, classes))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, P, K) of features (B, D, n, n), P = n n, row by row."""
        return torch.einsum("bdp,pkd->bpk", features.flatten(2), self.weight) + self.bias


# ------------------------------------------------------------------------ task


def _balanced_permutation(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return a random permutation for `labels` (N,) whose every prefix is class-balanced."""
    generator = random_streams.generator(seed, "labelled images")
    shuffled = generator.permutation(len(labels))
    rank = np.empty(len(labels), np.int64)  # rank within the class
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members))
    return shuffled[np.argsort(rank[shuffled], kind="stable")]


class CVTVisionTask(Task):
    """Updates on labelled and unlabelled images; labelled ones only for image_classification."""

    criterions = (ImageClassification,)

    def __init__(self, config: CVTVisionTaskConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        options, sizes = self.config, run_config.model
        model_class(run_config, ConvLarge)
        self.semi_supervised = isinstance(self.criterion, _ConsistentImages)
        largest = options.batch_size
        if isinstance(self.criterion, _ConsistentImages):
            largest = max(largest, options.unlabelled_batch_size)
            check_teacher(self.criterion.config.mean_teacher, options.average_decay)
        check_whole_batches(sizes.norm, largest, run_config.engine.micro_batch_size, POSITIONAL)

    # ---------------------------------------------------------------- data

    @cached_property
    def parts(self) -> dict[str, Images]:
        """The training images in three parts: "valid", "train" with labels, "unlabelled"."""
        options, images = self.config, load_images(self.data, "train")
        order = _balanced_permutation(images.labels, options.split_seed)
        available = len(order) - options.valid_count
        count = options.labelled or available
        if options.labelled_share:
            count = round(options.labelled_share * available)
            if not count:
                raise UsageError(
                    f"task.labelled_share={options.labelled_share} of {available} training images "
                    "is none; raise it"
                )
        if not 0 < count <= available:
            raise UsageError(
                f"{len(order)} training images are too few for "
                f"task.valid_count={options.valid_count} and {count} labelled ones; lower "
                "task.labelled or task.valid_count"
            )
        cuts = np.split(order, [options.valid_count, options.valid_count + count])
        names = ("valid", "train", UNLABELLED)
        return {name: images[np.sort(chosen)] for name, chosen in zip(names, cuts)}

    def labelled(self, split: str) -> Images:
        """Return the labelled images of a split."""
        if split == "train" or (split == "valid" and self.config.valid_count):
            return self.parts[split]
        return load_images(self.data, split)

    def training_batch(
        self, part: Images, size: str, samples: np.ndarray, keys: np.ndarray, width: int
    ) -> ImageBatch:
        """Return augmented, normalised images (B, C, H, W) and targets (B,); the size is `size`."""
        options, images = self.config, part.images[samples]
        if options.translate:
            u = random_streams.uniforms(keys, 0, 2)
            shifts = (u * (2 * options.translate + 1)).astype(np.int64) - options.translate
            images = shift_images(images, shifts)
        return ImageBatch(
            images=as_tensor(normalise_images(images, options.mean, options.sd)),
            targets=None if size == UNLABELLED else part.labels[samples],
            samples=samples,
            sizes={size: len(samples)},
        )

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        if split != "train":
            return self.single_pass(split)
        sizes = {"train": ("rows", options.batch_size)}
        if self.semi_supervised:
            sizes[UNLABELLED] = (UNLABELLED, options.unlabelled_batch_size)
        streams = {}
        for name, (size, rows) in sizes.items():
            images = self.parts[name]
            if not len(images):
                raise MetaseqError(
                    f"{self.data}: no image is left without a label; lower task.labelled"
                )
            order = Shuffled(len(images), rows, seed, name)
            collate = partial(self.training_batch, images, size)
            streams[name] = Stream(name, order, collate, seed, images.lengths)
        return streams

    def single_pass(self, split: str) -> dict[str, Stream]:
        """Return one pass over the labelled images of a split."""
        options, part = self.config, self.labelled(split)
        order = Sequential(len(part.labels), options.unlabelled_batch_size)
        batch = partial(part.batch, list(options.mean), list(options.sd))
        return {split: Stream(split, order, batch, self.run_config.seed, part.lengths)}

    # ---------------------------------------------------------------- model and updates

    def build_model(self) -> nn.Module:
        images = load_images(self.data, "train")
        _, height, width, channels = images.images.shape
        sizes = self.run_config.model
        if height != width or feature_size(height) < 1 or channels != sizes.channels:
            raise UsageError(
                f"{self.data}: images of {height} x {width} pixels and {channels} channels; the "
                f"model is for square ones of 12 or more and {sizes.channels} channels "
                "(model.channels)"
            )
        require_scale(images, self.config.mean, self.config.sd)
        if self.config.translate >= height:
            raise UsageError(
                f"task.translate is {self.config.translate}, but the images have {height} "
                "pixels a side"
            )
        net = ConvLarge(sizes, len(images.names))
        if isinstance(self.criterion, CVTVision):
            net.heads[POSITION_HEADS] = PositionHeads(
                feature_size(height) ** 2, net.outputs, len(images.names)
            )
        return AveragedNet(net, self.config.average_decay)

    def needs(self, update: int) -> dict[str, int]:
        if not self.semi_supervised:
            return {"train": 1}
        if self.config.joint:
            return {"train": 1, UNLABELLED: 1}
        return {UNLABELLED: 1} if update % 2 else {"train": 1}

    def kinds(self) -> Kinds:
        if not self.semi_supervised or self.config.joint:
            return [(1.0, self.needs(0))]
        return [(0.5, {"train": 1}), (0.5, {UNLABELLED: 1})]

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        assert isinstance(model, AveragedNet)
        model.move_average()
        return super().update(engine, model, batches)

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Score the averaged weights and, with task.score_raw, also the trained ones."""
        assert isinstance(model, AveragedNet)
        return model.scored(partial(self._evaluate_net, engine), passes, self.config.score_raw)

    def _evaluate_net(self, engine: Engine, net: nn.Module, passes: Passes) -> Scored:
        ((split, batches),) = passes.items()

        def scored(batch: ImageBatch) -> tuple[Tensor, Terms]:
            assert batch.targets is not None
            logits = net(batch.images)
            return logits.double().softmax(-1), class_terms(logits, batch.targets)

        return labelled_scores(engine, self.labelled(split), batches, scored)
