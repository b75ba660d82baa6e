"""The memory that parts of Parquet and Arrow files take, known before they are unpacked.

A few bytes may unpack to very many: a dictionary holds repeated values once, and pages and buffers
may compress well. Their sizes are stored before them, in the headers of Parquet's pages
(parquet.thrift, in Thrift's compact protocol) and of Arrow's buffers (Message.fbs).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import human_bytes
from metaseq_lm.data.storage.text_files import LONGEST, check_length

ROWS = 256  # rows read at once
MOST_BYTES = 2 * LONGEST  # of a page or a batch of records, which is unpacked as a whole
SLICE = 1 << 26  # bytes of rows that are converted at once
_SMALL_DICTIONARY = 1 << 16  # bytes; in a larger one the longest value is searched for
_LONGEST_HEADER = 1 << 15  # bytes of the header of a page
_DICTIONARY_PAGE = 2
# The fields of a page's header for each kind of page: data, dictionary, data of version 2.
_KIND_FIELDS = (5, 7, 8)


def _dense_bytes(array: Any) -> int:
    """Return the bytes of an Arrow array, values of a dictionary counted at each occurrence."""
    import pyarrow
    import pyarrow.compute

    types, kind = pyarrow.types, array.type
    if types.is_dictionary(kind) and _is_binary(kind.value_type):
        sizes = pyarrow.compute.binary_length(array.dictionary)
        return int(pyarrow.compute.sum(sizes.take(array.indices)).as_py() or 0)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _dense_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(map(_dense_bytes, array.flatten()))
    may_share_bytes = "view" in str(kind) or "run_end_encoded" in str(kind)
    return int(array.nbytes) * (len(array) if may_share_bytes else 1)


def _is_binary(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    variable = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    return any(is_type(kind) for is_type in variable)


def sliced(batch: Any, where: str, row: int) -> Iterator[Any]:
    """Yield a record batch, which begins at row `row`, in parts of SLICE bytes or of one row.

    MetaseqError, which begins with `where` and names row and column, for a cell that is too long.
    """
    sizes = list(map(_dense_bytes, batch.columns))
    if len(batch) > 1 and sum(sizes) > SLICE:
        half = len(batch) // 2
        yield from sliced(batch.slice(0, half), where, row)
        yield from sliced(batch.slice(half), where, row + half)
        return
    for name, size in zip(batch.schema.names, sizes):
        check_length(size, "cell", f"{where}: row {row + 1}, column '{name}'")
    yield batch


def _check_unpacked(size: int, part: str) -> None:
    if size > MOST_BYTES:
        raise MetaseqError(
            f"{part} of {human_bytes(size)}, which is unpacked as a whole; write the file again "
            f"with fewer rows in each, so that it has at most {human_bytes(MOST_BYTES)}"
        )


# -------------------------------------------------------------------- Parquet


@dataclass
class ParquetPlan:
    """How to read a Parquet file: rows at once by row group, and columns as dictionaries."""

    rows: list[int] = field(default_factory=list)
    dictionaries: list[str] = field(default_factory=list)


def parquet_plan(
    raw: IO[bytes], metadata: Any, columns: list[str] | None, where: str
) -> ParquetPlan:
    """Return how to read the row groups of a Parquet file in bounded memory, of `columns` or all.

    MetaseqError, which begins with `where`, for a cell or page that is too long; OSError for
    damage.
    """
    plan = ParquetPlan()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        bytes_of_row = 1
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            path = chunk.path_in_schema
            if columns is not None and path.partition(".")[0] not in columns:
                continue
            location = f"{where}: row group {group + 1}, column '{path}'"
            longest = _longest_value(raw, chunk, location)
            if chunk.num_values == row_group.num_rows:
                bytes_of_row += longest
            elif chunk.num_values * longest <= MOST_BYTES:
                bytes_of_row += chunk.num_values * longest // max(row_group.num_rows, 1)
            else:  # lists of any length, of values of any length
                plan.dictionaries.append(path)
        plan.rows.append(max(1, min(ROWS, LONGEST // bytes_of_row)))
    return plan


def _longest_value(raw: IO[bytes], chunk: Any, location: str) -> int:
    """Return a bound on the bytes of a value, by its dictionary or the average of a page."""
    longest = 0
    for page in _pages(raw, chunk):
        size = page.unpacked // max(page.values, 1)
        check_length(size, "cell", location)
        _check_unpacked(page.unpacked, f"{location}: a page")
        if page.kind == _DICTIONARY_PAGE and chunk.physical_type == "BYTE_ARRAY":
            size = page.unpacked
            if size > _SMALL_DICTIONARY:
                size = _longest_of_dictionary(raw, chunk, page)
                check_length(size, "cell", location)
        longest = max(longest, size)
    return longest


@dataclass
class _Page:
    """A page: its kind, unpacked and packed bytes, number of values, and begin of its content."""

    kind: int
    unpacked: int
    packed: int
    values: int
    start: int


def _pages(raw: IO[bytes], chunk: Any) -> Iterator[_Page]:
    """Yield the pages of a column in a row group."""
    offset, values = chunk.data_page_offset, 0
    if chunk.dictionary_page_offset:
        offset = min(offset, chunk.dictionary_page_offset)
    end = offset + chunk.total_compressed_size
    while offset < end and values < chunk.num_values:
        raw.seek(offset)
        header = _ThriftReader(raw.read(_LONGEST_HEADER))
        try:
            fields = header.struct()
            details = next(fields[number] for number in _KIND_FIELDS if number in fields)
            page = _Page(fields[1], fields[2], fields[3], details[1], offset + header.offset)
        except (IndexError, KeyError, StopIteration, TypeError, RecursionError) as error:
            raise OSError("the header of a page cannot be read") from error
        if min(page.unpacked, page.packed, page.values) < 0:
            raise OSError("the header of a page has a negative size")
        yield page
        values += page.values if page.kind != _DICTIONARY_PAGE else 0
        offset = page.start + page.packed


def _longest_of_dictionary(raw: IO[bytes], chunk: Any, page: _Page) -> int:
    """Return the bytes of the longest text in a page that stores each length before its text."""
    import pyarrow

    raw.seek(page.start)
    content: bytes | memoryview = raw.read(page.packed)
    if chunk.compression != "UNCOMPRESSED":
        try:
            codec = pyarrow.Codec(chunk.compression.lower())
            content = memoryview(codec.decompress(content, page.unpacked))
        except (pyarrow.ArrowException, ValueError, OSError):  # such as the older form of LZ4
            return page.unpacked
    longest = offset = 0
    while offset + 4 <= len(content):
        (size,) = struct.unpack_from("<I", content, offset)
        longest, offset = max(longest, size), offset + 4 + size
    return longest


class _ThriftReader:
    """Reads structs in Thrift's compact protocol; IndexError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data, self.offset = data, 0

    def struct(self) -> dict[int, Any]:
        """Return the fields of a struct by number; only numbers and structs, else None."""
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._integer()
            fields[number] = self._value(byte & 15)
        return fields

    def _byte(self) -> int:
        self.offset += 1
        return self._data[self.offset - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true, false
            return None
        if kind in (4, 5, 6):  # integers
            return self._integer()
        if kind == 12:
            return self.struct()
        if kind in (3, 7):  # a byte, a double
            self.offset += 1 if kind == 3 else 8
        elif kind == 8:  # bytes
            size = self._varint()
            self.offset += size
        elif kind in (9, 10):  # lists, sets
            byte = self._byte()
            for _ in range(self._varint() if byte >> 4 == 15 else byte >> 4):
                self.offset += 1 if byte & 15 in (1, 2) else 0
                self._value(byte & 15)
        else:
            raise TypeError(f"no type {kind} may occur in the header of a page")
        return None


# -------------------------------------------------------------------- Arrow


def check_record_batches(source: Any, where: str) -> None:
    """Raise a MetaseqError that begins with `where` if a compressed record batch is too large.

    `source` is a file at its first message.
    """
    import pyarrow

    number = 0
    for message in pyarrow.ipc.MessageReader.open_stream(source):
        if message.type not in ("dictionary", "record batch"):
            continue
        is_dictionary = message.type == "dictionary"
        number += not is_dictionary
        buffers = _compressed_buffers(message.metadata.to_pybytes(), is_dictionary)
        if buffers is None and not is_dictionary:
            return  # the other batches of the file are not compressed either
        sizes = [
            struct.unpack("<q", message.body.slice(start, 8).to_pybytes())[0]
            for start, length in buffers or ()
            if length >= 8
        ]
        unit = "a dictionary" if is_dictionary else f"batch {number} of records"
        _check_unpacked(sum(sizes), f"{where}: {unit}")


def _compressed_buffers(data: bytes, is_dictionary: bool) -> list[tuple[int, int]] | None:
    """Return offsets and lengths of the buffers of a message; None if not compressed."""
    (root,) = struct.unpack_from("<I", data)
    batch = _table_field(data, root, 2)
    if batch and is_dictionary:
        batch = _table_field(data, _follow(data, batch), 1)
    table = _follow(data, batch) if batch else 0
    buffers = _table_field(data, table, 2) if table else 0
    if not buffers or not _table_field(data, table, 3):
        return None
    start = _follow(data, buffers)
    (count,) = struct.unpack_from("<I", data, start)
    return list(struct.iter_unpack("<qq", data[start + 4 : start + 4 + 16 * count]))


def _follow(data: bytes, offset: int) -> int:
    return offset + int(struct.unpack_from("<I", data, offset)[0])


def _table_field(data: bytes, table: int, number: int) -> int:
    """Return the offset of a field of a FlatBuffers table, 0 if it is absent."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + int(offset) if offset else 0
