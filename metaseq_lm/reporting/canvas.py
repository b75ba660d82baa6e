"""Shared parts of all pictures: panels, axes, points of a series, the legend."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.output import printable
from metaseq_lm.reporting.drawing import begin, current_drawing, mark
from metaseq_lm.reporting.styles import GRID, PlotStyle
from metaseq_lm.reporting.svg import to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOK: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "legend.title_fontsize": "small",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    # Keep text as text in SVG, and the same ids every time it is written.
    "svg.fonttype": "none",
    "svg.hashsalt": "metaseq-lm",
}
_PANEL = (5.2, 3.4)  # inches


@dataclass(frozen=True)
class Point:
    """A point of a series, in the unit that is shown.

    Attributes:
        x: Its place.
        y: Its centre; None if it has only seeds.
        value: The centre in words, such as "87.2 ± 1.1".
        at: The place in words, such as "400 updates".
        ends: The ends of its interval.
        seeds: The score of each seed.
        label: A text beside it.
    """

    x: float
    y: float | None
    value: str = ""
    at: str = ""
    ends: Sequence[float] = ()
    seeds: Sequence[float] = ()
    label: str = ""


def draw_points(
    axes: "Axes",
    points: Sequence[Point],
    style: PlotStyle,
    size: float = 7,
    is_open: bool = False,
    is_crowded: bool = False,
    name: str = "",
) -> None:
    """Draw large points with their intervals, small ones for seeds, and a line between them.

    Open points have a white centre, dotted intervals and no line. In a crowded panel seeds are
    pale, elsewhere white, so that each can be seen over the centre. `name` is the series of the
    marks, by default the one that is being drawn.
    """
    centred = [point for point in points if point.y is not None]
    ys = [point.y for point in points if point.y is not None]
    barred = [point for point in centred if point.ends]
    xs, ends = [point.x for point in barred], [point.ends for point in barred]
    look: Any = {"colors": style.colour, "linestyles": ":" if is_open else "-", "linewidth": 1.2}
    axes.vlines(xs, [min(pair) for pair in ends], [max(pair) for pair in ends], **look)
    look = {"color": style.colour, "linestyle": "" if is_open else style.dash, "linewidth": 1.2}
    look |= {"markersize": size, "markerfacecolor": "none" if is_open else style.colour}
    axes.plot([point.x for point in centred], ys, marker=style.marker, **look)
    small: Any = {"color": style.colour, "markersize": 3}
    small |= {"alpha": 0.45, "zorder": 1.9} if is_crowded else {"markerfacecolor": "white"}
    seeds = [(point.x, seed) for point in points for seed in point.seeds]
    axes.plot([x for x, _ in seeds], [y for _, y in seeds], style.marker, **small)
    for point, y in zip(centred, ys):
        mark(axes, point.x, y, point.value, point.at, name)
        if point.label:
            beside: Any = {"xytext": (6, -9), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(point.label, (point.x, y), **beside, color=style.colour)


def ticks(axes: "Axes", numbers: Sequence[float], names: list[str] | None, is_log: bool) -> None:
    """Label the values that occur, except where a label would touch the previous one."""
    from matplotlib.ticker import NullLocator

    scaled = [math.log(x) if is_log else x for x in numbers]
    span = (scaled[-1] - scaled[0]) or 1.0
    labels = [fill(name, 20) for name in names or []] or [f"{x:g}" for x in numbers]
    labelled: list[int] = []
    for i in range(len(numbers)):
        if names or not labelled or scaled[i] - scaled[labelled[-1]] > 0.09 * span:
            labelled.append(i)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([numbers[i] for i in labelled], [labels[i] for i in labelled])
    # Names in a row of their own would run into each other.
    if sum(map(len, names or ())) > 36:
        for label in axes.get_xticklabels():
            label.set(rotation=30, horizontalalignment="right")
    low, high = scaled[0] - 0.08 * span, scaled[-1] + 0.08 * span
    axes.set_xlim(*map(math.exp, (low, high)) if is_log else (low, high))


def cost_axis(axes: "Axes", costs: Sequence[float], label: str) -> None:
    """Span all costs and at least a decade, with few enough labels that they do not touch."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(costs) / 1.5, max(costs) * 1.5
    wider = max(1.0, math.sqrt(10 * low / high))
    low, high = low / wider, high * wider
    subs = (1, 2, 5) if high < 100 * low else (1,)
    axes.set(xscale="log", xlabel=label, xlim=(low, high))
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=5))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0e}".replace("e+", "e"))
    axes.xaxis.set_minor_formatter(NullFormatter())


@contextmanager
def canvas(
    panels: int, path: Path, shared: bool = True, stacked: Sequence[float] = ()
) -> Iterator[tuple["Figure", list[Any]]]:
    """Yield a figure with `panels` panels, and write it to `path` as PNG on exit.

    If drawings are collected for a page, the page also gets the figure.

    If `shared`, all panels have one scale of scores, otherwise each has its own. They are in rows
    of up to three, or one below another with the heights `stacked`, in inches.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    columns = 1 if stacked else 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    heights = list(stacked) or [_PANEL[1]] * rows
    width = _PANEL[0] if columns == 1 else 3.8 * columns
    drawing = begin(path.stem.replace("_", " "))
    with rc_context(_LOOK):
        figure = Figure(figsize=(width, sum(heights)))
        FigureCanvasAgg(figure)
        ratios: Any = {"height_ratios": heights}
        grid = figure.subplots(rows, columns, squeeze=False, sharey=shared, **ratios).flatten()
        for spare in grid[panels:]:
            spare.set_axis_off()
        yield figure, list(grid[:panels])
        for i, axes in enumerate(grid[:panels]):
            if i % columns:
                axes.set_ylabel("")
        for text in figure.findobj(Text):
            text.set_text(printable(text.get_text()))
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
        write_atomic(path, drawn.getvalue())
        if drawing is not None:
            for shown in list(figure.legends):  # the page has its own legend, which switches series
                shown.remove()
            figure.set_figheight(sum(heights))
            drawing.sort_marks()
            drawing.svg = to_svg(figure, drawing)


def legend(figure: "Figure", styles: dict[str, PlotStyle], title: str) -> None:
    """Put the legend below the panels, in the number of columns that its names allow."""
    from matplotlib.lines import Line2D

    if (drawing := current_drawing()) is not None:
        drawing.styles, drawing.caption = styles, title
    room = int(figure.get_figwidth() * 15)  # in characters of a small font
    # matplotlib leaves names that begin with an underscore out of a legend.
    names = [fill(name if name[0] != "_" else f" {name}", room - 6) for name in styles]
    handles = [Line2D([], [], marker=style.marker, **style.line) for style in styles.values()]
    lines = "\n".join(names).splitlines()
    columns = max(1, min(len(names), room // (max(map(len, lines)) + 6)))
    title = fill(title, room)
    # The panels keep their size however many rows the legend has; 0.2 inches are one row.
    rows = -(-len(lines) // columns) + len(title.splitlines())
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, title=title)
