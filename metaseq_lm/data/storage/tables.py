"""Rows of CSV (RFC 4180) and TSV files; what a file is, is decided by its content."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import TextFile, blocks, format_suffix

QUOTING = ("auto", "csv", "none")
DELIMITERS = (",", ";", "\t", "|")
FIELD_LIMIT = 1 << 26  # characters; a quotation mark that is never closed does not fill the memory
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
        best = max(DELIMITERS, key=outside.count)
        delimiter = best if best in outside else delimiter
    return delimiter


def _tsv_format(file: TextFile) -> TableFormat:
    """Return the format of a TSV file: quoted if every quotation mark is one of RFC 4180, and some can be no text.

    That is a doubled mark, a tab or a line end in quotes, or a header row in which all names are.
    """
    evident, pending, width, rows, quoted_rows = False, "", 0, 0, 0
    for _, text, _ in file.lines():
        pending = f"{pending}\n{text}" if pending else text
        if pending.count('"') % 2:
            if len(pending) > FIELD_LIMIT:
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


def table_rows(file: TextFile, form: TableFormat) -> Iterator[tuple[int, list[str], bool]]:
    """Yield (number of the first line, fields, held bad UTF-8) of each row, blank ones included.

    MetaseqError with file and line for quotes that RFC 4180 does not allow.
    """
    if not form.quoted:
        for number, text, bad in file.lines():
            yield number, text.split(form.delimiter), bad
        return
    number, has_bad = 0, False

    def lines() -> Iterator[str]:
        nonlocal number, has_bad
        for line, text, bad in file.lines():
            number, has_bad = line, has_bad or bad
            # The csv module takes a CR for a line end.
            yield text.replace("\r", " ").replace("\0", "\ufffd") + "\n"

    csv.field_size_limit(FIELD_LIMIT)
    spaced = form.delimiter != "\t"
    rows = csv.reader(lines(), delimiter=form.delimiter, strict=True, skipinitialspace=spaced)
    while True:
        first, has_bad = number + 1, False
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            reason = "a quotation mark is not closed" if "end of data" in str(error) else error
            raise MetaseqError(
                f"{file}:{first}: {reason}; in a quoted field quotation marks are doubled. Mend the "
                "row, or give --quoting none if quotation marks are a part of the text"
            ) from error
        if first > 1 or fields != ["sep=", ""]:  # Excel's line that names the delimiter
            yield first, fields, has_bad
