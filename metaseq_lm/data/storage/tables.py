"""Rows of CSV (RFC 4180) and TSV files; what a file is, is decided by its content."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import (
    LONGEST,
    TextFile,
    blocks,
    check_length,
    format_suffix,
)

QUOTING = ("auto", "csv", "none")
DELIMITERS = (",", ";", "\t", "|")
_QUOTED = r'"(?:[^"]|"")*"'
_QUOTED_TSV_FIELD = re.compile(rf'(?:^|\t)({_QUOTED}|[^"\t]*)(?=\t|$)')
_QUOTED_TSV_ROW = re.compile(rf'(?:{_QUOTED}|[^"\t]*)(?:\t(?:{_QUOTED}|[^"\t]*))*')


@dataclass(frozen=True)
class TableFormat:
    """The character between the fields of a row, and whether quotes around a field are syntax.

    `remark` says what was decided of the quotes of a TSV file, if there are some.
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
    line = head(file).partition("\n")[0]
    is_csv = format_suffix(file.path) == ".csv"
    outside = re.sub(_QUOTED, "", line)
    delimiter = "," if is_csv else "\t"
    if is_csv or (has_header and "\t" not in line):
        best = max(DELIMITERS, key=outside.count)
        delimiter = best if best in outside else delimiter
    if quoting == "auto":
        return _tsv_format(file) if delimiter == "\t" else TableFormat(delimiter, True)
    return TableFormat(delimiter, quoting == "csv")


def _tsv_format(file: TextFile) -> TableFormat:
    """Return the format of a TSV file: quoted if every quotation mark is one of RFC 4180, and some can be no text.

    That is a doubled mark, a tab or a line end in quotes, or a header row in which all names are.
    """
    evident, pending, width, rows, quoted_rows = False, "", 0, 0, 0
    for _, text, _ in file.lines():
        pending = f"{pending}\n{text}" if pending else text
        if pending.count('"') % 2:
            if len(pending) > LONGEST:
                return TableFormat()
            continue
        if '"' in pending:
            if not _QUOTED_TSV_ROW.fullmatch(pending):
                return TableFormat()
            fields = _QUOTED_TSV_FIELD.findall(pending)
            quoted_rows += 1
            inner = [field[1:-1] for field in fields if field.startswith('"')]
            evident = evident or any(re.search(r'""|\t|\n', field) for field in inner)
            evident = evident or (not width and len(inner) == len(fields))
        else:
            fields = pending.split("\t")
        if pending.strip():
            rows += 1
            width = width or len(fields)
            if len(fields) != width:
                return TableFormat()
        pending = ""
    if pending or (2 * quoted_rows < rows and not evident):
        return TableFormat()
    if evident:
        return TableFormat(
            quoted=True, remark="is read without the quotes around fields (--quoting)"
        )
    return TableFormat(remark="has quotes around fields, which are read as text (--quoting csv)")


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
    """Iterates over rows as the csv module reads them, but its fields take no more memory than their text."""

    def __init__(self, file: TextFile, delimiter: str) -> None:
        self._file, self._delimiter = file, delimiter
        self._lines = file.lines()
        self._text, self._place, self._bad = "", 0, False
        self._first = self._number = 0  # lines: the first of the row, the current one

    def __iter__(self) -> Iterator[tuple[int, list[str], bool]]:
        while self._next_line():
            self._first = self._number
            yield self._first, list(self._fields()), self._bad
            self._bad = False

    def _next_line(self) -> bool:
        self._number, text, bad = next(self._lines, (0, "", False))
        self._bad = self._bad or bad
        self._text, self._place = text.replace("\r", " ").replace("\0", "\ufffd"), 0
        return self._number > 0

    def _fields(self) -> Iterator[str]:
        while True:
            if self._delimiter != "\t":
                while self._text.startswith(" ", self._place):
                    self._place += 1
            if self._text.startswith('"', self._place):
                yield self._quoted()
            else:
                end = self._text.find(self._delimiter, self._place)
                end = len(self._text) if end < 0 else end
                yield self._text[self._place : end]
                self._place = end
            if self._place == len(self._text):
                return
            if self._text[self._place] != self._delimiter:
                self._refuse(f"{self._delimiter!r} expected after '\"'")
            self._place += 1

    def _quoted(self) -> str:
        """Return the field that begins here, which may go on over lines; move behind it."""
        field, size, start = io.StringIO(), 0, self._place + 1
        while True:
            end = self._text.find('"', start)
            if end < 0:
                field.write(self._text[start:])
                field.write("\n")
                size += len(self._text) if self._text.isascii() else len(self._text.encode())
                check_length(size, "field", f"{self._file}:{self._first}")
                if not self._next_line():
                    self._refuse("a quotation mark is not closed")
                start = 0
            elif self._text.startswith('"', end + 1):
                field.write(self._text[start : end + 1])
                start = end + 2
            else:
                field.write(self._text[start:end])
                self._place = end + 1
                return field.getvalue()

    def _refuse(self, reason: str) -> NoReturn:
        raise MetaseqError(
            f"{self._file}:{self._first}: {reason}; in a quoted field quotation marks are doubled. Mend "
            "the row, or give --quoting none if quotation marks are a part of the text"
        )
