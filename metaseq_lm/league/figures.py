"""Figures of a league: the standings at each budget, and the ladder of budgets."""

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from metaseq_lm.league.cells import gain_text, interval_title, score_text, summary_text
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.ladder_tables import interval_name
from metaseq_lm.league.rungs import (
    Meeting,
    curve_intervals,
    ladder_of,
    meetings,
    objectives_of,
)
from metaseq_lm.league.standings import REFUSE, VOID
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, UNDECIDED, WORSE
from metaseq_lm.reporting.canvas import canvas, cost_axis, legend
from metaseq_lm.reporting.drawing import mark, series
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise
from metaseq_lm.reporting.styles import COLOURS, CONTROL, Style, control_style, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DARK = COLOURS[-1]
VERDICT_COLOURS = {
    BETTER: COLOURS[2],
    EQUIVALENT: COLOURS[0],
    WORSE: COLOURS[1],
    UNDECIDED: "#8a6d00",
}
_WIDTH, HEAD = 6.6, 0.7  # inches: the figure, a panel without rows
_ROW, LINE = 0.34, 0.15  # inches: the least height of a row of a panel, a line of its text
_START = 2.5  # the lowest budget over the x at which untrained models are drawn
_BAND = 0.1  # inches: half the height of an untrained model's band


def draw_standings(standings: Standings, path: Path) -> None:
    """Draw the primary metric, a panel for each budget and a line for each objective.

    Dots are seeds, a bar is their mean, controls are grey, and the verdict stands next to them.
    Void and refused rows are hollow, flagged rows are grey.
    """
    metric = standings.primary
    panels = [standings.at(budget, metric) for budget in standings.budgets]
    heights = [HEAD + sum(row_heights(standings, entries)) for entries in panels]
    with canvas(len(panels), path, shared=False, stacked=heights) as (figure, grid):
        figure.set_figwidth(_WIDTH)
        for axes, budget, entries in zip(grid, standings.budgets, panels):
            axes.set_title(f"{flops_text(budget)} FLOPs", loc="left")
            draw_panel(axes, standings, entries)
            axes.set_xlim(_axis_ends(standings))
        grid[-1].set_xlabel(metric.axis)
        legend(
            figure,
            _reference_styles(standings),
            _describe_marks(standings),
        )


def _axis_ends(standings: Standings) -> tuple[float, float]:
    """Return the ends of an axis on which every score, control and reference lies."""
    metric = standings.primary
    values = list(standings.references.get(metric.name, {}).values())
    for entry in standings.entries:
        for scores in (entry.scores, entry.untrained, entry.shuffled):
            values.extend(scores.get(metric.name, ()))
        if summary := summarise(entry.untrained.get(metric.name, ())):
            values += [summary.low, summary.high]
    low, high = metric.scale * min(values, default=0.0), metric.scale * max(values, default=1.0)
    margin = 0.04 * (high - low or 1.0)
    return low - margin, high + margin


def draw_panel(axes: "Axes", standings: Standings, entries: list[Entry]) -> None:
    """Draw the rows of one budget, the best at the top; y is in inches."""
    metric = standings.primary
    heights = row_heights(standings, entries)
    ys = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for y, entry in zip(ys, entries):
        _draw_row(axes, y, entry, metric, _colour_of(entry, standings))
        _mark_row(axes, y, standings, entry)
    axes.set_ylim(sum(heights), 0)
    axes.grid(visible=False, axis="y")
    names, words = zip(*(row_texts(standings, entry) for entry in entries))
    axes.set_yticks(ys, names)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(ys, words)
    beside.spines["right"].set_visible(False)
    for side in (axes.yaxis, beside.yaxis):
        side.set_tick_params(length=0, labelsize="small")
    for label, entry in zip(beside.get_yticklabels(), entries):
        label.set_color(_colour_of(entry, standings))
    values = standings.references.get(metric.name, {}).values()
    for value, (name, style) in zip(values, _reference_styles(standings).items()):
        look: Any = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.2}
        with series(axes, name):
            axes.axvline(value * metric.scale, zorder=1, **look)


