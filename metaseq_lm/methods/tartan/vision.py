"""End-task-aware training on images (paper appendix A.4).

The end task classifies a few target classes from few images; the auxiliary task classifies all
other classes. A development set is split off the target images. Shapes: B images, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.images import (
    Images,
    load_images,
    require_channels,
    require_scale,
)
from metaseq_lm.data.streams import Sequential, Shuffled, Stream
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan.criterion import Meta, MultiTask, endtask_scored
from metaseq_lm.methods.tartan.data import TartanRows
from metaseq_lm.methods.tartan.model import META
from metaseq_lm.methods.tartan.options import TartanVisionConfig
from metaseq_lm.methods.tartan.update import AUXILIARY, ENDTASK, EndTaskAware
from metaseq_lm.models.layers import Heads
from metaseq_lm.models.vision import WideResNet, check_whole_batches
from metaseq_lm.tasks import Passes, Scored, model_class
from metaseq_lm.tasks.finetuning import labelled_scores

OTHER, _TARGET = "other", "target"  # heads


def _select_classes(images: Images, classes: Sequence[int]) -> Images:
    """Return the images of some classes, renumbered in the order of `classes`."""
    chosen = images[np.flatnonzero(np.isin(images.labels, classes))]
    number = np.full(len(images.names), -1)
    number[list(classes)] = np.arange(len(classes))
    return Images(chosen.images, number[chosen.labels], tuple(images.names[c] for c in classes))


def _split_target(images: Images, options: TartanVisionConfig) -> tuple[Images, Images]:
    """Return the target's training and development images, in random order up to the limits.

    Images drawn for a full part are left out.
    """
    generator = random_streams.generator(options.split_seed, "target images")
    order = generator.permutation(len(images))
    for_dev = generator.random(len(images)) < options.dev_share
    train = order[~for_dev][: options.train_limit or None]
    dev = order[for_dev][: options.dev_limit or None]
    parts = images[np.sort(train)], images[np.sort(dev)]
    if not all(len(part) for part in parts):
        raise MetaseqError(
            f"{len(images)} target images leave {len(parts[0])} for training and {len(parts[1])} "
            "for development; change task.dev_share or task.target"
        )
    return parts


class TartanVisionTask(EndTaskAware):
    """A wide residual network with a linear head for each task, and the meta head."""

    criterion: MultiTask
    criterions = (MultiTask,)
    endtask_head = _TARGET

    def __init__(self, config: TartanVisionConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        options = self.config
        model_class(run_config, WideResNet)
        if isinstance(self.criterion, Meta) and options.train_on != "both":
            raise UsageError("criterion tartan_meta weighs tasks; it needs task.train_on=both")
        largest = max(options.batch_size, options.dev_batch_size, options.meta_head_batch_size)
        check_whole_batches(run_config.model.norm, largest, run_config.engine.micro_batch_size)
        self.members = [AUXILIARY + OTHER, ENDTASK]
        if options.train_on != "both":
            self.members = [self.members[options.train_on == "target"]]
        self.criterion.initial_logits(len(self.members))  # rejects wrong weights early

    # ---------------------------------------------------------------- data

    @cached_property
    def classes(self) -> tuple[list[int], list[int]]:
        """The numbers of the target classes and of all other classes."""
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
                f"task.target is {list(self.config.target)}; name two or more different classes, "
                f"and leave two or more of {', '.join(names)}"
            )
        return target, others

    @cached_property
    def parts(self) -> dict[str, Images]:
        """The images of the auxiliary task, and the target images for training and development."""
        images, (target, others) = load_images(self.data, "train"), self.classes
        train, dev = _split_target(_select_classes(images, target), self.config)
        return {OTHER: _select_classes(images, others), "train": train, "valid": dev}

    def labelled(self, split: str) -> Images:
        """Return the target's images; "train" and "valid" are parts of the training split."""
        if split in ("train", "valid"):
            return self.parts[split]
        target = _select_classes(load_images(self.data, split), self.classes[0])
        return target[np.arange(len(target))[: self.config.test_limit or None]]

    def rows(self, part: Images) -> TartanRows:
        """Return the rows of a part."""
        mean, sd = list(self.config.mean), list(self.config.sd)
        return TartanRows(part.lengths, partial(part.batch, mean, sd))

    def labelled_rows(self, split: str) -> TartanRows:
        return self.rows(self.parts[split])

    def build_streams(self, split: str) -> dict[str, Stream]:
        batch_size = self.config.batch_size
        if split != "train":
            part = self.labelled(split)
            one_pass = Sequential(len(part.labels), batch_size)
            return {split: self.stream(split, one_pass, self.rows(part), _TARGET)}
        streams = {}
        name = AUXILIARY + OTHER
        if name in self.members:
            rows = self.rows(self.parts[OTHER])
            order = Shuffled(len(rows.lengths), batch_size, self.run_config.seed, name)
            streams[name] = self.stream(name, order, rows, OTHER)
        return streams | self.drawn_streams()

    # ---------------------------------------------------------------- model

    def build_model(self) -> nn.Module:
        options, sizes = self.config, self.run_config.model
        images = self.parts["train"]
        require_channels(images, {"model.channels": sizes.channels})
        require_scale(images, options.mean, options.sd)
        target, others = self.classes
        model = nn.Module()
        model.encoder = WideResNet(sizes)
        width = model.encoder.outputs
        heads = {OTHER: nn.Linear(width, len(others)), _TARGET: nn.Linear(width, len(target))}
        if self.has_meta_head:
            heads[META] = nn.Linear(width, len(target))
        model.heads = Heads(heads)
        model.register_buffer("task_logits", self.criterion.initial_logits(len(self.members)))
        return model

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the network, and no head, of a run of this task."""
        return {name: w for name, w in weights.items() if name.startswith("encoder.")}

    # ---------------------------------------------------------------- scores

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the scores of the end task's head."""
        ((split, batches),) = passes.items()
        return labelled_scores(
            engine, self.labelled(split), batches, partial(endtask_scored, model)
        )
