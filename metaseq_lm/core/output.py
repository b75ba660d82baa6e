"""What a terminal shows, and escaping of texts for terminals, spreadsheets and Markdown."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


_quiet = False
_status_width = 0  # width of the status line on a terminal, 0 for none
_LOG_INTERVAL = 60.0  # seconds between lines of a status outside terminals


@contextmanager
def results_only() -> Iterator[None]:
    """Print only results and errors inside the block."""
    global _quiet
    _quiet = True
    try:
        yield
    finally:
        _quiet = False


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _quiet


def show_progress(text: str) -> None:
    """Print a message that is not a result, unless only results are printed."""
    if not _quiet:
        show(text)


class StatusLine:
    """Progress of a long operation: one line that is rewritten on a terminal, else a few lines.

    Outside a terminal, a line is printed at each tenth of the work, and when the last one is older
    than `_LOG_INTERVAL` seconds and a twentieth of the time so far.
    """

    def __init__(self) -> None:
        self.begun = self.shown = time.monotonic()
        self.tenths = -1

    def show(self, text: str, share: float) -> None:
        """Show the state, unless only results are printed; `share` is the work done, 0 to 1."""
        global _status_width
        if _quiet:
            return
        if sys.stdout.isatty():
            hide_status()
            _status_width = shutil.get_terminal_size().columns - 1
            print(clean(text)[:_status_width], end="", flush=True)
            return
        now, tenths = time.monotonic(), int(10 * share + 1e-9)
        if tenths > self.tenths or now - self.shown > max(_LOG_INTERVAL, (now - self.begun) / 20):
            self.tenths, self.shown = max(tenths, self.tenths), now
            show(text)


def hide_status() -> None:
    """Clear the line of a `StatusLine`, so that other output can take its place."""
    global _status_width
    if _status_width:
        print(f"\r{' ' * _status_width}\r", end="", flush=True)
        _status_width = 0


def show(text: str = "", end: str = "\n") -> None:
    """Print lines of text on standard output, flushed, without control characters."""
    hide_status()
    print(printable(text), end=end, flush=True)


def printable(text: str) -> str:
    """Return lines of text without terminal control characters."""
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
    return f"'{text}" if _FORMULA.match(text) and not NUMBER.fullmatch(text) else text


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
        # Round before splitting, so that 3599.9 s is 1 h and never 59 min 60 s.
        rounded = round(seconds / unit) * unit
        if rounded >= size:
            first, rest = divmod(rounded, size)
            return f"{first} {big} {rest // unit} {small}" if rest else f"{first} {big}"
    raise AssertionError(seconds)
