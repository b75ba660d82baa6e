"""The text of one column of JSON lines, a table, Parquet or Arrow files, read as lines of text."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.labelled.files import Columns, RowReader
from metaseq_lm.data.storage.text_files import TextFile, decode, open_source, source_bytes

ROWS = 256  # read at once
LINE_ENDS = re.compile(r"\r?\n")
NO_COLUMN = "\0"
U_FFFD = "\ufffd".encode()
# Arrow streams, which the library datasets saves, begin with the mark of a continued message.
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"


END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class MeteredFile(TextFile):
    """A text file that remembers how many bytes of it are consumed."""

    read: list[int] = field(default_factory=lambda: [0])

    def chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        for chunk, self.read[0] in super().chunks(size):
            yield chunk, self.read[0]


@dataclass(frozen=True)
class ColumnFile(TextFile):
    """A file of records of which one column is the text; what it is, is decided by its content.

    Attributes:
        column: The name of the column.
        names: The columns of a table without header row.
        quoting: Whether quotes around a field of a table are syntax, one of tables.QUOTING.
        documents: Whether the lines of a text stay lines, and a blank line ends it; else a text is a
            line, with blanks for its line ends.
    """

    column: str = "text"
    names: tuple[str, ...] | None = None
    quoting: str = "auto"
    documents: bool = False

    @property
    def is_arrow(self) -> bool:
        """Whether it is a file of Parquet or Arrow, which the package pyarrow reads."""
        with open_source(self.path) as raw:
            return raw.read(6).startswith((PARQUET, ARROW_FILE, ARROW_STREAM))

    def chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        content, read = bytearray(), 0
        for text, bad, read in self._arrow_texts() if self.is_arrow else self._texts():
            line = text.strip("\r\n")
            if self.documents:
                lines = filter(str.strip, LINE_ENDS.split(line))
                line = "".join(f"{sentence}\n" for sentence in lines)
            else:
                line = LINE_ENDS.sub(" ", line)
            data = f"{line}\n".encode()
            # An invalid byte again, so that the lines are counted or skipped as those of other files.
            content += data.replace(U_FFFD, b"\xff") if bad else data
            if len(content) >= size:
                yield bytes(content), read
                content.clear()
        if content:
            yield bytes(content), read

    def _texts(self) -> Iterator[tuple[str, bool, int]]:
        file = MeteredFile(self.path, self.on_bad_utf8, self.encoding)
        columns = Columns(self.names, (self.column,), NO_COLUMN, quoting=self.quoting)
        for row in RowReader(file, columns, required=False):
            yield row.texts[0], row.bad, file.read[0]

    def _arrow_texts(self) -> Iterator[tuple[str, bool, int]]:
        try:
            import pyarrow
        except ImportError as error:
            raise MetaseqError(
                f"{self}: Parquet and Arrow files need the package pyarrow: pip install pyarrow"
            ) from error
        total, number = source_bytes(self.path), 0
        with open_source(self.path) as raw:
            try:
                for column, share in self._arrow_columns(raw):
                    for value in column.cast(pyarrow.large_binary()).to_pylist():
                        number += 1
                        text = decode(value or b"", f"{self}:{number}", self.on_bad_utf8)
                        yield *text, int(share * total)
            except (pyarrow.ArrowException, OSError) as error:
                raise MetaseqError(
                    f"{self}: damaged behind row {number}: {error}. Copy or write the file again."
                ) from error

    def _arrow_columns(self, raw: IO[bytes]) -> Iterator[tuple[Any, float]]:
        """Yield the column in pieces of a few rows, and the share of the file that is read by then."""
        import pyarrow
        import pyarrow.parquet

        sign = raw.read(6)
        raw.seek(0)
        if sign.startswith(PARQUET):
            file = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)
            self._check_column(file.schema_arrow)
            rows = 0
            for batch in file.iter_batches(ROWS, columns=[self.column]):
                rows += len(batch)
                yield batch.column(0), rows / file.metadata.num_rows
            return
        if sign.startswith(ARROW_FILE):
            opened = pyarrow.ipc.open_file(raw)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            raw.seek(-len(END_OF_STREAM), os.SEEK_END)
            if raw.read() != END_OF_STREAM:
                raise OSError("it has no end mark")
            raw.seek(0)
            opened = batches = pyarrow.ipc.open_stream(raw)
        self._check_column(opened.schema)
        for batch in batches:
            for start in range(0, len(batch), ROWS):
                share = raw.tell() / source_bytes(self.path)
                yield batch.column(self.column).slice(start, ROWS), min(share, 1.0)

    def _check_column(self, schema: Any) -> None:
        import pyarrow

        if self.column not in schema.names:
            raise MetaseqError(
                f"{self}: no column '{self.column}'.{nearest(self.column, schema.names)} There are: "
                f"{abbreviated(schema.names)}. Choose with --text-column."
            )
        kind = schema.field(self.column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise MetaseqError(f"{self}: column '{self.column}' is no text but {kind}")
