"""Cross-view training of image classification (Clark 2021, section 4.4), with its baselines.

Shapes: B images, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import ImageBatch, Logs, Terms, as_tensor
from metaseq_lm.core.config import option, typed_options
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.image_classification import ImageClassification, class_terms
from metaseq_lm.data.images import (
    ClassifiedImages,
    Images,
    load_images,
    moved,
    normalised,
    require_scale,
)
from metaseq_lm.data.streams import Sequential, Shuffled, Stream
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.cvt.averaging import AveragedNet, check_teacher, scores
from metaseq_lm.methods.cvt.vision_losses import (
    PLACES,
    UNLABELLED,
    ConsistentImages,
    CVTVision,
    PlaceHeads,
)
from metaseq_lm.models.vision.conv_large import POSITIONAL, ConvLarge, places
from metaseq_lm.models.vision.wide_resnet import check_whole_batches
from metaseq_lm.tasks import Batches, Passes, Scored, Task
from metaseq_lm.tasks.finetuning import labelled_scores
from metaseq_lm.tasks.protocols import Kinds


@dataclass
class CVTVisionTaskConfig:
    """Which images have labels, batches, and how images are moved (sizes of VAT: from memory)."""

    labelled: int = option(
        4000, "labelled images, as many of each class as can be (0 = all)", at_least=0
    )
    labelled_share: float = option(
        0.0,
        "their share of the training images instead (0 = labelled)",
        at_least=0,
        at_most=1,
    )
    valid_count: int = option(
        1000, "training images that are split valid (0 = the data has one)", at_least=0
    )
    split_seed: int = option(1, "seed of these choices; a smaller set is a part of a larger one")
    batch_size: int = option(32, "labelled images of a batch", at_least=1)
    unlabelled_batch_size: int = option(128, "unlabelled images of a batch", at_least=1)
    joint: bool = option(
        False, "each update has a batch of both kinds and one step; false: they take turns"
    )
    translate: int = option(
        0, "training images are moved by up to this many pixels (CIFAR-10+: 2)", at_least=0
    )
    flip: bool = option(False, "half of the training images are mirrored")
    mean: list[float] = option([0.4914, 0.4822, 0.4465], "mean by channel")
    sd: list[float] = option([0.2023, 0.1994, 0.2010], "standard deviation by channel", above=0)
    average_decay: float = option(
        0.998,
        "of the moving average of the weights that is scored (0 = the weights themselves)",
        at_least=0,
        below=1,
    )
    score_raw: bool = option(False, "score the weights themselves too, as raw_*")


def balanced(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return all numbers of `labels` (N,) in a random order whose beginnings have all classes alike."""
    generator = random_streams.generator(seed, "labelled images")
    shuffled = generator.permutation(len(labels))
    rank = np.empty(len(labels), np.int64)  # of each among those of its class
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members))
    return shuffled[np.argsort(rank[shuffled], kind="stable")]


