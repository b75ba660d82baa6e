"""Figures of a league: the standings at each budget, scores by kind of labels, the ladder."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from metaseq_lm.league.columns import interval_title, short_name, value_of, verdict_text
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.ladder_tables import interval_name
from metaseq_lm.league.rungs import (
    CurveMeeting,
    curve_intervals,
    ladder_of,
    meetings,
    objectives_of,
)
from metaseq_lm.league.standings import REFUSE, VOID
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, UNDECIDED, WORSE
from metaseq_lm.reporting.canvas import (
    COLOURS,
    CONTROL,
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
)
from metaseq_lm.reporting.numbers import Metric, flops_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DARK = COLOURS[-1]
_VERDICT_COLOURS = {
    BETTER: COLOURS[2],
    EQUIVALENT: COLOURS[0],
    WORSE: COLOURS[1],
    UNDECIDED: "#8a6d00",
}
_WIDTH, _HEAD = 6.6, 0.7  # inches: the figure, a panel without rows
_ROW, _LINE = 0.34, 0.15  # inches: the least height of a row of a panel, a line of its text
_START = 2.5  # the lowest budget over the x at which untrained models are drawn
_BAND = 0.1  # inches: half the height of an untrained model's band
_KINDS = 7.5, 3.2  # inches: the figure of kinds, a panel
_SPREAD = 0.8  # share of a kind's place that its rows take
# A row, the texts left and right of it (its name and its verdicts), and its height in inches.
_Placed = tuple[StandingsEntry, str, str, float]


def draw_standings(standings: Standings, path: Path) -> None:
    """Draw the primary metric, a panel for each budget and a line for each objective.

    Dots are seeds, a bar is their mean, controls are grey, and the verdict stands next to them.
    Void and refused rows are hollow, flagged rows are grey.
    """
    metric = standings.primary
    panels = [_rows_at(standings, budget) for budget in standings.budgets]
    heights = []
    for rows in panels:
        heights.append(_HEAD + sum(height for *_, height in rows))
    with canvas(len(panels), path, shared=False, stacked=heights) as (figure, grid):
        figure.set_figwidth(_WIDTH)
        for axes in grid[1:]:
            axes.sharex(grid[0])
        for axes, budget, rows in zip(grid, standings.budgets, panels):
            axes.set_title(f"{flops_text(budget)} FLOPs", loc="left")
            styles = _draw_panel(axes, standings, rows)
        grid[-1].set_xlabel(metric.axis)
        entries, caption = standings.entries, "dot: a seed; bar: mean"
        caption += "; grey band: untrained, mean ± sd" * any(x.untrained for x in entries)
        caption += "; cross: trained on shuffled rows" * any(x.shuffled for x in entries)
        if any(entry.about(metric.name, VOID, REFUSE) for entry in entries):
            caption += "; hollow: void or refused"
        legend(figure, styles or {"mean": PlotStyle(_DARK, "", "|")}, caption)


def _rows_at(standings: Standings, budget: float) -> list[_Placed]:
    rows = []
    for entry in standings.at(budget):
        left, right = fill(entry.objective, 20), fill(verdict_text(standings, entry), 26)
        if decision := standings.stated_gain(entry):
            right += f"\ngain: {decision.verdict}"
        lines = 1 + max(left.count("\n"), right.count("\n"))
        rows.append((entry, left, right, max(_ROW, _LINE * lines + 0.06)))
    return rows


def _draw_panel(axes: "Axes", standings: Standings, rows: list[_Placed]) -> dict[str, PlotStyle]:
    """Draw the rows of one budget, the best at the top, y in inches; return styles of lines."""
    entries, names, words, heights = zip(*rows)
    ys = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for y, entry in zip(ys, entries):
        _draw_row(axes, y, standings, entry)
    axes.set_ylim(sum(heights), 0)
    axes.grid(visible=False, axis="y")
    beside = axes.secondary_yaxis("right")
    beside.spines["right"].set_visible(False)
    for side, texts in ((axes, names), (beside, words)):
        side.set_yticks(ys, texts, fontsize="small")
        side.tick_params("y", length=0)
    for label, entry in zip(beside.get_yticklabels(), entries):
        label.set_color(_colour_of(entry, standings))
    return _draw_references(axes, standings, is_upright=True)


def _draw_row(axes: "Axes", y: float, standings: Standings, entry: StandingsEntry) -> None:
    metric, name, colour = standings.primary, entry.objective, _colour_of(entry, standings)
    is_hollow = bool(entry.about(metric.name, VOID, REFUSE))
    for key in ("untrained", "shuffled"):
        value = value_of(key, standings, entry)
        if value.mean is None:
            continue
        x, sd = value.mean * metric.scale, (value.sd or 0.0) * metric.scale
        if key == "untrained":
            ends = [y - _BAND, y + _BAND]
            axes.fill_betweenx(ends, x - sd, x + sd, color=CONTROL, alpha=0.3, linewidth=0)
            axes.plot([x] * 2, ends, color=CONTROL, linewidth=1.2)
        else:
            axes.plot([x], [y], "x", color=CONTROL, markersize=6)
        if not is_hollow:
            mark(axes, x, y, value.wide, name=f"{name}, {key}")
    scores = _scaled(entry.scores.get(metric.name, ()), metric)
    look: Any = {"color": colour, "markersize": 5, "markeredgewidth": 0.8, "alpha": 0.55}
    if is_hollow:
        look |= {"markerfacecolor": "none", "alpha": 1.0}
    axes.plot(scores, [y] * len(scores), "o", **look)
    score, verdict = value_of("score", standings, entry), verdict_text(standings, entry)
    if is_hollow:
        mark(axes, sum(axes.get_xlim()) / 2, y, verdict, name=name)
    elif score.mean is not None:
        x = score.mean * metric.scale
        axes.plot([x], [y], "|", color=colour, markersize=16, markeredgewidth=2.4)
        mark(axes, x, y, f"{score.wide} ({len(scores)} seeds), {verdict}", name=name)


def _scaled(scores: Iterable[float], metric: Metric) -> list[float]:
    return [score * metric.scale for score in scores]


def _colour_of(entry: StandingsEntry, standings: Standings) -> str:
    """Return the colour of a row's verdict, dark for the baseline, grey without a verdict."""
    if entry.decision:
        return _VERDICT_COLOURS[entry.decision.verdict]
    is_base = entry.objective == standings.baseline and entry.is_ranked(standings.primary.name)
    return _DARK if is_base else CONTROL


