"""Figures of a league: the standings at each budget, scores by kind of labels, the ladder."""

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from metaseq_lm.league.columns import interval_title, short_name, value_of, verdict_text
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
_KINDS = 7.5, 3.2  # inches: the figure of kinds, a panel
_SPREAD = 0.8  # share of a kind's place that its rows take


def draw_standings(standings: Standings, path: Path) -> None:
    """Draw the primary metric, a panel for each budget and a line for each objective.

    Dots are seeds, a bar is their mean, controls are grey, and the verdict stands next to them.
    Void and refused rows are hollow, flagged rows are grey.
    """
    metric = standings.primary
    panels = [standings.at(budget) for budget in standings.budgets]
    heights = [HEAD + sum(row_heights(standings, entries)) for entries in panels]
    with canvas(len(panels), path, shared=False, stacked=heights) as (figure, grid):
        figure.set_figwidth(_WIDTH)
        for axes, budget, entries in zip(grid, standings.budgets, panels):
            axes.set_title(f"{flops_text(budget)} FLOPs", loc="left")
            draw_panel(axes, standings, entries)
            axes.set_xlim(_axis_ends(standings))
        grid[-1].set_xlabel(metric.axis)
        styles = _reference_styles(standings) or {"mean": Style(_DARK, "", "|")}
        legend(figure, styles, _describe_marks(standings))


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
    heights = row_heights(standings, entries)
    ys = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for y, entry in zip(ys, entries):
        _draw_row(axes, y, standings, entry)
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
    _draw_references(axes, standings, axes.axvline)


def row_texts(standings: Standings, entry: Entry) -> tuple[str, str]:
    """Return the texts left and right of a row: its name, and its verdicts."""
    decision = standings.stated_gain(entry)
    on_gain = f"\ngain: {decision.verdict}" if decision else ""
    return fill(entry.objective, 20), fill(verdict_text(standings, entry), 26) + on_gain


def row_heights(standings: Standings, entries: list[Entry]) -> list[float]:
    """Return the height of each row in inches, which depends on its texts."""
    counts = [max(text.count("\n") for text in row_texts(standings, e)) + 1 for e in entries]
    return [max(_ROW, LINE * count + 0.06) for count in counts]


def _draw_row(axes: "Axes", y: float, standings: Standings, entry: Entry) -> None:
    """Draw the seeds of a row with their mean and verdict, over its controls."""
    metric, name, colour = standings.primary, entry.objective, _colour_of(entry, standings)
    is_hollow = bool(entry.about(metric.name, VOID, REFUSE))
    controls = {key: value_of(key, standings, entry) for key in ("untrained", "shuffled")}
    for key, value in controls.items():
        if value.mean is None:
            continue
        x, sd = value.mean * metric.scale, (value.sd or 0.0) * metric.scale
        if key == "untrained":
            ends, grey = [y - _BAND, y + _BAND], CONTROL
            axes.fill_betweenx(ends, x - sd, x + sd, color=grey, alpha=0.3, linewidth=0)
            axes.plot([x] * 2, ends, color=grey, linewidth=1.2)
        else:
            axes.plot([x], [y], "x", color=CONTROL, markersize=6)
        if not is_hollow:
            mark(axes, x, y, value.wide, name=f"{name}, {key}")
    look: Any = {"markersize": 5, "markeredgewidth": 0.8, "alpha": 1.0 if is_hollow else 0.55}
    scores = _scaled(entry.scores.get(metric.name, ()), metric)
    face = "none" if is_hollow else colour
    axes.plot(scores, [y] * len(scores), "o", color=colour, markerfacecolor=face, **look)
    score, verdict = value_of("score", standings, entry), verdict_text(standings, entry)
    if is_hollow:
        mark(axes, sum(_axis_ends(standings)) / 2, y, verdict, name=name)
    elif score.mean is not None:
        x = score.mean * metric.scale
        axes.plot([x], [y], "|", color=colour, markersize=16, markeredgewidth=2.4)
        mark(axes, x, y, f"{score.wide} ({len(scores)} seeds), {verdict}", name=name)


def _scaled(scores: Any, metric: Metric) -> list[float]:
    """Return scores in the unit that is shown."""
    return [score * metric.scale for score in scores]


def _colour_of(entry: Entry, standings: Standings) -> str:
    """Return the colour of a row's verdict, dark for the baseline, grey without a verdict."""
    if entry.decision:
        return VERDICT_COLOURS[entry.decision.verdict]
    is_base = entry.objective == standings.baseline and entry.is_ranked(standings.primary.name)
    return _DARK if is_base else CONTROL