def _mark_row(axes: "Axes", y: float, standings: Standings, entry: Entry) -> None:
    """Mark the values of a row: its mean with the verdict, and its controls."""
    metric, name = standings.primary, entry.objective
    if entry.about(metric.name, VOID, REFUSE):
        low, high = _axis_ends(standings)
        mark(axes, (low + high) / 2, y, standings.verdict_text(entry), name=name)
        return
    if scores := scaled(entry.scores.get(metric.name, ()), metric):
        text = score_text(standings, entry, metric)
        value = f"{text} ({len(scores)} seeds), {standings.verdict_text(entry)}"
        mark(axes, sum(scores) / len(scores), y, value, name=name)
    for control, values in (("untrained", entry.untrained), ("shuffled", entry.shuffled)):
        if scores := scaled(values.get(metric.name, ()), metric):
            text = summary_text(values, metric)
            mark(axes, sum(scores) / len(scores), y, text, name=f"{name}, {control}")


def row_texts(standings: Standings, entry: Entry) -> tuple[str, str]:
    """Return the texts left and right of a row: its name, and its verdicts."""
    decision = entry.stated_gain(standings.primary.name)
    on_gain = f"\ngain: {decision.verdict}" if decision else ""
    return fill(entry.objective, 20), fill(standings.verdict_text(entry), 26) + on_gain


def row_heights(standings: Standings, entries: list[Entry]) -> list[float]:
    """Return the height of each row in inches, which depends on its texts."""
    counts = [max(text.count("\n") for text in row_texts(standings, e)) + 1 for e in entries]
    return [max(_ROW, LINE * count + 0.06) for count in counts]


def _draw_row(axes: "Axes", y: float, entry: Entry, metric: Metric, colour: str) -> None:
    """Draw the seeds of a row with their mean, over its controls."""
    if untrained := scaled(entry.untrained.get(metric.name, ()), metric):
        summary = summarise(untrained)
        assert summary is not None
        low, high, grey = summary.low, summary.high, CONTROL
        axes.fill_betweenx([y - _BAND, y + _BAND], low, high, color=grey, alpha=0.3, linewidth=0)
        axes.plot([summary.centre] * 2, [y - _BAND, y + _BAND], color=CONTROL, linewidth=1.2)
    if shuffled := scaled(entry.shuffled.get(metric.name, ()), metric):
        axes.plot([sum(shuffled) / len(shuffled)], [y], "x", color=CONTROL, markersize=6)
    if scores := scaled(entry.scores.get(metric.name, ()), metric):
        is_hollow = bool(entry.about(metric.name, VOID, REFUSE))
        face = "none" if is_hollow else colour
        look: Any = {"markersize": 5, "markeredgewidth": 0.8, "markerfacecolor": face}
        alpha = 1.0 if is_hollow else 0.55
        axes.plot(scores, [y] * len(scores), "o", color=colour, alpha=alpha, **look)
        if not is_hollow:
            mean = sum(scores) / len(scores)
            axes.plot([mean], [y], "|", color=colour, markersize=16, markeredgewidth=2.4)


def scaled(scores: Any, metric: Metric) -> list[float]:
    """Return scores in the unit that is shown."""
    return [score * metric.scale for score in scores]


def _colour_of(entry: Entry, standings: Standings) -> str:
    """Return the colour of a row's verdict, dark for the baseline, grey without a verdict."""
    if entry.decision:
        return VERDICT_COLOURS[entry.decision.verdict]
    is_base = entry.objective == standings.baseline and entry.is_ranked(standings.primary.name)
    return _DARK if is_base else CONTROL


def _reference_styles(standings: Standings) -> dict[str, Style]:
    """Return the style of each reference of the primary metric, or an entry for the mean."""
    metric = standings.primary
    styles = {}
    for i, (name, value) in enumerate(standings.references.get(metric.name, {}).items()):
        styles[f"{name} {metric.text(value)}"] = control_style(i)
    return styles or {"mean": Style(_DARK, "", "|")}