def _draw_references(
    axes: "Axes", standings: Standings, is_upright: bool = False
) -> dict[str, PlotStyle]:
    """Draw the references of the primary metric as lines across a panel; return their styles."""
    metric, styles = standings.primary, {}
    for i, (title, value) in enumerate(standings.references.get(metric.name, {}).items()):
        name, style = f"{title} {metric.text(value)}", control_style(i)
        styles[name] = style
        draw = axes.axvline if is_upright else axes.axhline
        with series(axes, name):
            draw(value * metric.scale, linewidth=1.2, zorder=1, **style.line)
    return styles


def draw_ladder(standings: Standings, path: Path) -> None:
    """Draw the primary metric over the FLOPs of a run: means as lines, seeds as dots.

    Means, established crossovers and predictions have intervals; those of means are from a
    bootstrap. A row that is void or refused has only seeds. The mean of the untrained models is an
    open mark at the left end, since their scores depend on what a model sees. References are grey.
    A second panel has the gains over untrained models, if there are any.
    """
    metric, start = standings.primary, min(standings.budgets) / _START
    costs = [start, *standings.budgets, *(o.prediction.budget for o in standings.predictions)]
    established = [pair for pair in meetings(standings) if pair.is_established]
    styles = {name: style_of(i) for i, name in enumerate(objectives_of(standings))}
    with canvas(1 + standings.has_gains, path, shared=False) as (figure, grid):
        axes, *others = grid
        for panel, column in zip(grid, ("score", "gain")):
            cost_axis(panel, costs, "FLOPs of a run")
            for i, (name, style) in enumerate(styles.items()):
                entries = [entry for entry in standings.entries if entry.objective == name]
                shift = 1.02 ** (i - (len(styles) - 1) / 2)
                with series(panel, name):
                    _draw_rungs(panel, standings, entries, style, shift, column)
                    if panel is axes:
                        _draw_open_points(axes, standings, entries, style, shift, start)
        for pair in established:
            _draw_crossover(axes, standings, pair)
        lines = _draw_references(axes, standings)
        legend(figure, styles | lines, _describe_ladder(standings, bool(established)))
        axes.set_ylabel(metric.axis)
        for panel in others:  # `canvas` names the axis of only the first panel of a row
            panel.axhline(0, color=CONTROL, linewidth=1.2)
            axes.set_title(metric.axis, fontsize="small")
            points = " (points)" * metric.percent
            panel.set_title(f"gain over the untrained model{points}", fontsize="small")


def _draw_rungs(
    axes: "Axes",
    standings: Standings,
    entries: list[StandingsEntry],
    style: PlotStyle,
    shift: float,
    name: str,
) -> None:
    """Draw the score or the gain of an objective over its budgets, with their intervals."""
    metric, points = standings.primary, []
    intervals = curve_intervals(standings, entries[0].objective)
    for entry in sorted(entries, key=lambda entry: entry.budget):
        value = value_of(name, standings, entry)
        seeds, ends = entry.scores.get(metric.name, ()), intervals.get(entry.budget, ())
        if name == "gain":
            seeds, ends = (), value_of("gain interval", standings, entry).interval or ()
        y = None if value.mean is None else value.mean * metric.scale
        # Shifted a little, so that objectives do not overlap.
        x, at = entry.budget * shift, f"{flops_text(entry.budget)} FLOPs"
        points.append(Point(x, y, value.wide, at, _scaled(ends, metric), _scaled(seeds, metric)))
    draw_points(axes, points, style, 7 if name == "score" else 5, is_crowded=True)


