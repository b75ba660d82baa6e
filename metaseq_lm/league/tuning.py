"""Tuning: the grid at each budget, the choice by a metric, and steps beyond a grid's end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from metaseq_lm.league.choice import plausible_settings, shares_of_best
from metaseq_lm.league.expansion import BUDGET, Values
from metaseq_lm.league.plan import Objective, Plan, is_number
from metaseq_lm.league.standings import Shares, metric_of
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import differing_functions, show

Grid = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Trials:
    """The trials of an objective at a budget.

    Attributes:
        objective: The objective.
        budget: FLOPs of a trial.
        runs: The runs, including failed ones.
        metric: The metric that chooses.
    """

    objective: Objective
    budget: float
    runs: tuple[Run, ...]
    metric: str

    @property
    def grid(self) -> Grid:
        """The tried values of each tuned option, numbers ascending."""
        grid: Grid = {}
        for key in self.objective.grid:
            values = dict.fromkeys(run.values.get(key) for run in self.runs)
            numeric = all(map(is_number, values))
            grid[key] = tuple(sorted(values)) if numeric else tuple(values)
        return grid

    @property
    def scored(self) -> list[tuple[Values, list[Run]]]:
        """The settings with a score in every run, with their runs."""
        settings: dict[tuple[str, ...], list[Run]] = {}
        for run in self.runs:
            key = tuple(repr(run.values.get(name)) for name in self.objective.grid)
            settings.setdefault(key, []).append(run)
        scored: list[tuple[Values, list[Run]]] = []
        for runs in settings.values():
            if not any(run.why_unscored(self.metric) for run in runs):
                scored.append(({key: runs[0].values[key] for key in self.objective.grid}, runs))
        return scored

    def means(self) -> list[tuple[Values, float]]:
        """Return the settings with a score in every run, with the mean score over seeds."""
        means = []
        for values, runs in self.scored:
            means.append((values, math.fsum(run.metrics[self.metric] for run in runs) / len(runs)))
        return means

    @property
    def lower_is_better(self) -> bool:
        """The direction of the metric that chooses."""
        return metric_of(self.metric, self.runs).lower_is_better

    def best(self) -> Values | None:
        """Return the setting with the best mean (the first of equals); None without scores."""
        sign = 1 if self.lower_is_better else -1
        means = self.means()
        return min(means, key=lambda pair: sign * pair[1])[0] if means else None

    def plausible(self, least: float) -> Shares:
        """Return the plausible settings with the shares of draws that choose them, which sum to 1.

        We draw the seeds that all settings have, see `choice`. The most frequent setting comes
        first. With `least` = 0 only the best setting is returned; () without scores.
        """
        best = self.best()
        if best is None or not least:
            return () if best is None else ((best, 1.0),)
        by_seed = []
        for _, runs in self.scored:
            by_seed.append({run.seed: run.metrics[self.metric] for run in runs})
        common = sorted(set.intersection(*map(set, by_seed)), key=lambda seed: seed or 0)
        scores = np.array([[of_seed[seed] for seed in common] for of_seed in by_seed])
        shares = shares_of_best(scores, self.lower_is_better)
        chosen = plausible_settings(shares, least)
        total = math.fsum(shares[chosen])
        return tuple((self.scored[i][0], float(shares[i] / total)) for i in chosen)

    def chosen_by(self, metric: str) -> Values | None:
        """Return the setting that another metric would have chosen.

        Return None unless all settings with a score also have one of that metric.
        """
        other = replace(self, metric=metric)
        return other.best() if len(other.means()) == len(self.means()) else None


def trials_of(plan: Plan, objective: Objective, runs: Iterable[Run]) -> dict[float, Trials]:
    """Return the trials of an objective by budget, from its runs of the phase `tune`.

    The runs get the plan's means of metrics.
    """
    by_budget: dict[float, list[Run]] = {}
    for run in runs:
        trial = replace(run, means=plan.comparison.means)
        by_budget.setdefault(float(run.values.get(BUDGET) or 0), []).append(trial)
    return {
        budget: Trials(objective, budget, tuple(of_budget), plan.tuning_metric(objective))
        for budget, of_budget in sorted(by_budget.items())
    }


def describe_other_choices(plan: Plan, trials: Sequence[Trials]) -> list[str]:
    """Return sentences on the settings that other objectives' tuning metrics would have chosen.

    Return [] if one metric tunes all. Only metrics that the trials were scored with count.
    """
    metrics = list(dict.fromkeys(plan.tuning_metric(o) for o in plan.objectives if o.grid))
    other, same = [], []
    unknown: dict[str, list[str]] = {}
    for item in trials:
        best, name = item.best(), item.objective.name
        for metric in metrics:
            if best is None or metric == item.metric:
                continue
            chosen, where = item.chosen_by(metric), f"{name} at {flops_text(item.budget)}"
            if chosen is None:
                names = unknown.setdefault(metric, [])
                names += [name] if name not in names else []
            elif chosen == best:
                same.append(f"{where} by {metric}")
            else:
                other.append(f"{where} by {metric} {values_text(chosen)}, not {values_text(best)}")
    sentences = []
    for item in trials:
        changing = differing_functions(item.metric, item.runs).keys() & item.objective.grid.keys()
        if changing:
            sentences.append(
                f"{item.metric} is another function for other values of "
                f"{', '.join(sorted(changing))}, so that it chose those of {item.objective.name} "
                f"at {flops_text(item.budget)} says little."
            )
    if other:
        sentences.append(f"Another metric would have chosen other values: {'; '.join(other)}.")
    if same:
        sentences.append(f"The same values would have been chosen: {', '.join(same)}.")
    for metric, names in unknown.items():
        sentences.append(
            f"What {metric} would have chosen is not known of {', '.join(names)}: their trials are "
            "not scored by it."
        )
    return sentences


def values_text(values: Values) -> str:
    """Return values of options as a text, such as optimizer.lr=0.003."""
    return " ".join(f"{key}={show(value)}" for key, value in values.items())


def widened(trials: Trials, most: int, plausible: float = 0.0) -> Grid:
    """Return the values of options with the best value at an end, plus a value beyond it.

    An option gets at most `most` values beyond the ends of its grid, one at a time. The best value
    is taken from the first plausible setting that is at an end.
    """
    wider: Grid = {}
    for best, _ in trials.plausible(plausible):
        for key, values in trials.grid.items():
            further = len(values) - len(trials.objective.grid[key])
            if key in wider or further >= most or not all(map(is_number, values)):
                continue
            if (value := beyond(values, best[key])) is not None:
                wider[key] = tuple(sorted((*values, value)))
    return wider


def beyond(values: Sequence[float], best: float) -> float | None:
    """Return the value one step beyond `best` if that is an end of `values`, else None.

    The step is the ratio of the last two values. Return None also for a single value, for an end
    that is not positive, and for adjacent whole numbers.
    """
    if len(values) < 2 or best not in (values[0], values[-1]):
        return None
    end, inner = (values[0], values[1]) if best == values[0] else (values[-1], values[-2])
    if not end * inner > 0:
        return None
    step = end * end / inner
    value = round(step) if all(isinstance(x, int) for x in values) else float(f"{step:.4g}")
    return None if value in (0, *values) else value