def _reference_styles(standings: Standings) -> dict[str, Style]:
    """Return the style of each reference of the primary metric."""
    metric = standings.primary
    values = standings.references.get(metric.name, {}).items()
    return {f"{name} {metric.text(x)}": control_style(i) for i, (name, x) in enumerate(values)}


def _draw_references(axes: "Axes", standings: Standings, draw: Callable[..., Any]) -> None:
    """Draw the references of the primary metric as lines across a panel."""
    metric = standings.primary
    values = standings.references.get(metric.name, {}).values()
    for value, (name, style) in zip(values, _reference_styles(standings).items()):
        with series(axes, name):
            look: Any = {"linestyle": style.dash, "linewidth": 1.2, "zorder": 1}
            draw(value * metric.scale, color=style.colour, **look)


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
        _draw_references(axes, standings, axes.axhline)
        lines = _reference_styles(standings)
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
        mark(axes, xs[-1], means[-1], value_of("gain", standings, entry).wide, at)
        if ends := gain.interval(level):
            axes.plot([xs[-1]] * 2, _scaled(ends, metric), color=style.colour, linewidth=1.2)
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
        x, ends = prediction.budget * shift, _scaled(prediction.interval, metric)
        axes.plot([x] * 2, ends, color=style.colour, linewidth=1.2, linestyle=":")
        look: Any = {"markersize": 7, "markerfacecolor": "none", "color": style.colour}
        (y,) = _scaled([prediction.value], metric)
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
    metric, colour, marker = standings.primary, style.colour, style.marker
    xs, means = [], []
    for entry in sorted(entries, key=lambda entry: entry.budget):
        scores, x = _scaled(entry.scores.get(metric.name, ()), metric), entry.budget * shift
        value = value_of("score", standings, entry)
        look: Any = {"markersize": 3, "markerfacecolor": "none" if value.hidden else colour}
        axes.plot([x] * len(scores), scores, marker, color=colour, alpha=0.5, **look)
        if value.mean is not None:
            xs.append(x)
            means.append(value.mean * metric.scale)
            mark(axes, x, means[-1], value.wide, f"{flops_text(entry.budget)} FLOPs")
    axes.plot(xs, means, color=colour, linestyle=style.dash, marker=marker, markersize=7)
    for budget, ends in curve_intervals(standings, entries[0].objective).items():
        axes.plot([budget * shift] * 2, _scaled(ends, metric), color=colour, linewidth=1.2)
    known = [entry for entry in entries if entry.untrained.get(metric.name)]
    if known:
        untrained = [score for entry in known for score in entry.untrained[metric.name]]
        x, y = min(standings.budgets) / _START * shift, np.mean(_scaled(untrained, metric))
        axes.plot([x], [y], marker, color=colour, markersize=7, markerfacecolor="none")
        text = value_of("untrained", standings, known[0]).wide
        mark(axes, x, float(y), text, "no training")


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
        legend(
            figure,
            styles,
            "small: a seed; large: mean ± sd; grey and open: mean of untrained models; below: "
            f"+ better than {standings.baseline}, - worse, = equivalent, ? flagged",
        )


def _draw_kinds_of(
    axes: "Axes", standings: Standings, entry: Entry, style: Style, shift: float
) -> None:
    """Draw the kinds of a row, each moved sideways from its place by `shift`.

    Each has seeds, mean ± sd with the mark of the verdict below, and the untrained model.
    """
    colour = style.colour
    for place, kind in enumerate(standings.kinds):
        view, x, scale = standings.about(kind), place + shift, kind.scale
        untrained, value = (value_of(name, view, entry) for name in ("untrained", "score"))
        if untrained.mean is not None:
            look: Any = {"color": CONTROL, "markersize": 5, "markerfacecolor": "none"}
            axes.plot([x], [untrained.mean * scale], style.marker, **look)
            name = f"{short_name(kind)}, untrained"
            mark(axes, x, untrained.mean * scale, untrained.wide, name)
        if value.mean is None:
            continue
        scores, mean, sd = _scaled(entry.scores[kind.name], kind), value.mean, value.sd or 0.0
        axes.plot([x] * len(scores), scores, style.marker, color=colour, markersize=2.5, alpha=0.45)
        ends = [(mean - sd) * scale, (mean + sd) * scale]
        axes.plot([x] * 2, ends, color=colour, linewidth=1.4)
        axes.plot([x], [mean * scale], style.marker, color=colour, markersize=6)
        mark(axes, x, mean * scale, value.wide, short_name(kind))
        look = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        look |= {"ha": "center", "va": "bottom", "fontsize": "small", "color": colour}
        axes.annotate(value.sign, (x, 0.0), xytext=(0, 1), **look)
