"""Parquet and Arrow files, read with pyarrow some rows at a time and recognised by content."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.arrow_bounds import ROWS, check_record_batches, parquet_plan, sliced
from metaseq_lm.data.storage.arrow_values import RowConverter
from metaseq_lm.data.storage.text_files import TextFile, joined, open_source, source_bytes

# Arrow streams, which the library datasets saves, begin with the mark of a continued message.
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def is_arrow(path: Path) -> bool:
    """Return whether a file is Parquet or Arrow, which the package pyarrow reads."""
    if path.exists() and not path.is_file():  # opening a pipe could block for ever
        return False
    try:
        with open_source(path) as raw:
            return raw.read(6).startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM))
    except OSError:  # reading it reports why
        return False


def arrow_batches(
    file: TextFile,
    check_schema: Callable[[Any], None],
    columns: list[str] | None = None,
) -> Iterator[tuple[Any, float]]:
    """Yield record batches of at most ROWS rows, and the share of the file read by then.

    `check_schema` gets the schema first; from Parquet only `columns` are read. MetaseqError for a
    cell that is too long.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MetaseqError(
            f"{file}: Parquet and Arrow files need pyarrow: pip install 'metaseq-lm[arrow]'"
        ) from error
    number = 0
    with open_source(file.path) as raw:
        try:
            for batch, share in _batches(raw, file, check_schema, columns):
                for part in sliced(batch, str(file), number):
                    yield part, share
                    number += len(part)
        except pyarrow.ArrowMemoryError as error:
            raise MetaseqError(f"{file}: too little memory behind row {number}: {error}") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise MetaseqError(
                f"{file}: damaged behind row {number}: {str(error).rstrip('.')}. Copy or write the "
                "file again."
            ) from error


def _batches(
    raw: IO[bytes],
    source: TextFile,
    check_schema: Callable[[Any], None],
    columns: list[str] | None,
) -> Iterator[tuple[Any, float]]:
    import pyarrow
    import pyarrow.parquet

    sign = raw.read(6)
    raw.seek(0)
    if sign.startswith(_PARQUET):
        file = pyarrow.parquet.ParquetFile(raw)
        check_schema(file.schema_arrow)
        metadata, rows = file.metadata, 0
        plan = parquet_plan(raw, metadata, columns, str(source))
        file = pyarrow.parquet.ParquetFile(
            raw, read_dictionary=plan.dictionaries, pre_buffer=False, buffer_size=1 << 20
        )
        for group, count in enumerate(plan.rows):
            for batch in file.iter_batches(count, [group], columns):
                rows += len(batch)
                yield batch, rows / metadata.num_rows
        return
    size = source_bytes(source.path)
    if sign.startswith(_ARROW_FILE):
        raw.seek(8)
        check_record_batches(raw, str(source))
        opened = pyarrow.ipc.open_file(raw)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    else:
        raw.seek(-len(_END_OF_STREAM), os.SEEK_END)
        if raw.read() != _END_OF_STREAM:
            raise OSError("it has no end mark")
        raw.seek(0)
        check_record_batches(raw, str(source))
        raw.seek(0)
        opened = batches = pyarrow.ipc.open_stream(raw)
    check_schema(opened.schema)
    for batch in batches:
        for start in range(0, len(batch), ROWS):
            yield batch.slice(start, ROWS), min(raw.tell() / size, 1.0)


@dataclass(frozen=True)
class ArrowFile(TextFile):
    """A Parquet or Arrow file as JSON lines, one per row, with the values of `RowConverter`.

    Bytes that are not UTF-8 stay in the lines, which are counted or skipped like lines of other
    files, unless `value_encoding` is another encoding.
    """

    value_encoding: str = "utf-8"

    def raw_chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        return joined(self._json_lines(), size)

    def _json_lines(self) -> Iterator[tuple[bytes, int]]:
        converters: list[RowConverter] = []

        def open_schema(schema: Any) -> None:
            converters.append(RowConverter(schema, str(self), self.value_encoding))

        number, total = 0, source_bytes(self.path)
        for batch, share in arrow_batches(self, open_schema):
            try:
                rows = list(converters[0].rows(batch))
            except UnicodeDecodeError as error:
                raise MetaseqError(
                    f"{self}: invalid UTF-8 in the {len(batch)} rows behind row {number}; write "
                    "the file again"
                ) from error
            number += len(batch)
            for row in rows:
                text = json.dumps(row, ensure_ascii=False)
                yield text.encode("utf-8", "surrogateescape") + b"\n", int(share * total)
