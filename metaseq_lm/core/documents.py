"""`--json`: one JSON document on standard output, everything else on standard error."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from metaseq_lm.core.output import show

_stream: TextIO | None = None  # standard output, inside `documents_only`
_is_shown = False


@contextlib.contextmanager
def documents_only() -> Iterator[None]:
    """Inside the block `show_result` prints JSON, and all other output goes to standard error."""
    global _stream, _is_shown
    if _stream is not None:  # a command that runs another one
        yield
        return
    _stream, _is_shown = sys.stdout, False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stream = None


def prints_json() -> bool:
    """Return whether the result of the command is a document."""
    return _stream is not None


def show_result(name: str, content: Mapping[str, Any] | list[Any], text: str | None = None) -> None:
    """Print a result: as strict JSON (RFC 8259) with --json, else as text, unless that is None.

    docs/reference/json.md has the keys of each document. An object says its schema, a list has no
    place for it. Numbers that are not finite become null.
    """
    global _is_shown
    if _stream is None:
        if text is not None:
            show(text)
        return
    if isinstance(content, Mapping):
        content = {"schema": f"metaseq-lm/{name}/1", **content}
    print(json.dumps(_finite(content), indent=1, allow_nan=False), file=_stream, flush=True)
    _is_shown = True


def show_failure(message: str, exit_code: int) -> None:
    """Print the error that ends a command, unless its result is printed already."""
    if not _is_shown:
        with contextlib.suppress(OSError):  # the reader may have left
            show_result("error", {"error": message, "exit_code": exit_code})


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder, by its relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _finite(value: Any) -> Any:
    """Return a JSON value with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
