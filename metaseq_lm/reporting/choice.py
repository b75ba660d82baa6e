"""Choosing, of runs that differ in one config key only, the value that validation likes best."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting, group, identity, show


def chosen_values(runs: Sequence[Run], key: str) -> tuple[list[Run], list[str]]:
    """Return the runs of the best value of `key` in each setting, and a note that names the values.

    The metric is the one by which each run kept its best checkpoint, at that checkpoint, the mean
    over seeds. A value with a run that has not finished is passed over; where that leaves none, all
    stay. Raises UsageError for an unknown key, and for runs that kept no best checkpoint.
    """
    kept: list[Run] = []
    lines = []
    buckets: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in group(runs, [key]):
        rest = tuple((k, identity(v)) for k, v in setting.values.items() if k != key)
        buckets.setdefault(rest, []).append(setting)
    for settings in buckets.values():
        known = [(value, s) for s in settings if (value := validated(s)) is not None]
        if not known:
            kept += [run for setting in settings for run in setting.runs]
            continue
        # The first of equals, as everywhere: max keeps it.
        best = max(known, key=lambda pair: pair[0])[1]
        kept += best.runs
        lines.append(f"{best.name_without(key)}: {show(best.values[key])}")
    note = f"{key} was chosen by validation ({', '.join(sorted({metric_of(r) for r in kept}))}): "
    return kept, [note + "; ".join(lines) + "."]


def metric_of(run: Run) -> str:
    """Return the validation metric by which a run kept its best checkpoint, as "valid.score"."""
    name = run.values.get("trainer.best_checkpoint_metric")
    if not name:
        raise UsageError(
            f"--choose: {run.name} kept no best checkpoint, so nothing says which value is better; train "
            "with trainer.best_checkpoint_metric"
        )
    return f"{run.values.get('trainer.valid_split')}.{name}"


def validated(setting: Setting) -> float | None:
    """Return the mean validation metric of a setting, larger is better; None if a run lacks it."""
    values = []
    for run in setting.runs:
        metric = metric_of(run)
        if run.why_unscored(metric) is not None:
            return None
        sign = 1 if run.values.get("trainer.maximize_best_checkpoint_metric") else -1
        values.append(sign * run.metrics[metric])
    return float(np.mean(values))
