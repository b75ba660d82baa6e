"""Rows of CSV (RFC 4180) and TSV files, told apart by their content."""

import csv
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.records.record import TABLE, Reading, Record, register_reader
from metaseq_lm.data.records.text_files import LONGEST, TextFile, check_length, format_suffix

_DELIMITERS = (",", ";", "\t", "|")
_MALFORMED_NAMED = 3  # malformed rows of a file that are named; the others are only counted
_IN_QUOTES = r'"([^"]*(?:""[^"]*)*)'
_QUOTED = re.compile(rf'{_IN_QUOTES}("|$)')
_ALL_QUOTED = re.compile(r'"[^"]*"(?:\t"[^"]*")*')
_FIELD = rf'(?:{_IN_QUOTES}"|[^"\t]*)'
_ROW = re.compile(rf"{_FIELD}(?:\t{_FIELD})*")
_OPEN_ROW = re.compile(rf"(?:{_FIELD}\t)*{_IN_QUOTES}")
csv.field_size_limit(LONGEST)


@dataclass(frozen=True)
class _TableFormat:
    """The character between the fields of a row, and whether quotes around a field are syntax.

    `remark` says whether the quotes of a TSV file, if any, were read as marks or as text.
    """

    delimiter: str = "\t"
    quoted: bool = False
    remark: str = ""


