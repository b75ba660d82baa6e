"""Escaping of texts of users and files for terminals, spreadsheets and Markdown."""

import re
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


_quiet = False


def set_quiet(quiet: bool) -> None:
    """Choose whether only results and errors are printed."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _quiet


def show_progress(text: str) -> None:
    """Print a message that is not a result, unless only results are printed."""
    if not _quiet:
        show(text)


def show(text: str = "", end: str = "\n") -> None:
    """Print a text of lines on standard output, at once, without control characters."""
    print(printable(text), end=end, flush=True)


def printable(text: str) -> str:
    """Return a text of lines without terminal control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def clean(text: str) -> str:
    """Return the text on one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def present_time() -> str:
    """Return the present time in UTC (ISO 8601), to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def inert(value: Any) -> Any:
    """Escape a value that a spreadsheet could evaluate as a formula, which could leak data.

    The text has no control characters; an apostrophe is prepended to a possible formula.
    """
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown; names such as which_moon_10 need no escape."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*|\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def seconds_text(seconds: float | None) -> str:
    """Return a time as 4.2 s, 12 min 5 s, 3 h 20 min or 2 d 4 h, or "-" if unknown."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for (big, size), (small, unit) in pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        # Rounded before it is split, so that 3599.9 s is 1 h and never 59 min 60 s.
        rounded = round(seconds / unit) * unit
        if rounded >= size:
            first, rest = divmod(rounded, size)
            return f"{first} {big} {rest // unit} {small}" if rest else f"{first} {big}"
    raise AssertionError(seconds)
