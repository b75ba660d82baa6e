"""What a file holds, told by its content: binary data, another encoding, JSON lines, a table.

What is no plain text in UTF-8 would otherwise be learned, without a word, as if it were.
"""

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import SIGNS, Block, TextFile, blocks

DAMAGED_SHARE = 0.01  # of the lines; more is another encoding rather than damage
HEAD, HEAD_LINES = 1 << 18, 200  # bytes and lines of a file whose form is looked at
MANY_HIGH = 0.3  # bytes above ASCII: more than Western languages have
MOST = 0.95  # of the lines looked at
CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
EAST_ASIAN = re.compile("[\u3000-\u9fff\uac00-\ud7a3\uff01-\uff5e]")
OPENS_JSON = re.compile(r'\s*\[?\s*\{\s*"[^"\n]*"\s*:')
# A quoted text or a number, with the next field right behind it.
FIRST_FIELD = re.compile(r'("([^"]|"")*"|-?\d+(\.\d+)?)([,;|])\S')
COLUMN_NAME = re.compile(r"\w[\w .:/()-]{0,39}")


def check_content(file: TextFile, damage_allowed: bool) -> None:
    """Raise a MetaseqError unless a file is text in the encoding that it is read in.

    All of it is read: if several lines hold invalid UTF-8 or NULs, and a share above DAMAGED_SHARE,
    this is told, unless it is allowed, before any work is done.
    """
    head = next((chunk for chunk, _ in file.raw_chunks(HEAD)), b"")
    if file.is_utf8:
        if meaning := describe_bytes(head):
            raise MetaseqError(f"{file}: is {meaning}")
    elif _is_other_utf8(head, file.encoding):
        raise MetaseqError(f"{file}: is UTF-8, not {file.encoding}; leave --encoding out")
    if damage_allowed:
        return
    lines = invalid = nuls = first = 0
    sample = b""
    last_damaged = 0  # a line may be several blocks
    for block in blocks(file):
        lines += block.data.removesuffix(b"\n").count(b"\n") + (not block.continues)
        for number, line in _damaged_lines(block):
            first = first or number
            if number > last_damaged:
                nuls += _valid(line)
                invalid += not _valid(line)
                last_damaged = number
            if len(sample) < HEAD and not _valid(line):
                sample += line[:HEAD] + b"\n"
    if invalid + nuls <= max(1, DAMAGED_SHARE * lines):
        if nuls:
            print(f"{file}: NUL bytes in {nuls:,} lines", file=sys.stderr)
        return
    allow = "or allow the damage with --on-bad-utf8 replace or skip"
    if nuls > invalid:
        raise MetaseqError(
            f"{file}: {nuls:,} of {lines:,} lines hold NUL bytes, the first is line {first}; remove "
            f"them, for example with tr -d '\\000' < OLD > NEW, {allow}"
        )
    guess = guess_encoding(sample)
    raise MetaseqError(
        f"{file}: {invalid:,} of {lines:,} lines hold invalid UTF-8, the first is line {first}; "
        f"perhaps the text is {guess}: convert it with --encoding {guess} (or with iconv), {allow}"
    )


def _damaged_lines(block: Block) -> Iterator[tuple[int, bytes]]:
    if b"\0" not in block.data and _valid(block.data):
        return
    for number, line in enumerate(block.data.split(b"\n"), block.line):
        if b"\0" in line or not _valid(line):
            yield number, line


