"""Base classes of tasks: a task builds the data streams and the model, and defines the update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.batch import Batch, Logs
from metaseq_lm.core.config import RunConfig, build
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS, MODELS, TASKS, is_compatible, tasks_for
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.engine.engine import Engine
from metaseq_lm.optim import Optimizer, build_optimizer

__all__ = ["Batches", "Passes", "Scored", "Task", "TextTask"]

# The input of an update: for each stream, a list of global batches, each a list of micro-batches.
Batches = dict[str, list[list[Any]]]  # instances of the task's Batch class

# The input of an evaluation: for each stream, an iterable over all its global batches.
Passes = dict[str, Iterable[list[Batch]]]


class Scored(NamedTuple):
    """The result of an evaluation: metrics, equal on all replicas, and rows of predictions.

    `rows` returns one dict per example, an empty list for a task without predictions. It is a
    function because not every caller needs the rows.
    """

    metrics: Logs
    rows: Callable[[], Sequence[dict[str, Any]]] = tuple


class Task:
    """Base class: data streams, model, optimizers and update; subclasses override what differs.

    Optional methods are listed in `tasks.protocols`.

    Args:
        config: The task's options, an instance of the dataclass that it is registered with.
        run_config: The resolved configuration of the whole run.

    Attributes:
        criterions: The classes of criterion that the task accepts, subclasses included.
        fresh: Prefixes of the parameters that the checkpoint of init_from may lack; they then keep
            their initial values. All other parameters must be in it.
        exported: Whether `metaseq-lm export` may write the model: it must read rows as its
            tokenizer makes them and have the layers of the registered model. A string says why it
            may not. Not inherited: only the body of the registered class counts.
        in_mixtures: Whether the task can be an objective of task mixture: it must predict tokens of
            a corpus's rows, made by `text_stream`, with one head and the default update. Not
            inherited, like `exported`.
        text_token: Index n of the token [CLSn] that starts unlabelled text.
        takes_second_derivatives: Whether `update` calls Engine.inner, which decides how parameters
            are sharded.
        dry_run: Whether the task must not write any file, caches included.
    """

    criterions: tuple[type[Criterion], ...] = (Criterion,)
    fresh: tuple[str, ...] = ("heads.",)
    exported: bool | str = False
    in_mixtures = False
    text_token = 0
    takes_second_derivatives = False
    dry_run = False

    def __init__(self, config: Any, run_config: RunConfig) -> None:
        self.config = config
        self.run_config = run_config
        self.data = Path(run_config.data)
        check_pair(run_config, type(self))
        if isinstance(config, WarmupConfig) and (config.row_lengths or config.length_phases):
            # Raises UsageError before the run has a folder.
            config.in_phases()
        self.criterion: Criterion = build("criterion", run_config.criterion)

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the named streams of "train" (endless) or of another split (one pass)."""
        raise NotImplementedError(f"task '{self.run_config.task._name}' must define build_streams")

    def build_model(self) -> nn.Module:
        """Return all networks, trained and frozen; several networks as one ModuleDict."""
        raise NotImplementedError(f"task '{self.run_config.task._name}' must define build_model")

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        """Return the optimizers by name; by default one, "main", for all trained parameters."""
        return {
            "main": build_optimizer(
                model.named_parameters(), self.run_config.optimizer, self.run_config.schedule
            )
        }

    def needs(self, update: int) -> dict[str, int]:
        """Return how many global batches update number `update` (from 0) takes from each stream."""
        return {"train": 1}

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Run one update; by default one gradient over all batches and one step of "main"."""
        all_batches = itertools.chain.from_iterable(batches.values())
        micro_batches = list(itertools.chain.from_iterable(all_batches))
        grads, logs = engine.gradients(
            lambda batch: self.criterion(model, batch), micro_batches, engine.parameters("main")
        )
        engine.step("main", grads)
        return logs

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the metrics over all batches of a split, and the predictions if there are any.

        A collective operation: all replicas call it, in evaluation mode, and get the same metrics.
        """
        batches = itertools.chain.from_iterable(passes.values())
        logs = engine.evaluate(
            lambda batch: self.criterion(model, batch), batches, rng_key="validate"
        )
        return Scored(logs)

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Select the weights of a checkpoint that initialise this task's model."""
        return weights


