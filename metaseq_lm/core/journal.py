"""Append-only files of JSON lines with checksums, such as the log of a run.

A kill, a full disk or a power cut can tear the last line of a journal. Readers leave it out, and
the next append cuts it off first. A journal that is damaged elsewhere is refused.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.core.files import (
    LARGEST_LOG,
    checksum,
    full_disk_message,
    is_altered,
    to_json,
    with_checksum,
    without_link,
)

BLOCK = 1 << 16


class Journal:
    """A journal; each reading continues where the last one ended.

    Args:
        path: The file.
        find_problem: Given a line and its number, returns what is wrong with it, or "".
        remedy: What the user can do about a damaged line.
        limit: The largest size in bytes.
        sync: Whether an appended line must survive a power cut.

    Attributes:
        torn: The number of the torn last line at the last reading, 0 for none.
    """

    def __init__(
        self,
        path: Path,
        find_problem: Callable[[dict[str, Any], int], str] = lambda row, number: "",
        remedy: str = "Delete that line",
        limit: int = LARGEST_LOG,
        sync: bool = True,
    ) -> None:
        self.path, self.limit, self.remedy = path, limit, remedy
        self._find_problem, self._sync = find_problem, sync
        self._start, self._number = 0, 1  # offset and line number of the unread rest
        self._warned = self._mended = self._lacks_break = False
        self.torn = 0

    # ---------------------------------------------------------------- reading

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield all lines with their numbers; MetaseqError for a damaged one."""
        self._start, self._number = 0, 1
        return self.new_rows()

    @property
    def next(self) -> int:
        """The number of the next appended line, if all lines were read."""
        return self._number + self._lacks_break

    def new_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the lines that were appended since the last call; MetaseqError for a damaged one.

        Another process may be writing a torn last line, so the next call reads it again.
        """
        self.torn = 0
        if not (content := self._read()):
            return
        self._lacks_break = False
        lines = content.split(b"\n")
        last = max((i for i, line in enumerate(lines) if line.strip()), default=0)
        for i, line in enumerate(lines):
            if line.strip():
                try:
                    row = _parse(line)
                    problem = self._problem(line, row)
                except ValueError as error:
                    if i == last:
                        self.torn = self._number
                        return
                    row, problem = {}, f"not readable as JSON: {error}"
                if problem:
                    raise MetaseqError(
                        f"{self.path}:{self._number}: damaged ({problem}). {self.remedy}"
                    )
                yield self._number, row
            is_complete = i < len(lines) - 1
            self._start += len(line) + is_complete
            self._number += is_complete
        self._lacks_break = bool(lines[-1].strip())

    def _problem(self, line: bytes, row: Any) -> str:
        if not isinstance(row, dict):
            return "it is no mapping"
        if problem := self._find_problem(row, self._number):
            return problem
        # Most lines are exactly as `write` wrote them: check those without serialising them again.
        content, _, seal = line.rpartition(b', "checksum": "')
        is_intact = seal == checksum(content + b"}").encode() + b'"}'
        # Lines of earlier versions have no checksum.
        is_changed = not is_intact and "checksum" in row and is_altered(row)
        return "changed after it was written" if is_changed else ""

    def _read(self) -> bytes:
        if not self.path.exists():
            return b""
        size = self.path.stat().st_size
        if not self.path.is_file() or size > self.limit:
            raise MetaseqError(
                f"{self.path}: not a file of at most {self.limit:,} bytes ({size:,})"
            )
        with open(self.path, "rb") as file:
            file.seek(self._start)
            return file.read(max(0, size - self._start))

    def warn_of_torn_line(self) -> None:
        """Print, once, that the last line is torn, if it was when the journal was last read."""
        if self.torn and not self._warned:
            self._warned = True
            say(
                f"{self.path}:{self.torn}: warning: the last line is incomplete (a kill, a full "
                "disk or a power cut?) and was left out"
            )

    # ---------------------------------------------------------------- writing

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append lines, all or none; raises MetaseqError if the disk is full."""
        with full_disk_message(self.path):
            self.write(rows)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append lines, all or none; raises OSError if the disk is full."""
        text = "".join(to_json(with_checksum(row)) + "\n" for row in rows)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = without_link(str(self.path), flags)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            remaining = self._mend(descriptor) + text.encode()
            size = os.fstat(descriptor).st_size
            try:
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
                if self._sync:
                    os.fsync(descriptor)
            except BaseException:
                # All lines or none.
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def _mend(self, descriptor: int) -> bytes:
        """Cut off a torn last line; return the line break if a complete one lacks it, else b""."""
        end = os.fstat(descriptor).st_size
        if not end or (self._mended and os.pread(descriptor, 1, end - 1) == b"\n"):
            return b""
        self._mended = True
        start, line = _last_line(descriptor, end)
        try:
            if line.strip():
                _parse(line)
            return b"" if line.endswith(b"\n") else b"\n"
        except ValueError:
            before = b""
            if start <= self.limit:
                before = os.pread(descriptor, start, 0)
            self.torn = before.count(b"\n") + 1
            self.warn_of_torn_line()
            os.ftruncate(descriptor, start)
            return b""


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _last_line(descriptor: int, end: int) -> tuple[int, bytes]:
    """Return the offset of the last line of a file and the line, with its line break if any."""
    size = BLOCK
    while True:
        start = max(0, end - size)
        block = os.pread(descriptor, end - start, start)
        at = block.rfind(b"\n", 0, -1) + 1
        if at or not start:
            return start + at, block[at:]
        size *= 2