@register_reader(TABLE)
def _table_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the rows; their fields are texts, under the names in the header row."""
    names, first_joined, counts = reading.names, 0, reading.counts
    form = table_format(file, reading.quoting, names is None)
    if form.remark:
        reading.remarks.append(form.remark)
    for number, fields, is_bad in table_rows(file, form):
        if not any(map(str.strip, fields)):
            counts["blank"] += 1
            continue
        fields[0] = fields[0].removeprefix("\ufeff")  # BOM inside concatenated files
        stripped = tuple(map(str.strip, fields))
        if names is None:
            names = stripped
            if doubled := repeated(names):
                raise MetaseqError(
                    f"{file}:{number}: a column name occurs twice: {abbreviated(doubled)}"
                )
            reading.on_names(names, number)
            continue
        if stripped == names:
            counts["repeated_header"] += 1
            if counts["repeated_header"] == 1:
                reading.remarks.append(f"holds the header again in line {number}")
            continue
        if len(fields) != len(names):
            between = "tabs" if form.delimiter == "\t" else repr(form.delimiter)
            message = (
                f"{file}:{number}: {len(fields)} fields, expected {len(names)} "
                f"({abbreviated(names)}) with {between} between them"
            )
            if not reading.skip_malformed:
                raise MetaseqError(message)
            counts["malformed"] += 1
            if counts["malformed"] <= _MALFORMED_NAMED:
                show(f"{message}; the row is left out")
            continue
        lines = form.delimiter.join(fields).split("\n") if form.quoted else ()
        # Each line of such a row would be a row by itself without the quotes.
        if len(lines) > 1 and all(line.count(form.delimiter) == len(names) - 1 for line in lines):
            counts["joined_rows"] += 1
            first_joined = first_joined or number
        values: dict[str, Any] = dict(zip(names, fields))
        yield Record(values, f"{file}:{number}", counts, is_bad=is_bad, line=number)
    if first_joined:
        reading.remarks.append(
            f"in line {first_joined} quotation marks join lines that look like rows, "
            f"{counts['joined_rows']:,} times in all; --quoting none reads them apart"
        )
    if counts["malformed"] > _MALFORMED_NAMED:
        show(
            f"{file}: {counts['malformed']:,} malformed rows are left out, the first "
            f"{_MALFORMED_NAMED} are named above"
        )


@functools.lru_cache(maxsize=16)
def table_format(file: TextFile, quoting: str, has_header: bool) -> _TableFormat:
    """Return the format of a file of rows.

    The delimiter is a tab if the first row has one, else the most frequent of DELIMITERS in the
    header, or in any first row of a .csv file. `quoting` is one of QUOTING; "auto" reads a file
    with tabs as quoted only if all of it is, as pandas, R and spreadsheets write it.
    """
    delimiter = table_delimiter(file, has_header)
    if quoting == "auto" and delimiter == "\t":
        return _tsv_format(file)
    return _TableFormat(delimiter, quoting != "none")


def table_delimiter(file: TextFile, has_header: bool = True) -> str:
    """Return the character between the fields of a table, see `table_format`."""
    line = next(iter(file.first_lines), "")
    if "\r" in line.rstrip("\r") and len(file.first_lines) == 1:
        raise MetaseqError(
            f"{file}: its lines end in CR alone; convert them, for example with "
            f"tr '\\r' '\\n' < {file.path.name} > converted{file.path.suffix}"
        )
    is_csv = format_suffix(file.path) == ".csv"
    outside = _QUOTED.sub("", line)
    delimiter = "," if is_csv else "\t"
    if is_csv or (has_header and "\t" not in line):
        best = max(_DELIMITERS, key=outside.count)
        if best in outside:
            return best
    return delimiter


def _tsv_format(file: TextFile) -> _TableFormat:
    """Return the format of a TSV file, decided by the whole file.

    It is quoted if every quotation mark follows RFC 4180 and the rows have equal widths only when
    read as quoted; or if they have equal widths both ways, no quotes hold a line end, and some
    marks are doubled or all names in the header are quoted.
    """
    plain_widths: set[int] = set()
    widths: set[int] = set()
    rows = quoted_rows = tabs = 0
    is_open = has_joined = evident = False
    for _, text, _ in file.lines():
        if not is_open and not text.strip():
            continue
        evident = evident or (not plain_widths and _ALL_QUOTED.fullmatch(text) is not None)
        plain_widths.add(text.count("\t"))
        has_joined = has_joined or is_open
        line = f'"{text}' if is_open else text  # the quotes that the lines before have opened
        quoted_rows += '"' in text and not is_open
        tabs += text.count("\t")
        if '"' in line:
            evident = evident or any('""' in match[1] for match in _QUOTED.finditer(line))
            tabs += _QUOTED.sub("", line).count("\t") - text.count("\t")
            is_open = _OPEN_ROW.fullmatch(line) is not None
            if not is_open and not _ROW.fullmatch(line):
                return _TableFormat()
        if not is_open:
            widths.add(tabs)
            if len(widths) > 1:
                return _TableFormat()
            rows, tabs = rows + 1, 0
    if is_open or not quoted_rows:
        return _TableFormat()
    if len(plain_widths) > 1 or (evident and not has_joined):
        remark = "is read without the quotes around fields (--quoting none keeps them)"
        return _TableFormat(quoted=True, remark=remark)
    if has_joined or 2 * quoted_rows >= rows:
        return _TableFormat(
            remark="has quotes around fields, which are read as text (--quoting csv)"
        )
    return _TableFormat()


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names of columns, apart from "", that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1 and name]


def table_rows(file: TextFile, form: _TableFormat) -> Iterator[tuple[int, list[str], bool]]:
    """Yield (number of the first line, fields, held bad UTF-8) of each row, blank ones included.

    MetaseqError with file and line for quotes that RFC 4180 does not allow.
    """
    if not form.quoted:
        for number, text, bad in file.lines():
            yield number, text.split(form.delimiter), bad
        return
    lines = _RowLines(file, form.delimiter)
    reader = csv.reader(lines, delimiter=form.delimiter, strict=True)
    while True:
        lines.first = 0
        try:
            fields = next(reader, None)
        except csv.Error as error:
            reason = str(error).replace("\t", "\\t")
            if "end of data" in reason:
                reason = "a quotation mark is not closed"
            raise MetaseqError(
                f"{file}:{lines.first}: {reason}; "
                "in a quoted field quotation marks are doubled. Mend the row, or give --quoting "
                "none if quotation marks are a part of the text"
            ) from error
        if fields is None:
            return
        if lines.first > 1 or fields != ["sep=", ""]:  # Excel's line that names the delimiter
            yield lines.first, fields or [""], lines.is_bad


class _RowLines:
    """The lines of a file for the csv module; MetaseqError for too many that quotes join.

    Attributes:
        first: The number of the first line of a row; set to 0 before a row is read.
        is_bad: Whether the lines of the row held invalid UTF-8.
    """

    def __init__(self, file: TextFile, delimiter: str) -> None:
        self._file, self._lines = file, file.lines()
        blanks = " *" if delimiter != "\t" else ""
        self._quoted_field = re.compile(rf'(^|{re.escape(delimiter)}){blanks}({_IN_QUOTES}"?)')
        self.first, self.is_bad, self._size = 0, False, 0

    def __iter__(self) -> "_RowLines":
        return self

    def __next__(self) -> str:
        number, text, bad = next(self._lines)
        text = text.replace("\r", " ").replace("\0", "\ufffd")
        is_inside = self.first > 0  # of quotes that a line before has opened
        if not is_inside:
            self.first, self.is_bad, self._size = number, False, 0
        if ' "' in text:
            # Blanks before quotes do not belong to the field, others do.
            opened = '"' * is_inside
            text = self._quoted_field.sub(r"\1\2", opened + text).removeprefix(opened)
        self.is_bad = self.is_bad or bad
        self._size += 1 + len(text.encode())
        if number > self.first:
            check_length(self._size, "field", f"{self._file}:{self.first}")
        return f"{text}\n"
