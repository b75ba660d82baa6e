"""Several prediction objectives on one stream of rows: at once, one after the other, or both.

    task.objectives=[{task: causal_lm, weight: [1, 0]},
                     {task: masked_lm, weight: [0, 1], mask_prob: 0.4}]
    task.phases=[0.25,0.75]

An objective is a registered task with its criterion, as in a separate run. In each phase the rows
of a batch are divided among the objectives by their weights (data.corpus.mixture), and the loss is
the weighted sum of their losses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from metaseq_lm.config.entries import ObjectiveEntry, as_text, entry_keys, read_entry, usage
from metaseq_lm.config.tasks import LanguageModelingConfig, MixtureConfig
from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import RunConfig, build, options_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import format_value, load_config
from metaseq_lm.core.options import check_options
from metaseq_lm.core.registry import TASKS, nearest
from metaseq_lm.criterions.mixture import Mixture
from metaseq_lm.data.corpus.mixture import mean_rows, mixed_stream
from metaseq_lm.data.streams import Phases, Stream
from metaseq_lm.engine.engine import Engine
from metaseq_lm.tasks import Passes, Scored, Task, TextTask, check_pair
from metaseq_lm.tasks.protocols import Kinds, NeedsEager, Prepares, PricedByRule, usual_facts

# Options of the rows, which all objectives share.
ROWS = {item.name: item.default for item in fields(LanguageModelingConfig)}


@dataclass(frozen=True)
class _MixtureObjective:
    """An objective of a mixture.

    Attributes:
        name: Its name, also the prefix of its losses.
        weights: Its weight in each phase, or one for all phases.
        config: The configuration of a run of this objective alone.
    """

    name: str
    weights: tuple[float, ...]
    config: RunConfig


def _parse_objectives(config: RunConfig) -> dict[str, _MixtureObjective]:
    """Return the objectives of a mixture by name; UsageError that names a wrong entry."""
    objectives: dict[str, _MixtureObjective] = {}
    for item in config.task.objectives:
        try:
            objective = _parse_objective(item, config)
            if objective.name in objectives:
                raise UsageError(f"another one is called {objective.name}, too; give it a name")
        except UsageError as error:
            raise UsageError(f"task.objectives, entry '{as_text(item)}': {error}") from error
        objectives[objective.name] = objective
    if not objectives:
        raise UsageError(f"give task.objectives=[...], each entry as {usage(ObjectiveEntry)}")
    return objectives


def _parse_objective(item: str | Mapping[str, Any], config: RunConfig) -> _MixtureObjective:
    """Return the objective of an entry of task.objectives in a run; UsageError if it is wrong."""
    entry = read_entry(item, ObjectiveEntry)
    # A preset names another task.
    task_name = compose_cached(f"task={entry.task}").task._name
    _check_takes_part(task_name)
    name = entry.name or entry.task
    if not name.isidentifier():
        raise UsageError(f"name={name}: use letters, digits and _")
    choices = [f"task={entry.task}", f"criterion={entry.criterion or task_name}"]
    keys = {key: _option_key(key, compose_cached(*choices)) for key in entry.options}
    for key in keys.values():
        if key.startswith("task.") and key.removeprefix("task.") in ROWS:
            raise UsageError(f"{key} is that of all objectives; give it as an option by itself")
    options = [f"{keys[key]}={format_value(value)}" for key, value in entry.options.items()]
    alone = compose_cached(*choices, f"trainer.max_update={config.trainer.max_update}", *options)
    rows = _with_rows(alone.task, config.task)
    alone = _prepared(replace(config, task=rows, criterion=alone.criterion))
    check_pair(alone)
    return _MixtureObjective(name, tuple(entry.weight), alone)


def _option_key(key: str, config: RunConfig) -> str:
    """Return the dotted key of an option of an objective; UsageError if there is none."""
    if key.startswith(("task.", "criterion.")):
        return key
    groups = [group for group in ("task", "criterion") if hasattr(getattr(config, group), key)]
    if len(groups) == 1:
        return f"{groups[0]}.{key}"
    if groups:
        raise UsageError(f"'{key}' is an option of the task and of the criterion; write task.{key}")
    known = [*entry_keys(ObjectiveEntry), *options_of(config.task), *options_of(config.criterion)]
    raise UsageError(
        f"'{key}' is no part of an entry.{nearest(key, known)} Write {usage(ObjectiveEntry)}"
    )


@cache
def compose_cached(*overrides: str) -> RunConfig:
    """Return `load_config(overrides)`; cached, because it dominates the time to build a mixture."""
    return load_config(overrides)


def _check_takes_part(name: str) -> None:
    """Raise UsageError for a task that cannot be an objective of a mixture."""
    # Not inherited: a class itself says so.
    able = [n for n, e in sorted(TASKS.entries.items()) if vars(e.value).get("in_mixtures")]
    if name not in able:
        raise UsageError(
            f"task {name} is no objective of a mixture, which predict tokens of the same rows with "
            f"the same model; these are: {', '.join(able)}"
        )


def _with_rows(options: Any, rows: Any) -> Any:
    """Return the options of an objective with the mixture's row options.

    Raises UsageError if the objective lacks an option that is set, or does not allow its value.
    """
    for name, default in ROWS.items():
        if not hasattr(options, name) and getattr(rows, name) != default:
            raise UsageError(f"task {options._name} has no option task.{name}; leave that out")
    shared = {name: getattr(rows, name) for name in ROWS if hasattr(options, name)}
    changed = replace(options, **shared)
    check_options(type(changed), changed, "task.")
    return changed


def _prepared(config: RunConfig) -> RunConfig:
    """Return the configuration of a single objective, completed by its task.

    Raises UsageError if the task would change the rows.
    """
    task_class = TASKS.entry(config.task._name).value
    if not issubclass(task_class, Prepares):
        return config
    complete: RunConfig = task_class.prepare(config)
    for name in ROWS:
        before, after = (getattr(c.task, name, None) for c in (config, complete))
        if before != after:
            raise UsageError(
                f"its options ask for task.{name}={after}, and the rows, which all objectives "
                f"share, have {before}; give task.{name}={after} as an option by itself"
            )
    return complete


def _phase_weights(objectives: Sequence[_MixtureObjective], config: MixtureConfig) -> np.ndarray:
    """Return the weights of the objectives in each phase, (phases, objectives); rows sum to 1.

    Raises UsageError for an objective with another number of weights, or a phase without any.
    """
    columns, phases = [], len(config.phases) or 1
    for objective in objectives:
        weights = objective.weights
        if len(weights) not in (1, phases):
            raise UsageError(
                f"objective {objective.name} has {len(weights)} weights, but task.phases has "
                f"{len(config.phases) or 'no'} phases; give one weight for each, or one for all"
            )
        columns.append(weights * phases if len(weights) == 1 else weights)
    table = np.array(columns, float).T
    sums = table.sum(1, keepdims=True)
    if not sums.all():
        raise UsageError(
            f"phase {int(sums.argmin()) + 1} of task.phases has no objective with a weight above 0"
        )
    return np.asarray(table / sums)


def _read_name(name: str, names: Sequence[str], weights: np.ndarray) -> str:
    """Return the name of the objective that represents a run in scores, probes and exports.

    Args:
        name: The value of criterion.read; "" for the largest weight in the last phase.
        names: The names of all objectives.
        weights: Their weights in each phase, (phases, objectives).

    Raises:
        UsageError: There is no such objective, or it is not trained.
    """
    name = name or names[int(weights[-1].argmax())]
    if name not in names:
        raise UsageError(
            f"criterion.read={name}: no objective is called so.{nearest(name, names)} Objectives: "
            f"{', '.join(names)}"
        )
    if not weights[:, names.index(name)].any():
        raise UsageError(f"criterion.read={name}: its weight is 0, so that it is not trained")
    return name


class MixtureTask(TextTask):
    """A mixture of objectives with weights and phases: one stream of rows, one model."""

    config: MixtureConfig
    criterion: Mixture
    criterions = (Mixture,)

    def __init__(self, config: MixtureConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.objectives = _parse_objectives(run_config)
        self.tasks: dict[str, Task] = {}
        for name, objective in self.objectives.items():
            alone = objective.config
            try:
                self.tasks[name] = build("task", alone.task, alone)
            except UsageError as error:
                raise UsageError(f"objective {name}: {error}") from error
        criterions = {name: task.criterion for name, task in self.tasks.items()}
        self.criterion = Mixture(run_config.criterion, criterions)
        updates = config.phase_updates or run_config.trainer.max_update
        self.phases = Phases(tuple(config.phases) or (1.0,), updates)
        self.weights = _phase_weights([*self.objectives.values()], config)
        _read_name(self.criterion.config.read, [*self.objectives], self.weights)

    @classmethod
    def prepare(cls, run_config: RunConfig) -> RunConfig:
        """Return the configuration unchanged; UsageError if an entry is wrong."""
        cls.read_as(run_config)
        return run_config

    @classmethod
    def read_as(cls, run_config: RunConfig) -> RunConfig:
        """Return the configuration of a run with only the objective that criterion.read names."""
        objectives = _parse_objectives(run_config)
        weights = _phase_weights([*objectives.values()], run_config.task)
        return objectives[_read_name(run_config.criterion.read, [*objectives], weights)].config

    def facts(self) -> dict[str, Any]:
        """Return the usual facts, and the updates of all phases, which determine the batches."""
        facts = usual_facts(self)
        if self.config.phases:
            facts["phase_updates"] = self.phases.updates
        return facts

    # ---------------------------------------------------------------- training

    def build_streams(self, split: str) -> dict[str, Stream]:
        """Return the mixture's stream "train", or streams SPLIT/OBJECTIVE, each with all rows."""
        if split != "train":
            alone = self.streams_alone(split)
            return {f"{split}/{name}": stream for name, stream in alone.items()}
        parts = {name: task.build_streams(split)[split] for name, task in self.tasks.items()}
        return {split: mixed_stream(parts, self.weights_at)}

    def streams_alone(self, split: str) -> dict[str, Stream]:
        """Return a stream of all rows of a split for each objective."""
        streams: dict[str, Stream] = {}
        for name, task in self.tasks.items():
            streams[name] = mixed_stream({name: task.build_streams(split)[split]}, lambda _: (1.0,))
        return streams

    def weights_at(self, update: int) -> Sequence[float]:
        """Return the weights of the objectives in an update."""
        weights: list[float] = self.weights[self.phases.at(update)].tolist()
        return weights

    def build_model(self) -> nn.Module:
        """Return the model of the first objective; UsageError if another needs a different one."""
        (first_name, first), *others = self.tasks.items()
        model = first.build_model()
        shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        for name, task in others:
            with torch.device("meta"):
                other = task.build_model().state_dict()
            if {key: weight.shape for key, weight in other.items()} != shapes:
                raise UsageError(f"objectives {first_name} and {name} train different networks")
        return model

    # ---------------------------------------------------------------- cost

    @property
    def shares(self) -> dict[str, float]:
        """The share of a run's rows that each objective gets; without objectives that get none."""
        rows = self.config.batch_size
        lengths = np.array(self.phases.shares) / sum(self.phases.shares)
        of_rows = np.array([mean_rows(weights, rows) / rows for weights in self.weights.tolist()])
        return {name: share for name, share in zip(self.tasks, lengths @ of_rows) if share}

    def kinds(self) -> Kinds:
        """Return updates of one objective each: the cost of an update is their mean."""
        return [(float(share), {name: 1}) for name, share in self.shares.items()]

    def kind_streams(self) -> dict[str, Stream]:
        return self.streams_alone("train")

    def flops_by_rule(self) -> float | None:
        """Return the mean FLOPs of an update over the run; None if an objective has no rule.

        Within a phase it is the mean over the objectives, weighted by their shares of the rows.
        """
        flops = 0.0
        for name, share in self.shares.items():
            task = self.tasks[name]
            if not isinstance(task, PricedByRule) or (by_rule := task.flops_by_rule()) is None:
                return None
            flops += share * by_rule
        return flops

    def eager_reason(self) -> str:
        """Return why the losses cannot be compiled: the reason of the first objective with one."""
        for task in self.tasks.values():
            for part in (task, task.criterion):
                if isinstance(part, NeedsEager) and (reason := part.eager_reason()):
                    return reason
        return ""

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the loss and other terms of each objective on all rows, and the mixture's loss.

        They are called OBJECTIVE.loss and OBJECTIVE.TERM. "loss" always has the weights of the last
        phase, so that all validations of a run are comparable.
        """
        metrics: Logs = {}
        for name, batches in zip(self.tasks, passes.values(), strict=True):
            logs = engine.evaluate(
                lambda batch: self.criterion(model, batch), batches, rng_key="validate"
            )
            if "loss" in logs:
                metrics[f"{name}.loss"] = logs.pop("loss")
            metrics |= logs
        last = {f"{name}.loss": weight for name, weight in zip(self.tasks, self.weights[-1])}
        used = {name: float(weight) for name, weight in last.items() if weight}
        if used.keys() <= metrics.keys():
            metrics = {"loss": sum(w * metrics[n] for n, w in used.items()), **metrics}
        return Scored(metrics)
