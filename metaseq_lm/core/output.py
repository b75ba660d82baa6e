"""What a terminal shows, and escaping of texts for terminals, spreadsheets and Markdown."""

import contextlib
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any, TextIO

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


_quiet = False
_status: tuple[TextIO, int] | None = None  # the terminal that shows a status line, and its width
_LOG_INTERVAL = 60.0  # seconds between lines of a status outside terminals
_TERMINAL_INTERVAL = 0.1  # seconds between the texts of a `Meter`


@contextlib.contextmanager
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
        if _quiet:
            return
        if sys.stdout.isatty():
            _rewrite(sys.stdout, text)
            return
        # A share may be a rounding error below its tenth.
        now, tenths = time.monotonic(), int(10 * share + 1e-9)
        if tenths > self.tenths or now - self.shown > max(_LOG_INTERVAL, (now - self.begun) / 20):
            self.tenths, self.shown = max(tenths, self.tenths), now
            show(text)


class Meter:
    """Progress of counted work, only on a terminal: what is done, how fast, and the time left.

    It is the status line of standard error, for commands whose log has lines of its own.

    Attributes:
        note: Text behind it.
    """

    def __init__(self, name: str, unit: str, total: float, done: float = 0) -> None:
        self.name, self.unit, self.total, self.done = name, unit, total, done
        self.note = ""
        self._first, self._begun, self._shown = done, time.monotonic(), -math.inf

    @property
    def is_visible(self) -> bool:
        """Whether there is a terminal, and not only results are printed."""
        return not _quiet and sys.stderr.isatty()

    def advance(self, count: float = 1) -> None:
        """Count work; show the state if the last one is old."""
        self.done += count
        now = time.monotonic()
        if now - self._shown >= _TERMINAL_INTERVAL and self.is_visible:
            self._shown = now
            with contextlib.suppress(OSError):  # the terminal may be closed
                _rewrite(sys.stderr, self.text())

    def text(self) -> str:
        """Return what is done, units a second, and the time left, with the note."""
        seconds = time.monotonic() - self._begun
        rate = (self.done - self._first) / seconds if seconds else 0.0
        parts = [f"{self.name}  {self.done:,}/{self.total:,} {self.unit}"]
        if rate:
            left = seconds_text((self.total - self.done) / rate)
            parts += [rate_text(rate, self.unit), f"about {left} left"]
        return f"{', '.join(parts)}  {self.note}".rstrip()


def rate_text(rate: float, unit: str) -> str:
    """Return a number of units a second, such as "12.3 updates/s" or "45,678 tokens/s"."""
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def _rewrite(stream: TextIO, text: str) -> None:
    """Show a status line on a terminal in place of the last one."""
    global _status
    hide_status()
    width = shutil.get_terminal_size().columns - 1
    _status = stream, width
    print(clean(text)[:width], end="", flush=True, file=stream)


def hide_status() -> None:
    """Clear the status line, so that other output can take its place."""
    global _status
    if _status is not None:
        (stream, width), _status = _status, None
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"\r{' ' * width}\r", end="", flush=True, file=stream)


def show(text: str = "", end: str = "\n") -> None:
    """Print lines of text on standard output, flushed, without control characters."""
    hide_status()
    print(printable(text), end=end, flush=True)


def printable(text: str, allowed: str = "\n\t") -> str:
    """Return a text with blanks for its control characters, except the `allowed` ones."""
    return "".join(c if c.isprintable() or c in allowed else " " for c in text)


def clean(text: str) -> str:
    """Return the text on one line without control characters."""
    return printable(text, allowed="")


def present_time() -> str:
    """Return the present time in UTC (ISO 8601), to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def escape_formula(value: Any) -> Any:
    """Escape a value that a spreadsheet could evaluate as a formula, which could leak data.

    The text has no control characters; an apostrophe is prepended to a possible formula.
    """
    if not isinstance(value, str):
        return value
    text = clean(value)
    if _FORMULA.match(text) and not NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown; names such as which_moon_10 need no escape."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*|\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def count_text(count: int, noun: str) -> str:
    """Return a number and its noun, which is in the plural unless the number is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"


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
