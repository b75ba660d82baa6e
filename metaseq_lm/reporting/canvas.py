"""Parts of all pictures: colours and markers, panels, axes, legends, and their form on a page.

A figure of a page has data in addition to its pixels. Inside `collect()` every figure of `canvas`
leaves a `Drawing`. Functions that draw call `series` and `mark` to record which marks belong
together and their values; without a collector these calls do nothing.

A page ignores `style="..."` if its Content-Security-Policy allows a single style sheet by its hash.
We write matplotlib's styles as presentation attributes, which any rule of a style sheet overrides,
so the page can exchange colours in a dark theme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.output import clean, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which colour-blind readers can tell apart, without the pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
CONTROL = "#888888"
_GRID = "#e5e5e5"
# The colours on the dark page for all colours of figures.
ON_DARK = {
    "#0072b2": "#58b0ea",
    "#d55e00": "#ff8a3d",
    "#009e73": "#2fc79c",
    "#cc79a7": "#e59ac3",
    "#e69f00": "#f2b53a",
    "#56b4e9": "#8fd0f5",
    "#333333": "#e3e3e3",
    "#888888": "#9d9d9d",
    "#8a6d00": "#d3b445",
    "#e5e5e5": "#363a41",
    "#000000": "#c9c9c9",
    "#ffffff": "#15181c",
}
# Markers tell series apart without colour; from the eighth on, colours repeat with another dash.
_DASHES = ("-", "--", ":", "-.")
_SPARSE_DOTS = (0, (1.2, 4))
_CONTROL_DASHES = ("--", ":", "-.", "-", _SPARSE_DOTS)
_MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class PlotStyle:
    """How a series is drawn."""

    colour: str
    dash: Any  # a line style of matplotlib
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Options of matplotlib for a line without points."""
        return {"color": self.colour, "linestyle": self.dash}


def style_of(i: int) -> PlotStyle:
    """Return the style of the i-th series."""
    turn = i // len(COLOURS)
    return PlotStyle(COLOURS[i % len(COLOURS)], _DASHES[turn % len(_DASHES)], _MARKERS[i % 4])


def control_style(i: int) -> PlotStyle:
    """Return the style of the i-th control, a grey line without points."""
    return PlotStyle(CONTROL, _CONTROL_DASHES[i % len(_CONTROL_DASHES)], "")


# ---------------------------------------------------------------- the data of a figure

_PREFIX = "series-"  # prefix of the group id that matplotlib writes for an artist of a series
_LISTED = 12  # series in an alternative text; the table of values has all


@dataclass(frozen=True)
class _Mark:
    """A point of a figure with its texts, such as "400 updates" and "87.2 ± 1.1".

    It is switched with the series `legend`, which is `series` or, for a prediction, the predicted
    series; "" for a point that no legend switches.
    """

    axes: Axes = field(repr=False)
    x: float
    y: float
    series: str
    at: str
    value: str
    legend: str = ""

    @property
    def panel(self) -> str:
        """The title of the panel of the mark, on one line."""
        title = self.axes.get_title() or self.axes.get_title(loc="left")
        return " ".join(clean(title).split())

    @property
    def text(self) -> str:
        """Series, value and place in one line."""
        value = f"{self.value} at {self.at}" if self.at else self.value
        return clean(f"{self.series}: {value}" if self.series else value)


@dataclass
class Drawing:
    """A figure of a page.

    Attributes:
        name: Its name, such as "score by flops".
        svg: The figure without its legend.
        marks: Its points with their values.
        styles: The series of its legend.
        caption: The meaning of the marks.
        keys: The number of each series, which its artists carry in their group id.
    """

    name: str
    svg: str = ""
    marks: list[_Mark] = field(default_factory=list)
    styles: Mapping[str, PlotStyle] = field(default_factory=dict)
    caption: str = ""
    keys: dict[str, int] = field(default_factory=dict)
    _series: str = ""

    @property
    def panels(self) -> list[str]:
        """The titles of the panels that have marks."""
        return list(dict.fromkeys(mark.panel for mark in self.marks))

    def sort_marks(self) -> None:
        """Put the marks of each panel and series together, from left to right."""
        groups: dict[tuple[Axes, str], list[_Mark]] = {}
        for mark in self.marks:
            groups.setdefault((mark.axes, mark.legend or mark.series), []).append(mark)
        ordered = (sorted(same, key=lambda mark: mark.x) for same in groups.values())
        self.marks = list(chain.from_iterable(ordered))

    @property
    def alternative(self) -> str:
        """An alternative text: the last value of each series."""
        last = {(mark.panel, mark.series): mark for mark in self.marks}
        has_panels = len(self.panels) > 1
        texts = [f"{f'{m.panel}: ' * has_panels}{m.text}" for m in last.values()]
        rest = f"; and {len(texts) - _LISTED} more" * (len(texts) > _LISTED)
        values = f". {'; '.join(texts[:_LISTED])}{rest}. All values are in the table below"
        return f"{clean(self.name)}{values if texts else ''}."


