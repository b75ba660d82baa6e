"""Choosing the value of a config key by validation, as most papers choose the learning rate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting, describe, group, scored_functions, show


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
    candidates: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in group(runs, [key]):
        other_keys = tuple(other for other in setting.values if other != key)
        candidates.setdefault((other_keys, setting.identity(other_keys)), []).append(setting)
    for settings in candidates.values():
        # Larger is better.
        means = {setting: _mean_validation(setting, metric) for setting in settings}
        validated = [setting for setting in settings if means[setting] is not None]
        if not validated:
            for setting in settings:
                chosen += setting.runs
            continue
        name = metric.name if metric else _metric_of(validated[0].runs[0])
        if differing := scored_functions(name, validated):
            raise UsageError(
                f"--choose {key}: {describe(name, differing)}, so none is the best; give "
                "--choose-by with a metric of an end task"
            )
        # As everywhere, the first of equals: max returns it.
        best = max(validated, key=lambda setting: means[setting] or 0.0)
        chosen += best.runs
        lines.append(f"{best.name_without(key)}: {show(best.values[key])}")
    if not lines:
        return chosen, [f"No {key} was chosen: no value has a score in all of its runs."]
    names = sorted({metric.name if metric else _metric_of(run) for run in chosen})
    by = ", ".join(names) if metric else f"validation ({', '.join(names)})"
    return chosen, [f"{key} was chosen by {by}: {'; '.join(lines)}."]


def _metric_of(run: Run) -> str:
    """Return the validation metric by which a run kept its best checkpoint, as "valid.score"."""
    name = run.values.get("trainer.best_checkpoint_metric")
    if not name:
        raise UsageError(
            f"--choose: {run.name} kept no best checkpoint, so nothing says which value is better; "
            "train with trainer.best_checkpoint_metric, or give --choose-by METRIC"
        )
    return f"{run.values.get('trainer.valid_split')}.{name}"


def _mean_validation(setting: Setting, metric: Metric | None) -> float | None:
    """Return the mean of `metric` over a setting, larger is better; None if a run lacks it.

    Without `metric`, the metric of the best checkpoints is used.
    """
    values = []
    for run in setting.runs:
        name = metric.name if metric else _metric_of(run)
        if run.why_unscored(name) is not None:
            return None
        if metric:
            lower_is_better = metric.lower_is_better
        else:
            lower_is_better = not run.values.get("trainer.maximize_best_checkpoint_metric")
        values.append(-run.metrics[name] if lower_is_better else run.metrics[name])
    return float(np.mean(values))
