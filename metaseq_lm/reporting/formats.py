"""Back ends of a table: plain text, Markdown, csv, LaTeX, JSON; page.html has that of pages."""

import csv
import io
import unicodedata
from collections.abc import Callable
from itertools import chain
from typing import Any

from metaseq_lm.core.output import clean, escape_formula, escape_markdown
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.significance import UNIT, Significance
from metaseq_lm.reporting.stats import LEVEL
from metaseq_lm.reporting.table import Table

_TEX = {character: f"\\{character}" for character in "{}$&%#_"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    # After "\\" (end of row) LaTeX takes a bracket or star in the next cell for an argument.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}


def to_text(table: Table) -> str:
    """Return the table for a terminal; a star marks the best."""
    columns = []
    for j, title in enumerate(table.head):
        cells = [row[j] for row in table.rows]
        # Every cell of a column with a star has room for one, which keeps digits aligned.
        unmarked = "  " * any(cell.best for cell in cells)
        texts = [clean(title)]
        texts += [clean(cell.text) + (" *" if cell.best else unmarked) for cell in cells]
        most = max(map(width, texts))
        texts.insert(1, "-" * most)
        gaps = [" " * (most - width(text)) for text in texts]
        columns.append(map("".join, zip(gaps, texts) if table.right[j] else zip(texts, gaps)))
    out = [clean(table.title), "", *("  ".join(line).rstrip() for line in zip(*columns))]
    if table.has_best:
        out += ["", "* best"]
    if table.notes:
        out += ["", *map(clean, table.notes)]
    return "\n".join(out) + "\n"


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; the best is bold."""
    head, *rows = _escaped(table, escape_markdown, "**{}**")
    rule = ["---:" if right else "---" for right in table.right]
    out = [escape_markdown(table.title), ""]
    out += [f"| {' | '.join(line)} |" for line in (head, rule, *rows)]
    if table.notes:
        out += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(out) + "\n"


def _escaped(table: Table, escape: Callable[[str], str], best: str) -> list[list[str]]:
    """Return the texts of the head and of the rows; those of the best stand in `best`."""
    lines = [list(map(escape, table.head))]
    for row in table.rows:
        texts = [escape(cell.text) for cell in row]
        lines.append([best.format(x) if cell.best else x for cell, x in zip(row, texts)])
    return lines


def to_csv(table: Table) -> str:
    """Return a line with unrounded numbers for each setting or cell; fractions stay fractions."""
    out = io.StringIO()
    head = dict.fromkeys(chain.from_iterable(table.records)) or table.head
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(escape_formula, head))
    for record in table.records:
        writer.writerow(escape_formula(record.get(key)) for key in head)
    return out.getvalue()


def to_document(
    table: Table, metric: Metric, spread: str, significance: Significance | None
) -> dict[str, Any]:
    """Return a table for JSON: its rows as csv has them, the test, and the notes."""
    test = None
    if significance:
        used = significance.test
        test = {"name": used.name, "of": used.centre, "sides": used.sides, "level": LEVEL}
        test |= {
            "unit": UNIT,
            "family": significance.family,
            "baseline": significance.baseline,
            "keys": list(significance.keys),
        }
    return {
        "metric": metric.name,
        "better": metric.better,
        "spread": spread,
        "test": test,
        "rows": list(table.records),
        "notes": list(table.notes),
    }


def _to_tex(table: Table) -> str:
    """Return a LaTeX table float that needs the package booktabs; the best is bold."""
    columns = "".join("r" if is_right else "l" for is_right in table.right)
    lines = _escaped(table, _escape_tex, r"\textbf{{{}}}")
    head, *rows = (rf"    {' & '.join(line)} \\" for line in lines)
    out = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_escape_tex(table.title)}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        head,
        r"    \midrule",
        *rows,
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par\footnotesize {_escape_tex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(out) + "\n"


def width(text: str) -> int:
    """Return the width of a text in columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _escape_tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in clean(text))


WRITERS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "text": ("table.txt", to_text),
    "md": ("table.md", to_markdown),
    "csv": ("table.csv", to_csv),
    "tex": ("table.tex", _to_tex),
}
