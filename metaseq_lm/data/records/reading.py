"""The records of a file of any kind, by the reader for its content."""

from collections.abc import Iterator

from metaseq_lm.data.records import arrow_files, conll, json_files, plain_text, tables  # noqa: F401
from metaseq_lm.data.records.file_kinds import is_conllu, is_json
from metaseq_lm.data.records.record import (
    COLUMNS,
    CONLLU,
    JSON,
    READERS,
    TABLE,
    Reading,
    Record,
    signed_reader,
)
from metaseq_lm.data.records.tables import table_format, table_rows
from metaseq_lm.data.records.text_files import TextFile


def records(
    file: TextFile, reading: Reading | None = None, expected: str = TABLE
) -> Iterator[Record]:
    """Yield the records of a file; MetaseqError with file and line for what cannot be read.

    `expected` names the reader of a file whose content says nothing else.
    """
    return READERS[reader_name(file, expected)](file, reading or Reading())


def reader_name(file: TextFile, expected: str = TABLE) -> str:
    """Return the name of the reader of a file."""
    if name := signed_reader(file):
        return name
    if is_json(file):
        return JSON
    return CONLLU if expected == COLUMNS and is_conllu(file) else expected


def column_names(file: TextFile) -> tuple[str, ...]:
    """Return the fields of the first object of a file, or the first row of a table."""
    if reader_name(file) != TABLE:
        return tuple(next((record.fields for record in records(file)), ()))
    form = table_format(file, "none", has_header=True)
    first = next((row for _, row, _ in table_rows(file, form) if any(map(str.strip, row))), [])
    return tuple(name.strip('\ufeff \t"') for name in first)


def judge(file: TextFile) -> None:
    """Read a whole file to judge the damage in it, unless that is done or allowed."""
    if not signed_reader(file):
        file.judge()
    elif not file.is_judged:
        for _ in records(file):
            pass
