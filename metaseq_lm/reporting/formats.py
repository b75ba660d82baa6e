"""Writers of a table: plain text, Markdown, csv, LaTeX."""

import csv
import io
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from metaseq_lm.core.output import clean, escape_markdown, inert
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.significance import UNIT, Significance
from metaseq_lm.reporting.stats import LEVEL
from metaseq_lm.reporting.table import Cell, Table

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
    right = numeric_columns(table.head, table.rows)
    columns = []
    for j, title in enumerate(table.head):
        cells = [row[j] for row in table.rows]
        columns.append(_text_column(title, cells, right[j]))
    head, *rows = zip(*columns)
    rule = ["-" * width(title) for title in head]
    out = [clean(table.title), ""]
    out += ["  ".join(line).rstrip() for line in (head, rule, *rows)]
    if any(cell.best for row in table.rows for cell in row):
        out += ["", "* best"]
    if table.notes:
        out += ["", *map(clean, table.notes)]
    return "\n".join(out) + "\n"


def _text_column(title: str, cells: Sequence[Cell], is_right: bool) -> list[str]:
    """Return the title and the cells of a column, padded to one width."""
    # Every cell of a column with a star has room for one, which keeps digits aligned.
    unmarked = "  " if any(cell.best for cell in cells) else ""
    texts = [clean(title)]
    texts += [clean(cell.text) + (" *" if cell.best else unmarked) for cell in cells]
    widths = [width(text) for text in texts]
    padded = []
    for text, text_width in zip(texts, widths):
        gap = " " * (max(widths) - text_width)
        padded.append(gap + text if is_right else text + gap)
    return padded


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; the best is bold."""
    rule = ["---:" if right else "---" for right in numeric_columns(table.head, table.rows)]
    lines = [[escape_markdown(title) for title in table.head], rule]
    for row in table.rows:
        texts = []
        for cell in row:
            text = escape_markdown(cell.text)
            texts.append(f"**{text}**" if cell.best else text)
        lines.append(texts)
    out = [escape_markdown(table.title), "", *(f"| {' | '.join(line)} |" for line in lines)]
    if table.notes:
        out += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(out) + "\n"


def to_csv(table: Table) -> str:
    """Return a line with unrounded numbers for each setting or cell; fractions stay fractions."""
    out = io.StringIO()
    head = list(table.records[0]) if table.records else table.head
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(inert, head))
    writer.writerows([inert(record[key]) for key in head] for record in table.records)
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
        "better": "lower" if metric.lower_is_better else "higher",
        "spread": spread,
        "test": test,
        "rows": table.records,
        "notes": table.notes,
    }


def to_tex(table: Table) -> str:
    """Return a LaTeX table float that needs the package booktabs; the best is bold."""
    right = numeric_columns(table.head, table.rows)
    columns = "".join("r" if is_right else "l" for is_right in right)
    lines = []
    for row in table.rows:
        texts = []
        for cell in row:
            text = escape_tex(cell.text)
            texts.append(rf"\textbf{{{text}}}" if cell.best else text)
        lines.append(_tex_line(texts))
    out = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_tex(table.title)}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        _tex_line([escape_tex(title) for title in table.head]),
        r"    \midrule",
        *lines,
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par\footnotesize {escape_tex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(out) + "\n"


def _tex_line(cells: Sequence[str]) -> str:
    """Return the cells of a row as a line of LaTeX."""
    return "    " + " & ".join(cells) + r" \\"


def numeric_columns(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Return which columns have only numbers, absent values aside, and are right-aligned."""
    numeric = []
    for j in range(len(head)):
        column = [row[j] for row in rows]
        present = [cell for cell in column if not cell.is_absent]
        numeric.append(all(cell.number for cell in present or column))
    return numeric


def width(text: str) -> int:
    """Return the width of a text in columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def escape_tex(text: str) -> str:
    """Return the text so that LaTeX sets it as it is."""
    return "".join(_TEX.get(c, c) for c in clean(text))


WRITERS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "text": ("table.txt", to_text),
    "md": ("table.md", to_markdown),
    "csv": ("table.csv", to_csv),
    "tex": ("table.tex", to_tex),
}
