"""`--json`: one JSON document on standard output, everything else on standard error."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from metaseq_lm.core.files import as_text
from metaseq_lm.core.output import show

_stream: TextIO | None = None  # standard output, inside `documents_only`
_is_shown = False


@contextlib.contextmanager
def documents_only() -> Iterator[None]:
    """Inside the block `show_result` prints JSON, and other output goes to standard error."""
    global _stream, _is_shown
    if _stream is not None:  # a command that runs another one
        yield
        return
    _stream, _is_shown = sys.stdout, False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:  # a defect, whose traceback goes to standard error
        show_failure(repr(error), 1)
        raise
    finally:
        _stream = None


def show_result(name: str, content: dict[str, Any] | list[Any], text: str | None = None) -> None:
    """Print a result: with --json as strict JSON (RFC 8259), else as `text`, unless that is None.

    docs/reference/json.md has the keys of each document. An object names its schema, a list cannot.
    Numbers that are not finite become null.
    """
    global _is_shown
    if _stream is not None:
        if isinstance(content, dict):
            content = {"schema": f"metaseq-lm/{name}/1", **content}
        strict = as_text(content, lambda number: None)
        print(json.dumps(strict, indent=1, allow_nan=False), file=_stream, flush=True)
        _is_shown = True
    elif text is not None:
        show(text)


def show_failure(message: str, exit_code: int) -> None:
    """Print the error that ends a command, with --json and unless its result is printed already."""
    if not _is_shown and "RANK" not in os.environ:  # the launcher of replicas prints one document
        with contextlib.suppress(OSError):  # the reader may have left
            show_result("error", {"error": message, "exit_code": exit_code})


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder, by its relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}
