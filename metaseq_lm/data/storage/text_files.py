"""Reading text files of any size, with any bytes in them, in bounded memory.

Only "\\n" and "\\r\\n" end a line, which is a document or a sentence. Files may be compressed (by suffix).
"""

import bz2
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from metaseq_lm.core.errors import MetaseqError, UsageError

BLOCK = 1 << 20
# Longer lines go to the tokenizer in pieces of at most this many bytes, cut at white space.
PIECE = 1 << 16
BOM = b"\xef\xbb\xbf"
SURROGATES = re.compile("[\ud800-\udfff]")
BAD_UTF8 = ("replace", "skip", "fail")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
SIGNS = {
    b"\x1f\x8b": "gzip data; give it the suffix .gz",
    b"\xfd7zXZ": "xz data; give it the suffix .xz",
    b"BZh9": "bzip2 data; give it the suffix .bz2",
    b"\x28\xb5\x2f\xfd": "zstd data, which is not read; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xff\xfe": "UTF-16; convert it, for example with 'iconv -f UTF-16 -t UTF-8'",
    b"\xfe\xff": "UTF-16; convert it, for example with 'iconv -f UTF-16 -t UTF-8'",
}


@dataclass(frozen=True)
class TextFile:
    """A text file, plain or packed, and what becomes of invalid UTF-8 in it.

    Attributes:
        path: The file; `str` of a TextFile gives it, for messages.
        on_bad_utf8: "replace" the bytes by U+FFFD, "skip" the line, or "fail" with its number.
    """

    path: Path
    on_bad_utf8: str = "replace"

    def __post_init__(self) -> None:
        if self.on_bad_utf8 not in BAD_UTF8:
            choices = ", ".join(BAD_UTF8)
            raise UsageError(f"--on-bad-utf8 {self.on_bad_utf8}: choose one of {choices}")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def skips_bad(self) -> bool:
        """Whether readers leave out lines with invalid UTF-8."""
        return self.on_bad_utf8 == "skip"

    def lines(self) -> Iterator[tuple[int, str, bool]]:
        """Yield (line number, text without line end, held bad UTF-8) for each line, held whole."""
        pending = bytearray()
        for block in blocks(self):
            pending += block.data
            if block.continues:
                continue
            lines, pending = bytes(pending).removesuffix(b"\n").split(b"\n"), bytearray()
            for number, line in enumerate(lines, block.line):
                text, bad = self.decode(line.removesuffix(b"\r"), number)
                yield number, text, bad

    def decode(self, data: bytes, number: int) -> tuple[str, bool]:
        """Return the text of a part of line `number`, and whether it held invalid UTF-8."""
        return decode(data, f"{self.path}:{number}", self.on_bad_utf8)


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, or a piece of one line that is too long for a block."""

    file: TextFile
    data: bytes
    line: int  # the number, from 1, of the first line in it
    read: int  # how many bytes of the file on disk are consumed
    piece: bool = False  # whether it is a piece of a line
    continues: bool = False  # whether the line of the piece goes on in the next block


def check_text_file(path: Path) -> None:
    """Raise a MetaseqError unless `path` is a regular, readable file that is not empty."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise MetaseqError(f"{path}: no such file") from error
    except OSError as error:
        raise MetaseqError(f"{path}: cannot be opened: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise MetaseqError(f"{path}: is a directory; give text files, for example {path}/*.txt")
    if not stat.S_ISREG(status.st_mode):
        # It is read twice: for the tokenizer and to binarise.
        raise MetaseqError(f"{path}: is not a regular file; write the text to a file first")
    if not status.st_size:
        raise MetaseqError(f"{path}: is empty (0 bytes)")
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        raise MetaseqError(
            f"{path}: cannot be read: {error.strerror}; check its permissions"
        ) from error
    if path.suffix in OPENERS:
        return
    for sign, meaning in SIGNS.items():
        if head.startswith(sign):
            raise MetaseqError(f"{path}: is {meaning}")


def _chunks(path: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the content in chunks, unpacked and without BOM, and the bytes read from the disk."""
    check_text_file(path)
    with open(path, "rb") as raw:
        file: IO[bytes] = OPENERS[path.suffix](raw) if path.suffix in OPENERS else raw
        count = 0
        while True:
            try:
                chunk = file.read(size)
            except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, OSError) as error:
                raise MetaseqError(
                    f"{path}: damaged after {count} bytes of text: {error}. "
                    "Copy or pack the file again."
                ) from error
            if not chunk:
                return
            if not count:
                chunk = chunk.removeprefix(BOM)
            count += len(chunk)
            yield chunk, raw.tell()


def format_suffix(path: Path) -> str:
    """Return the suffix that says what a file holds, that of packing aside; "" if it has none."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in OPENERS]
    return suffixes[-1] if suffixes else ""


def cut_point(line: bytes) -> int:
    """Return where to cut a line longer than PIECE: before a word if possible.

    It depends on the first PIECE + 1 bytes alone. Every tokenizer here starts a new token at a
    single space in front of an ASCII character, so the ids are those of the uncut line.
    """
    at = line.rfind(b" ", 1, PIECE)
    while at > 0 and not 0x20 < line[at + 1] < 0x7F:
        at = line.rfind(b" ", 1, at)
    if at > 0:
        return at
    for at in range(PIECE, PIECE - 4, -1):
        if line[at] & 0xC0 != 0x80:
            return at
    return PIECE


def pieces(line: bytes) -> list[bytes]:
    """Cut a line into pieces of at most PIECE bytes."""
    if len(line) <= PIECE:
        return [line]
    parts, start = [], 0
    while len(line) - start > PIECE:
        size = cut_point(line[start : start + PIECE + 1])
        parts.append(line[start : start + size])
        start += size
    return [*parts, line[start:]]


def blocks(file: TextFile, size: int = BLOCK) -> Iterator[Block]:
    """Yield a file in blocks of about `size` bytes; MetaseqError if it cannot be read."""
    rest, line, inside, read = b"", 1, False, 0
    for chunk, read in _chunks(file.path, size):
        rest += chunk
        end = rest.rfind(b"\n") + 1
        start = 0
        if end and inside:
            start = rest.find(b"\n") + 1
            yield Block(file, rest[:start], line, read, piece=True)
            inside = False
            line += 1
        if end > start:
            yield Block(file, rest[start:end], line, read)
            line += rest.count(b"\n", start, end)
        rest = rest[end:]
        if len(rest) > size + PIECE:
            # The last piece stays: it may not have ended yet.
            ready = sum(map(len, pieces(rest)[:-1]))
            yield Block(file, rest[:ready], line, read, piece=True, continues=True)
            rest, inside = rest[ready:], True
    if rest or inside:
        yield Block(file, rest, line, read, piece=inside)


def decode(data: bytes, where: str, policy: str) -> tuple[str, bool]:
    """Return the text and whether it held invalid UTF-8, which became U+FFFD.

    With policy "fail" that is a MetaseqError naming `where` and the first bad byte.
    """
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError as error:
        if policy == "fail":
            raise MetaseqError(
                f"{where}: invalid UTF-8 (byte 0x{data[error.start]:02x}). Repair the file, or use "
                "--on-bad-utf8 replace or skip."
            ) from error
        return data.decode("utf-8", "replace"), True


def without_surrogates(text: str) -> str:
    """Replace halves of characters, which JSON can spell ("\\ud800") but no UTF-8 text can hold."""
    return SURROGATES.sub("\ufffd", text)


def training_lines(files: Iterable[TextFile]) -> Iterator[str]:
    """Yield the text of all files for a tokenizer to learn from, long lines in pieces."""
    for file in files:
        for block in blocks(file):
            for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.line):
                for part in pieces(line.removesuffix(b"\r")):
                    text, bad = file.decode(part, number)
                    if not (bad and file.skips_bad):
                        yield text