def _describe_marks(standings: Standings) -> str:
    """Return a caption that explains the marks: scores, controls and findings."""
    texts = ["dot: a seed; bar: mean"]
    if any(entry.untrained for entry in standings.entries):
        texts.append("grey band: untrained, mean ± sd")
    if any(entry.shuffled for entry in standings.entries):
        texts.append("cross: trained on shuffled rows")
    if _is_any_hidden(standings):
        texts.append("hollow: void or refused")
    return "; ".join(texts)


def _is_any_hidden(standings: Standings) -> bool:
    """Return whether a row is void or refused."""
    return any(entry.about(standings.primary.name, VOID, REFUSE) for entry in standings.entries)


def draw_ladder(standings: Standings, path: Path) -> None:
    """Draw the primary metric over the FLOPs of a run: means as lines, seeds as dots.

    Means, established crossovers and predictions have intervals; those of means are from a
    bootstrap. A row that is void or refused is hollow and not part of a line. The mean of the
    untrained models is an open mark at the left end, since their scores depend on what a model
    sees. References are grey. A second panel has the gains over untrained models, if there are any.
    """
    metric = standings.primary
    predicted = [item.prediction.budget for item in standings.predictions]
    established = [pair for pair in meetings(standings) if pair.is_established]
    styles = {name: style_of(i) for i, name in enumerate(objectives_of(standings))}
    with canvas(1 + standings.has_gains, path, shared=False) as (figure, (axes, *others)):
        axes.set(ylabel=metric.axis)
        for gains in others:
            gains.set(ylabel=f"gain over the untrained model{' (points)' * metric.percent}")
            gains.axhline(0, color=CONTROL, linewidth=1.2)
        for panel in (axes, *others):
            panel.set(xscale="log", xlabel="FLOPs of a run")
            cost_axis(panel, [min(standings.budgets) / _START, *standings.budgets, *predicted])
        for i, (name, style) in enumerate(styles.items()):
            entries = [entry for entry in standings.entries if entry.objective == name]
            shift = 1.02 ** (i - (len(styles) - 1) / 2)
            with series(axes, name):
                _draw_steps(axes, standings, entries, style, shift)
                _draw_predictions(axes, standings, name, style, shift)
            for gains in others:
                with series(gains, name):
                    _draw_gains(gains, standings, entries, style, shift)
        for pair in established:
            _draw_crossover(axes, standings, pair)
        values = standings.references.get(metric.name, {}).values()
        lines = _reference_styles(standings) if values else {}
        for value, (name, style) in zip(values, lines.items()):
            look: Any = {"color": CONTROL, "linestyle": style.dash, "linewidth": 1.2}
            with series(axes, name):
                axes.axhline(value * metric.scale, **look)
        legend(figure, styles | lines, _describe_ladder(standings, bool(established)))
        for panel in others:  # `canvas` names the axis of only the first panel of a row
            axes.set_title(metric.axis, fontsize="small")
            panel.set_title(panel.get_ylabel(), fontsize="small")


def _draw_gains(
    axes: "Axes", standings: Standings, entries: list[Entry], style: Style, shift: float
) -> None:
    """Draw the gains of an objective over its budgets, with their Welch intervals."""
    metric, level = standings.primary, standings.rule.level
    xs, means = [], []
    for entry in sorted(entries, key=lambda entry: entry.budget):
        if (gain := entry.gain(metric.name)) is None:
            continue
        xs.append(entry.budget * shift)
        means.append(gain.mean * metric.scale)
        at = f"{flops_text(entry.budget)} FLOPs"
        mark(axes, xs[-1], means[-1], gain_text(gain, metric), at)
        if ends := gain.interval(level):
            axes.plot([xs[-1]] * 2, scaled(ends, metric), color=style.colour, linewidth=1.2)
    look: Any = {"color": style.colour, "linestyle": style.dash, "marker": style.marker}
    axes.plot(xs, means, markersize=5, **look)


