"""Rows of CSV (RFC 4180) and TSV files, told apart by their content."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import (
    TextFile,
    blocks,
    check_length,
    format_suffix,
)

QUOTING = ("auto", "csv", "none")
_DELIMITERS = (",", ";", "\t", "|")
_QUOTED = r'"(?:[^"]|"")*"'
_ALL_QUOTED = re.compile(r'"[^"]*"(?:\t"[^"]*")*')
_MOST_BLANKS = 80
_WITHIN_QUOTES = re.compile(r'[^"]*(?:""[^"]*)*("(?=\t|$)|$)')
_OUTSIDE_QUOTES = re.compile(r'[^"\t]*(?=\t|$)')


@dataclass(frozen=True)
class TableFormat:
    """The character between the fields of a row, and whether quotes around a field are syntax.

    `remark` says whether the quotes of a TSV file, if any, were read as marks or as text.
    """

    delimiter: str = "\t"
    quoted: bool = False
    remark: str = ""


def head(file: TextFile) -> str:
    """Return the first lines of a file; MetaseqError if lines end in CR alone."""
    block = next(blocks(file), None)
    data = b"" if block is None else block.data
    if b"\r" in data.rstrip(b"\r\n") and b"\n" not in data:
        raise MetaseqError(
            f"{file}: its lines end in CR alone; convert them, for example with "
            f"tr '\\r' '\\n' < {file.path.name} > converted{file.path.suffix}"
        )
    return data.decode("utf-8", "replace")


def table_format(file: TextFile, quoting: str, has_header: bool) -> TableFormat:
    """Return the format of a file of rows.

    The delimiter is a tab if the first row has one, else the most frequent of DELIMITERS in the
    header, or in any first row of a .csv file. `quoting` is one of QUOTING; "auto" reads a file
    with tabs as quoted only if all of it is, as pandas, R and spreadsheets write it.
    """
    delimiter = table_delimiter(file, has_header)
    if quoting == "auto":
        return _tsv_format(file) if delimiter == "\t" else TableFormat(delimiter, True)
    return TableFormat(delimiter, quoting == "csv")


def table_delimiter(file: TextFile, has_header: bool = True) -> str:
    """Return the character between the fields of a table, see `table_format`."""
    line = head(file).partition("\n")[0]
    is_csv = format_suffix(file.path) == ".csv"
    outside = re.sub(_QUOTED, "", line)
    delimiter = "," if is_csv else "\t"
    if is_csv or (has_header and "\t" not in line):
        best = max(_DELIMITERS, key=outside.count)
        delimiter = best if best in outside else delimiter
    return delimiter


def _tsv_format(file: TextFile) -> TableFormat:
    """Return the format of a TSV file, decided by the whole file.

    It is quoted if every quotation mark follows RFC 4180 and the rows have equal widths only when
    read as quoted; or if they have equal widths both ways, no quotes hold a line end, and some
    marks are doubled or all names in the header are quoted.
    """
    plain_width = width = rows = quoted_rows = tabs = 0
    is_plain, is_open, has_joined, evident = True, False, False, False
    for _, text, _ in file.lines():
        if not is_open and not text.strip():
            continue
        columns = text.count("\t") + 1
        evident = evident or (not plain_width and _ALL_QUOTED.fullmatch(text) is not None)
        plain_width = plain_width or columns
        is_plain = is_plain and columns == plain_width
        if is_open or '"' in text:
            has_joined = has_joined or is_open
            quoted_rows += not is_open
            scan = _scan_quotes(text, is_open)
            if scan is None:
                return TableFormat()
            columns, is_open, has_doubled = scan
            evident = evident or has_doubled
        tabs += columns - 1
        if not is_open:
            rows, width = rows + 1, width or tabs + 1
            if tabs + 1 != width:
                return TableFormat()
            tabs = 0
    if is_open or not quoted_rows:
        return TableFormat()
    if not is_plain or (evident and not has_joined):
        remark = "is read without the quotes around fields (--quoting none keeps them)"
        return TableFormat(quoted=True, remark=remark)
    if has_joined or 2 * quoted_rows >= rows:
        return TableFormat(
            remark="has quotes around fields, which are read as text (--quoting csv)"
        )
    return TableFormat()


def _scan_quotes(text: str, is_open: bool) -> tuple[int, bool, bool] | None:
    """Return a line's number of fields, whether the last is open, and if a mark is doubled.

    `is_open` says that the line begins within quotes. None for quotes that RFC 4180 does not allow.
    """
    position, count, has_doubled = 0, 1, False
    while True:
        if not is_open and text.startswith('"', position):
            is_open, position = True, position + 1
        match = (_WITHIN_QUOTES if is_open else _OUTSIDE_QUOTES).match(text, position)
        if match is None:
            return None
        if is_open:
            has_doubled = has_doubled or '""' in match[0]
            is_open = not match[1]
        position = match.end()
        if position == len(text):
            return count, is_open, has_doubled
        count, position = count + 1, position + 1


def joins_rows(fields: Sequence[str], delimiter: str) -> bool:
    """Return whether each line of a row of several would be a row by itself without quotes."""
    lines = delimiter.join(fields).split("\n")
    return len(lines) > 1 and all(line.count(delimiter) == len(fields) - 1 for line in lines)


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names of columns, apart from "", that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1 and name]


def table_rows(file: TextFile, form: TableFormat) -> Iterator[tuple[int, list[str], bool]]:
    """Yield (number of the first line, fields, held bad UTF-8) of each row, blank ones included.

    MetaseqError with file and line for quotes that RFC 4180 does not allow.
    """
    if not form.quoted:
        for number, text, bad in file.lines():
            yield number, text.split(form.delimiter), bad
        return
    for number, fields, bad in _QuotedRows(file, form.delimiter):
        if number > 1 or fields != ["sep=", ""]:  # Excel's line that names the delimiter
            yield number, fields, bad


class _QuotedRows:
    """Iterates over rows as the csv module does, but in no more memory than their text takes."""

    def __init__(self, file: TextFile, delimiter: str) -> None:
        self._file, self._delimiter = file, delimiter
        self._lines = file.lines()
        self._text, self._position, self._bad = "", 0, False
        self._first = self._number = 0  # lines: the first of the row, the current one

    def __iter__(self) -> Iterator[tuple[int, list[str], bool]]:
        while self._next_line():
            self._first = self._number
            yield self._first, list(self._fields()), self._bad
            self._bad = False

    def _next_line(self) -> bool:
        self._number, text, bad = next(self._lines, (0, "", False))
        self._bad = self._bad or bad
        self._text, self._position = text.replace("\r", " ").replace("\0", "\ufffd"), 0
        return self._number > 0

    def _fields(self) -> Iterator[str]:
        while True:
            if self._delimiter != "\t" and self._text.startswith(" ", self._position):
                # Blanks before quotes do not belong to the field, others do.
                rest = self._text[self._position : self._position + _MOST_BLANKS]
                blanks = len(rest) - len(rest.lstrip(" "))
                if self._text.startswith('"', self._position + blanks):
                    self._position += blanks
            if self._text.startswith('"', self._position):
                yield self._quoted()
            else:
                end = self._text.find(self._delimiter, self._position)
                end = len(self._text) if end < 0 else end
                yield self._text[self._position : end]
                self._position = end
            if self._position == len(self._text):
                return
            if self._text[self._position] != self._delimiter:
                self._refuse(f"{self._delimiter!r} expected after '\"'")
            self._position += 1

    def _quoted(self) -> str:
        """Return the field that begins here, which may span several lines, and move past it."""
        field, size, start = io.StringIO(), 0, self._position + 1
        while True:
            end = self._text.find('"', start)
            if end < 0:
                field.write(self._text[start:])
                field.write("\n")
                size += 1 + len(self._text if self._text.isascii() else self._text.encode())
                check_length(size, "field", f"{self._file}:{self._first}")
                if not self._next_line():
                    self._refuse("a quotation mark is not closed")
                start = 0
            elif self._text.startswith('"', end + 1):
                field.write(self._text[start : end + 1])
                start = end + 2
            else:
                field.write(self._text[start:end])
                self._position = end + 1
                return field.getvalue()

    def _refuse(self, reason: str) -> NoReturn:
        raise MetaseqError(
            f"{self._file}:{self._first}: {reason}; in a quoted field quotation marks are doubled. "
            "Mend the row, or give --quoting none if quotation marks are a part of the text"
        )
