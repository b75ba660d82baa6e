"""Optional abilities of a task (or criterion) beyond the methods of `Task`.

A class has an ability if it defines the methods of the protocol; it need not derive from it. The
functions at the end use an ability, or return the default for a task without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.batch import Layout, Logs, ScoredBatch
from metaseq_lm.core.config import RunConfig, build, options_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS, TASKS
from metaseq_lm.criterions import Exported
from metaseq_lm.data.storage.manifest import labels_in
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.transformer.encoder import Encoder
from metaseq_lm.runs.lineage_cost import Costs

if TYPE_CHECKING:
    from metaseq_lm.data.streams import Stream
    from metaseq_lm.tasks import Task

__all__ = [
    "ChecksSource",
    "ComparesTokens",
    "CutsRows",
    "Ensembles",
    "HasLayout",
    "HasParts",
    "HasSamples",
    "IsReadAs",
    "LoadsFrozen",
    "NeedsEager",
    "Prepares",
    "PricedByRule",
    "ScoresTokens",
    "ScoresTraining",
    "UsesOtherRuns",
]

# For each kind of update: its share of all updates, and its batches (see `Task.needs`).
Kinds = list[tuple[float, dict[str, int]]]


@runtime_checkable
class Prepares(Protocol):
    """Completes the configuration of a training run from its data, e.g. the number of updates."""

    @classmethod
    def prepare(cls, run_config: RunConfig) -> RunConfig:
        """Return the configuration for config.yaml; a resumed run must get the same one."""


@runtime_checkable
class _HasKinds(Protocol):
    """Makes several kinds of updates, which differ in cost."""

    def kinds(self) -> Kinds:
        """Return the kinds of updates; a dry run makes one update of each."""


@runtime_checkable
class _HasKindStreams(Protocol):
    """Has batches of a single kind only in separate streams, which training does not use."""

    def kind_streams(self) -> dict[str, Stream]:
        """Return the streams that the kinds of updates take their batches from."""


@runtime_checkable
class ScoresTraining(Protocol):
    """Can be scored on its training data."""

    def single_pass(self, split: str) -> dict[str, Stream]:
        """Return one pass over a split; for "train", over the examples that are trained on."""


def passes_of(task: Task, split: str) -> dict[str, Stream]:
    """Return one pass over each stream of a split, for an evaluation."""
    if isinstance(task, ScoresTraining):
        return task.single_pass(split)
    return task.build_streams(split)


@runtime_checkable
class CutsRows(Protocol):
    """Makes rows that lose tokens if they are too long."""

    def cut_rows(self, split: str) -> dict[str, np.ndarray]:
        """Return which rows of a split are cut, bool (rows,), by set; "" names an only set."""


@runtime_checkable
class HasSamples(Protocol):
    """Logs example outputs of the model as texts after each validation."""

    def samples(self, engine: Engine, model: nn.Module) -> list[str]:
        """Return the texts. A collective call in eval mode; the first replica's are logged."""


@runtime_checkable
class PricedByRule(Protocol):
    """Has a closed form of its FLOPs (see models.transformer.flops_rules)."""

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update's passes; None if no rule covers the configuration."""


def flops_by_rule(task: Any, engine: Engine) -> float | None:
    """Return the FLOPs of an update of all replicas with optimizer steps; None without a rule.

    Each replica makes the whole step of an optimizer that counts FLOPs.
    """
    if not isinstance(task, PricedByRule) or (passes := task.flops_by_rule()) is None:
        return None
    steps = sum(optimizer.step_flops for optimizer in engine.optimizers.values())
    return passes + steps * process_group.world_size()


@runtime_checkable
class _Submits(Protocol):
    """Writes the files that a leaderboard takes."""

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return {file name: text} for the predictions of a whole split."""


@runtime_checkable
class Ensembles(Protocol):
    """Combines the predictions of several runs."""

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions of the ensemble, given the predictions of each run."""


@runtime_checkable
class LoadsFrozen(Protocol):
    """Has frozen networks with weights from another run."""

    def load_frozen(self, model: nn.Module) -> None:
        """Load the frozen weights, before the weights of init_from.

        Parameters may be shards, which `runs.checkpoint.load_into` fills like others. Not called if
        all weights come from a checkpoint of this task, as in evaluation.
        """


@runtime_checkable
class UsesOtherRuns(Protocol):
    """Uses runs besides init_from, such as teachers or a frozen language model."""

    def further_costs(self) -> Costs:
        """Return the costs of these runs, see runs.lineage_cost."""


@runtime_checkable
class _HasFacts(Protocol):
    """Stores facts in a checkpoint besides the configuration."""

    def facts(self) -> dict[str, Any]:
        """Return the facts, for JSON; they must stay equal when a run is resumed or finished.

        "labels" are the classes of each labelled set, in the order of its head's outputs. A task
        that uses other runs adds a hash of their weights.
        """


@runtime_checkable
class ChecksSource(Protocol):
    """Checks the run that it starts from."""

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if a run cannot start from `source`, a checkpoint with these facts."""


@runtime_checkable
class NeedsEager(Protocol):
    """Has losses that torch.compile cannot compile: a task, or a criterion."""

    def eager_reason(self) -> str:
        """Return why, after "because"; "" if this configuration can be compiled."""


@runtime_checkable
class ScoresTokens(Protocol):
    """Gives (pseudo-)log-probabilities of tokens: a criterion, or a task of several networks."""

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token given all others or the ones before it, in nats.

        Args:
            model: The task's model, in evaluation mode.
            batch: Unmasked rows (B, S), and the positions to score.

        Returns:
            A tensor (B, S), 0 where a position is not scored.
        """


