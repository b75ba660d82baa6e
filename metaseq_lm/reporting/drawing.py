"""Data of a figure for a page in addition to its pixels: values of marks, series to switch.

Inside `collect()` every figure of `canvas` leaves a `Drawing`. Functions that draw call `series`
and `mark` to record which marks belong together and their values; without a collector these calls
do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metaseq_lm.core.output import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from metaseq_lm.reporting.styles import PlotStyle

PREFIX = "series-"  # prefix of the group id that matplotlib writes for an artist of a series
_LISTED = 12  # series in an alternative text; the table of values has all


@dataclass(frozen=True)
class Mark:
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
    marks: list[Mark] = field(default_factory=list)
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
        groups: dict[tuple[Axes, str], list[Mark]] = {}
        for mark in self.marks:
            groups.setdefault((mark.axes, mark.legend or mark.series), []).append(mark)
        self.marks = [m for same in groups.values() for m in sorted(same, key=lambda m: m.x)]

    @property
    def alternative(self) -> str:
        """An alternative text: the last value of each series."""
        last = {(mark.panel, mark.series): mark for mark in self.marks}
        has_panels = len(self.panels) > 1
        texts = [f"{f'{m.panel}: ' * has_panels}{m.text}" for m in last.values()]
        rest = f"; and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
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


def begin(name: str) -> Drawing | None:
    """Return the drawing of a new figure, which `collect` has; None without a collector."""
    if (drawings := _collected.get()) is not None:
        drawings.append(Drawing(name))
    return current_drawing()


def current_drawing() -> Drawing | None:
    """Return the drawing of the figure that is drawn; None without a collector."""
    drawings = _collected.get()
    return drawings[-1] if drawings else None


@contextmanager
def series(axes: Axes, name: str) -> Iterator[None]:
    """Assign everything drawn and marked inside to a series, which its legend switches."""
    if (drawing := current_drawing()) is None:
        yield
        return
    before = set(axes.get_children())
    drawing._series = name
    yield
    drawing._series = ""
    key = drawing.keys.setdefault(name, len(drawing.keys))
    for artist in set(axes.get_children()) - before:
        artist.set_gid(f"{PREFIX}{key}")


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
    if (drawing := current_drawing()) is not None:
        legend = drawing._series
        drawing.marks.append(Mark(axes, x, y, name or legend, clean(at), clean(value), legend))


def thinned(count: int, most: int = 60) -> Sequence[int]:
    """Return at most `most` indices of `count` points at equal distances, including the last."""
    step = max(1, -(-count // most))
    return sorted({*range(count - 1, -1, -step)})