def _draw_predictions(
    axes: "Axes", standings: Standings, objective: str, style: Style, shift: float
) -> None:
    """Draw the predictions of an objective as open marks, with their intervals."""
    metric = standings.primary
    for outcome in standings.predictions:
        prediction = outcome.prediction
        if prediction.objective != objective or prediction.metric != metric.name:
            continue
        x, ends = prediction.budget * shift, scaled(prediction.interval, metric)
        axes.plot([x] * 2, ends, color=style.colour, linewidth=1.2, linestyle=":")
        look: Any = {"markersize": 7, "markerfacecolor": "none", "color": style.colour}
        (y,) = scaled([prediction.value], metric)
        axes.plot([x], [y], style.marker, **look)
        at = f"{flops_text(prediction.budget)} FLOPs"
        mark(axes, x, y, f"{y:.4g}", at, f"{objective}, predicted")


def _draw_crossover(axes: "Axes", standings: Standings, pair: Meeting) -> None:
    """Draw a bar where the means of two objectives cross."""
    result, metric = pair.crossover, standings.primary
    assert result.budget and result.interval
    ladder = ladder_of(standings, pair.after)
    y = float(np.interp(np.log(result.budget), ladder.logs, ladder.means)) * metric.scale
    axes.plot(result.interval, [y] * 2, color=_DARK, linewidth=2.4, alpha=0.8)
    axes.plot([result.budget], [y], "|", color=_DARK, markersize=10, markeredgewidth=1.6)


def _describe_ladder(standings: Standings, has_crossovers: bool) -> str:
    """Return a caption that explains the marks of a ladder."""
    name = interval_name(standings)
    texts = [f"small: a seed; large: mean, with its bootstrap {name}"]
    if has_crossovers:
        texts.append(f"horizontal bar: an established crossover, with its {name}")
    if standings.predictions:
        texts.append(f"open, with a dotted bar: predicted, with its {name}")
    if any(entry.untrained for entry in standings.entries):
        texts.append("open, at the left: mean of untrained models")
    if standings.has_gains:
        interval = interval_title(standings.rule)
        texts.append(f"right: score less that of the untrained model, with its {interval}")
    if _is_any_hidden(standings):
        texts.append("small and hollow: void or refused")
    return "; ".join(texts)


def _draw_steps(
    axes: "Axes", standings: Standings, entries: list[Entry], style: Style, shift: float
) -> None:
    """Draw an objective over its budgets times `shift`, so that objectives do not overlap."""
    metric = standings.primary
    xs, means = [], []
    for entry in sorted(entries, key=lambda entry: entry.budget):
        scores = scaled(entry.scores.get(metric.name, ()), metric)
        x = entry.budget * shift
        is_hollow = bool(entry.about(metric.name, VOID, REFUSE))
        look: Any = {"markersize": 3, "markerfacecolor": "none" if is_hollow else style.colour}
        axes.plot([x] * len(scores), scores, style.marker, color=style.colour, alpha=0.5, **look)
        if scores and not is_hollow:
            xs.append(x)
            means.append(sum(scores) / len(scores))
            at = f"{flops_text(entry.budget)} FLOPs"
            mark(axes, x, means[-1], score_text(standings, entry, metric), at)
    look = {"color": style.colour, "linestyle": style.dash, "marker": style.marker}
    axes.plot(xs, means, markersize=7, **look)
    for budget, ends in curve_intervals(standings, entries[0].objective).items():
        axes.plot([budget * shift] * 2, scaled(ends, metric), color=style.colour, linewidth=1.2)
    untrained = [
        x for entry in entries for x in scaled(entry.untrained.get(metric.name, ()), metric)
    ]
    if summary := summarise(untrained):
        x = min(standings.budgets) / _START * shift
        look = {"markersize": 7, "markerfacecolor": "none"}
        axes.plot([x], [summary.centre], style.marker, color=style.colour, **look)
        known = next(entry.untrained for entry in entries if entry.untrained.get(metric.name))
        mark(axes, x, summary.centre, summary_text(known, metric), "no training")
