"""Tuning: the trials of an objective at each budget, and what other metrics would choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from metaseq_lm.league.expansion import BUDGET
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import differing_functions, metric_of, show, spent_flops
from metaseq_lm.sweeps.search import Choice
from metaseq_lm.sweeps.trials import Trial, Trials, Values


def trials_of(plan: Plan, objective: Objective, runs: Iterable[Run]) -> dict[float, Trials[Trial]]:
    """Return the trials of an objective by budget, from its runs of the phase `tune`.

    The runs get the plan's means of metrics.
    """
    by_budget: dict[float, list[Run]] = {}
    for run in runs:
        trial = replace(run, means=plan.comparison.means)
        by_budget.setdefault(float(run.values.get(BUDGET) or 0), []).append(trial)
    metric = plan.tuning_metric(objective)
    return {
        budget: _collect_trials(objective, budget, of_budget, metric)
        for budget, of_budget in sorted(by_budget.items())
    }


def _collect_trials(
    objective: Objective, budget: float, runs: Sequence[Run], metric: str
) -> Trials[Trial]:
    """Return the trials of an objective at a budget, with the scores of a metric."""
    settings: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = tuple(repr(run.values.get(name)) for name in objective.grid)
        settings.setdefault(key, []).append(run)
    trials = []
    for same in settings.values():
        scores = [None if r.why_unscored(metric) else r.metrics[metric] for r in same]
        values = {name: same[0].values.get(name) for name in objective.grid}
        trials.append(Trial(values, tuple(scores), spent_flops(same), runs=tuple(same)))
    space = {name: Choice(tuple(values)) for name, values in objective.grid.items()}
    lower = metric_of(metric, runs).lower_is_better
    return Trials(objective.name, metric, lower, tuple(trials), space, budget)


def describe_other_choices(plan: Plan, trials: Sequence[Trials[Trial]]) -> list[str]:
    """Return sentences on the settings that other objectives' tuning metrics would have chosen.

    Return [] if one metric tunes all. Only metrics that the trials were scored with count.
    """
    metrics = list(dict.fromkeys(plan.tuning_metric(o) for o in plan.objectives if o.grid))
    other, same = [], []
    unknown: dict[str, dict[str, None]] = {}
    for item in trials:
        best, objective = item.best(), plan.objective(item.name)
        for metric in metrics:
            if best is None or metric == item.metric:
                continue
            rescored = _collect_trials(objective, item.budget, item.runs, metric)
            chosen, where = rescored.best(), f"{item.name} at {flops_text(item.budget)}"
            if chosen is None or len(rescored.scores()) < len(item.scores()):
                unknown.setdefault(metric, {})[item.name] = None
            elif chosen.values == best.values:
                same.append(f"{where} by {metric}")
            else:
                texts = f"{values_text(chosen.values)}, not {values_text(best.values)}"
                other.append(f"{where} by {metric} {texts}")
    sentences = []
    for item in trials:
        changing = differing_functions(item.metric, item.runs).keys() & item.space.keys()
        if changing:
            sentences.append(
                f"{item.metric} is a different function for other values of "
                f"{', '.join(sorted(changing))}, so its choice for {item.name} at "
                f"{flops_text(item.budget)} says little."
            )
    if other:
        sentences.append(f"Another metric would have chosen other values: {'; '.join(other)}.")
    if same:
        sentences.append(f"The same values would have been chosen: {', '.join(same)}.")
    for metric, names in unknown.items():
        sentences.append(
            f"What {metric} would have chosen is not known of {', '.join(names)}: their trials "
            "are not scored by it."
        )
    return sentences


def values_text(values: Values) -> str:
    """Return values of options as a text, such as optimizer.lr=0.003."""
    return " ".join(f"{key}={show(value)}" for key, value in values.items())
