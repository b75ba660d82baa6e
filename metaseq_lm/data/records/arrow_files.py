"""Parquet and Arrow files, read with pyarrow some rows at a time.

Text may be marked as binary by programs without a type for text. Numbers of classes become the
names that the library datasets stored for them; NaN becomes null. A value of a type that JSON
lacks, such as a timestamp, a map or an image, becomes an object that names the type, see
`record`.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import IO, Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import human_bytes
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.records.record import ARROW, Reading, Record, register_reader, unreadable
from metaseq_lm.data.records.tables import repeated
from metaseq_lm.data.records.text_content import Damage, is_utf8
from metaseq_lm.data.records.text_files import (
    LONGEST,
    TextFile,
    check_length,
    decode,
    open_source,
    source_bytes,
)

ROWS = 256  # rows read at once
MOST_BYTES = 2 * LONGEST  # of a page or a batch of records, which is unpacked as a whole
SLICE = 1 << 26  # bytes of rows that are converted at once
_MOST_PACKED = 100  # bytes that text packs into one; pages that pack better are not unpacked
# Arrow streams, which the library datasets saves, begin with the mark of a continued message.
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_FRAME = re.compile(rb"\x28\xb5\x2f\xfd|\x04\x22\x4d\x18")  # zstd, LZ4
# The features that the library datasets records for columns that are not media.
_PLAIN_FEATURES = (None, "Value", "ClassLabel", "Sequence", "List", "LargeList", "Translation")
_FAMILIES = {
    **dict.fromkeys(("string", "large_string", "string_view"), "text"),
    **dict.fromkeys(("binary", "large_binary", "binary_view", "fixed_size_binary"), "binary"),
    **dict.fromkeys(("list", "large_list", "fixed_size_list"), "list"),
    **dict.fromkeys(("halffloat", "float", "double"), "float"),
    **dict.fromkeys("int8 int16 int32 int64 uint8 uint16 uint32 uint64".split(), "integer"),
}
_Convert = Callable[[Any], Any]


@register_reader(ARROW, lambda file, head: head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM)))
def _arrow_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the rows; MetaseqError for damage, a cell that is too long, or two equal columns."""
    converter: _RowConverter | None = None
    damage = None if file.is_judged else Damage()
    number = 0
    for batch in _arrow_batches(file, reading.column):
        converter = converter or _RowConverter(batch.schema, file)
        for row in converter.rows(batch, number):
            number += 1
            if damage is not None and converter.bad_value:
                damage.add(converter.bad_value, number)
            where, is_bad = f"{file}:{number}", bool(converter.bad_value)
            yield Record(row, where, reading.counts, is_bad=is_bad, line=number)
    if damage is not None:
        damage.lines = number
        file.is_judged = True
        damage.judge(str(file))


# -------------------------------------------------------------------- bounded batches


