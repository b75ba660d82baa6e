"""Shared parts of all pictures: panels, axes, the legend."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.output import printable
from metaseq_lm.reporting.drawing import begin, describe
from metaseq_lm.reporting.styles import GRID, Style
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
    "figure.constrained_layout.use": True,
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    # Keep text as text in SVG, and the same ids every time it is written.
    "svg.fonttype": "none",
    "svg.hashsalt": "metaseq-lm",
}
_PANEL = (5.2, 3.4)  # inches
_DPI = 150


def dodge(x: float, i: int, n: int, numbers: Sequence[float], is_log: bool) -> float:
    """Return x slightly shifted, so that the points of n series at the same x do not overlap."""
    step = (i - (n - 1) / 2) * min(0.012, 0.06 / max(n, 1))
    if is_log:
        return float(x * (max(numbers) / min(numbers)) ** step)
    return x + step * ((max(numbers) - min(numbers)) or 1.0)


def ticks(axes: "Axes", numbers: Sequence[float], names: list[str] | None, is_log: bool) -> None:
    """Label the values that occur, except where a label would touch the previous one."""
    from matplotlib.ticker import NullFormatter, NullLocator

    scaled = [math.log(x) if is_log else x for x in numbers]
    span = (scaled[-1] - scaled[0]) or 1.0
    labels = [fill(name, 20) for name in names or []] or [f"{x:g}" for x in numbers]
    labelled: list[int] = []
    for i in range(len(numbers)):
        if names or not labelled or scaled[i] - scaled[labelled[-1]] > 0.09 * span:
            labelled.append(i)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    # Names in a row of their own would run into each other.
    slanted = names is not None and sum(map(len, names)) > 36
    axes.set_xticks(
        [numbers[i] for i in labelled],
        [labels[i] for i in labelled],
        rotation=30 if slanted else 0,
        ha="right" if slanted else "center",
    )
    margin = 0.08 * span
    ends = scaled[0] - margin, scaled[-1] + margin
    axes.set_xlim(*(math.exp(e) if is_log else e for e in ends))


def cost_axis(axes: "Axes", costs: Sequence[float]) -> None:
    """Span all costs and at least a decade, with few enough labels that they do not touch."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(costs) / 1.5, max(costs) * 1.5
    wider = max(1.0, math.sqrt(10 * low / high))
    low, high = low / wider, high * wider
    subs = (1, 2, 5) if high < 100 * low else (1,)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0e}".replace("e+", "e")))
    axes.xaxis.set_minor_formatter(NullFormatter())


def thousands(axes: "Axes") -> None:
    """Write updates as 20k and 1.5M, because long numbers under small panels overlap."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


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
    with rc_context(_LOOK), begin(path.stem.replace("_", " ")) as drawing:
        width = _PANEL[0] if columns == 1 else 3.8 * columns
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
            if (words := printable(text.get_text())) != text.get_text():
                text.set_text(words)
        drawn = BytesIO()
        figure.savefig(drawn, dpi=_DPI, format="png")
        write_atomic(path, drawn.getvalue())
        if drawing is not None:
            for shown in list(figure.legends):  # the page has its own legend, which switches series
                shown.remove()
            figure.set_figheight(sum(heights))
            drawing.sort_marks()
            drawing.svg = to_svg(figure, drawing)


def legend(figure: "Figure", styles: dict[str, Style], title: str) -> None:
    """Put the legend below the panels, in the number of columns that its names allow."""
    from matplotlib.lines import Line2D

    describe(styles, title)
    room = int(figure.get_figwidth() * 15)  # in characters of a small font
    # matplotlib leaves names that begin with an underscore out of a legend.
    names = [fill(name if name[0] != "_" else f" {name}", room - 6) for name in styles]
    handles = [
        Line2D([], [], color=s.colour, linestyle=s.dash, marker=s.marker, label=name)
        for name, s in zip(names, styles.values())
    ]
    longest = max(len(line) for name in names for line in name.splitlines()) + 6
    columns = max(1, min(len(handles), room // longest))
    # The panels keep their size however many rows the legend has; 0.2 inches are one row.
    lines = sum(len(name.splitlines()) for name in names)
    title = fill(title, room)
    rows = -(-lines // columns) + len(title.splitlines())
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        title=title,
        fontsize="small",
        title_fontsize="small",
    )
