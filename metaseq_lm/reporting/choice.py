"""Choosing options by their scores, and the best score that a tuning budget buys.

Of n trials drawn without replacement from N with the scores x_1 <= ... <= x_N the expected maximum
is the sum of x_i C(i - 1, n - 1) / C(N, n), an unbiased estimate of what n trials reach (Dodge et
al. 2019, "Show Your Work", whose estimate draws with replacement). It needs trials that do not
depend on each other's scores. If trials were stopped at rungs, or TPE proposed their values, the
best score so far is shown instead, which is one of many possible courses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.canvas import canvas, cost_axis, legend, style_of
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, describe, group, scored_functions, show
from metaseq_lm.reporting.table import Table
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
    by = ", ".join(names)
    if metric is None:
        by = f"validation ({by})"
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


_MOST_ROWS = 12  # rows of a setting in the table; the csv has all


@dataclass(frozen=True)
class _TuningCurve:
    """The best score of a setting by number of trials, with the FLOPs of these trials.

    Its scores are expectations, or else those of the one search there was.
    """

    setting: str
    points: Sequence[tuple[int, float, float]]  # trials, FLOPs, score
    is_expectation: bool


def expected_best(scores: Sequence[float], n: int, lower_is_better: bool = False) -> float:
    """Return the expected best of n scores drawn without replacement.

    Raises ValueError unless 1 <= n <= the number of scores.
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"{n} of {len(scores)} scores cannot be drawn")
    sign = -1.0 if lower_is_better else 1.0
    ordered = sorted(sign * score for score in scores)
    subsets = math.comb(len(ordered), n)
    terms = [x * (math.comb(rank, n - 1) / subsets) for rank, x in enumerate(ordered)]
    return sign * math.fsum(terms)


def _tuning_curve(setting: str, runs: Sequence[Run]) -> _TuningCurve:
    """Return the curve of a setting from its trials; empty if none has a score at its end."""
    records = sorted((run.trial for run in runs), key=lambda record: record["number"])
    tried = []
    for record in records:
        score, flops = (record["score"],), float(record["flops"])
        tried.append(Trial(record["values"], score, flops, record["state"]))
    lower = bool(records[0]["lower_is_better"])
    trials = Trials(setting, records[0]["metric"], lower, tuple(tried))
    finished = [score for _, score in trials.scores()]
    is_expectation = bool(finished) and all(record["independent"] for record in records)
    points = []
    if is_expectation:
        price = trials.flops / len(finished)  # trials without a score also cost FLOPs
        for n in range(1, len(finished) + 1):
            points.append((n, n * price, expected_best(finished, n, lower)))
    else:
        for n in range(1, len(trials) + 1):
            so_far = replace(trials, trials=trials.trials[:n])
            best = so_far.best()
            if best is not None and best.score is not None:
                points.append((n, so_far.flops, best.score))
    return _TuningCurve(setting, points, is_expectation)


def tuning_curves(runs: Sequence[Run]) -> tuple[list[_TuningCurve], str]:
    """Return the curve of each setting, and the metric of the search.

    Raises UsageError if no run is a trial of a search, or if searches used different metrics.
    """
    settings: dict[str, list[Run]] = {}
    for run in runs:
        if run.trial:
            settings.setdefault(run.trial["setting"], []).append(run)
    if not settings:
        raise UsageError("--expected-best: no run is a trial of a search (sweep --search)")
    metrics = sorted({str(run.trial["metric"]) for run in runs if run.trial})
    if len(metrics) > 1:
        raise UsageError(
            f"--expected-best: the searches chose by different metrics ({', '.join(metrics)}); "
            "report them one by one"
        )
    return [_tuning_curve(*item) for item in settings.items()], metrics[0]


def tuning_table(curves: Sequence[_TuningCurve], metric: Metric) -> Table:
    """Return the best scores by FLOPs of tuning; for many points of a setting, only doublings."""
    rows, records, notes = [], [], []
    for curve in curves:
        kind = "expected best" if curve.is_expectation else "best so far"
        is_short, last = len(curve.points) <= _MOST_ROWS, curve.points[-1:]
        for point in curve.points:
            trials, flops, score = point
            record = {"setting": curve.setting, "trials": trials, "flops": flops}
            records.append({**record, "best": score, "kind": kind})
            if is_short or point in last or trials & (trials - 1) == 0:
                texts = [str(trials), flops_text(flops), metric.text(score), kind]
                rows.append([curve.setting, *texts])
    if any(not curve.is_expectation for curve in curves):
        notes.append(
            "best so far: of the one search there was, because its trials were stopped at rungs or "
            "depend on earlier scores; an expectation needs --search-prune none and another "
            "sampler than tpe."
        )
    if empty := [curve.setting for curve in curves if not curve.points]:
        notes.append(f"No trial finished of {', '.join(empty)}.")
    head = ["setting", "trials", "FLOPs of tuning", metric.title, "kind"]
    title = f"{metric.title}: the best that a tuning budget buys"
    return replace(Table.of_texts(head, rows, head[1:-1], title), notes=notes, records=records)


def draw_tuning(curves: Sequence[_TuningCurve], metric: Metric, path: Path) -> None:
    """Draw the best score against the FLOPs of tuning, a line for each setting."""
    drawn = [curve for curve in curves if curve.points]
    styles = {curve.setting: style_of(i) for i, curve in enumerate(drawn)}
    with canvas(1, path) as (figure, (axes,)):
        axes.set_ylabel(metric.axis)
        points = chain.from_iterable(curve.points for curve in drawn)
        cost_axis(axes, [flops for _, flops, _ in points], "FLOPs of tuning")
        for curve, style in zip(drawn, styles.values()):
            _, xs, scores = zip(*curve.points)
            ys = [score * metric.scale for score in scores]
            look: Any = {"drawstyle": "default" if curve.is_expectation else "steps-post"}
            axes.plot(xs, ys, marker=style.marker, markersize=4, **style.line, **look)
        legend(figure, styles, "slopes: expected best; steps: best so far of the one search")
