"""Reading text files of any size, with any bytes in them, in bounded memory.

Only "\\n" and "\\r\\n" end a line, which is a document or a sentence. Files may be compressed (by
suffix). "-" is standard input, kept in an unnamed temporary file because text is read more than
once.
"""

import bz2
import codecs
import functools
import gzip
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metaseq_lm.config.suites import BAD_UTF8
from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.files import human_bytes
from metaseq_lm.data.records.text_content import HEAD, SIGNS, Damage, is_utf8

__all__ = ["check_length", "decode"]

BLOCK = 1 << 20
_HEAD_LINES = 200
# Longer lines go to the tokenizer in pieces of at most this many bytes, cut at white space.
PIECE = 1 << 16
LONGEST = 1 << 28  # most bytes of a line, a field or a cell that is held whole
BOM = b"\xef\xbb\xbf"
_SURROGATES = re.compile("[\ud800-\udfff]")
STANDARD_INPUT = "-"


class _ZstdReader:
    """Reads zstd data; EOFError for a frame without end, which zstandard's reader hides."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MetaseqError(
                f"{raw.name}: zstd data need zstandard: pip install 'metaseq-lm[zstd]', or unpack "
                "the file with unzstd"
            ) from error
        self._raw = raw
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None

    def read(self, size: int) -> bytes:
        """Return at least `size` bytes unless the data end earlier."""
        content = bytearray()
        # Little at a time: a few bytes may unpack to very many.
        while len(content) < size and (packed := self._raw.read(1 << 12)):
            while packed:
                self._frame = self._frame or self._new_frame()
                content += self._frame.decompress(packed)
                if not self._frame.eof:
                    break
                packed, self._frame = self._frame.unused_data, None
        if not content and self._frame is not None:
            raise EOFError("the zstd data end before their end marker")
        return bytes(content)


OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _ZstdReader,
}
# The first bytes of packed data: their suffix and name.
_PACKED = {
    b"\x1f\x8b": (".gz", "gzip"),
    b"\xfd7zXZ": (".xz", "xz"),
    b"BZh9": (".bz2", "bzip2"),
    b"\x28\xb5\x2f\xfd": (".zst", "zstd"),
}

_TAR_SUFFIXES = (".tgz", ".txz", ".tbz", ".tbz2", ".tzst")
_OTHER_SPLIT = re.compile(r"(train|validation|valid|dev|test)(?![^\W_])")


@dataclass(eq=False)
class TextFile:
    """A text file, plain or packed, and the treatment of invalid UTF-8 in it.

    Attributes:
        path: The file; `str` of a TextFile gives it, for messages.
        on_bad_utf8: "replace" the bytes by U+FFFD, "skip" the line, or "fail" with its number.
        encoding: The encoding to convert from, by Python's name.
        is_judged: Whether damage in it is allowed or has been judged; otherwise the first reader of
            the whole file judges it.
        read: How many bytes on the disk have been read.
    """

    path: Path
    on_bad_utf8: str = "replace"
    encoding: str = "utf-8"
    is_judged: bool = True
    read: int = 0

    def __post_init__(self) -> None:
        if self.on_bad_utf8 not in BAD_UTF8:
            choices = ", ".join(BAD_UTF8)
            raise UsageError(f"--on-bad-utf8 {self.on_bad_utf8}: choose one of {choices}")
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"--encoding {self.encoding}: no text encoding of Python, such as latin-1, cp1252, "
                "utf-16 or gb18030"
            ) from error

    def __str__(self) -> str:
        return "standard input" if str(self.path) == STANDARD_INPUT else str(self.path)

    @property
    def skips_bad(self) -> bool:
        """Whether readers leave out lines with invalid UTF-8."""
        return self.on_bad_utf8 == "skip"

    @property
    def is_utf8(self) -> bool:
        """Whether the file is read without conversion."""
        return codecs.lookup(self.encoding).name == "utf-8"

    @functools.cached_property
    def head(self) -> bytes:
        """The first HEAD bytes, unpacked, not converted."""
        return next(self._raw_chunks(HEAD), b"")

    @functools.cached_property
    def first_lines(self) -> list[str]:
        """The lines in the first HEAD bytes, at most 200; the last may be cut."""
        data = next(self.chunks(HEAD), b"")
        data = data[: data.rfind(b"\n") + 1] or data
        lines = data.decode("utf-8", "replace").split("\n")[:_HEAD_LINES]
        return [line.removesuffix("\r") for line in lines]

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content as UTF-8 in chunks."""
        return self._raw_chunks(size) if self.is_utf8 else self._converted(size)

    def _raw_chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content in chunks, unpacked but not converted, without BOM."""
        check_text_file(self.path, self.is_utf8)
        with open_source(self.path) as raw:
            suffix = self.path.suffix.lower()
            if str(self.path) == STANDARD_INPUT:
                head = raw.read(8)
                raw.seek(0)
                suffix = next((s for sign, (s, _) in _PACKED.items() if head.startswith(sign)), "")
            file: IO[bytes] = OPENERS[suffix](raw) if suffix in OPENERS else raw
            count = 0
            while True:
                try:
                    chunk = file.read(size)
                except MetaseqError:
                    raise
                except Exception as error:  # each packing format raises its own
                    raise MetaseqError(
                        f"{self}: damaged after {count} bytes of text: {error}. Copy or pack the "
                        "file again."
                    ) from error
                if not chunk:
                    return
                if not count and self.is_utf8:
                    while chunk.startswith(BOM):
                        chunk = chunk.removeprefix(BOM)
                count += len(chunk)
                self.read = raw.tell()
                yield chunk

    def _converted(self, size: int) -> Iterator[bytes]:
        decoder, begins = codecs.getincrementaldecoder(self.encoding)(), True
        try:
            for chunk in self._raw_chunks(size):
                text = decoder.decode(chunk)
                if begins and text:
                    text, begins = text.removeprefix("\ufeff"), False
                yield text.encode("utf-8")
            yield decoder.decode(b"", True).encode("utf-8")
        except UnicodeError as error:
            raise MetaseqError(
                f"{self}: not {self.encoding}: {error}; give another --encoding"
            ) from error

    def blocks(self, in_pieces: bool = False) -> Iterator["Block"]:
        """Yield the lines in blocks of about BLOCK bytes, with `in_pieces` longer lines in several.

        MetaseqError for a line that is too long, and at the end for a file that is not judged yet
        and has too much damage.
        """
        damage = None if self.is_judged else Damage()
        after, bad = "", set[int]()
        # A line that is skipped if it is bad has to be known whole.
        for data, number, goes_on, ends in self._parts(in_pieces and not self.skips_bad):
            block = self._block(data, number, damage, ends)
            found_bad = block.bad
            if goes_on:  # a line counts as bad once, at its first bad piece
                block.after, block.bad = after, block.bad - bad
                found_bad = block.bad | bad
            after, bad = block.texts[-1][-1:], found_bad
            if damage is not None:
                damage.lines += len(block.texts) - goes_on
            yield block
        if damage is not None:
            self.is_judged = True
            damage.judge(str(self))

    def _parts(self, in_pieces: bool) -> Iterator[tuple[bytes, int, bool, bool]]:
        """Yield lines or a piece of one, the number of the first, whether it goes on, and ends.

        The first piece of a line has text unless all of the line is blank.
        """
        number, begun = 1, 0  # the bytes of the line that have been yielded
        rest: list[bytes] = []
        for chunk in self.chunks(BLOCK):
            size = begun + sum(map(len, rest)) + (chunk.find(b"\n") + 1 or len(chunk))
            check_length(size, "line", f"{self}:{number}")
            if begun and b"\n" in chunk:
                end = chunk.index(b"\n") + 1
                yield b"".join([*rest, chunk[:end]]), number, True, True
                number, begun, rest, chunk = number + 1, 0, [], chunk[end:]
            if end := chunk.rfind(b"\n") + 1:
                lines, rest = b"".join([*rest, chunk[:end]]), []
                yield lines, number, False, True
                number += lines.count(b"\n")
            rest.append(chunk[end:])
            if in_pieces and sum(map(len, rest)) > BLOCK + PIECE:
                rest = [b"".join(rest)]
                # The last piece may not have ended yet.
                ready = sum(map(len, pieces(rest[0])[:-1]))
                # Not bytes.strip, to which U+2028 is no blank.
                if begun or rest[0][:ready].decode("utf-8", "replace").strip():
                    yield rest[0][:ready], number, begun > 0, False
                    begun, rest = begun + ready, [rest[0][ready:]]
        if any(rest):
            yield b"".join(rest), number, begun > 0, True

    def _block(self, data: bytes, number: int, damage: Damage | None, ends: bool) -> "Block":
        bad: set[int] = set()
        try:
            # Nearly all blocks are valid, and to decode line by line is slow.
            texts = data.decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            texts = []
            for at, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
                text, is_bad = decode(line, f"{self}:{number + at}", self.on_bad_utf8)
                texts.append(text)
                if is_bad:
                    bad.add(at)
        if damage is not None and (bad or b"\0" in data):
            for at, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
                if at in bad or b"\0" in line:
                    damage.add(line, number + at)
        if ends and b"\r" in data:
            texts = [text.removesuffix("\r") for text in texts]
        return Block(texts, number, self.read, bad)

    def judge(self) -> None:
        """Read the whole file for the damage in it alone, unless it has been judged."""
        if self.is_judged:
            return
        damage = Damage()
        for data, number, *_ in self._parts(False):
            if b"\0" in data or not is_utf8(data):
                self._block(data, number, damage, True)
            damage.lines += data.count(b"\n") + (not data.endswith(b"\n"))
        self.is_judged = True
        damage.judge(str(self))

    def lines(self) -> Iterator[tuple[int, str, bool]]:
        """Yield (line number, text without line end, held bad UTF-8) for each line."""
        for block in self.blocks():
            for at, text in enumerate(block.texts):
                yield block.first + at, text, at in block.bad


@dataclass
class Block:
    """Some lines of a file, or texts that are treated like lines.

    Attributes:
        texts: The lines without line ends.
        first: The number, from 1, of the first one.
        read: How many bytes of the file on disk are consumed.
        bad: The places in `texts` of lines that held invalid UTF-8.
        after: If the only text goes on with the line of the block before, the character before it.
    """

    texts: list[str]
    first: int
    read: int
    bad: set[int] = field(default_factory=set)
    after: str = ""


def check_length(size: int, unit: str, where: str) -> None:
    """Raise a MetaseqError if a "line", "field" or "cell" has more than LONGEST bytes."""
    if size > LONGEST:
        raise MetaseqError(
            f"{where}: a {unit} of {human_bytes(size)}; a line, field or cell may have "
            f"{human_bytes(LONGEST)}: write its text as several records"
        )


@functools.lru_cache(maxsize=1)
def _spooled(stream: IO[str]) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
    try:
        shutil.copyfileobj(stream.buffer, file, BLOCK)  # type: ignore[attr-defined]
        file.flush()
    except OSError as error:
        raise MetaseqError(
            f"standard input: cannot be kept in {tempfile.gettempdir()}: {error.strerror}; name a "
            "folder with more space in TMPDIR, or write the text to a file"
        ) from error
    return file


def _standard_input() -> IO[bytes]:
    if sys.stdin is None:
        raise MetaseqError("standard input: is closed")
    return _spooled(sys.stdin)


def open_source(path: Path) -> IO[bytes]:
    """Open a file, or the copy of standard input, which allows one reader at a time."""
    if str(path) != STANDARD_INPUT:
        return open(path, "rb")
    file = os.fdopen(os.dup(_standard_input().fileno()), "rb")
    file.seek(0)
    return file


def source_bytes(path: Path) -> int:
    """Return the size of a file on disk."""
    if str(path) == STANDARD_INPUT:
        return os.fstat(_standard_input().fileno()).st_size
    return path.stat().st_size


def check_text_file(path: Path, is_utf8: bool = True) -> None:
    """Raise a MetaseqError unless `path` is a regular, readable file that is not empty.

    With `is_utf8`, its first bytes must not mark another format either.
    """
    if str(path) == STANDARD_INPUT:
        if not source_bytes(path):
            raise MetaseqError("standard input: is empty (0 bytes)")
        return
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise MissingError(f"{path}: no such file") from error
    except OSError as error:
        raise MetaseqError(f"{path}: cannot be opened: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise MetaseqError(f"{path}: is a directory; give text files, for example {path}/*.txt")
    if not stat.S_ISREG(status.st_mode):
        # It is read twice: for the tokenizer and to binarise.
        raise MetaseqError(
            f"{path}: is not a regular file; give - and the text on standard input, or write it to "
            "a file first"
        )
    if not status.st_size:
        raise MetaseqError(f"{path}: is empty (0 bytes)")
    try:
        with open(path, "rb") as file:
            head = file.read(32)
    except OSError as error:
        raise MetaseqError(
            f"{path}: cannot be read: {error.strerror}; check its permissions"
        ) from error
    if path.suffix.lower() in OPENERS:
        return
    for sign, (suffix, name) in _PACKED.items():
        if head.startswith(sign):
            if path.suffix.lower() in _TAR_SUFFIXES:
                raise MetaseqError(f"{path}: is a packed tar archive; unpack it first")
            raise MetaseqError(f"{path}: is {name} data; give it the suffix {suffix}")
    for sign, meaning in SIGNS.items():
        if is_utf8 and head.startswith(sign):
            raise MetaseqError(f"{path}: is {meaning}")


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Replace folders by their files in order of names, unless names begin with "." or "_"."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        if (path / "dataset_dict.json").is_file():
            saved = [file.parent for file in sorted(path.glob("*/state.json"))]
            split = min(saved, key=lambda folder: folder.name != "train", default=path / "train")
            raise MetaseqError(f"{path}: a dataset of several splits; give one, such as {split}")
        # A folder of the library datasets has JSON files next to its Arrow files.
        pattern = "*.arrow" if (path / "state.json").is_file() else "*"
        inside = []
        for file in sorted(path.rglob(pattern)):
            is_hidden = any(part[0] in "._" for part in file.relative_to(path).parts)
            if not is_hidden and not file.is_dir():
                inside.append(file)
        if not inside:
            raise MetaseqError(f"{path}: is a directory without text files")
        tops = {file.relative_to(path).parts[0] for file in inside}
        splits = {match[1] for top in tops if (match := _OTHER_SPLIT.match(top))}
        if "train" in splits and len(splits) > 1:
            raise MetaseqError(
                f"{path}: holds files of several splits ({', '.join(sorted(splits))}); give those "
                f"of one, such as {path}/train*"
            )
        files += inside
    return files


def format_suffix(path: Path) -> str:
    """Return the suffix of a file's format without the suffix of its packing; "" if it has none."""
    suffixes = [suffix for suffix in map(str.lower, path.suffixes) if suffix not in OPENERS]
    return suffixes[-1] if suffixes else ""


def _cut_point(line: bytes) -> int:
    """Return where to cut a line longer than PIECE, by its first PIECE + 1 bytes alone."""
    # Every tokenizer here starts a new token at a single space in front of an ASCII character, so
    # the ids are the same as for the uncut line.
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
        size = _cut_point(line[start : start + PIECE + 1])
        parts.append(line[start : start + size])
        start += size
    return [*parts, line[start:]]


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
    return _SURROGATES.sub("\ufffd", text)


def text_pieces(text: str) -> list[str]:
    """Cut a text into pieces of at most PIECE bytes of UTF-8."""
    if len(text) * 4 <= PIECE:
        return [text]
    return [piece.decode("utf-8") for piece in pieces(text.encode("utf-8"))]
