"""What a task (or criterion) may offer beyond the seven methods of `Task`; the core looks for each.

A class offers a protocol by defining its methods; it need not derive from it. The functions below
ask for one, with the answer for a task that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omegaconf import DictConfig
from torch import Tensor, nn

from metaseq_lm.core.batch import Logs, ScoredBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS
from metaseq_lm.data.storage.manifest import HERE, labels_in, sets_named
from metaseq_lm.engine.engine import Engine
from metaseq_lm.runs.lineage_cost import Costs

if TYPE_CHECKING:
    from metaseq_lm.tasks import Task

# The kinds of updates: the share of each in all updates, and what it takes, as `Task.needs` says it.
Kinds = list[tuple[float, dict[str, int]]]


@runtime_checkable
class Prepares(Protocol):
    """Completes the configuration of a training run with what only the data can tell."""

    @classmethod
    def prepare(cls, run_config: DictConfig) -> DictConfig:
        """Return the configuration that config.yaml records; nothing is built yet.

        A resumed run must come to the same configuration.
        """


@runtime_checkable
class HasKinds(Protocol):
    """Makes updates of several kinds, which differ in cost."""

    def kinds(self) -> Kinds:
        """Return the kinds of updates in the long run; a dry run makes one update of each."""


@runtime_checkable
class HasSamples(Protocol):
    """Shows what the model does as texts in the log, after each validation."""

    def samples(self, engine: Engine, model: nn.Module) -> list[str]:
        """Return the texts; a call of all replicas in evaluation mode, the first one's are logged."""


@runtime_checkable
class PricedByRule(Protocol):
    """Has a closed form of its FLOPs (see models.transformer.flops_rules)."""

    def flops_by_rule(self) -> float | None:
        """Return the FLOPs of an update; None where the rule does not cover the configuration."""


@runtime_checkable
class Submits(Protocol):
    """Writes the files that a leaderboard takes."""

    def submissions(self, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the files, name to text, made of the predictions of a whole split."""


@runtime_checkable
class Ensembles(Protocol):
    """Combines the predictions of several runs."""

    def ensemble(
        self, split: str, members: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[Logs, Sequence[dict[str, Any]]]:
        """Return metrics and predictions of the runs together, given the predictions of each."""


@runtime_checkable
class LoadsFrozen(Protocol):
    """Has frozen nets, whose weights come from another run."""

    def load_frozen(self, model: nn.Module) -> None:
        """Fill in the frozen weights, before those of init_from.

        Not called where all weights come from a checkpoint of this task, as for evaluation.
        """


@runtime_checkable
class UsesOtherRuns(Protocol):
    """Uses runs besides the one of init_from, such as teachers or a frozen language model."""

    def further_costs(self) -> Costs:
        """Return what those runs have cost, see runs.lineage_cost."""


@runtime_checkable
class HasFacts(Protocol):
    """Has facts of its own that a checkpoint keeps besides the configuration."""

    def facts(self) -> dict[str, Any]:
        """Return the facts, for JSON; a run that is resumed must have the same.

        "labels" are the classes of each set, without which a head's outputs mean nothing.
        """


@runtime_checkable
class ChecksSource(Protocol):
    """Restricts which runs it can start from."""

    def check_facts(self, facts: dict[str, Any], source: object) -> None:
        """Raise UsageError if a run cannot start from the weights of `source`, which has these facts."""


@runtime_checkable
class ScoresTokens(Protocol):
    """Gives (pseudo-)log-probabilities of tokens: a criterion, or a task that knows which net to ask."""

    def token_log_probs(self, model: nn.Module, batch: ScoredBatch) -> Tensor:
        """Return the log-probability of each token given the others, in nats.

        Args:
            model: The task's model, in evaluation mode.
            batch: Rows (B, S) in which nothing is hidden, and which positions to score.

        Returns:
            A tensor (B, S), 0 where a position is not scored.
        """


def kinds_of(task: Task) -> Kinds:
    """Return the kinds of updates of a task, by default one."""
    return task.kinds() if isinstance(task, HasKinds) else [(1.0, task.needs(0))]


def facts_of(task: Task) -> dict[str, Any]:
    """Return the facts of a task, by default the classes of each set that its options name."""
    if isinstance(task, HasFacts):
        return task.facts()
    names = [HERE, *sets_named(task.data, vars(task.config))]
    return {"labels": labels_in(task.data, names)}


def submissions_of(task: Task, split: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the leaderboard files of a task, by default none."""
    return task.submissions(split, rows) if isinstance(task, Submits) else {}


def token_scorer(task: Task) -> Callable[[nn.Module, ScoredBatch], Tensor]:
    """Return `token_log_probs` of a task, if it has its own, or of its criterion.

    Raises UsageError, which names the criterions that can, if the criterion has none.
    """
    if isinstance(task.criterion, ScoresTokens):
        scorer = task if isinstance(task, ScoresTokens) else task.criterion
        return scorer.token_log_probs
    names = [
        n for n, e in sorted(CRITERIONS.entries.items()) if hasattr(e.value, "token_log_probs")
    ]
    raise UsageError(
        f"the criterion {task.run_config.criterion._name} gives no probabilities of tokens, so its runs "
        f"cannot score sentences; runs of these can: {', '.join(names)}"
    )