@runtime_checkable
class ComparesTokens(Protocol):
    """Compares tokens at a position by scores other than log-probabilities."""

    def comparison_scores(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the scores; arguments and shape as in `ScoresTokens.token_log_probs`."""


@runtime_checkable
class HasLayout(Protocol):
    """Has a visibility between tokens that no reach describes: a criterion."""

    def layout(self, tokens: Tensor, layout: Layout) -> Layout:
        """Return the layout for reading the states of rows (B, S), given their padding."""


@runtime_checkable
class IsReadAs(Protocol):
    """Is scored, probed and exported as a run of another task."""

    @classmethod
    def read_as(cls, run_config: RunConfig) -> RunConfig:
        """Return the configuration of such a run; UsageError if there is none."""


@runtime_checkable
class HasParts(Protocol):
    """Trains several objectives on the same networks; each is a task."""

    tasks: dict[str, Task]


@runtime_checkable
class _HasEncoder(Protocol):
    """Has its encoder elsewhere than in `model.encoder`."""

    def encoder_of(self, model: nn.Module) -> nn.Module:
        """Return the encoder that fine-tuning starts from."""


TokenScorer = Callable[[nn.Module, ScoredBatch], Tensor]


def kinds_of(task: Task) -> Kinds:
    """Return the kinds of updates of a task; by default a single kind."""
    if isinstance(task, _HasKinds):
        return task.kinds()
    return [(1.0, task.needs(0))]


def kind_streams_of(task: Task) -> dict[str, Stream]:
    """Return the streams of the kinds of updates; by default the training streams.

    Streams that change over a run are replaced by typical ones, of mean cost.
    """
    streams = task.build_streams("train")
    if isinstance(task, _HasKindStreams):
        streams = task.kind_streams()
    return {n: s.typical() if hasattr(s, "typical") else s for n, s in streams.items()}


def facts_of(task: Task) -> dict[str, Any]:
    """Return the facts of a task; by default `usual_facts`."""
    if isinstance(task, _HasFacts):
        return task.facts()
    return usual_facts(task)


def usual_facts(task: Task) -> dict[str, Any]:
    """Return the classes of each set that a task's options name.

    Also the updates of warm-ups and length phases, if there are any: batches depend on them.
    """
    facts: dict[str, Any] = {"labels": labels_in(task.data, options_of(task.config))}
    if isinstance(task.config, WarmupConfig):
        updates = task.run_config.trainer.max_update
        lengths = task.config.warmup_lengths(updates)
        if any(lengths):
            facts["warmup_updates"] = list(lengths)
        if task.config.has_phases:
            facts["length_updates"] = task.config.length_updates or updates
    return facts


def submissions_of(task: Task, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the leaderboard files of a task; by default none."""
    if isinstance(task, _Submits):
        return task.submissions(split, rows)
    return {}


def read_as(config: RunConfig) -> RunConfig:
    """Return the configuration with which a run is scored, probed and exported."""
    task_class = TASKS.entry(config.task._name).value
    if issubclass(task_class, IsReadAs):
        config = task_class.read_as(config)
    return config


def task_read_as(task: Task) -> Task:
    """Return the task with which a run is scored, probed and exported: itself, unless a mixture."""
    config = read_as(task.run_config)
    if config is task.run_config:
        return task
    reading: Task = build("task", config.task, config)
    return reading


def token_scorer(task: Task) -> TokenScorer:
    """Return `token_log_probs` of a task, if it defines it, or of its criterion.

    Raises UsageError if the criterion has none; it names the criterions that have one.
    """
    if isinstance(task.criterion, ScoresTokens):
        scorer = task if isinstance(task, ScoresTokens) else task.criterion
        return scorer.token_log_probs
    names = [
        n for n, e in sorted(CRITERIONS.entries.items()) if hasattr(e.value, "token_log_probs")
    ]
    raise UsageError(
        f"the criterion {task.run_config.criterion._name} gives no probabilities of tokens, so its "
        f"runs cannot score sentences; runs of these can: {', '.join(names)}"
    )


def comparison_scorer(task: Task) -> TokenScorer:
    """Return the criterion's `comparison_scores` of tokens at a position, else `token_scorer`.

    Raises UsageError as `token_scorer` does.
    """
    if isinstance(task.criterion, ComparesTokens):
        return task.criterion.comparison_scores
    return token_scorer(task)


def encoder_of(task: Task, model: nn.Module) -> Encoder:
    """Return the Transformer encoder of a task's model; UsageError for a model without one."""
    encoder = task.encoder_of(model) if isinstance(task, _HasEncoder) else None
    encoder = encoder or getattr(model, "encoder", None)
    if not isinstance(encoder, Encoder):
        raise UsageError(
            f"model {task.run_config.model._name} of task {task.run_config.task._name} has no "
            "Transformer encoder, whose layers have hidden states"
        )
    return encoder


def reach_of(task: Task) -> str:
    """Return what a token sees when states are read: the criterion's `reach`, else `exported`'s."""
    if task.criterion.reach is not None:
        return task.criterion.reach
    exported = task.criterion.exported
    return exported.reach if isinstance(exported, Exported) else "both"


def score_reach_of(task: Task) -> str:
    """Return which tokens a token's score depends on: "both" sides, or "causal", earlier ones."""
    return task.criterion.score_reach or reach_of(task)


def layout_of_states(task: Task, tokens: Tensor, layout: Layout) -> Layout:
    """Return the layout for reading states of rows (B, S): the criterion's, or by `reach_of`."""
    if isinstance(task.criterion, HasLayout):
        return task.criterion.layout(tokens, layout)
    return replace(layout, reach=reach_of(task))
