"""The contents of a league: rows of runs, facts about its data, and findings on rows.

A row is an objective at a budget, trained with several seeds. `gates.examine` makes the standings
of a context: each row with its findings. A row has a score for each seed, the mean over the runs of
that seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from metaseq_lm.league.corpus import CorpusFacts
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, finished, metric_of, runs_of

__all__ = ["FLAG", "NOTE", "REFUSE", "VOID", "Context", "GateFinding"]

# Actions of findings, most severe first.
VOID = "void"  # no number is shown, only the reason
REFUSE = "refuse"  # the row is not comparable with the others and is not ranked
FLAG = "flag"  # the number is shown with a letter, outside the ranking and the tests
NOTE = "note"  # a sentence below the table
ACTIONS = (VOID, REFUSE, FLAG, NOTE)


@dataclass(frozen=True)
class GateFinding:
    """A statement of a gate about a row.

    Attributes:
        gate: The name of the gate, such as "ceiling".
        action: VOID, REFUSE, FLAG or NOTE.
        reason: One sentence with the numbers, without the full stop.
        metric: The metric that the finding is about; "" for the whole row.
    """

    gate: str
    action: str
    reason: str
    metric: str = ""


@dataclass(frozen=True, eq=False)
class Context:
    """All rows of a league, and the facts that gates need to judge one.

    Attributes:
        rows: The rows, in the order of the plan.
        baseline: The name of the objective that all others are compared with.
        metrics: The names of the metrics, the primary one first.
        seeds: The number of final runs that the plan asks for in a row.
        corpus: Facts about the data; None if there are none.
        solved: The score at which a seed counts as having solved a task.
        shuffled: The budgets at which the plan asks for shuffled controls.
        options: The keys that each objective sets itself, including its grid, by objective.
        bounds: The best possible value by metric, according to the plan.
        planned: The seeds of the plan; () if they are unknown.
    """

    rows: tuple[Row, ...]
    baseline: str
    metrics: tuple[str, ...]
    seeds: int
    corpus: CorpusFacts | None = None
    solved: float = 0.9
    shuffled: tuple[float, ...] = ()
    options: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    planned: tuple[int, ...] = ()

    @property
    def primary(self) -> str:
        """The metric that decides."""
        return self.metrics[0]

    @cached_property
    def described(self) -> dict[str, Metric]:
        """The metrics by name, with direction and unit."""
        runs = runs_of(self.rows)
        return {name: metric_of(name, runs) for name in self.metrics}

    @cached_property
    def scored(self) -> list[Run]:
        """The finished runs of all rows."""
        return finished(runs_of(self.rows))

    def lower_is_better(self, metric: str) -> bool:
        """Return whether a smaller value of a metric is better."""
        return self.described[metric].lower_is_better

    @cached_property
    def by_name(self) -> dict[tuple[str, float], Row]:
        """The rows by objective and budget."""
        return {(row.objective, row.budget): row for row in self.rows}

    def baseline_of(self, row: Row) -> Row | None:
        """Return the baseline at a row's budget; None for the baseline itself or without one."""
        base = self.by_name.get((self.baseline, row.budget))
        return None if base is row else base


@dataclass(frozen=True, eq=False)
class Standing:
    """A row and the findings of the gates on it."""

    row: Row
    findings: tuple[GateFinding, ...] = ()