def _valid(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_other_utf8(head: bytes, encoding: str) -> bool:
    """Return whether bytes to be read in an encoding of one byte a character are plainly UTF-8."""
    if codecs.lookup(encoding).name.startswith("utf") or head.isascii():
        return False
    return _decodes(head, "utf-8")


def _decodes(data: bytes, encoding: str) -> bool:
    """Return whether the data, which may end inside a character, are of this encoding."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def describe_bytes(head: bytes) -> str:
    """Return what the first bytes of a file say it is, with the remedy; "" for text."""
    for sign, meaning in SIGNS.items():
        if head.startswith(sign):
            return meaning
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if b"\0" in head:
        return _describe_nuls(head)
    if b"\n" not in head and head.count(b"\r") > 1:
        return "text, but its lines end in CR alone; convert them with tr '\\r' '\\n' < OLD > NEW"
    if len(CONTROL.findall(head)) > DAMAGED_SHARE * len(head):
        return "binary data, not text"
    return ""


def _describe_nuls(head: bytes) -> str:
    share = head.count(b"\0") / len(head)
    for width, least in (("32", 0.5), ("16", 0.001)):
        for order in ("le", "be"):
            encoding = f"utf-{width}-{order}"
            if share > least and _decodes(head, encoding):
                text = codecs.getincrementaldecoder(encoding)().decode(head)
                # The wrong order makes rare characters of spaces and line ends.
                if "\0" not in text and (" " in text or "\n" in text):
                    return f"UTF-{width} without a byte order mark; convert it with --encoding {encoding}"
    if share > DAMAGED_SHARE or not _valid(head[: head.index(b"\0")]):
        return "binary data, not text (it holds NUL bytes)"
    return ""


def guess_encoding(sample: bytes) -> str:
    """Return the likely encoding of text that is not UTF-8."""
    high = [byte for byte in sample if byte >= 0x80]
    if len(high) < MANY_HIGH * len(sample):
        return "cp1252" if any(byte < 0xA0 for byte in high) else "latin-1"
    for encoding in ("gb18030", "shift_jis", "euc_kr", "big5"):
        if _decodes(sample, encoding):
            text = codecs.getincrementaldecoder(encoding)().decode(sample)
            if 2 * len(EAST_ASIAN.findall(text)) > len(text):
                return encoding
    letters = sum(byte >= 0xC0 for byte in high)
    if letters < MANY_HIGH * len(sample):
        return "cp1252"
    # Small letters, which most letters are, are the last 32 of one and the last but 32 of the other.
    return "cp1251" if 2 * sum(byte >= 0xE0 for byte in high) > letters else "koi8-r"


def check_plain_text(file: TextFile, remedy: str) -> None:
    """Raise a MetaseqError, which ends in `remedy`, if the first lines of a file are JSON or a table."""
    block = next(blocks(file, HEAD), None)
    lines = [] if block is None else block.data.decode("utf-8", "replace").split("\n")[:HEAD_LINES]
    if meaning := describe_lines(lines):
        raise MetaseqError(f"{file}: is {meaning}, not plain text; {remedy}")


def describe_lines(lines: Sequence[str]) -> str:
    """Return what the first lines of a file are, if they are JSON or a table; "" for plain text."""
    lines = [line for line in lines if line.strip()]
    if not lines:
        return ""
    if OPENS_JSON.match("\n".join(lines[:5])) or _share(map(_is_json, lines)) > 0.5:
        return "JSON lines" if _is_json(lines[0]) else "JSON"
    # Tabs in front of a line indent it.
    tabs = [line.lstrip("\t ").count("\t") for line in lines]
    if len(lines) > 1 and tabs[0] and _share(n == tabs[0] for n in tabs) >= MOST:
        return f"a table of {tabs[0] + 1} columns with tabs between them"
    for delimiter, name in ((",", "commas"), (";", "semicolons"), ("|", "bars")):
        columns = table_columns(lines, delimiter)
        if columns:
            return f"a table ({', '.join(columns)}) with {name} between its columns"
    if len(lines) > 4 and _share(bool(FIRST_FIELD.match(line)) for line in lines) >= MOST:
        return "a table without a header row"
    return ""


def _share(values: Iterable[bool]) -> float:
    answers = list(values)
    return sum(answers) / len(answers)


def _is_json(line: str) -> bool:
    line = line.strip()
    if line[:1] not in ("{", "["):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return bool(OPENS_JSON.match(line))
    return isinstance(value, (dict, list)) and bool(value)


def table_columns(lines: Sequence[str], delimiter: str) -> list[str]:
    """Return the names in the first line of a table with at least two columns; [] for other text."""
    try:
        rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter))
    except csv.Error:
        return []
    header = rows[0]
    if len(rows) < 2 or len(header) < 2 or not all(map(COLUMN_NAME.fullmatch, header)):
        return []
    # The last row may go on behind the lines looked at.
    rows = rows[1:-1] or rows[1:]
    return header if _share(len(row) == len(header) for row in rows) >= MOST else []