def _draw_open_points(
    axes: "Axes",
    standings: Standings,
    entries: list[StandingsEntry],
    style: PlotStyle,
    shift: float,
    start: float,
) -> None:
    """Draw the mean of an objective's untrained models at the cost `start`, and predictions."""
    metric, name, points = standings.primary, entries[0].objective, []
    if known := [entry for entry in entries if entry.untrained.get(metric.name)]:
        scores = np.concatenate([entry.untrained[metric.name] for entry in known])
        text = value_of("untrained", standings, known[0]).wide
        point = Point(start * shift, float(scores.mean()) * metric.scale, text, "no training")
        draw_points(axes, [point], style, is_open=True)
    for outcome in standings.predictions:
        item = outcome.prediction
        if item.objective == name and item.metric == metric.name:
            y, at = item.value * metric.scale, f"{flops_text(item.budget)} FLOPs"
            ends = _scaled(item.interval, metric)
            points.append(Point(item.budget * shift, y, f"{y:.4g}", at, ends))
    draw_points(axes, points, style, is_open=True, name=f"{name}, predicted")


def _draw_crossover(axes: "Axes", standings: Standings, pair: CurveMeeting) -> None:
    result, metric = pair.crossover, standings.primary
    assert result.budget and result.interval
    ladder = ladder_of(standings, pair.after)
    y = float(np.interp(np.log(result.budget), ladder.logs, ladder.means)) * metric.scale
    axes.plot(result.interval, [y] * 2, color=_DARK, linewidth=2.4, alpha=0.8)
    axes.plot([result.budget], [y], "|", color=_DARK, markersize=10, markeredgewidth=1.6)


def _describe_ladder(standings: Standings, has_crossovers: bool) -> str:
    name, gain = interval_name(standings), interval_title(standings.rule)
    text = f"small: a seed (alone: void or refused); large: mean, with its bootstrap {name}"
    text += f"; horizontal bar: an established crossover, with its {name}" * has_crossovers
    if standings.predictions:
        text += f"; open, with a dotted bar: predicted, with its {name}"
    if any(entry.untrained for entry in standings.entries):
        text += "; open, at the left: mean of untrained models"
    if standings.has_gains:
        text += f"; right: score less that of the untrained model, with its {gain}"
    return text


# ---------------------------------------------------------------- kinds of labels


def draw_kinds(standings: Standings, path: Path) -> None:
    """Draw the scores of each kind of labels and of untrained models, a panel for each budget.

    Dots are seeds, a mark with a line is their mean ± sd; the verdict on the kind is below.
    """
    styles = {name: style_of(i) for i, name in enumerate(objectives_of(standings))}
    heights = [_KINDS[1]] * len(standings.budgets)
    with canvas(len(heights), path, stacked=heights) as (figure, grid):
        figure.set_figwidth(_KINDS[0])
        for axes, budget in zip(grid, standings.budgets):
            axes.set_title(f"{flops_text(budget)} FLOPs", loc="left")
            axes.set_ylabel("score (%)" if standings.primary.percent else "score")
            axes.set_xticks(range(len(standings.kinds)), map(short_name, standings.kinds))
            axes.set_xlim(-0.5, len(standings.kinds) - 0.5)
            axes.grid(visible=False, axis="x")
            axes.axhline(0, color=CONTROL, linewidth=1.2)
            entries = {e.objective: e for e in standings.entries if e.budget == budget}
            for i, (name, style) in enumerate(styles.items()):
                shift = _SPREAD * ((i + 0.5) / len(styles) - 0.5)
                if name in entries:
                    with series(axes, name):
                        _draw_kinds_of(axes, standings, entries[name], style, shift)
        marks = "small: a seed; large: mean ± sd; grey and open: mean of untrained models; below: "
        marks += f"+ better than {standings.baseline}, - worse, = equivalent, ? flagged"
        legend(figure, styles, marks)


def _draw_kinds_of(
    axes: "Axes", standings: Standings, entry: StandingsEntry, style: PlotStyle, shift: float
) -> None:
    """Draw the kinds of a row, each moved sideways from its place by `shift`."""
    untrained_points, points = [], []
    for place, kind in enumerate(standings.kinds):
        view, x, scale = standings.about(kind), place + shift, kind.scale
        untrained, value = (value_of(name, view, entry) for name in ("untrained", "score"))
        if untrained.mean is not None:
            at = f"{short_name(kind)}, untrained"
            untrained_points.append(Point(x, untrained.mean * scale, untrained.wide, at))
        if value.mean is None:
            continue
        mean, sd = value.mean * scale, (value.sd or 0.0) * scale
        seeds = _scaled(entry.scores[kind.name], kind)
        points.append(Point(x, mean, value.wide, short_name(kind), (mean - sd, mean + sd), seeds))
        look: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        look |= {"ha": "center", "va": "bottom", "fontsize": "small", "color": style.colour}
        axes.annotate(value.sign, (x, 0.0), xytext=(0, 1), **look)
    draw_points(axes, untrained_points, replace(style, colour=CONTROL), 5, is_open=True)
    draw_points(axes, points, replace(style, dash=""), 6, is_crowded=True)
