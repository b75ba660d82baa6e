"""End-task-aware training on images (paper appendix A.4): a few classes, and all others beside them.

The end task is to tell the target classes apart, with few images; the auxiliary task tells all
other classes apart. A development set is split off the target images. Shapes: B images, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import option, typed_options
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest, register_task
from metaseq_lm.data.images import (
    ClassifiedImages,
    Images,
    load_images,
    require_channels,
    require_scale,
)
from metaseq_lm.data.streams import Order, Sequential, Shuffled, Stream
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan import data, update
from metaseq_lm.methods.tartan.criterion import Meta, MultiTask, endtask_scored
from metaseq_lm.methods.tartan.model import META
from metaseq_lm.methods.tartan.update import AUXILIARY, BODY, DEV, ENDTASK, FIT, HEAD
from metaseq_lm.models.vision.wide_resnet import WideResNet, check_whole_batches
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.tasks import Batches, Passes, Scored, Task
from metaseq_lm.tasks.finetuning import labelled_scores

OTHER, TARGET = "other", "target"  # heads


@dataclass
class TartanVisionConfig:
    """Classes, how the target images are split, and batches (the authors' values)."""

    target: list[str] = option([], "names of the classes of the end task")
    train_on: str = option(
        "both",
        "tasks: both, auxiliary (pre-training) or target (fine-tuning)",
        choices=("both", "auxiliary", "target"),
    )
    dev_share: float = option(
        0.2, "probability that a target image is for development", at_least=0, at_most=1
    )
    dev_limit: int = option(65, "most development images (0 = all of them)", at_least=0)
    train_limit: int = option(200, "most training images of the target (0 = all)", at_least=0)
    test_limit: int = option(
        0, "first target images of a test split used (0 = all; the code: 200)", at_least=0
    )
    split_seed: int = option(1, "seed of the split, the same for all runs")
    batch_size: int = option(64, "images of a batch of each task", at_least=1)
    dev_batch_size: int = option(16, "images of a batch of the meta-objective", at_least=1)
    meta_head_batch_size: int = option(16, "images the meta head is fitted to", at_least=1)
    mean: list[float] = option([0.4914, 0.4822, 0.4465], "mean by channel")
    sd: list[float] = option([0.2023, 0.1994, 0.2010], "standard deviation by channel", above=0)
    head_lr: float | None = option(
        None, "rate of the end task's head (null = optimizer.lr)", at_least=0
    )
    head_weight_decay: float = option(0.0, "weight decay of the end task's head", at_least=0)


def only(images: Images, classes: Sequence[int]) -> Images:
    """Return the images of some classes, which are renumbered in that order."""
    chosen = images[np.flatnonzero(np.isin(images.labels, classes))]
    number = np.full(len(images.names), -1)
    number[list(classes)] = np.arange(len(classes))
    return Images(chosen.images, number[chosen.labels], tuple(images.names[c] for c in classes))


def cut(images: Images, options: DictConfig) -> tuple[Images, Images]:
    """Return the target's training and development images; each is drawn for one of the two.

    In a random order, until each part is full; what is drawn for a full part is left out.
    """
    generator = random_streams.generator(options.split_seed, "target images")
    order = generator.permutation(len(images))
    for_dev = generator.random(len(images)) < options.dev_share
    parts = []
    for chosen, limit in (
        (order[~for_dev], options.train_limit),
        (order[for_dev], options.dev_limit),
    ):
        parts.append(images[np.sort(chosen[: limit or None])])
    if not all(len(part) for part in parts):
        raise MetaseqError(
            f"{len(images)} target images leave {len(parts[0])} for training and {len(parts[1])} for "
            "development; change task.dev_share or task.target"
        )
    return parts[0], parts[1]


@register_task("tartan_vision", dataclass=TartanVisionConfig)
class TartanVisionTask(Task):
    """One wide residual network with a linear head for each task and the meta head."""

    fresh = ("heads.", "task_logits")
    criterion: MultiTask
    criterions = (MultiTask,)

    def __init__(self, config: TartanVisionConfig, run_config: DictConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        if run_config.model._name != "wide_resnet":
            raise UsageError(
                f"task tartan_vision needs model=wide_resnet, not {run_config.model._name}"
            )
        if isinstance(self.criterion, Meta) and options.train_on != "both":
            raise UsageError("criterion tartan_meta weighs tasks; it needs task.train_on=both")
        largest = max(options.batch_size, options.dev_batch_size, options.meta_head_batch_size)
        check_whole_batches(run_config.model.norm, largest, run_config.engine.micro_batch_size)
        self.members = [AUXILIARY + OTHER, ENDTASK]
        if options.train_on != "both":
            self.members = [self.members[options.train_on == "target"]]
        self.criterion.start(len(self.members))

    # ---------------------------------------------------------------- data

    @cached_property
    def classes(self) -> tuple[list[int], list[int]]:
        """The numbers of the target classes and of all others."""
        names = list(load_images(self.data, "train").names)
        for name in self.config.target:
            if name not in names:
                raise UsageError(
                    f"task.target: no class '{name}'.{nearest(name, names)} There are: "
                    f"{', '.join(names)}"
                )
        target = [names.index(name) for name in self.config.target]
        others = [i for i in range(len(names)) if i not in target]
        if len(set(target)) < 2 or len(others) < 2 or len(set(target)) < len(target):
            raise UsageError(
                f"task.target is {list(self.config.target)}; name two or more different classes, and "
                f"leave two or more of {', '.join(names)}"
            )
        return target, others

    @cached_property
    def parts(self) -> dict[str, ClassifiedImages]:
        """The images of the auxiliary task, and the target's for training and development."""
        images, (target, others) = load_images(self.data, "train"), self.classes
        train, dev = cut(only(images, target), self.config)
        found = {OTHER: only(images, others), "train": train, "valid": dev}
        return {name: ClassifiedImages(part) for name, part in found.items()}

    def labelled(self, split: str) -> ClassifiedImages:
        """Return the target's images: "train" and "valid" are cut from the training split."""
        if split in ("train", "valid"):
            return self.parts[split]
        target = only(load_images(self.data, split), self.classes[0])
        return ClassifiedImages(target[np.arange(len(target))[: self.config.test_limit or None]])

    def stream(self, name: str, order: Order, part: ClassifiedImages, head: str) -> Stream:
        """Return a stream whose batches name their head; an image counts as one token."""
        mean, sd = list(self.config.mean), list(self.config.sd)

        def collate(samples: np.ndarray, keys: np.ndarray, width: int) -> data.HeadedImageBatch:
            batch = part.batch(mean, sd, samples, keys, width)
            return data.HeadedImageBatch(**vars(batch), head=head)

        lengths = np.ones(len(part.labels), np.int64)
        return Stream(name, order, collate, self.run_config.seed, lengths)

    def build_streams(self, split: str) -> dict[str, Stream]:
        options, seed = self.config, self.run_config.seed
        if split != "train":
            part = self.labelled(split)
            once = Sequential(len(part.labels), options.batch_size)
            return {split: self.stream(split, once, part, TARGET)}
        streams = {}
        full = AUXILIARY + OTHER
        if full in self.members:
            part = self.parts[OTHER]
            order = Shuffled(len(part.labels), options.batch_size, seed, full)
            streams[full] = self.stream(full, order, part, OTHER)
        wanted = {ENDTASK: ("train", options.batch_size, TARGET)} if ENDTASK in self.members else {}
        if isinstance(self.criterion, Meta):
            config = self.criterion.config
            fit = "train" if config.meta_head_split == "train" else "valid"
            wanted[DEV] = ("valid", options.dev_batch_size, TARGET if config.same_head else META)
            if not config.same_head:
                wanted[FIT] = (fit, options.meta_head_batch_size, META)
        for name, (part_of, size, head) in wanted.items():
            part = self.parts[part_of]
            drawn = data.Drawn(len(part.labels), size, seed, name)
            streams[name] = self.stream(name, drawn, part, head)
        return streams

    # ---------------------------------------------------------------- model

    def build_model(self) -> nn.Module:
        assert isinstance(self.criterion, MultiTask)
        options, sizes = self.config, typed_options("model", self.run_config.model)
        images = self.parts["train"].images
        require_channels(images, {"model.channels": sizes.channels})
        require_scale(images, options.mean, options.sd)
        encoder = WideResNet(sizes)
        target, others = self.classes
        heads = {OTHER: nn.Linear(encoder.outputs, len(others))}
        heads[TARGET] = nn.Linear(encoder.outputs, len(target))
        if isinstance(self.criterion, Meta) and not self.criterion.config.same_head:
            heads[META] = nn.Linear(encoder.outputs, len(target))
        model = nn.Module()
        model.encoder, model.heads = encoder, nn.ModuleDict(heads)
        model.register_buffer("task_logits", self.criterion.start(len(self.members)))
        return model

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        config, options = self.run_config, self.config
        own = (f"heads.{TARGET}.", f"heads.{META}.")
        body = [(n, p) for n, p in model.named_parameters() if not n.startswith(own)]
        lr = config.optimizer.lr if options.head_lr is None else options.head_lr
        head = model.get_submodule(f"heads.{TARGET}")
        return {
            BODY: build_optimizer(body, config.optimizer, config.schedule),
            HEAD: update.build_own_optimizer(
                head, config.optimizer, config.schedule, lr, options.head_weight_decay
            ),
        }

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the network, and no head, of a run of this task."""
        return {name: w for name, w in weights.items() if name.startswith("encoder.")}

    # ---------------------------------------------------------------- updates and scores

    def needs(self, number: int) -> dict[str, int]:
        wanted = dict.fromkeys(self.members, 1)
        if isinstance(self.criterion, Meta):
            wanted |= {DEV: 1} if self.criterion.config.same_head else {DEV: 1, FIT: 1}
        return wanted

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        optimizer = self.run_config.optimizer
        return update.update(engine, model, batches, self.members, self.criterion, optimizer)

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the `labelled_split` of the end task's head."""
        ((split, batches),) = passes.items()
        return labelled_scores(
            engine, self.labelled(split), batches, partial(endtask_scored, model)
        )
