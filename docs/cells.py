"""Tables of Markdown and what stands in their cells."""

import re
from itertools import zip_longest


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table, which narrow screens show as a list (site.css)."""
    lines = [header, ("---",) * len(header), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    second = " default" * (header[1] == "default")
    return f'<div class="options{second}" markdown>\n\n{text}\n\n</div>'


def escape(text: str) -> str:
    """Return a text for a cell of a table: one line, in which only `code` is Markdown."""
    return escape_lines(" ".join(text.split())).replace("|", "\\|")


def escape_lines(text: str) -> str:
    """Return a text in which only `code` is Markdown."""
    parts = text.split("`")
    plain = [re.sub(r"([*{}\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(
        part for pair in zip_longest(plain, parts[1::2]) for part in pair if part is not None
    )


def code(text: str) -> str:
    """Return a text as code in a cell; "" for none."""
    return f"`{text}`".replace("|", "\\|") if text else ""