@register_task("cvt_vision", dataclass=CVTVisionTaskConfig)
class CVTVisionTask(Task):
    """Labelled and unlabelled images by turns, or together; with image_classification labelled only."""

    criterions = (ImageClassification,)

    def __init__(self, config: CVTVisionTaskConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        options, sizes = self.config, run_config.model
        if sizes._name != "conv_large":
            raise UsageError(f"task cvt_vision needs --model conv_large, got {sizes._name}")
        self.semi_supervised = isinstance(self.criterion, ConsistentImages)
        largest = options.batch_size
        if isinstance(self.criterion, ConsistentImages):
            largest = max(largest, options.unlabelled_batch_size)
            check_teacher(self.criterion.config.mean_teacher, options.average_decay)
        check_whole_batches(sizes.norm, largest, run_config.engine.micro_batch_size, POSITIONAL)

    # ---------------------------------------------------------------- data

    @cached_property
    def parts(self) -> dict[str, Images]:
        """The training images in three: "valid", "train" with labels, "unlabelled"."""
        options, images = self.config, load_images(self.data, "train")
        order = balanced(images.labels, options.split_seed)
        left = len(order) - options.valid_count
        count = options.labelled or left
        if options.labelled_share:
            count = round(options.labelled_share * left)
            if not count:
                raise UsageError(
                    f"task.labelled_share={options.labelled_share} of {left} training images is none; "
                    "raise it"
                )
        if not 0 < count <= left:
            raise UsageError(
                f"{len(order)} training images are too few for task.valid_count={options.valid_count} "
                f"and {count} labelled ones; lower task.labelled or task.valid_count"
            )
        cuts = np.split(order, [options.valid_count, options.valid_count + count])
        names = ("valid", "train", UNLABELLED)
        return {name: images[np.sort(chosen)] for name, chosen in zip(names, cuts)}

    def labelled(self, split: str) -> ClassifiedImages:
        """Return the labelled images of a split."""
        if split == "train" or (split == "valid" and self.config.valid_count):
            return ClassifiedImages(self.parts[split])
        return ClassifiedImages(load_images(self.data, split))

    def training_batch(
        self, part: Images, size: str, samples: np.ndarray, keys: np.ndarray, width: int
    ) -> ImageBatch:
        """Return images (B, C, H, W), moved and normalised, and targets (B,); the size is `size`."""
        options, images = self.config, part.images[samples]
        if options.translate or options.flip:
            drawn = random_streams.uniforms(keys, 0, 3)
            most = options.translate
            shifts = (drawn[:, :2] * (2 * most + 1)).astype(np.int64) - most
            images = moved(images, shifts, options.flip & (drawn[:, 2] < 0.5))
        return ImageBatch(
            images=as_tensor(normalised(images, options.mean, options.sd)),
            targets=None if size == UNLABELLED else part.labels[samples],
            samples=samples,
            sizes={size: len(samples)},
        )

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        if split != "train":
            part = self.labelled(split)
            once = Sequential(len(part.labels), options.unlabelled_batch_size)
            batch = partial(part.batch, list(options.mean), list(options.sd))
            return {split: Stream(split, once, batch, seed, ones(part.images))}
        wanted = {"train": ("rows", options.batch_size)}
        if self.semi_supervised:
            wanted[UNLABELLED] = (UNLABELLED, options.unlabelled_batch_size)
        streams = {}
        for name, (size, rows) in wanted.items():
            images = self.parts[name]
            if not len(images):
                raise MetaseqError(
                    f"{self.data}: no image is left without a label; lower task.labelled"
                )
            order = Shuffled(len(images), rows, seed, name)
            collate = partial(self.training_batch, images, size)
            streams[name] = Stream(name, order, collate, seed, ones(images))
        return streams

    # ---------------------------------------------------------------- model and updates

    def build_model(self) -> nn.Module:
        images = load_images(self.data, "train")
        _, height, width, channels = images.images.shape
        sizes = typed_options("model", self.run_config.model)
        if height != width or places(height) < 1 or channels != sizes.channels:
            raise UsageError(
                f"{self.data}: images of {height} x {width} pixels and {channels} channels; the model is "
                f"for square ones of 12 or more and {sizes.channels} channels (model.channels)"
            )
        require_scale(images, self.config.mean, self.config.sd)
        if self.config.translate >= height:
            raise UsageError(
                f"task.translate is {self.config.translate}, but the images have {height} pixels a side"
            )
        net = ConvLarge(sizes, len(images.names))
        if isinstance(self.criterion, CVTVision):
            net.heads[PLACES] = PlaceHeads(places(height) ** 2, net.outputs, len(images.names))
        return AveragedNet(net, self.config.average_decay)

    def needs(self, update: int) -> dict[str, int]:
        if not self.semi_supervised:
            return {"train": 1}
        if self.config.joint:
            return {"train": 1, UNLABELLED: 1}
        return {UNLABELLED: 1} if update % 2 else {"train": 1}

    def kinds(self) -> Kinds:
        turns = self.semi_supervised and not self.config.joint
        return [(0.5, {"train": 1}), (0.5, {UNLABELLED: 1})] if turns else [(1.0, self.needs(0))]

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        assert isinstance(model, AveragedNet)
        if model.average is not None:
            model.average.move(model.net)
        return super().update(engine, model, batches)

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return what the averaged weights give, and with task.score_raw the scores of the others too."""
        assert isinstance(model, AveragedNet)
        return scores(self._evaluate_net, engine, model, passes, self.config.score_raw)

    def _evaluate_net(self, engine: Engine, net: nn.Module, passes: Passes) -> Scored:
        """Return accuracy, macro F1, loss and rows of one net."""
        ((split, batches),) = passes.items()

        def scored(batch: ImageBatch) -> tuple[Tensor, Terms]:
            assert batch.targets is not None
            logits = net(batch.images)
            return logits.double().softmax(-1), class_terms(logits, batch.targets)

        return labelled_scores(engine, self.labelled(split), batches, scored)


def ones(images: Images) -> np.ndarray:
    """Return the lengths of images as streams want them: each counts as one token."""
    return np.ones(len(images), np.int64)
