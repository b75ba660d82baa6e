"""Writers of a table: plain text, Markdown, csv, LaTeX."""

import csv
import io
import unicodedata
from collections.abc import Callable
from typing import Any

from metaseq_lm.core.output import clean, escape_markdown, inert
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.significance import LEVEL, Significance
from metaseq_lm.reporting.table import Cell, Table

TEX = {character: f"\\{character}" for character in "{}$&%#_"} | {
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
    lines = [[clean(text) for text in table.head]]
    lines += [[clean(c.text) + (" *" if c.best else "") for c in row] for row in table.rows]
    # Room for the star in every cell of a column that has one keeps the digits below each other.
    starred = [any(row[j].best for row in table.rows) for j in range(len(table.head))]
    for i, row in enumerate(table.rows):
        for j, cell in enumerate(row):
            if starred[j] and not cell.best:
                lines[i + 1][j] += "  "
    widths = [max(map(width, column)) for column in zip(*lines)]
    right = numeric_columns(table)
    out = [clean(table.title), ""]
    for number, line in enumerate(lines):
        padded = []
        for text, wide, is_right in zip(line, widths, right):
            gap = " " * (wide - width(text))
            padded.append(gap + text if is_right else text + gap)
        out.append("  ".join(padded).rstrip())
        if number == 0:
            out.append("  ".join("-" * wide for wide in widths))
    if any(starred):
        out += ["", "* best"]
    if table.notes:
        out += ["", *map(clean, table.notes)]
    return "\n".join(out) + "\n"


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; the best is bold."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(c: Cell) -> str:
        return f"**{escape_markdown(c.text)}**" if c.best else escape_markdown(c.text)

    rule = ["---:" if right else "---" for right in numeric_columns(table)]
    out = [escape_markdown(table.title), "", line([escape_markdown(t) for t in table.head])]
    out += [line(rule), *(line([cell(c) for c in row]) for row in table.rows)]
    if table.notes:
        out += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(out) + "\n"


def to_csv(table: Table) -> str:
    """Return one line for each setting or cell with unrounded numbers; fractions stay fractions."""
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
        test = {"name": significance.test, "of": significance.centre, "level": LEVEL}
        test |= {"baseline": significance.baseline, "keys": list(significance.keys)}
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

    def line(cells: list[str]) -> str:
        return "    " + " & ".join(cells) + r" \\"

    def cell(c: Cell) -> str:
        text = escape_tex(c.text)
        return rf"\textbf{{{text}}}" if c.best else text

    columns = "".join("r" if right else "l" for right in numeric_columns(table))
    out = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_tex(table.title)}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        line([escape_tex(text) for text in table.head]),
        r"    \midrule",
        *(line([cell(c) for c in row]) for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par\footnotesize {escape_tex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(out) + "\n"


def numeric_columns(table: Table) -> list[bool]:
    """Return which columns are aligned right."""
    return [all(row[j].number for row in table.rows) for j in range(len(table.head))]


def width(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def escape_tex(text: str) -> str:
    """Return the text so that LaTeX sets it as it is."""
    return "".join(TEX.get(c, c) for c in clean(text))


WRITERS: dict[str, tuple[str, Callable[[Table], str]]] = {
    "text": ("table.txt", to_text),
    "md": ("table.md", to_markdown),
    "csv": ("table.csv", to_csv),
    "tex": ("table.tex", to_tex),
}
