"""What a task is: data, nets, and the order of the updates as straight-line code in one method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import II, DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.config import build
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS, SCHEDULES
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.storage.manifest import HERE, labels_in, sets_named
from metaseq_lm.data.streams import Stream
from metaseq_lm.engine.engine import Engine, Logs
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.runs.lineage_cost import Costs

# What one update gets: per stream a list of global batches, each a list of micro-batches.
Batches = dict[str, list[list[Batch]]]
# The kinds of updates: of each its share of all updates, and what it takes as `Task.needs` says it.
Kinds = list[tuple[float, dict[str, int]]]
# What an evaluation gets: per stream all global batches, once.
Passes = dict[str, Iterable[list[Batch]]]


class Scored(NamedTuple):
    """What an evaluation gives: metrics, the same on all replicas, and rows for a predictions file.

    `rows` makes one dict per example when it is called; no rows where a task predicts nothing.
    """

    metrics: Logs
    rows: Callable[[], Sequence[dict]] = tuple


class Task:
    """Base class; a method overrides what differs.

    `config` is the whole resolved config of the run, `self.config` its task node. `fresh` are
    beginnings of the names of weights that start fresh where `pretrained` has none for them; all
    others must be there. Before an unlabelled text stands [CLSn], n being `text_token`. In a
    `dry_run` nothing may be written, and one update of each of the `kinds` is made. A criterion is
    one of the classes `criterions`, or derived from one.
    """

    criterions: tuple[type[Criterion], ...] = (Criterion,)
    fresh: tuple[str, ...] = ()
    text_token = 0
    dry_run = False

    def __init__(self, config: Any, run_config: DictConfig) -> None:
        self.config = config
        self.run_config = run_config
        self.data = Path(run_config.data)
        self.criterion = self.build_criterion()
        self._check_criterion()

    def _check_criterion(self) -> None:
        """Raise UsageError unless task and criterion belong together."""
        task, given, known = (
            self.run_config.task._name,
            self.run_config.criterion._name,
            self.criterion.tasks,
        )
        if known and task not in known:
            raise UsageError(
                f"criterion {given} is for task {' or '.join(known)}, not for {task}; give --task and "
                "--criterion that belong together"
            )
        if not isinstance(self.criterion, self.criterions):
            fitting = [
                name
                for name, entry in sorted(CRITERIONS.entries.items())
                if issubclass(entry.value, self.criterions)
                and task in (entry.value.tasks or (task,))
            ]
            raise UsageError(
                f"task '{task}' needs criterion={' or '.join(fitting)}, not '{given}'; one of your own "
                f"derives from {' or '.join(c.__name__ for c in self.criterions)}"
            )

    @classmethod
    def prepare(cls, config: DictConfig) -> DictConfig:
        """Return the config of a training run with what only the data can tell; nothing is built yet.

        What comes back is what config.yaml records, and a resumed run must come to the same.
        """
        return config

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the named streams of "train" (endless) or of another split (one pass)."""
        raise NotImplementedError(f"task '{self.run_config.task._name}' must define build_streams")

    def build_model(self) -> nn.Module:
        """Return every net, trained and frozen; several are one ModuleDict."""
        raise NotImplementedError(f"task '{self.run_config.task._name}' must define build_model")

    def build_criterion(self) -> Criterion:
        """Return the criterion that the config names, given its options as keyword arguments."""
        return build("criterion", self.run_config.criterion)

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        """Return the optimizers by name; the default is one, "main", of all trained parameters."""
        return {
            "main": build_optimizer(
                model.named_parameters(), self.run_config.optimizer, self.run_config.schedule
            )
        }

    def needs(self, update: int) -> dict[str, int]:
        """Return how many global batches update number `update` (from 0) takes from each stream."""
        return {"train": 1}

    def kinds(self) -> Kinds:
        """Return the kinds of updates that differ in cost, in the long run; the default is one.

        A dry run makes one update of each, and the price of an update is their mean.
        """
        return [(1.0, self.needs(0))]

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        """Do one update; the default is one gradient over all batches and one step of "main"."""
        everything = [micro for stream in batches.values() for batch in stream for micro in batch]
        grads, logs = engine.gradients(
            lambda batch: self.criterion(model, batch), everything, engine.parameters("main")
        )
        engine.step("main", grads)
        return logs

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return metrics over all batches of a split, exact over replicas, and its predictions, if any.

        A call of all replicas, in evaluation mode.
        """
        everything = (micro for stream in passes.values() for batch in stream for micro in batch)
        return Scored(
            engine.evaluate(lambda batch: self.criterion(model, batch), everything, draw="validate")
        )

    def samples(self, engine: Engine, model: nn.Module) -> list[str]:
        """Return texts that show what the model does, for the log; called after each validation.

        Called on all replicas, in evaluation mode; what the first one returns is logged.
        """
        return []

    def token_log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log-probability of each token of a micro-batch, (B, S), see Criterion."""
        return self.criterion.token_log_probs(model, batch)

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update by the rules of flops_rules.py; None where there is no rule."""
        return None

    def submissions(self, split: str, rows: Sequence[dict]) -> dict[str, str]:
        """Return files for a leaderboard, name to text, made of the predictions of a whole split."""
        return {}

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict]]
    ) -> tuple[Logs, Sequence[dict]]:
        """Return metrics and predictions of several runs together, given the predictions of each.

        Raises UsageError if the task has no way to put predictions together.
        """
        raise UsageError(
            f"task '{self.run_config.task._name}' cannot put predictions of runs together"
        )

    def start(self, model: nn.Module) -> None:
        """Fill in frozen weights of another run, before a run begins and before those of init_from.

        Not called where all weights come from a checkpoint of this task, as for evaluation. What the
        other run cost is for `further_costs` to say.
        """

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint has to say of its data and weights besides the config, for JSON.

        A run that goes on must have the same facts. "labels" are the classes of each set that the
        options name, without which a head's outputs mean nothing.
        """
        names = [HERE, *sets_named(self.data, vars(self.config))]
        return {"labels": labels_in(self.data, names)}

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if a run cannot start from the weights of `source`, which has these facts."""

    def further_costs(self) -> Costs:
        """Return what the runs cost that this one used without starting from them, see cost.py."""
        return {}

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Choose from a checkpoint's `weights` those that this task's model starts from."""
        return weights


