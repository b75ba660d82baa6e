"""How this program starts itself again, from the code that it runs from."""

from __future__ import annotations

import sys
from pathlib import Path


def program(root: Path | None = None) -> list[str]:
    """Return the start of a command line that runs this program from the package under `root`.

    The default is the package that runs now. Not `-m metaseq_lm`: that takes the package of the
    working directory first.
    """
    place = str((root or Path(__file__).parents[1]).resolve())
    return python(place, "from metaseq_lm.cli import program; program()")


def python(place: str, code: str) -> list[str]:
    """Return the start of a command line that runs Python `code` with `place` first on the path."""
    return [sys.executable, "-u", "-c", f"import sys; sys.path[0] = {place!r}; {code}"]
