"""One column of a JSON lines, table, Parquet or Arrow file, read as lines of text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.labelled.files import Columns, RowReader
from metaseq_lm.data.storage.arrow_files import arrow_batches, is_arrow
from metaseq_lm.data.storage.text_files import TextFile, decode, joined, source_bytes

_LINE_ENDS = re.compile(r"\r?\n")
_NO_COLUMN = "\0"
_U_FFFD = "\ufffd".encode()


@dataclass(frozen=True)
class MeteredFile(TextFile):
    """A text file that records how many of its bytes have been read."""

    read: list[int] = field(default_factory=lambda: [0])

    def chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        for chunk, self.read[0] in super().chunks(size):
            yield chunk, self.read[0]


@dataclass(frozen=True)
class ColumnFile(TextFile):
    """A file of records, one column of which is the text; its format is detected.

    Attributes:
        column: The name of the column.
        names: The column names of a table without a header row.
        quoting: Whether quotes around a field of a table are syntax, one of tables.QUOTING.
        documents: Whether to keep the lines of each text and end it with a blank line; otherwise a
            text becomes one line, with spaces in place of its line breaks.
    """

    column: str = "text"
    names: tuple[str, ...] | None = None
    quoting: str = "auto"
    documents: bool = False

    def chunks(self, size: int) -> Iterator[tuple[bytes, int]]:
        return joined(self._text_lines(), size)

    def _text_lines(self) -> Iterator[tuple[bytes, int]]:
        for text, bad, read in self._arrow_texts() if is_arrow(self.path) else self._texts():
            line = text.strip("\r\n")
            if self.documents:
                lines = filter(str.strip, _LINE_ENDS.split(line))
                line = "".join(f"{sentence}\n" for sentence in lines)
            else:
                line = _LINE_ENDS.sub(" ", line)
            data = f"{line}\n".encode()
            # Put an invalid byte back, so that the line is counted or skipped as in other files.
            yield data.replace(_U_FFFD, b"\xff") if bad else data, read

    def _texts(self) -> Iterator[tuple[str, bool, int]]:
        file = MeteredFile(self.path, self.on_bad_utf8, self.encoding)
        columns = Columns(
            self.names, (self.column,), _NO_COLUMN, null_is_empty=True, quoting=self.quoting
        )
        for row in RowReader(file, columns, required=False):
            yield row.texts[0], row.bad, file.read[0]

    def _arrow_texts(self) -> Iterator[tuple[str, bool, int]]:
        total, number = source_bytes(self.path), 0
        for batch, share in arrow_batches(self, self._check_column, [self.column]):
            # Cast to binary: a cast to string would fail on invalid UTF-8.
            for value in self._column_of(batch).cast("large_binary").to_pylist():
                number += 1
                text = decode(value or b"", f"{self}:{number}", self.on_bad_utf8)
                yield *text, int(share * total)

    def _check_column(self, schema: Any) -> None:
        import pyarrow

        types, kind, names, prefix = pyarrow.types, None, schema.names, ""
        for name in self._path(schema.names):
            if name not in names:
                raise MetaseqError(
                    f"{self}: no column "
                    f"'{self.column}'.{nearest(prefix + name, [prefix + n for n in names])} There "
                    f"are: {abbreviated([prefix + n for n in names])}. Choose with --text-column."
                )
            kind = (schema if kind is None else kind).field(name).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            names = [inner.name for inner in kind] if types.is_struct(kind) else []
            prefix += f"{name}."
        if names:
            raise MetaseqError(
                f"{self}: column '{self.column}' has fields; choose one of "
                f"{abbreviated([prefix + n for n in names])} with --text-column"
            )
        # Some programs write text as binary, without the type of text.
        texts = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
        if not any(is_text(kind) for is_text in texts):
            raise MetaseqError(
                f"{self}: column '{self.column}' is no text but {kind}; choose another one with "
                "--text-column"
            )

    def _path(self, columns: Sequence[str]) -> list[str]:
        """Return the column's name, followed by field names if it is nested, as in row.text."""
        return [self.column] if self.column in columns else self.column.split(".")

    def _column_of(self, batch: Any) -> Any:
        import pyarrow.compute

        first, *fields = self._path(batch.schema.names)
        column = batch.column(first)
        return pyarrow.compute.struct_field(column, fields) if fields else column