def with_epochs(
    config: DictConfig,
    examples: int,
    batch_size: int,
    epochs: float,
    between: float = 0.0,
) -> DictConfig:
    """Return `config` with trainer.max_update for so many `epochs` of `examples`; 0 changes nothing.

    An epoch is the examples padded up to whole batches (Clark et al. 2020, code). `between` are the
    epochs between validations; 0 leaves trainer.validate_interval_updates as it is. Raises UsageError
    for less than one update.
    """
    per_epoch = -(-examples // batch_size)
    if between:
        config = config.copy()
        config.trainer.validate_interval_updates = max(1, int(per_epoch * between))
    if not epochs:
        return config
    updates = int(per_epoch * epochs)
    if updates < 1:
        raise UsageError(
            f"task.epochs is {epochs}, which makes {updates} updates of {examples} examples in batches "
            f"of {batch_size}; it must make at least 1 (or be 0: trainer.max_update counts)"
        )
    return with_updates(config, updates)


def with_updates(config: DictConfig, updates: int) -> DictConfig:
    """Return `config` with trainer.max_update at `updates`, and the totals that followed it.

    Those are total_updates of the schedule and of the criterion, where its default is max_update
    and no other number was given.
    """
    config = config.copy()
    for registry, node in ((SCHEDULES, config.schedule), (CRITERIONS, config.criterion)):
        defaults = {f.name: f.default for f in fields(registry.entry(node._name).dataclass)}
        follows = defaults.get("total_updates") == II("trainer.max_update")
        if follows and node.total_updates == config.trainer.max_update:
            node.total_updates = updates
    config.trainer.max_update = updates
    return config
