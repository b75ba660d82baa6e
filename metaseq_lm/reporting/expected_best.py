"""The best score that a tuning budget buys: its expectation over the trials of a search.

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
from pathlib import Path

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.canvas import canvas, cost_axis, legend
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.styles import style_of
from metaseq_lm.reporting.table import Cell, Table
from metaseq_lm.sweeps.trials import Trial, Trials

_MOST_ROWS = 12  # rows of a setting in the table; the csv has all
_EXPECTED, _SO_FAR = "expected best", "best so far"


@dataclass(frozen=True)
class TuningCurve:
    """The best score of a setting against the FLOPs of its tuning.

    Attributes:
        setting: The name of the setting.
        trials: Numbers of trials, ascending.
        flops: FLOPs of each number of trials.
        scores: The best score of each number of trials.
        is_expectation: Whether the scores are expectations, and not scores of the one search.
    """

    setting: str
    trials: tuple[int, ...]
    flops: tuple[float, ...]
    scores: tuple[float, ...]
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


def _tuning_curve(setting: str, runs: Sequence[Run]) -> TuningCurve:
    """Return the curve of a setting from its trials; empty if none has a score at its end."""
    records = sorted((run.trial for run in runs), key=lambda record: record["number"])
    tried = []
    for record in records:
        tried.append(
            Trial(record["values"], (record["score"],), float(record["flops"]), record["state"])
        )
    lower = bool(records[0]["lower_is_better"])
    trials = Trials(setting, records[0]["metric"], lower, tuple(tried))
    finished = [score for _, score in trials.scores()]
    if all(record["independent"] for record in records) and finished:
        # Trials without a score also cost FLOPs.
        price = trials.flops / len(finished)
        numbers = tuple(range(1, len(finished) + 1))
        expected = tuple(expected_best(finished, n, lower) for n in numbers)
        return TuningCurve(setting, numbers, tuple(n * price for n in numbers), expected, True)
    points = []
    for number in range(1, len(trials) + 1):
        so_far = replace(trials, trials=trials.trials[:number])
        best = so_far.best()
        if best is not None and best.score is not None:
            points.append((number, so_far.flops, best.score))
    numbers, flops, scores = zip(*points) if points else ((), (), ())
    return TuningCurve(setting, numbers, flops, scores, False)


def tuning_curves(runs: Sequence[Run]) -> tuple[list[TuningCurve], str]:
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
    curves = [_tuning_curve(name, members) for name, members in settings.items()]
    return curves, metrics[0]


def tuning_table(curves: Sequence[TuningCurve], metric: Metric) -> Table:
    """Return the best scores by FLOPs of tuning; for many points of a setting, only doublings."""
    rows, records = [], []
    for curve in curves:
        kind = _EXPECTED if curve.is_expectation else _SO_FAR
        points = list(zip(curve.trials, curve.flops, curve.scores))
        shown = points if len(points) <= _MOST_ROWS else points[:1]
        if shown is not points:
            shown = [p for p in points[:-1] if p[0] & (p[0] - 1) == 0] + points[-1:]
        for trials, flops, score in shown:
            texts = [str(trials), flops_text(flops), metric.text(score)]
            rows.append([Cell(curve.setting, number=False), *map(Cell, texts)])
            rows[-1].append(Cell(kind, number=False))
        records += [
            {"setting": curve.setting, "trials": n, "flops": flops, "best": score, "kind": kind}
            for n, flops, score in points
        ]
    notes = []
    if any(not curve.is_expectation for curve in curves):
        notes.append(
            "best so far: of the one search there was, because its trials were stopped at rungs or "
            "depend on earlier scores; an expectation needs --search-prune none and another "
            "sampler than tpe."
        )
    if empty := [curve.setting for curve in curves if not curve.trials]:
        notes.append(f"No trial finished of {', '.join(empty)}.")
    head = ["setting", "trials", "FLOPs of tuning", metric.title, "kind"]
    return Table(f"{metric.title}: the best that a tuning budget buys", head, rows, notes, records)


def draw_tuning(curves: Sequence[TuningCurve], metric: Metric, path: Path) -> None:
    """Draw the best score against the FLOPs of tuning, a line for each setting."""
    drawn = [curve for curve in curves if curve.trials]
    styles = {curve.setting: style_of(i) for i, curve in enumerate(drawn)}
    with canvas(1, path) as (figure, (axes,)):
        axes.set(xscale="log", xlabel="FLOPs of tuning", ylabel=metric.axis)
        costs = [flops for curve in drawn for flops in curve.flops]
        cost_axis(axes, costs)
        for curve in drawn:
            style = styles[curve.setting]
            scores = [score * metric.scale for score in curve.scores]
            look = "default" if curve.is_expectation else "steps-post"
            axes.plot(
                curve.flops,
                scores,
                color=style.colour,
                linestyle=style.dash,
                marker=style.marker,
                markersize=4,
                drawstyle=look,
            )
        legend(figure, styles, "slopes: expected best; steps: best so far of the one search")
