"""Colours, dashes and markers of series, and the colours of the dark page."""

from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
CONTROL = "#888888"
GRID = "#e5e5e5"
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
SPARSE_DOTS = (0, (1.2, 4))
_CONTROL_DASHES = ("--", ":", "-.", "-", SPARSE_DOTS)
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