_collected: ContextVar[list[Drawing] | None] = ContextVar("collected", default=None)


@contextmanager
def collect() -> Iterator[list[Drawing]]:
    """Yield a list that collects a drawing of every figure."""
    drawings: list[Drawing] = []
    token = _collected.set(drawings)
    try:
        yield drawings
    finally:
        _collected.reset(token)


def _current_drawing() -> Drawing | None:
    drawings = _collected.get()
    return drawings[-1] if drawings else None  # None without a collector


@contextmanager
def series(axes: Axes, name: str) -> Iterator[None]:
    """Assign everything drawn and marked inside to a series, which its legend switches."""
    if (drawing := _current_drawing()) is None:
        yield
        return
    before = set(axes.get_children())
    drawing._series = name
    yield
    drawing._series = ""
    key = drawing.keys.setdefault(name, len(drawing.keys))
    for artist in set(axes.get_children()) - before:
        artist.set_gid(f"{_PREFIX}{key}")


def mark(axes: Axes, x: float, y: float, value: str, at: str = "", name: str = "") -> None:
    """Record the value of a point in data coordinates.

    Args:
        axes: The panel.
        x: Its x coordinate.
        y: Its y coordinate.
        value: The text that is shown, such as "87.2 ± 1.1".
        at: The place on the x axis in words, such as "400 updates".
        name: Its series; by default the series that is being drawn.
    """
    if (drawing := _current_drawing()) is not None:
        legend = drawing._series
        drawing.marks.append(_Mark(axes, x, y, name or legend, clean(at), clean(value), legend))