def _arrow_batches(file: TextFile, column: str | None = None) -> Iterator[Any]:
    """Yield record batches of at most ROWS rows, of `column` or of all if it is not there.

    MetaseqError for a cell that is too long, for damage, and without pyarrow.
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
            for batch in _batches(raw, file, column):
                for part in _sliced(batch, str(file), number):
                    yield part
                    number += len(part)
        except pyarrow.ArrowMemoryError as error:
            raise MetaseqError(f"{file}: too little memory behind row {number}: {error}") from error
        except (pyarrow.ArrowException, OSError) as error:
            raise MetaseqError(
                f"{file}: damaged behind row {number}: {str(error).rstrip('.')}. Copy or write the "
                "file again."
            ) from error


def _batches(raw: IO[bytes], source: TextFile, column: str | None) -> Iterator[Any]:
    """Yield record batches, and note in `source` how much has been read."""
    import pyarrow

    sign, size = raw.read(6), source_bytes(source.path)
    raw.seek(0)
    if sign.startswith(_PARQUET):
        for batch, share in _parquet_batches(raw, str(source), column):
            source.read = int(share * size)
            yield batch
        return
    if sign.startswith(_ARROW_FILE):
        raw.seek(8)
        _check_messages(raw, str(source))
        opened = pyarrow.ipc.open_file(raw)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    else:
        # pyarrow takes a stream that is cut off between two messages for a whole one.
        raw.seek(-len(_END_OF_STREAM), os.SEEK_END)
        if raw.read() != _END_OF_STREAM:
            raise OSError("it has no end mark")
        raw.seek(0)
        _check_messages(raw, str(source))
        raw.seek(0)
        batches = pyarrow.ipc.open_stream(raw)
    for batch in batches:
        for start in range(0, len(batch), ROWS):
            source.read = min(raw.tell(), size)
            yield batch.slice(start, ROWS)


def _parquet_batches(raw: IO[bytes], where: str, column: str | None) -> Iterator[tuple[Any, float]]:
    """Yield batches of Parquet.

    A few bytes may unpack to very many: columns that repeat values stay dictionaries, and so few
    rows are read at once that values of average size fit into LONGEST.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(raw)
    metadata, names = file.metadata, file.schema_arrow.names
    first = [name for name in (column, column and column.partition(".")[0]) if name in names][:1]
    columns = first or None
    dictionaries: set[str] = set()
    counts = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        bytes_of_row = 1
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            path = chunk.path_in_schema
            if columns is not None and path.partition(".")[0] not in columns:
                continue
            place = f"{where}: row group {group + 1}, column '{path}'"
            size = chunk.total_uncompressed_size
            check_length(size // max(chunk.num_values, 1), "cell", place)
            if size > MOST_BYTES and size > _MOST_PACKED * chunk.total_compressed_size:
                raise MetaseqError(
                    f"{place}: {human_bytes(size)} in few bytes; write the file again with fewer "
                    "rows in each row group"
                )
            bytes_of_row += size // max(row_group.num_rows, 1)
            is_map = "map<" in str(file.schema_arrow.field(path.partition(".")[0]).type)
            if chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page and not is_map:
                dictionaries.add(path)
        counts.append(max(1, min(ROWS, LONGEST // bytes_of_row)))
    # With pre_buffer pyarrow would read the columns of a whole row group ahead.
    file = pyarrow.parquet.ParquetFile(
        raw, read_dictionary=sorted(dictionaries), pre_buffer=False, buffer_size=1 << 20
    )
    rows = 0
    for group, count in enumerate(counts):
        for batch in file.iter_batches(count, [group], columns):
            rows += len(batch)
            yield batch, rows / metadata.num_rows


def _check_messages(source: Any, where: str) -> None:
    """Raise a MetaseqError that begins with `where` if a compressed record batch is too large.

    `source` is a file at its first message. Each compressed buffer begins with its unpacked size,
    8 bytes, and the sign of a frame of zstd or LZ4.
    """
    import pyarrow

    number = 0
    for message in pyarrow.ipc.MessageReader.open_stream(source):
        if message.type not in ("dictionary", "record batch"):
            continue
        number += message.type == "record batch"
        body = memoryview(message.body) if message.body is not None else b""
        size = 0
        for match in _FRAME.finditer(body):
            unpacked = int.from_bytes(body[max(match.start() - 8, 0) : match.start()], "little")
            # Text may hold the signs; what stands before them then is no size of a buffer.
            if unpacked < 1 << 40:
                size += unpacked
        if size > MOST_BYTES:
            unit = "a dictionary" if message.type == "dictionary" else f"batch {number} of records"
            raise MetaseqError(
                f"{where}: {unit} of {human_bytes(size)}, which is unpacked as a whole; write the "
                f"file again with fewer rows in each, so that it has at most "
                f"{human_bytes(MOST_BYTES)}"
            )


def _dense_bytes(array: Any) -> int:
    """Return the bytes of an Arrow array, values of a dictionary counted at each occurrence."""
    import pyarrow.compute

    kind, family = array.type, _family(array.type)
    if family == "dictionary" and _family(kind.value_type) in ("text", "binary"):
        sizes = pyarrow.compute.binary_length(array.dictionary)
        return int(pyarrow.compute.sum(sizes.take(array.indices)).as_py() or 0)
    if family == "list":
        return _dense_bytes(array.flatten())
    if family == "struct":
        return sum(map(_dense_bytes, array.flatten()))
    # Rows of these types may share bytes, at worst all of them.
    shares = "view" in str(kind) or "run_end_encoded" in str(kind)
    return int(array.nbytes) * (len(array) if shares else 1)


def _sliced(batch: Any, where: str, row: int) -> Iterator[Any]:
    """Yield a record batch, which begins at row `row`, in parts of SLICE bytes or of one row.

    MetaseqError, which begins with `where` and names row and column, for a cell that is too long.
    """
    sizes = list(map(_dense_bytes, batch.columns))
    if len(batch) > 1 and sum(sizes) > SLICE:
        half = len(batch) // 2
        yield from _sliced(batch.slice(0, half), where, row)
        yield from _sliced(batch.slice(half), where, row + half)
        return
    for name, size in zip(batch.schema.names, sizes):
        check_length(size, "cell", f"{where}: row {row + 1}, column '{name}'")
    yield batch


# -------------------------------------------------------------------- values


class _BinaryColumn:
    """Decodes the values of a binary column, unless most of the first ones are not text."""

    def __init__(self, type_name: str, converter: "_RowConverter") -> None:
        self._type_name, self._converter = type_name, converter
        self.is_text: bool | None = None
        self._values = self._invalid = 0

    def __call__(self, data: bytes) -> Any:
        if self._converter.examines:
            self._values += 1
            self._invalid += b"\0" in data or (self._converter.is_utf8 and not is_utf8(data))
            return None
        if self.is_text is False:
            return unreadable(self._type_name)
        return self._converter.text(data)

    def decide(self) -> None:
        """Decide whether the column is text, if it has had values."""
        if self.is_text is None and self._values:
            self.is_text = 2 * self._invalid <= self._values


class _RowConverter:
    """Converts record batches of one schema to rows.

    Bytes that are not UTF-8 are decoded from the file's encoding, or treated as the file says.

    Attributes:
        bad_value: The last value of the current row with bytes that are not UTF-8, else b"".
        examines: Whether values are only examined, so that binary columns can decide.
    """

    def __init__(self, schema: Any, file: TextFile) -> None:
        if doubled := repeated(schema.names):
            raise MetaseqError(f"{file}: a column name occurs twice: {abbreviated(doubled)}")
        self._file, self._number = file, 0
        self.bad_value = b""
        self.is_utf8 = file.is_utf8
        self.examines = False
        self._binary_columns: list[_BinaryColumn] = []
        features = _features(schema)
        self._types = {field.name: _as_binary(field.type) for field in schema}
        self._converts = {
            field.name: self._convert(field.type, features.get(field.name)) for field in schema
        }

    def rows(self, batch: Any, number: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a record batch, which begins after row `number`."""
        columns = {
            name: _values(column, self._types[name])
            for name, column in zip(batch.schema.names, batch.columns)
        }
        if any(column.is_text is None for column in self._binary_columns):
            self.examines = True
            for name, values in columns.items():
                for value in values:
                    self._converts[name](value)
            for binary in self._binary_columns:
                binary.decide()
            self.examines = False
        for self._number, row in enumerate(zip(*columns.values()), number + 1):
            self.bad_value = b""
            yield {
                name: convert(value) for (name, convert), value in zip(self._converts.items(), row)
            }

    def _convert(self, kind: Any, feature: Any) -> _Convert:
        """Return the function that converts values of a type, given the feature of `datasets`."""
        convert = self._convert_present(kind, feature)
        return lambda value: None if value is None else convert(value)

    def _convert_present(self, kind: Any, feature: Any) -> _Convert:
        if isinstance(feature, list) and feature:  # a list, in older versions
            feature = feature[0]
        if not isinstance(feature, dict):
            feature = {}
        inside, media = feature.get("feature", feature), feature.get("_type")
        family = _family(kind)
        if family == "dictionary":
            return self._convert_present(kind.value_type, feature)
        if family == "struct" and isinstance(media, str) and media not in _PLAIN_FEATURES:
            return lambda value: unreadable(media)
        if family == "struct":
            if not isinstance(inside, dict):
                inside = {}
            converts = {f.name: self._convert(f.type, inside.get(f.name)) for f in kind}
            return lambda row: {name: converts[name](value) for name, value in row.items()}
        if family == "list":
            convert = self._convert(kind.value_type, inside)
            return lambda values: list(map(convert, values))
        if family == "binary":
            self._binary_columns.append(_BinaryColumn(str(kind), self))
            return self._binary_columns[-1]
        if family == "integer":
            names = feature.get("names")
            numbered = dict(enumerate(names)) if isinstance(names, list) else {}
            return lambda value: numbered.get(value, value)
        simple: dict[str, _Convert] = {
            "text": self.text,
            "decimal": _number,
            "float": lambda value: None if math.isnan(value) else float(value),
            "bool": bool,
        }
        return simple.get(family, lambda value: unreadable(str(kind)))

    def text(self, data: bytes | str) -> str:
        if isinstance(data, str):
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            if not self.is_utf8:
                return data.decode(self._file.encoding, "replace")
            if self.examines:
                return ""
            self.bad_value = data
            return decode(data, f"{self._file}:{self._number}", self._file.on_bad_utf8)[0]


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _family(kind: Any) -> str:
    """Return the name of a type, without its parameters, or of the family that it belongs to."""
    # By their names, because some versions of pyarrow have no function for views.
    name = re.split(r"[<(\[]", str(kind))[0]
    return _FAMILIES.get(name) or ("decimal" if name.startswith("decimal") else name)


def _as_binary(kind: Any) -> Any:
    """Return a type with binary values for texts, which may hold invalid UTF-8."""
    import pyarrow

    family = _family(kind)
    if family == "dictionary":
        return _as_binary(kind.value_type)
    if family == "text":
        return pyarrow.large_binary()
    if family == "struct":
        return pyarrow.struct([field.with_type(_as_binary(field.type)) for field in kind])
    if family != "list":
        return kind
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(_as_binary(kind.value_type))
    return pyarrow.list_(_as_binary(kind.value_type), getattr(kind, "list_size", -1))


def _values(column: Any, kind: Any) -> list[Any]:
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        texts = _values(column.dictionary, kind)
        return [None if at is None else texts[at] for at in column.indices.to_pylist()]
    # This version of pyarrow may not convert nested types; invalid UTF-8 is an error then.
    with contextlib.suppress(pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        if column.type != kind:
            column = column.cast(kind)
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise OSError("invalid UTF-8 in a list") from error


def _features(schema: Any) -> Mapping[str, Any]:
    try:
        note = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = note["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}
