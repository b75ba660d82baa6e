"""One self-contained page: sections of notes, tables, figures and texts, with style and script.

The style sheet and the script are the same on every page, and the page's Content-Security-Policy
allows only these two, by their hashes. So neither a label nor anything else in a run can add a
script, an image or a connection.
"""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.core.output import clean, present_time
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.formats import numeric_columns
from metaseq_lm.reporting.styles import ON_DARK
from metaseq_lm.reporting.svg import swatch
from metaseq_lm.reporting.table import Cell, Table

_TEMPLATE, _STYLE, SCRIPT = (
    Path(__file__).with_name(f"page.{end}") for end in ("html", "css", "js")
)
# The number at the start of a cell: "<0.0001", "70.65 ± 2.30 a", "+1.91", "1,234".
_LEADING = re.compile(r"<?\s*([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class HtmlTable:
    """A table of a page.

    Attributes:
        head: The titles of the columns.
        rows: The cells.
        title: Title above the table.
        notes: Sentences below it.
        look: "small" or "".
        closed: If not "", the table is hidden behind this text until it is opened.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()
    look: str = ""
    closed: str = ""

    @cached_property
    def right(self) -> list[bool]:
        """Which columns are numbers, right-aligned and sorted as numbers."""
        return numeric_columns(self.head, self.rows)

    @property
    def has_best(self) -> bool:
        """Whether any cell is marked as the best."""
        return any(cell.best for row in self.rows for cell in row)


@dataclass(frozen=True)
class Section:
    """A section: notes, figures, tables, then texts with their headings."""

    title: str
    notes: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[HtmlTable] = ()
    texts: Sequence[tuple[str, str]] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.notes or self.drawings or self.tables or self.texts)


@dataclass(frozen=True)
class Page:
    """A page; it reloads itself after `reload` seconds if it follows runs, 0 for never."""

    title: str
    sections: Sequence[Section]
    reload: int = 0


def html_table(table: Table, title: str = "", notes: Sequence[str] | None = None) -> HtmlTable:
    """Return a table for a page, with `notes` or else its own."""
    below = table.notes if notes is None else notes
    return HtmlTable(table.head, table.rows, title, below)


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), **options: Any
) -> HtmlTable:
    """Return a table of texts; `right` names the columns of numbers."""
    numbers = [title in right for title in head]
    cells = [
        [Cell(text, number=is_number) for text, is_number in zip(row, numbers)] for row in rows
    ]
    return HtmlTable(head, cells, **options)


def render(page: Page) -> str:
    """Return the page as HTML. The template escapes every text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        finalize=_without_control_characters,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    style = environment.from_string(source(_STYLE)).render(colours=ON_DARK)
    script = source(SCRIPT)
    shown = [section for section in page.sections if not section.is_empty]
    return environment.from_string(source(_TEMPLATE)).render(
        page=Page(page.title, shown, page.reload),
        time=present_time(),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash_source(style),
        script_hash=_hash_source(script),
        sort_value=sort_value,
        swatch=swatch,
        value_table=value_table,
    )


@cache
def source(path: Path) -> str:
    """Return the content of a file of the package."""
    return path.read_text(encoding="utf-8")


def _hash_source(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _without_control_characters(value: Any) -> Any:
    """Return a value for the template to print; markup of its macros keeps line ends."""
    return clean(value) if type(value) is str else value


def sort_value(cell: Cell) -> float | None:
    """Return the number to sort a cell by, None without a number."""
    value = cell.value
    if value is None and cell.number and (match := _LEADING.match(cell.text)):
        value = float(match[1].replace(",", ""))
    return value if value is not None and math.isfinite(value) else None


def value_table(drawing: Drawing) -> HtmlTable:
    """Return the values of a figure as a table, for readers who cannot see it."""
    marks = drawing.marks
    columns = {
        "panel": [Cell(mark.panel, number=False) for mark in marks] * (len(drawing.panels) > 1),
        "series": [Cell(mark.series, number=False) for mark in marks],
        # Sorted as along the axis, which has numbers or names.
        "at": [Cell(mark.at, number=False, value=mark.x if mark.at else None) for mark in marks],
        "value": [Cell(mark.value) for mark in marks],
    }
    shown = {title: cells for title, cells in columns.items() if any(c.text for c in cells)}
    return HtmlTable(list(shown), list(zip(*shown.values())), look="small")
