"""matplotlib's SVG as part of a page: no inline style, no global names, values at its marks.

A page ignores `style="..."` if its Content-Security-Policy allows a single style sheet by its hash.
We write matplotlib's styles as presentation attributes, which any rule of a style sheet overrides,
so the page can exchange colours in a dark theme.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from metaseq_lm.reporting.drawing import PREFIX, Drawing
from metaseq_lm.reporting.styles import SPARSE_DOTS, PlotStyle

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
_DASHES: dict[Any, str] = {"--": "5 3", ":": "1.5 2.5", "-.": "6 2 1.5 2", SPARSE_DOTS: "1.5 5"}


def to_svg(figure: Figure, drawing: Drawing) -> str:
    """Return a figure as an element `svg` for a page; its marks are circles with titles.

    Artists of a series have its number in `data-series`.
    """
    written = StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    _simplify(root, re.sub(r"\W+", "-", drawing.name))
    width = figure.get_figwidth() * _PIXELS
    root.attrib = {
        "class": "chart broad" if width > _BROAD else "chart",
        "viewBox": root.attrib["viewBox"],
        "width": f"{width:.0f}",
        "role": "img",
        "aria-label": drawing.alternative,
        "stroke-linejoin": "round",
    }
    _add_marks(root, figure, drawing)
    return ElementTree.tostring(root, encoding="unicode")


def _simplify(element: Element, name: str) -> None:
    """Remove namespaces, metadata and style sheets; turn styles into attributes; round numbers.

    Ids begin with the name of the figure; groups have none, but the number of their series.
    """
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
    if identifier.startswith(PREFIX):
        attributes["data-series"] = identifier.removeprefix(PREFIX)
    elif identifier and element.tag != "g":
        attributes["id"] = f"{name}-{identifier}"
    element.attrib = attributes
    for child in list(element):
        if child.tag.rpartition("}")[2] in ("metadata", "style"):
            element.remove(child)
        else:
            _simplify(child, name)


def _add_marks(root: Element, figure: Figure, drawing: Drawing) -> None:
    """Add a circle with a title for each mark, where its point was drawn."""
    width, height = (float(size) * _POINTS for size in figure.get_size_inches())
    to_fraction = figure.transFigure.inverted()
    group = SubElement(root, "g", {"fill": "none", "pointer-events": "all"})
    panels = {name: str(i) for i, name in enumerate(drawing.panels)}
    for mark in drawing.marks:
        point = mark.axes.transData.transform((mark.x, mark.y))
        x, y = to_fraction.transform(point)
        centre = {"cx": f"{x * width:.1f}", "cy": f"{(1 - y) * height:.1f}", "r": "4"}
        circle = SubElement(group, "circle", {"class": "mark", **centre})
        circle.set("data-panel", panels[mark.panel])
        if mark.legend in drawing.keys:
            circle.set("data-series", str(drawing.keys[mark.legend]))
        SubElement(circle, "title").text = mark.text


def swatch(style: PlotStyle) -> str:
    """Return the line and marker of a series for a legend."""
    root = Element("svg", {"class": "swatch", "viewBox": "0 0 28 12", "aria-hidden": "true"})
    colour = style.colour.lower()
    if style.dash:
        line = {"d": "M1 6h26", "stroke": colour, "stroke-width": "1.8", "fill": "none"}
        if style.dash in _DASHES:
            line["stroke-dasharray"] = _DASHES[style.dash]
        SubElement(root, "path", line)
    if style.marker in _SHAPES:
        SubElement(root, "path", {"d": _SHAPES[style.marker], "fill": colour})
    return ElementTree.tostring(root, encoding="unicode")
