"""The figure of a league by kind of labels: which objective is best for which end task."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.league.by_kind import kind_mark
from metaseq_lm.league.cells import score_text, summary_text
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.parts import short_name
from metaseq_lm.league.rungs import objectives_of
from metaseq_lm.league.standings import REFUSE, VOID
from metaseq_lm.reporting.canvas import canvas, legend
from metaseq_lm.reporting.drawing import mark, series
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise
from metaseq_lm.reporting.styles import CONTROL, Style, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7.5, 3.2  # inches: the figure, a panel
SPREAD = 0.8  # share of a kind's place that its rows take


def draw_kinds(standings: Standings, path: Path) -> None:
    """Draw the scores of each kind of labels and of untrained models, a panel for each budget.

    Dots are seeds, a mark with a line is their mean ± sd; the verdict on the kind is below.
    """
    styles = {name: style_of(i) for i, name in enumerate(objectives_of(standings))}
    heights = [_HEIGHT] * len(standings.budgets)
    with canvas(len(heights), path, stacked=heights) as (figure, grid):
        figure.set_figwidth(_WIDTH)
        for axes, budget in zip(grid, standings.budgets):
            axes.set_title(f"{flops_text(budget)} FLOPs", loc="left")
            axes.set_ylabel("score (%)" if standings.primary.percent else "score")
            axes.set_xticks(range(len(standings.kinds)), map(short_name, standings.kinds))
            axes.set_xlim(-0.5, len(standings.kinds) - 0.5)
            axes.grid(visible=False, axis="x")
            axes.axhline(0, color=CONTROL, linewidth=1.2)
            entries = {e.objective: e for e in standings.entries if e.budget == budget}
            for i, (name, style) in enumerate(styles.items()):
                shift = SPREAD * ((i + 0.5) / len(styles) - 0.5)
                if name in entries:
                    with series(axes, name):
                        _draw_row(axes, standings, entries[name], style, shift)
        legend(
            figure,
            styles,
            "small: a seed; large: mean ± sd; grey and open: mean of untrained models; below: "
            f"+ better than {standings.baseline}, - worse, = equivalent, ? flagged",
        )


def _draw_row(axes: "Axes", standings: Standings, entry: Entry, style: Style, shift: float) -> None:
    """Draw the kinds of a row, each moved sideways from its place by `shift`."""
    for place, kind in enumerate(standings.kinds):
        x = place + shift
        untrained = summarise(entry.untrained.get(kind.name, ()))
        if untrained is not None:
            look: Any = {"color": CONTROL, "markersize": 5, "markerfacecolor": "none"}
            y = untrained.centre * kind.scale
            axes.plot([x], [y], style.marker, **look)
            mark(axes, x, y, summary_text(entry.untrained, kind), f"{short_name(kind)}, untrained")
        if not entry.about(kind.name, VOID, REFUSE):
            _draw_scores(axes, standings, entry, kind, style, x)


def _draw_scores(
    axes: "Axes", standings: Standings, entry: Entry, kind: Metric, style: Style, x: float
) -> None:
    """Draw the seeds of a kind, their mean ± sd, and the mark of the verdict."""
    scores = entry.scores.get(kind.name, ())
    summary = summarise(scores)
    if summary is None:
        return
    look: Any = {"color": style.colour, "markersize": 2.5, "alpha": 0.45}
    axes.plot([x] * len(scores), [score * kind.scale for score in scores], style.marker, **look)
    ends = [summary.low * kind.scale, summary.high * kind.scale]
    axes.plot([x] * 2, ends, color=style.colour, linewidth=1.4)
    y = summary.centre * kind.scale
    axes.plot([x], [y], style.marker, color=style.colour, markersize=6)
    mark(axes, x, y, score_text(standings, entry, kind), short_name(kind))
    axes.annotate(
        kind_mark(entry, kind),
        (x, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 1),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize="small",
        color=style.colour,
    )
