"""Plots of runs: curves over updates, score against a config key, score against FLOPs.

A series (the settings that differ only in the keys of the x axis and of the panels) has the same
colour in all plots of a report. Each draw function writes one PNG and returns notes for the reader.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.canvas import (
    canvas,
    cost_axis,
    dodge,
    legend,
    thousands,
    ticks,
)
from metaseq_lm.reporting.drawing import mark, series, thinned
from metaseq_lm.reporting.numbers import SPREAD_TITLES, Metric, flops_text, summarise, words_text
from metaseq_lm.reporting.runs import Run, identity, natural
from metaseq_lm.reporting.settings import Row, axis_numbers, distinct, runs_of, show
from metaseq_lm.reporting.styles import Style, control_style, style_of
from metaseq_lm.reporting.table import cost_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_DATA_KEYS = ("data", "task.labelled")


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

    def styles(self) -> dict[str, Style]:
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


def is_pattern(metric: str) -> bool:
    """Return whether a name is a pattern for several logged metrics, such as train.alpha_*."""
    return bool(set(metric) & set("*?["))


def require_logged(runs: Sequence[Run], metric: str) -> list[str]:
    """Return the logged metrics that match `metric`, a name or a pattern, in natural order.

    Raises UsageError listing the logged metrics if none matches.
    """
    known = sorted(set().union(*(run.logged for run in runs)), key=natural)
    matching = [name for name in known if fnmatchcase(name, metric)] if is_pattern(metric) else []
    matching = matching or [name for name in known if name == metric]
    if not matching:
        raise UsageError(
            f"no log has the metric '{metric}'.{nearest(metric, known)} "
            f"Logged: {', '.join(known) or 'nothing'}."
        )
    return matching


def _unit_of(metric: str, runs: Sequence[Run]) -> Metric:
    """Return a logged metric with its unit and direction, inferred from the logged values."""
    values = []
    for run in runs:
        values += run.series(metric)[1]
    return Metric.of(metric, values)


def draw_metrics(pictures: Pictures, pattern: str, path: Path) -> list[str]:
    """Draw all logged metrics that match a pattern over updates, a panel for each setting.

    Each line is a metric, as centre and spread over the finished runs. Raises UsageError if no run
    logged a matching metric.
    """
    names = require_logged(pictures.runs, pattern)
    styles = {name.partition(".")[2]: style_of(i) for i, name in enumerate(names)}
    settings = []
    for setting in pictures.settings:
        if any(not set(names).isdisjoint(run.logged) for run in setting.runs):
            settings.append(setting)
    notes = []
    with canvas(len(settings), path) as (figure, grid):
        for axes, setting in zip(grid, settings):
            axes.set(title=fill(setting.name, 44), xlabel="updates", ylabel=pattern)
            thousands(axes)
            for name, style in zip(names, styles.values()):
                unit = _unit_of(name, setting.runs)
                with series(axes, name.partition(".")[2]):
                    notes += curve(axes, setting, unit, style, pictures.spread)
        legend(figure, styles, "line and band: " + SPREAD_TITLES[pictures.spread])
    return notes


def draw_curves(pictures: Pictures, metric: str, path: Path) -> list[str]:
    """Draw a logged metric over updates: centre and spread of the finished runs of each setting.

    Runs without a result are drawn as thin lines. Raises UsageError if no run logged the metric.
    """
    runs = pictures.runs
    require_logged(runs, metric)
    unit = _unit_of(metric, runs)
    styles, notes = pictures.styles(), []
    key = pictures.panels or pictures.along
    panels = pictures.split(key)
    with canvas(len(panels), path, pictures.shares_scale(key)) as (figure, grid):
        for axes, (title, settings) in zip(grid, panels):
            axes.set(title=title, xlabel="updates", ylabel=unit.axis)
            thousands(axes)
            for setting in settings:
                name = pictures.series(setting)
                with series(axes, name):
                    notes += curve(axes, setting, unit, styles[name], pictures.spread)
        subject = "line and band: " + SPREAD_TITLES[pictures.spread]
        thin = any(run.status != "finished" and run.series(metric)[0] for run in runs)
        legend(figure, styles, subject + ("; thin: run without a result" if thin else ""))
    return notes


def curve(axes: "Axes", setting: Row, unit: Metric, style: Style, spread: str) -> list[str]:
    """Draw the runs of one setting; returns notes on values that cannot be drawn."""
    notes, finished = [], []
    for run in setting.runs:
        updates, values = (np.asarray(part, dtype=float) for part in run.series(unit.name))
        finite = np.isfinite(values)
        if not finite.all():
            notes.append(f"{run.name}: {(~finite).sum()} values of {unit.name} are not finite.")
        points = updates[finite], values[finite] * unit.scale
        if not finite.any():
            continue
        if run.status == "finished":
            finished.append(points)
        else:
            axes.plot(*points, color=style.colour, linestyle=style.dash, linewidth=0.7)
            axes.plot(points[0][-1:], points[1][-1:], color=style.colour, marker="x")
            last = f"{unit.text(values[finite][-1])} ({run.status})"
            mark(axes, points[0][-1], points[1][-1], last, _updates_text(points[0][-1]))
    if finished:
        # Interpolate on the range of updates that all runs cover, so that every mean is over all
        # runs. With equal schedules these are the logged values themselves.
        first = max(x[0] for x, _ in finished)
        last = min(x[-1] for x, _ in finished)
        at = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in finished]))
        columns = np.stack([np.interp(at, x, y) for x, y in finished], axis=1)  # (updates, runs)
        middle = [summarise(column, spread) for column in columns]
        lone_marker = style.marker if len(at) == 1 else None
        centre = [s.centre for s in middle if s]
        axes.plot(at, centre, color=style.colour, linestyle=style.dash, marker=lone_marker)
        if len(finished) > 1:
            low, high = [s.low for s in middle if s], [s.high for s in middle if s]
            axes.fill_between(at, low, high, color=style.colour, alpha=0.2, linewidth=0)
        raw = [summarise(column / unit.scale, spread) for column in columns]
        for i in thinned(len(at)):
            if (summary := raw[i]) is not None:
                mark(axes, at[i], centre[i], summary.text(unit), _updates_text(at[i]))
    return notes


def _updates_text(update: float) -> str:
    """Return the x position of a point of a curve in words."""
    return f"{update:,.0f} updates"


def draw_scores(pictures: Pictures, metric: Metric, path: Path) -> list[str]:
    """Draw the score against the config key `pictures.along`, with one point per seed.

    Values such as which_moon_10 are placed at their number, others at equal distances. The x axis
    is logarithmic if the numbers are positive and span more than a factor of 10.
    """
    key = pictures.along
    assert key is not None
    present = [s for s in pictures.compared() if s.values[key] is not None]
    notes = [
        f"{s.name}: not in the plot over {key}, which its config does not set."
        for s in pictures.compared()
        if s.values[key] is None
    ]
    if not present:
        raise MetaseqError(f"no run sets {key}; choose another key for --x")
    values = distinct(s.values[key] for s in present)
    numeric = axis_numbers(values)
    numbers, prefix = numeric if numeric else ([float(i) for i in range(len(values))], "")
    at = {identity(value): number for value, number in zip(values, numbers)}
    is_log = numeric is not None and min(numbers) > 0 and max(numbers) > 10 * min(numbers)
    styles = pictures.styles()
    parts = pictures.panels if pictures.panels != key else None
    panels = pictures.split(parts)
    # Series are shifted sideways only if several share a value.
    names = {pictures.series(s) for s in present}
    lanes = len(names) if len(present) > len(values) * len(panels) else 1
    with canvas(len(panels), path, pictures.shares_scale(parts)) as (figure, grid):
        for axes, (title, settings) in zip(grid, panels):
            label = f"{key} ({prefix}…)" if prefix else key
            axes.set(title=title, xlabel=label, ylabel=metric.axis)
            if is_log:
                axes.set_xscale("log")
            ticks(axes, numbers, None if numeric else [show(value) for value in values], is_log)
            for i, (name, style) in enumerate(styles.items()):
                points = []
                for setting in settings:
                    if setting in present and pictures.series(setting) == name:
                        x = at[identity(setting.values[key])]
                        x = dodge(x, i % lanes, lanes, numbers, is_log)
                        place = f"{key} = {show(setting.values[key])}"
                        points.append(Point(x, setting.run_scores(metric.name), place))
                with series(axes, name):
                    _trend(axes, points, metric, style, pictures.spread)
            _draw_controls(axes, pictures, settings, metric)
        legend(figure, styles, f"small: a seed; large: {SPREAD_TITLES[pictures.spread]}")
    return notes


_COST_AXES = {"flops": ("FLOPs", "training FLOPs"), "words": ("words", "words of the corpus seen")}
_COST_TEXTS = {"flops": flops_text, "words": words_text}


def draw_costs(pictures: Pictures, metric: Metric, path: Path, cost: str) -> list[str]:
    """Draw the score against a cost, pretraining included, on a logarithmic axis.

    If the cost does not depend on the key `pictures.along`, its values become panels. `cost` is one
    of COST_AXES.
    """
    unit, label = _COST_AXES[cost]
    styles = pictures.styles()
    known: list[tuple[Row, float]] = []
    notes = []
    for setting in pictures.compared():
        if spent := cost_of(setting, metric, cost, pictures.spread):
            known.append((setting, spent))
        elif setting.scored_by(metric.name):
            notes.append(
                f"{setting.name}: not in the plot over {unit}, which its runs do not record."
            )
    panels = pictures.panels if pictures.panels != pictures.along else None
    if panels is None and _have_equal_costs(pictures, known):
        panels = pictures.along
    parts = pictures.split(panels)
    sizes = _value_labels(pictures) if panels != pictures.along else {}
    moved = False
    with canvas(len(parts), path, pictures.shares_scale(panels)) as (figure, grid):
        for axes, (title, settings) in zip(grid, parts):
            axes.set(title=title, xscale="log", ylabel=metric.axis)
            axes.set_xlabel(f"{label}, pretraining included")
            cost_axis(axes, [spent for _, spent in known])
            inside = [(s, spent) for s, spent in known if s in settings]
            at = separate_overlapping(
                [(c, s.run_scores(metric.name)) for s, c in inside], axes.get_xlim()
            )
            moved |= any(abs(x - spent) > 1e-6 * spent for x, (_, spent) in zip(at, inside))
            for name, style in styles.items():
                points = []
                for x, (setting, spent) in zip(at, inside):
                    if pictures.series(setting) == name:
                        place = f"{_COST_TEXTS[cost](spent)} {unit}"
                        scores = setting.run_scores(metric.name)
                        points.append(Point(x, scores, place, sizes.get(setting.name, "")))
                points.sort(key=lambda point: point.x)
                with series(axes, name):
                    _trend(axes, points, metric, style, pictures.spread)
            _draw_controls(axes, pictures, settings, metric)
        subject = f"small: a seed; large: {SPREAD_TITLES[pictures.spread]}"
        if any(sizes.values()):
            subject += f"; number: {pictures.along}"
        if moved:
            subject += f"; side by side: equal {unit}"
        legend(figure, styles, subject)
    return notes


def _have_equal_costs(pictures: Pictures, known: Sequence[tuple[Row, float]]) -> bool:
    """Return whether the costs within each series differ by less than 10 %."""
    costs: dict[str, list[float]] = {}
    for setting, cost in known:
        costs.setdefault(pictures.series(setting), []).append(cost)
    return all(max(same) < 1.1 * min(same) for same in costs.values())


def _draw_controls(
    axes: "Axes", pictures: Pictures, settings: Sequence[Row], metric: Metric
) -> None:
    """Draw the controls of a panel as horizontal lines with their spread."""
    styles = pictures.styles()
    for setting in settings:
        summary = summarise(
            [score * metric.scale for score in setting.run_scores(metric.name)], pictures.spread
        )
        if setting not in pictures.controls or summary is None:
            continue
        name = pictures.series(setting)
        style = styles[name]
        style_kwargs: Any = {"color": style.colour, "zorder": 1.2}
        with series(axes, name):
            axes.axhline(summary.centre, linestyle=style.dash, linewidth=1.2, **style_kwargs)
            if summary.n > 1:
                axes.axhspan(summary.low, summary.high, alpha=0.2, linewidth=0, **style_kwargs)
            exact = summarise(setting.run_scores(metric.name), pictures.spread)
            assert exact is not None
            mark(axes, axes.get_xlim()[1], summary.centre, exact.text(metric))


def _value_labels(pictures: Pictures) -> dict[str, str]:
    """Return the numeric label of each setting's value of `along`; {} if they are not numeric."""
    key = pictures.along
    if key is None:
        return {}
    numeric = axis_numbers([s.values[key] for s in pictures.settings])
    return {s.name: f"{x:g}" for s, x in zip(pictures.settings, numeric[0])} if numeric else {}