class TextTask(Task):
    """A task on a data folder with one vocabulary of tokens."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the data folder."""
        return Vocabulary.load(self.data / "dict.txt")


def check_pair(config: RunConfig, task_class: type[Task] | None = None) -> None:
    """Raise UsageError unless the configured task accepts the configured criterion.

    `task_class` defaults to the registered class of the task.
    """
    task, criterion = config.task._name, config.criterion._name
    task_class = task_class or TASKS.entry(task).value
    criterion_class = CRITERIONS.entry(criterion).value
    named = vars(criterion_class).get("evaluates_as")
    if named and named not in CRITERIONS.entries:
        raise UsageError(
            f"criterion {criterion}: evaluates_as names no criterion: "
            f"{CRITERIONS.describe_unknown(named)}"
        )
    if is_compatible(task, task_class, criterion_class):
        return
    tasks = tasks_for(criterion_class)
    if tasks:
        raise UsageError(
            f"criterion {criterion} is for task {' or '.join(tasks)}, not for {task}; choose "
            "another --task or --criterion"
        )
    accepted = [
        name
        for name, entry in sorted(CRITERIONS.entries.items())
        if is_compatible(task, task_class, entry.value)
    ]
    raise UsageError(
        f"task '{task}' needs criterion={' or '.join(accepted)}, not '{criterion}'; a custom "
        f"criterion derives from {' or '.join(c.__name__ for c in task_class.criterions)}"
    )


def model_class(config: RunConfig, base: type) -> Any:
    """Return the class of the configured model.

    Raises UsageError, with the choices, if it is not a subclass of `base`.
    """
    classes = {name: entry.value for name, entry in sorted(MODELS.entries.items())}
    choices = [n for n, c in classes.items() if isinstance(c, type) and issubclass(c, base)]
    model = config.model._name
    if model not in choices:
        task, names = config.task._name, " or ".join(choices)
        raise UsageError(f"task {task} needs --model {names}, got {model}")
    return classes[model]


def with_epochs(
    config: RunConfig,
    examples: int,
    batch_size: int,
    epochs: float,
    between: float = 0.0,
) -> RunConfig:
    """Return `config` with trainer.max_update set for `epochs` of `examples`; 0 changes nothing.

    An epoch has ceil(examples / batch_size) updates, as in the code of Clark et al. 2020. `between`
    is the number of epochs between validations; 0 leaves trainer.validate_interval_updates
    unchanged. Raises UsageError if there would be no update.
    """
    per_epoch = -(-examples // batch_size)
    if between:
        interval = max(1, int(per_epoch * between))
        config = replace(
            config, trainer=replace(config.trainer, validate_interval_updates=interval)
        )
    if not epochs:
        return config
    updates = int(per_epoch * epochs)
    if updates < 1:
        raise UsageError(
            f"task.epochs is {epochs}, which is less than one update of {examples} examples in "
            f"batches of {batch_size}; raise it, or set it to 0 to use trainer.max_update"
        )
    return with_updates(config, updates)


def with_updates(config: RunConfig, updates: int) -> RunConfig:
    """Return `config` with trainer.max_update, and options that follow it, set to `updates`.

    Options of the schedule and the criterion that were set to another value are kept.
    """
    changed: dict[str, Any] = {}
    for group, options in (("schedule", config.schedule), ("criterion", config.criterion)):
        follows = {
            item.name: updates
            for item in fields(options)
            if item.metadata.get("follows") == "trainer.max_update"
            and getattr(options, item.name) == config.trainer.max_update
        }
        changed[group] = replace(options, **follows)
    return replace(config, trainer=replace(config.trainer, max_update=updates), **changed)
