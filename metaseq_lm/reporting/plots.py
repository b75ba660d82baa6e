"""Plots of runs: curves over updates, score against a config key, score against FLOPs.

A series (the settings that differ only in the keys of the x axis and of the panels) has the same
colour in all plots of a report. Each draw function writes one PNG and returns notes for the reader.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import count_text
from metaseq_lm.reporting.canvas import (
    PlotStyle,
    Point,
    canvas,
    control_style,
    cost_axis,
    draw_points,
    legend,
    mark,
    series,
    style_of,
    thinned,
    ticks,
)
from metaseq_lm.reporting.numbers import SPREAD_TITLES, Metric, flops_text, summarise, words_text
from metaseq_lm.reporting.runs import Run, identity
from metaseq_lm.reporting.settings import (
    Row,
    axis_numbers,
    describe,
    distinct,
    remedy,
    require_logged,
    runs_of,
    scored_functions,
    show,
)
from metaseq_lm.reporting.table import cost_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DATA_KEYS = ("data", "task.labelled")
_READABLE = 14  # readable number of series in a picture


@dataclass(frozen=True)
class Pictures:
    """Shared options of all plots of a report.

    Attributes:
        settings: The settings to plot.
        spread: The measure of spread, a key of SPREAD_TITLES.
        panels: Config key with a panel for each of its values; not part of the series' names.
        along: Config key of the x axis; not part of the series' names.
        controls: The settings drawn as horizontal lines in plots of scores.
    """

    settings: Sequence[Row]
    spread: str = "sd"
    panels: str | None = None
    along: str | None = None
    controls: Sequence[Row] = ()

    @property
    def runs(self) -> list[Run]:
        """The runs of all settings."""
        return runs_of(self.settings)

    def series(self, setting: Row) -> str:
        """Return the name of the series that a setting belongs to."""
        return setting.name_without(self.panels, self.along)

    def styles(self) -> dict[str, PlotStyle]:
        """Return the style of each series in the order of the legend, controls last."""
        names = dict.fromkeys(self.series(setting) for setting in self.compared())
        styles = {name: style_of(i) for i, name in enumerate(names)}
        lines = dict.fromkeys(self.series(setting) for setting in self.controls)
        return styles | {name: control_style(i) for i, name in enumerate(lines)}

    def compared(self) -> list[Row]:
        """Return all settings except controls."""
        return [setting for setting in self.settings if setting not in self.controls]

    def shares_scale(self, key: str | None) -> bool:
        """Return whether the panels of a key share a y axis; false if they show different data.

        Sets that differ only in a number, such as which_moon_10 and which_moon_160, share an axis.
        """
        if key not in _DATA_KEYS:
            return True
        return axis_numbers([setting.values[key] for setting in self.settings]) is not None

    def split(self, key: str | None) -> list[tuple[str, list[Row]]]:
        """Return the title and settings of each panel; one untitled panel if `key` is None."""
        if key is None:
            return [("", list(self.settings))]
        panels = []
        for value in distinct(setting.values[key] for setting in self.settings):
            same = [s for s in self.settings if identity(s.values[key]) == identity(value)]
            panels.append((fill(f"{key} = {show(value)}", 44), same))
        return panels


def draw_all(
    pictures: Pictures, metric: Metric, curves: Sequence[str], out: Path
) -> tuple[list[Path], list[str]]:
    """Write the pictures of a report; return their paths and notes on missing contents."""
    paths: list[Path] = []
    notes: list[str] = []
    count = len(pictures.styles())
    if count > _READABLE:
        text = "series in one picture are hard to tell apart; use --where, --columns."
        notes.append(f"{count} {text}")
    for curve in curves:
        paths.append(out / _file_name("curves", curve))
        notes += _draw_curves(pictures, curve, paths[-1])
    if differing := scored_functions(metric.name, pictures.settings):
        reason = f"{describe(metric.name, differing)}; {remedy(differing)}"
        return paths, [*notes, f"No picture of scores: {reason}."]
    if not any(setting.scored_by(metric.name) for setting in pictures.settings):
        notes.append("No picture of scores: no run has one.")
    elif pictures.along:
        paths.append(out / _file_name("score_by", pictures.along))
        notes += _draw_scores(pictures, metric, paths[-1])
    for cost in _drawn_costs(pictures.settings, metric):
        paths.append(out / f"score_by_{cost}.png")
        notes += _draw_costs(pictures, metric, paths[-1], cost)
    return paths, notes


def _file_name(kind: str, name: str) -> str:
    """Return the file name of a picture, such as curves_valid.accuracy.png."""
    return f"{kind}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.png"


def _draw_curves(pictures: Pictures, curve: str, path: Path) -> list[str]:
    """Draw a logged metric over updates, a line for each series; runs without a result are thin.

    Several metrics that match a pattern have a panel for each setting.
    """
    from matplotlib.ticker import EngFormatter

    names, key = require_logged(pictures.runs, curve), pictures.panels or pictures.along
    styles, panels = pictures.styles(), []  # a line is a series, a setting and a metric
    # Only a pattern for several logged metrics, such as train.alpha_*, has such characters.
    if is_pattern := not set(curve).isdisjoint("*?["):
        styles = {name.partition(".")[2]: style_of(i) for i, name in enumerate(names)}
        for setting in pictures.settings:
            if any(not set(names).isdisjoint(run.logged) for run in setting.runs):
                lines = [(title, setting, name) for title, name in zip(styles, names)]
                panels.append((fill(setting.name, 44), lines))
    else:
        for title, settings in pictures.split(key):
            panels.append((title, [(pictures.series(s), s, curve) for s in settings]))
    notes, is_thin, spread = [], False, pictures.spread
    shared = is_pattern or pictures.shares_scale(key)
    with canvas(len(panels), path, shared) as (figure, grid):
        for axes, (title, lines) in zip(grid, panels):
            # 20k and 1.5M, because long numbers under small panels overlap.
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            for name, setting, metric in lines:
                values = chain.from_iterable(run.series(metric)[1] for run in pictures.runs)
                unit = Metric.of(metric, values)
                ylabel = curve if is_pattern else unit.axis
                axes.set(title=title, xlabel="updates", ylabel=ylabel)
                with series(axes, name):
                    notes += _draw_runs(axes, setting, unit, styles[name], spread)
                is_thin |= any(r.status != "finished" and r.series(metric)[0] for r in setting.runs)
        thin = "; thin: run without a result" * is_thin
        legend(figure, styles, f"line and band: {SPREAD_TITLES[spread]}{thin}")
    return notes


def _draw_runs(
    axes: "Axes", setting: Row, unit: Metric, style: PlotStyle, spread: str
) -> list[str]:
    notes, finished = [], []
    for run in setting.runs:
        updates, values = (np.asarray(part, dtype=float) for part in run.series(unit.name))
        finite = np.isfinite(values)
        if not finite.all():
            notes.append(f"{run.name}: {(~finite).sum()} values of {unit.name} are not finite.")
        updates, values = updates[finite], values[finite]
        if run.status == "finished" and len(values):
            finished.append((updates, values))
        elif len(values):
            axes.plot(updates, values * unit.scale, linewidth=0.7, **style.line)
            x, y = updates[-1], values[-1] * unit.scale
            axes.plot([x], [y], "x", color=style.colour)
            mark(axes, x, y, f"{unit.text(values[-1])} ({run.status})", f"{x:,.0f} updates")
    if not finished:
        return notes
    # Interpolate on the range of updates that all runs cover, so that every mean is over all runs.
    # With equal schedules these are the logged values themselves.
    first, last = max(x[0] for x, _ in finished), min(x[-1] for x, _ in finished)
    at = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in finished]))
    columns = np.stack([np.interp(at, x, y) for x, y in finished], axis=1)  # (updates, runs)
    summaries = [summary for column in columns if (summary := summarise(column, spread))]
    ends = np.array([(s.centre, s.low, s.high) for s in summaries]).reshape(-1, 3) * unit.scale
    axes.plot(at, ends[:, 0], marker=style.marker if len(at) == 1 else None, **style.line)
    if len(finished) > 1:
        axes.fill_between(at, ends[:, 1], ends[:, 2], color=style.colour, alpha=0.2, linewidth=0)
    for i in thinned(len(at)):
        mark(axes, at[i], ends[i, 0], summaries[i].text(unit), f"{at[i]:,.0f} updates")
    return notes


def _draw_scores(pictures: Pictures, metric: Metric, path: Path) -> list[str]:
    """Draw the score against the config key `pictures.along`, with one point per seed."""
    key = pictures.along
    assert key is not None
    present, notes = [], []
    for setting in pictures.compared():
        if setting.values[key] is None:
            text = f"{setting.name}: not in the plot over {key}, which its config does not set."
            notes.append(text)
        else:
            present.append(setting)
    if not present:
        raise MetaseqError(f"no run sets {key}; choose another key for --x")
    values = distinct(s.values[key] for s in present)
    # Values such as which_moon_10 are placed at their number, others at equal distances.
    numbers, prefix = axis_numbers(values) or ([], "")
    names = None if numbers else [show(value) for value in values]
    numbers = numbers or [float(i) for i in range(len(values))]
    is_log = names is None and min(numbers) > 0 and max(numbers) > 10 * min(numbers)
    at = {identity(value): number for value, number in zip(values, numbers)}
    places = {}
    for setting in present:
        value = setting.values[key]
        places[setting.name] = Point(at[identity(value)], None, at=f"{key} = {show(value)}")

    def prepare(axes: "Axes") -> None:
        axes.set(xlabel=f"{key} ({prefix}…)" if prefix else key)
        if is_log:
            axes.set_xscale("log")
        ticks(axes, numbers, names, is_log)

    panels = pictures.panels if pictures.panels != key else None
    _draw_places(pictures, metric, path, panels, places, prepare, f"; side by side: equal {key}")
    return notes


_COST_AXES = {
    "flops": ("FLOPs", "training FLOPs", flops_text),
    "words": ("words", "words of the corpus seen", words_text),
}


def _draw_costs(pictures: Pictures, metric: Metric, path: Path, cost: str) -> list[str]:
    """Draw the score against a cost of _COST_AXES, pretraining included, on a logarithmic axis."""
    unit, label, text_of = _COST_AXES[cost]
    places: dict[str, Point] = {}
    by_series: dict[str, list[float]] = {}
    notes = []
    for setting in pictures.compared():
        if price := cost_of(setting, metric, cost, pictures.spread):
            places[setting.name] = Point(price, None, at=f"{text_of(price)} {unit}")
            by_series.setdefault(pictures.series(setting), []).append(price)
        elif setting.scored_by(metric.name):
            text = f"{setting.name}: not in the plot over {unit}, which its runs do not record."
            notes.append(text)
    along = pictures.along
    panels = pictures.panels if pictures.panels != along else None
    # If the cost does not depend on the key of the x axis, its values become panels.
    if panels is None and all(max(same) < 1.1 * min(same) for same in by_series.values()):
        panels = along
    if along is not None and panels != along:
        numbers, _ = axis_numbers([s.values[along] for s in pictures.settings]) or ([], "")
        for setting, number in zip(pictures.settings, numbers):
            if setting.name in places:
                places[setting.name] = replace(places[setting.name], label=f"{number:g}")

    def prepare(axes: "Axes") -> None:
        spent = [place.x for place in places.values()]
        cost_axis(axes, spent, f"{label}, pretraining included")

    _draw_places(pictures, metric, path, panels, places, prepare, f"; side by side: equal {unit}")
    return notes


def _draw_places(
    pictures: Pictures,
    metric: Metric,
    path: Path,
    key: str | None,
    places: Mapping[str, Point],
    prepare: Callable[["Axes"], None],
    about_moved: str,
) -> None:
    """Draw the scores of settings at their places, a panel for each value of `key`."""
    styles, moved = pictures.styles(), False
    parts = pictures.split(key)
    with canvas(len(parts), path, pictures.shares_scale(key)) as (figure, grid):
        for axes, (title, settings) in zip(grid, parts):
            axes.set(title=title, ylabel=metric.axis)
            prepare(axes)
            scored = [s for s in settings if s.name in places and s.scored_by(metric.name)]
            true = [(places[s.name].x, s.run_scores(metric.name)) for s in scored]
            xs = _separate_overlapping(true, axes.get_xlim(), axes.get_xscale() == "log")
            moved |= any(abs(x - place) > 1e-6 * abs(place) for x, (place, _) in zip(xs, true))
            by_series: dict[str, list[Point]] = {name: [] for name in styles}
            for x, setting in sorted(zip(xs, scored), key=lambda pair: pair[0]):
                place = replace(places[setting.name], x=x)
                point = _point_of(setting, metric, pictures.spread, place)
                by_series[pictures.series(setting)].append(point)
            for name, points in by_series.items():
                with series(axes, name):
                    draw_points(axes, points, styles[name], 8)
            for setting in settings:
                if setting in pictures.controls and setting.scored_by(metric.name):
                    _draw_control(axes, pictures, setting, metric)
        subject = f"small: a seed; large: {SPREAD_TITLES[pictures.spread]}"
        if any(place.label for place in places.values()):
            subject += f"; number: {pictures.along}"
        legend(figure, styles, subject + about_moved * moved)


def _point_of(setting: Row, metric: Metric, spread: str, place: Point) -> Point:
    """Return the point of a setting at its place, which has no score yet."""
    scores, scale = setting.run_scores(metric.name), metric.scale
    summary = summarise(scores, spread)
    assert summary is not None
    value = f"{summary.text(metric)} ({count_text(summary.n, 'seed')})"
    ends = [summary.low * scale, summary.high * scale] if summary.n > 1 else []
    seeds = [score * scale for score in scores]
    return replace(place, y=summary.centre * scale, value=value, ends=ends, seeds=seeds)


def _draw_control(axes: "Axes", pictures: Pictures, setting: Row, metric: Metric) -> None:
    name = pictures.series(setting)
    point = _point_of(setting, metric, pictures.spread, Point(axes.get_xlim()[1], None))
    style = pictures.styles()[name]
    assert point.y is not None
    with series(axes, name):
        axes.axhline(point.y, linewidth=1.2, zorder=1.2, **style.line)
        if point.ends:
            axes.axhspan(*point.ends, alpha=0.2, linewidth=0, color=style.colour, zorder=1.2)
        mark(axes, point.x, point.y, point.value)


def _separate_overlapping(
    points: Sequence[tuple[float, list[float]]], ends: tuple[float, float], is_log: bool = True
) -> list[float]:
    """Return the places of points (x, scores), shifted slightly where points would overlap."""
    scaled = [math.log(x) if is_log else x for x, _ in points]
    low, high = map(math.log, ends) if is_log else ends
    span = high - low

    def hides(i: int, j: int) -> bool:
        first, second = points[i][1], points[j][1]
        overlap = min(first) <= max(second) and min(second) <= max(first)
        # Closer than 1 % of the axis, whose limits are `ends`.
        return overlap and scaled[i] - scaled[j] < 0.01 * span

    groups: list[list[int]] = []
    for i in sorted(range(len(points)), key=lambda i: scaled[i]):
        for group in groups:
            if any(hides(i, j) for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    for group in groups:
        middle = sum(scaled[i] for i in group) / len(group)
        for rank, i in enumerate(sorted(group)):
            scaled[i] = middle + (rank - (len(group) - 1) / 2) * 0.025 * span
    return [math.exp(x) if is_log else x for x in scaled]


def _drawn_costs(settings: Sequence[Row], metric: Metric) -> list[str]:
    """Return the costs that have points to plot; words only if they differ."""
    drawn = []
    for cost in _COST_AXES:
        spent = {cost_of(setting, metric, cost) for setting in settings} - {None, 0.0}
        drawn += [cost] * (len(spent) > (cost == "words"))
    return drawn