def separate_overlapping(
    points: Sequence[tuple[float, list[float]]], ends: tuple[float, float]
) -> list[float]:
    """Return the costs of points (cost, scores), shifted slightly where points would overlap.

    `ends` are the limits of the logarithmic axis. Points overlap if their costs are closer than 1 %
    of its length and their ranges of scores intersect.
    """
    span = math.log(ends[1] / ends[0])
    logs = [math.log(cost) for cost, _ in points]

    def hides(i: int, j: int) -> bool:
        first, second = points[i][1], points[j][1]
        overlap = min(first) <= max(second) and min(second) <= max(first)
        return overlap and logs[i] - logs[j] < 0.01 * span

    groups: list[list[int]] = []
    for i in sorted(range(len(points)), key=lambda i: logs[i]):
        for group in groups:
            if any(hides(i, j) for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    for group in groups:
        middle = sum(logs[i] for i in group) / len(group)
        for rank, i in enumerate(sorted(group)):
            if len(group) > 1:
                logs[i] = middle + (rank - (len(group) - 1) / 2) * 0.025 * span
    return [math.exp(log) for log in logs]


def drawn_costs(settings: Sequence[Row], metric: Metric) -> list[str]:
    """Return the costs that have points to plot; words only if they differ."""
    drawn = []
    for cost in _COST_AXES:
        spent = {cost_of(setting, metric, cost) for setting in settings} - {None, 0.0}
        drawn += [cost] if len(spent) > (cost == "words") else []
    return drawn


@dataclass(frozen=True)
class Point:
    """The scores of a setting at an x position, with a text for x and a label at the point."""

    x: float
    scores: Sequence[float]
    text: str
    label: str = ""


def _trend(
    axes: "Axes", points: Sequence[Point], metric: Metric, style: Style, spread: str
) -> None:
    """Draw one series: a small point per seed, a large one with its spread, a line between."""
    centres = []
    colour = style.colour
    for point in points:
        x, y = point.x, [score * metric.scale for score in point.scores]
        summary, exact = summarise(y, spread), summarise(point.scores, spread)
        if summary is None or exact is None:
            continue
        centre = summary.centre
        centres.append((x, centre))
        bar = [[centre - summary.low], [summary.high - centre]] if summary.n > 1 else None
        axes.errorbar([x], [centre], yerr=bar, color=colour, capsize=3, elinewidth=1.2)
        axes.plot([x], [centre], style.marker, color=colour, markersize=8)
        if point.label:
            offset: Any = {"xytext": (6, -9), "textcoords": "offset points"}
            axes.annotate(point.label, (x, centre), **offset, fontsize=7, color=colour)
        # Drawn over the centre with a white face, so that every seed stays visible.
        small: Any = {"color": colour, "markerfacecolor": "white", "markersize": 3}
        axes.plot([x] * len(y), y, style.marker, **small)
        seeds = f" ({summary.n} seeds)" if summary.n > 1 else " (1 seed)"
        mark(axes, x, centre, exact.text(metric) + seeds, point.text)
    if len(centres) > 1:
        xs, ys = zip(*centres)
        axes.plot(xs, ys, color=colour, linestyle=style.dash, linewidth=1.2, zorder=1.5)