def thinned(count: int, most: int = 60) -> Sequence[int]:
    """Return at most `most` indices of `count` points at equal distances, including the last."""
    return range(count - 1, -1, -max(1, -(-count // most)))[::-1]


# ---------------------------------------------------------------- the figure on a page

_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_NUMBERS = ("d", "x", "y", "transform", "points", "width", "height")
_POINTS, _PIXELS = 72, 100  # units of an inch, in the SVG and on the page
_BROAD = 700  # pixels: a wider figure, with panels side by side, is not shrunk to a narrow screen
# Marks of a legend, in a box of 28 by 12.
_SHAPES = {
    "o": "M17 6a3 3 0 1 1-6 0a3 3 0 1 1 6 0z",
    "s": "M11 3h6v6h-6z",
    "^": "M14 2.5l3.5 6.5h-7z",
    "D": "M14 2l4 4l-4 4l-4-4z",
    "|": "M13 1h2v10h-2z",
}
_DASHARRAYS: dict[Any, str] = {
    "--": "5 3",
    ":": "1.5 2.5",
    "-.": "6 2 1.5 2",
    _SPARSE_DOTS: "1.5 5",
}


def _to_svg(figure: Figure, drawing: Drawing) -> str:
    """Return a figure as an element `svg` for a page; its marks are circles with titles."""
    written = StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    _simplify(root, re.sub(r"\W+", "-", drawing.name))
    width, height = (float(size) for size in figure.get_size_inches())
    root.attrib = {
        "class": "chart broad" if width * _PIXELS > _BROAD else "chart",
        "viewBox": root.attrib["viewBox"],
        "width": f"{width * _PIXELS:.0f}",
        "role": "img",
        "aria-label": drawing.alternative,
        "stroke-linejoin": "round",
    }
    to_fraction = figure.transFigure.inverted()
    group = SubElement(root, "g", {"fill": "none", "pointer-events": "all"})
    panels = {name: str(i) for i, name in enumerate(drawing.panels)}
    for mark in drawing.marks:
        point = mark.axes.transData.transform((mark.x, mark.y))
        x, y = to_fraction.transform(point)
        centre = {"cx": f"{x * width * _POINTS:.1f}", "cy": f"{(1 - y) * height * _POINTS:.1f}"}
        circle = SubElement(group, "circle", {"class": "mark", **centre, "r": "4"})
        circle.set("data-panel", panels[mark.panel])
        if mark.legend in drawing.keys:
            circle.set("data-series", str(drawing.keys[mark.legend]))
        SubElement(circle, "title").text = mark.text
    return ElementTree.tostring(root, encoding="unicode")


def _simplify(element: Element, name: str) -> None:
    """Remove namespaces, metadata and style sheets; turn styles into attributes; round numbers."""
    element.tag = element.tag.rpartition("}")[2]
    element.text = (element.text or "").strip() and element.text
    element.tail = None
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    identifier = attributes.pop("id", "")
    for part in attributes.pop("style", "").split(";"):
        key, _, value = part.partition(":")
        if value and key.strip() != "font-family":  # the page sets the font
            attributes[key.strip()] = value.strip()
    for key, value in attributes.items():
        if key in _NUMBERS:
            attributes[key] = _LONG_NUMBER.sub(lambda n: f"{round(float(n[0]), 2):g}", value)
        elif key == "href" or value.startswith("url("):
            attributes[key] = value.replace("#", f"#{name}-")
    # The numbers of series are for the script; other ids are unique on a page of several figures.
    if identifier.startswith(_PREFIX):
        attributes["data-series"] = identifier.removeprefix(_PREFIX)
    elif identifier and element.tag != "g":
        attributes["id"] = f"{name}-{identifier}"
    element.attrib = attributes
    for child in list(element):
        if child.tag.rpartition("}")[2] in ("metadata", "style"):
            element.remove(child)
        else:
            _simplify(child, name)


def swatch(style: PlotStyle) -> str:
    """Return the line and marker of a series for a legend."""
    root = Element("svg", {"class": "swatch", "viewBox": "0 0 28 12", "aria-hidden": "true"})
    colour = style.colour.lower()
    if style.dash:
        line = {"d": "M1 6h26", "stroke": colour, "stroke-width": "1.8", "fill": "none"}
        if style.dash in _DASHARRAYS:
            line["stroke-dasharray"] = _DASHARRAYS[style.dash]
        SubElement(root, "path", line)
    if style.marker in _SHAPES:
        SubElement(root, "path", {"d": _SHAPES[style.marker], "fill": colour})
    return ElementTree.tostring(root, encoding="unicode")


# ---------------------------------------------------------------- drawing

_LOOK: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
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
    axes: Axes,
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
    axes.vlines(xs, list(map(min, ends)), list(map(max, ends)), **look)
    look = {"color": style.colour, "linestyle": "" if is_open else style.dash, "linewidth": 1.2}
    look |= {"markersize": size, "markerfacecolor": "none" if is_open else style.colour}
    axes.plot([point.x for point in centred], ys, marker=style.marker, **look)
    small: Any = {"color": style.colour, "markersize": 3}
    small |= {"alpha": 0.45, "zorder": 1.9} if is_crowded else {"markerfacecolor": "white"}
    at, seeds = list[float](), list[float]()
    for point in points:
        at += [point.x] * len(point.seeds)
        seeds += point.seeds
    axes.plot(at, seeds, style.marker, **small)
    for point, y in zip(centred, ys):
        mark(axes, point.x, y, point.value, point.at, name)
        if point.label:
            beside: Any = {"xytext": (6, -9), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(point.label, (point.x, y), **beside, color=style.colour)


def ticks(axes: Axes, numbers: Sequence[float], names: list[str] | None, is_log: bool) -> None:
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


def cost_axis(axes: Axes, costs: Sequence[float], label: str) -> None:
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
) -> Iterator[tuple[Figure, list[Any]]]:
    """Yield a figure with `panels` panels, and write it to `path` as PNG on exit.

    If drawings are collected for a page, the page also gets the figure.

    If `shared`, all panels have one scale of scores, otherwise each has its own. They are in rows
    of up to three, or one below another with the heights `stacked`, in inches.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    columns = 1 if stacked else {4: 2}.get(panels, min(panels, 3))  # not three panels above one
    rows = -(-panels // columns)
    heights = list(stacked) or [_PANEL[1]] * rows
    width = _PANEL[0] if columns == 1 else 3.8 * columns
    drawing, drawings = Drawing(path.stem.replace("_", " ")), _collected.get()
    if drawings is not None:
        drawings.append(drawing)
    with rc_context(_LOOK):
        figure = Figure(figsize=(width, sum(heights)))
        FigureCanvasAgg(figure)
        look: Any = {"squeeze": False, "sharey": shared, "height_ratios": heights}
        grid = figure.subplots(rows, columns, **look).flatten()
        for spare in grid[panels:]:
            spare.set_axis_off()
        yield figure, list(grid[:panels])
        for i, axes in enumerate(grid):
            if i % columns:
                axes.set_ylabel("")
        for text in figure.findobj(Text):
            text.set_text(printable(text.get_text()))
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
        write_atomic(path, drawn.getvalue())
        if drawings is not None:
            for shown in list(figure.legends):  # the page has its own legend, which switches series
                shown.remove()
            figure.set_figheight(sum(heights))
            drawing.sort_marks()
            drawing.svg = _to_svg(figure, drawing)


def legend(figure: Figure, styles: dict[str, PlotStyle], title: str) -> None:
    """Put the legend below the panels, in the number of columns that its names allow."""
    from matplotlib.lines import Line2D

    if (drawing := _current_drawing()) is not None:
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
