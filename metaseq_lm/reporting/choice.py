"""Choosing the value of a config key by validation, as most papers choose the learning rate."""

from collections.abc import Sequence
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, describe, group, scored_functions, show
from metaseq_lm.sweeps.trials import Trial, Trials


def chosen_values(
    runs: Sequence[Run], key: str, metric: Metric | None = None
) -> tuple[list[Run], list[str]]:
    """Return the runs of the best value of `key` in each setting, and a note that names the values.

    The best value has the best mean over seeds of `metric`, by default the metric by which each run
    kept its best checkpoint, at that checkpoint. A value with an unfinished run is skipped; if no
    value is left, all stay. Raises UsageError for an unknown key, for runs without a best
    checkpoint if there is no `metric`, and for values with different functions of the metric.
    """
    chosen: list[Run] = []
    lines = []
    candidates: dict[tuple[Any, ...], list[Row]] = {}
    for setting in group(runs, [key]):
        other_keys = tuple(other for other in setting.values if other != key)
        candidates.setdefault((other_keys, setting.identity(other_keys)), []).append(setting)
    for settings in candidates.values():
        trials = _trials_of(settings, key, metric)
        best = trials.best()
        if best is None:
            chosen += trials.runs
            continue
        validated = [setting for setting in settings if not setting.unscored(trials.metric)]
        if differing := scored_functions(trials.metric, validated):
            raise UsageError(
                f"--choose {key}: {describe(trials.metric, differing)}, so none is the best; give "
                "--choose-by with a metric of an end task"
            )
        chosen += best.runs
        lines.append(f"{settings[0].name_without(key)}: {show(best.values[key])}")
    if not lines:
        return chosen, [f"No {key} was chosen: no value has a score in all of its runs."]
    names = sorted({_metric_of(run, metric) for run in chosen})
    by = ", ".join(names) if metric else f"validation ({', '.join(names)})"
    return chosen, [f"{key} was chosen by {by}: {'; '.join(lines)}."]


def _trials_of(settings: Sequence[Row], key: str, metric: Metric | None) -> Trials[Trial]:
    """Return the values of `key` as trials, with scores of `metric` or of the best checkpoints."""
    trials = []
    for setting in settings:
        named = [(run, _metric_of(run, metric)) for run in setting.runs]
        scores = [None if run.why_unscored(name) else run.metrics[name] for run, name in named]
        trials.append(Trial({key: setting.values[key]}, tuple(scores), runs=tuple(setting.runs)))
    first = settings[0].runs[0]
    lower = not first.values.get("trainer.maximize_best_checkpoint_metric")
    lower = metric.lower_is_better if metric else lower
    return Trials(settings[0].name, _metric_of(first, metric), lower, tuple(trials))


def _metric_of(run: Run, metric: Metric | None) -> str:
    """Return the name of `metric`, by default of that which chose the run's best checkpoint."""
    if metric:
        return metric.name
    name = run.values.get("trainer.best_checkpoint_metric")
    if not name:
        raise UsageError(
            f"--choose: {run.name} kept no best checkpoint, so nothing says which value is better; "
            "train with trainer.best_checkpoint_metric, or give --choose-by METRIC"
        )
    return f"{run.values.get('trainer.valid_split')}.{name}"
