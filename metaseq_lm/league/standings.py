"""The contents of a league: rows of runs, facts about its data, and findings on rows.

A row is an objective at a budget, trained with several seeds. `gates.examine` makes the standings
of a context: each row with its findings. A row has a score for each seed, the mean over the runs of
that seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from metaseq_lm.league.choice import sd_of_choice
from metaseq_lm.league.corpus import Corpus
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import RunGroup, seed_means
from metaseq_lm.reporting.settings import finished as finished
from metaseq_lm.reporting.settings import metric_of as metric_of

# Actions of findings, most severe first.
VOID = "void"  # no number is shown, only the reason
REFUSE = "refuse"  # the row is not comparable with the others and is not ranked
FLAG = "flag"  # the number is shown with a letter, outside the ranking and the tests
NOTE = "note"  # a sentence below the table
ACTIONS = (VOID, REFUSE, FLAG, NOTE)
# Settings of an objective, each with the share of draws of tuning seeds that choose it.
Shares = tuple[tuple[Mapping[str, Any], float], ...]


@dataclass(frozen=True)
class Finding:
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
class Choice:
    """How the options of a row were tuned.

    Attributes:
        grid: The values tried for each option in all rounds; an option was tuned if it has several.
        chosen: The value of each option that the row has.
        runs: The trials.
        budget: The FLOPs of a trial, which differ from the row's budget if tuned at another one.
        shares: The plausible settings, most frequent first, if the choice is part of the
            experiment; () if final seeds run only at the best setting.
    """

    grid: Mapping[str, Sequence[Any]]
    chosen: Mapping[str, Any]
    runs: tuple[Run, ...] = field(default=(), repr=False)
    budget: float = 0.0
    shares: Shares = ()

    @property
    def flops(self) -> float:
        """The recorded FLOPs of all trials."""
        return sum(run.costs["flops"] or 0.0 for run in self.runs)


@dataclass(frozen=True, eq=False)
class Row(RunGroup):
    """An objective at a budget, with its controls.

    Attributes:
        objective: The name of the objective in the plan.
        budget: The FLOPs of a run.
        runs: The final runs, including failed ones.
        untrained: Runs of the same model with one update at rate 0.
        shuffled: Runs of the same objective at this budget on shuffled rows (task.shuffle_tokens).
        control: The row of the matched control, another objective of the plan, at this budget; None
            if the plan names no control.
        control_name: The name of the control, "" without one.
        tuning: How its options were chosen; None if they were not tuned.
        added: Whether the objective was added to a frozen plan.
        shipped: Whether its runs shipped with the plan and were not made here.
    """

    objective: str
    budget: float
    runs: tuple[Run, ...] = field(repr=False)
    untrained: tuple[Run, ...] = field(default=(), repr=False)
    shuffled: tuple[Run, ...] = field(default=(), repr=False)
    control: "Row | None" = field(default=None, repr=False)
    tuning: Choice | None = field(default=None, repr=False)
    control_name: str = ""
    added: bool = False
    shipped: bool = False

    def parts(self, metric: str) -> Sequence[str]:
        """Return the non-mean metrics that a metric averages; itself if it is not a mean."""
        return self.runs[0].parts_of(metric) if self.runs else (metric,)

    @property
    def settings(self) -> list[tuple[float, list[Run]]]:
        """The plausible settings: the share of draws that choose each, and its runs.

        A single setting has all runs.
        """
        shares = self.tuning.shares if self.tuning else ()
        if len(shares) < 2:
            return [(1.0, list(self.runs))]
        settings = []
        for values, share in shares:
            runs = [run for run in self.runs if values.items() <= run.values.items()]
            settings.append((share, runs))
        return settings

    def scores(self, metric: str) -> list[float]:
        """Return the score of each seed, by seed; only finite scores of finished runs.

        With several plausible settings it is the expected score, the mean over draws of the tuning
        seeds that choose again, for the seeds that have a score at every setting.
        """
        if len(self.settings) < 2:
            return seed_scores(self.runs, metric)
        shares = [share for share, _ in self.settings]
        by_seed = [seed_means(runs, metric) for _, runs in self.settings]
        common = [seed for seed in by_seed[0] if all(seed in scores for scores in by_seed)]
        mixed = []
        for seed in common:
            mixed.append(math.fsum(share * x[seed] for share, x in zip(shares, by_seed)))
        return mixed

    def sd_of_choice(self, metric: str) -> float | None:
        """Return the sd of the expected score over draws of the tuning seeds that choose again.

        Each setting counts with its mean over final seeds, so this is the spread of the choice
        alone, 0 with one plausible setting. Return None if the choice is unknown or not part of the
        experiment.
        """
        if not (self.tuning and self.tuning.shares):
            return None
        of_settings = [seed_scores(runs, metric) for _, runs in self.settings]
        if not all(of_settings):
            return None
        means = [math.fsum(scores) / len(scores) for scores in of_settings]
        return sd_of_choice(means, [share for share, _ in self.settings])


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
    corpus: Corpus | None = None
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
        runs = [run for row in self.rows for run in row.runs]
        return {name: metric_of(name, runs) for name in self.metrics}

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
    findings: tuple[Finding, ...] = ()


def seed_scores(runs: Sequence[Run], metric: str) -> list[float]:
    """Return the mean score of each seed, by seed; only finite scores of finished runs."""
    return list(seed_means(runs, metric).values())
