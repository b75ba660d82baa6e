"""One self-contained page: sections of notes, tables, figures and texts, with style and script.

The style sheet and the script are the same on every page, and the page's Content-Security-Policy
allows only these two, by their hashes. So neither a label nor anything else in a run can add a
script, an image or a connection.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.output import clean, present_time
from metaseq_lm.reporting.drawing import Drawing
from metaseq_lm.reporting.formats import to_html
from metaseq_lm.reporting.styles import ON_DARK
from metaseq_lm.reporting.svg import swatch
from metaseq_lm.reporting.table import Cell, Table

_MOST = 12  # rows of an open table that are shown at first


@dataclass(frozen=True)
class Section:
    """A section: figures, tables, notes, then texts with their headings; an empty one is left out.

    A closed one shows only its title until it is opened.
    """

    title: str
    notes: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()
    closed: bool = False


@dataclass(frozen=True)
class Page:
    """A page in the order of a reader: title, question, answer, sections.

    Attributes:
        title: The title.
        sections: The sections.
        reload: Seconds after which it reloads itself, since it follows runs; 0 for never.
        lead: The question and the answer; () for none.
        source: What the page is about in small print, such as the hash of a plan.
    """

    title: str
    sections: Sequence[Section]
    reload: int = 0
    lead: Sequence[str] = ()
    source: str = ""


def render(page: Page) -> str:
    """Return the page as HTML. The template escapes every text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:  # markup of the template's macros keeps line ends
        return clean(value) if type(value) is str else value

    environment = Environment(
        autoescape=True, finalize=printed, trim_blocks=True, undefined=StrictUndefined
    )
    template, style, script = (
        Path(__file__).with_name(f"page.{end}").read_text("utf-8") for end in ("html", "css", "js")
    )
    style = environment.from_string(style).render(colours=ON_DARK)
    shown = []
    for section in page.sections:
        has_rows = any(table.rows for table in section.tables)
        if section.notes or section.drawings or section.texts or has_rows:
            shown.append(section)
    return environment.from_string(template).render(
        page=replace(page, sections=shown),
        time=present_time(),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash_source(style),
        script_hash=_hash_source(script),
        to_html=to_html,
        most=_MOST,
        swatch=swatch,
        value_table=value_table,
    )


def _hash_source(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def value_table(drawing: Drawing) -> Table:
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
    return Table(drawing.name, list(shown), list(zip(*shown.values())))
