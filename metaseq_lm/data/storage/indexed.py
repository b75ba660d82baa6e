"""Token files in the Megatron-core `.bin/.idx` layout; fairseq's older header is also read.

`.idx` is the magic `MMIDIDX\\0\\0`, u64 version, u8 dtype code, u64 sequence count, in Megatron's
layout u64 document count, then int32 sizes (tokens), int64 pointers (bytes) and, in Megatron's
layout, int64 document indices; all little-endian. `.bin` holds only the tokens.
Layouts: megatron/core/datasets/indexed_dataset.py and fairseq/data/indexed_dataset.py.
"""

import array
import contextlib
import os
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from metaseq_lm.core.errors import MetaseqError, MissingError
from metaseq_lm.core.files import full_disk_message, sync_folder, temporary_name

MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_FAIRSEQ_HEADER = 26
_MEGATRON_HEADER = 34
MAX_SIZE = 2**31 - 1

# Both share codes 1 to 5 and 8; 7 means another width in each, and 9, 10 are fairseq's alone.
_COMMON = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 8: "u2"}
_MEGATRON_DTYPES = {code: np.dtype("<" + s) for code, s in {**_COMMON, 7: "f4"}.items()}
_FAIRSEQ_DTYPES = {
    code: np.dtype("<" + s) for code, s in {**_COMMON, 7: "f8", 9: "u4", 10: "u8"}.items()
}
CHUNK = 1 << 20


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 for vocabularies below 65,500 (the bound both peers use), else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def prefix_path(prefix: str | Path, suffix: str) -> Path:
    """Return the path of one file of a pair; the prefix may itself contain dots."""
    return Path(f"{os.fspath(prefix)}{suffix}")


class _Header:
    """The fixed part of an index, and where its three tables begin and end."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(_MEGATRON_HEADER)
        if head[:9] != MAGIC[: len(head)] or not head:
            raise MetaseqError(
                f"{path}: not an index of tokens (its first 9 bytes are not MMIDIDX). "
                "Make the pair with 'metaseq-lm preprocess'."
            )
        if len(head) < _FAIRSEQ_HEADER:
            raise MetaseqError(
                f"{path}: cut off inside the header ({size} bytes, at least {_FAIRSEQ_HEADER} "
                "expected). Copy the pair again or run 'metaseq-lm preprocess' again."
            )
        version, code, self.count = struct.unpack_from("<QBQ", head, len(MAGIC))
        if version != _VERSION:
            raise MetaseqError(f"{path}: format version {version}; this program reads {_VERSION}.")
        # The sequence count has the same offset in both layouts, and Megatron's index is
        # always at least 8 bytes longer, so one file size never fits both.
        self.documents: int | None = None
        self.start = _FAIRSEQ_HEADER
        self.dtypes = _FAIRSEQ_DTYPES
        tables = 12 * self.count
        if size != _FAIRSEQ_HEADER + tables:
            self.documents = struct.unpack_from("<Q", head, 26)[0] if len(head) == 34 else 0
            self.start = _MEGATRON_HEADER
            self.dtypes = _MEGATRON_DTYPES
            self._check_size(path, size, _MEGATRON_HEADER + tables + 8 * self.documents)
        if code not in self.dtypes:
            raise MetaseqError(
                f"{path}: unknown data type code {code}; known are {sorted(self.dtypes)}. "
                "The file is damaged or made by a newer program."
            )
        self.dtype = self.dtypes[code]

    def _check_size(self, path: Path, size: int, expected: int) -> None:
        if self.count and size == expected + self.count:
            raise MetaseqError(f"{path}: has sequence modes (multimodal data), only text is read.")
        if size != expected:
            raise MetaseqError(
                f"{path}: {size} bytes, but the header announces {self.count} sequences and "
                f"{self.documents} document indices, {expected} bytes in Megatron's layout "
                f"({_FAIRSEQ_HEADER + 12 * self.count} in fairseq's). The file is truncated or "
                "damaged: copy it again or run 'metaseq-lm preprocess' again."
            )


class IndexedDataset:
    """A read-only, memory-mapped list of token sequences stored as `prefix.bin`, `prefix.idx`.

    Opening checks the header, the size of both files and that they end together. The tables are
    read, and every entry checked, when one of them is first used; a reader of the token stream
    alone opens a corpus of any size in constant time and memory.

    Attributes:
        sizes: The number of tokens of each sequence, int64.
        starts: The offset of each sequence in tokens, int64.
        documents: The first sequence of each document, and the number of sequences, int64
            (documents + 1).
        tokens: The memory map of the whole .bin file.
        dtype: The type of the tokens.

    Raises:
        MetaseqError: A file is missing or damaged.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = os.fspath(prefix)
        index, data = prefix_path(prefix, ".idx"), prefix_path(prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                raise MissingError(
                    f"{path}: no such file. A data set is a pair .bin and .idx made by "
                    "'metaseq-lm preprocess'."
                )
        self._index = index
        self._header = header = _Header(index)
        self.dtype = header.dtype
        total = self._stored_total()
        actual = data.stat().st_size
        if actual != total * self.dtype.itemsize:
            total = int(self.sizes.sum())  # raises the error of a damaged table
            raise MetaseqError(
                f"{data}: {actual} bytes, but {index.name} describes {total} tokens of "
                f"{self.dtype.name}, {total * self.dtype.itemsize} bytes. The two files do not "
                "belong together or one is truncated: copy them again or preprocess again."
            )
        # mmap refuses an empty file. A plain array is faster to index than a memmap.
        memory = np.memmap(data, self.dtype, "r") if total else np.frombuffer(b"", self.dtype)
        self.tokens = np.asarray(memory)

    def _stored_total(self) -> int:
        """Return the number of tokens by the last size and the last pointer."""
        count, at = self._header.count, self._header.start
        if not count:
            return 0
        size = np.fromfile(self._index, "<i4", 1, offset=at + 4 * (count - 1))
        pointer = np.fromfile(self._index, "<i8", 1, offset=at + 4 * count + 8 * (count - 1))
        return int(pointer[0]) // self.dtype.itemsize + int(size[0])

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The sizes and the starts of all sequences, compared with the stored pointers."""
        index, count, at = self._index, self._header.count, self._header.start
        sizes = np.fromfile(index, "<i4", count, offset=at).astype(np.int64)
        if len(sizes) and sizes.min() < 0:
            raise self._damage_error(f"sequence {int(sizes.argmin())} has a negative size.")
        starts = np.zeros(count, np.int64)
        np.cumsum(sizes[:-1], out=starts[1:])
        at += 4 * count
        for first in range(0, count, CHUNK):  # in pieces of bounded memory
            part = starts[first : first + CHUNK] * self.dtype.itemsize
            stored = np.fromfile(index, "<i8", len(part), offset=at + 8 * first)
            wrong = np.flatnonzero(part != stored)
            if len(wrong):
                i = int(wrong[0])
                raise self._pointer_error(first + i, int(stored[i]), int(part[i]))
        return sizes, starts

    def read_sizes(self, chunk: int) -> Iterator[np.ndarray]:
        """Yield sizes, int32, of `chunk` sequences at a time; MetaseqError for a negative one."""
        with open(self._index, "rb") as file:
            file.seek(self._header.start)
            for first in range(0, len(self), chunk):
                sizes = np.fromfile(file, "<i4", min(chunk, len(self) - first))
                if sizes.min() < 0:
                    raise self._damage_error(
                        f"sequence {first + int(sizes.argmin())} has a negative size."
                    )
                yield sizes

    @cached_property
    def stored_sizes(self) -> np.ndarray:
        """The memory map of the sizes as they are stored, unchecked, int32."""
        return self._map("<i4", self._header.start)

    @cached_property
    def _pointers(self) -> np.ndarray:
        return self._map("<i8", self._header.start + 4 * len(self))

    def _map(self, dtype: str, offset: int) -> np.ndarray:
        if not len(self):
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(self._index, dtype, "r", offset, (len(self),)))

    def check_pointers(self, sequences: np.ndarray, starts: np.ndarray) -> None:
        """Raise MetaseqError unless `sequences` (n,) are stored as beginning at `starts` (n,)."""
        stored, expected = self._pointers[sequences], starts * self.dtype.itemsize
        wrong = np.flatnonzero(stored != expected)
        if len(wrong):
            i = int(wrong[0])
            raise self._pointer_error(int(sequences[i]), int(stored[i]), int(expected[i]))

    def _pointer_error(self, sequence: int, stored: int, expected: int) -> MetaseqError:
        return self._damage_error(
            f"pointer {sequence} is {stored}, the sizes give {expected} (older tools let it "
            "overflow past 2 GiB)."
        )

    @property
    def sizes(self) -> np.ndarray:
        return self._tables[0]

    @property
    def starts(self) -> np.ndarray:
        return self._tables[1]

    @cached_property
    def documents(self) -> np.ndarray:
        header = self._header
        if header.documents is None:
            return np.arange(header.count + 1, dtype=np.int64)
        at = header.start + 12 * header.count
        ends = np.fromfile(self._index, "<i8", header.documents, offset=at)
        if not len(ends) or ends[0] != 0 or ends[-1] != header.count or (np.diff(ends) < 0).any():
            raise self._damage_error(
                f"document indices must rise from 0 to the {header.count} sequences."
            )
        return ends

    def _damage_error(self, problem: str) -> MetaseqError:
        size = self._index.stat().st_size
        return MetaseqError(
            f"{self._index}: {size} bytes, damaged or truncated; copy or preprocess it again: "
            + problem
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A memmap would be copied whole into another process; its name is enough.
        return IndexedDataset, (self.prefix,)

    def __len__(self) -> int:
        return int(self._header.count)

    def __getitem__(self, i: int) -> np.ndarray:
        start = int(self.starts[i])
        return self.tokens[start : start + int(self.sizes[i])]

    def gather(
        self, indices: npt.ArrayLike, pad: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return many sequences in one array, padded on the right.

        Values are int64 (rows, `length`); longer sequences are cut. The second result is the number
        of tokens kept, int64 (rows,). IndexError for an index out of range.
        """
        rows = np.asarray(indices, dtype=np.int64)
        lengths = np.minimum(self.sizes[rows], length)
        values = np.full((len(rows), length), pad, np.int64)
        places = concatenate_ranges(self.starts[rows], lengths)
        values[np.arange(length) < lengths[:, None]] = self.tokens[places]
        return values, lengths


def open_integers(prefix: str | Path) -> IndexedDataset:
    """Open a pair of files of tokens or other whole numbers; MetaseqError if it holds none."""
    data = IndexedDataset(prefix)
    if data.dtype.kind not in "iu":
        raise MetaseqError(f"{data.prefix}.bin: holds {data.dtype}, not whole numbers")
    return data


def number_outside(values: np.ndarray, count: int) -> int | None:
    """Return the least value if it is negative, or the greatest from `count` on; None for neither.

    Values are whole numbers, such as token ids for a vocabulary of `count` symbols.
    """
    if not len(values):
        return None
    least, most = int(values.min()), int(values.max())
    if least < 0:
        return least
    return most if most >= count else None


def concatenate_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers starts[i] to starts[i] + counts[i] - 1 for all i, end to end."""
    shifts = starts - (np.cumsum(counts) - counts)
    return np.asarray(np.arange(np.sum(counts)) + np.repeat(shifts, counts))


class IndexedWriter:
    """Write a `.bin/.idx` pair under temporary names, renamed at a clean end.

    A context manager: leaving it cleanly fsyncs and renames both files, an exception removes the
    written files. Memory is 4 bytes per sequence. Every sequence is a document of its own, or, with
    `documents`, only `end_documents` ends one.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike, documents: bool = False) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in _MEGATRON_DTYPES.items() if known == self.dtype]
        if not codes:
            raise ValueError(f"{np.dtype(dtype)} cannot be stored; use one of Megatron's types")
        self._code = codes[0]
        self._final = [prefix_path(prefix, suffix) for suffix in (".bin", ".idx")]
        self._temporary = [temporary_name(path) for path in self._final]
        self._sizes = array.array("i")
        self._ends = array.array("q", [0]) if documents else None
        self.tokens = 0
        # Share of the input written so far, to estimate the need when the disk is full.
        self.fraction = 1.0

    def __len__(self) -> int:
        return len(self._sizes)

    def __enter__(self) -> "IndexedWriter":
        with full_disk_message(self._final[0]):
            self._file = open(self._temporary[0], "xb")
        return self

    def add(self, tokens: npt.ArrayLike) -> None:
        """Append one sequence; ValueError if a token does not fit the data type."""
        values = np.asarray(tokens)
        self.extend(values, np.array([len(values)], np.int64))

    def extend(self, values: np.ndarray, sizes: np.ndarray, joins: bool = False) -> None:
        """Append many sequences, given end to end in `values`, their lengths in `sizes`.

        With `joins` the first one, if any, goes on with the last sequence.
        """
        assert int(np.sum(sizes)) == len(values)
        if joins and len(sizes):
            sizes = np.asarray(sizes, np.int64).copy()
            sizes[0] += self._sizes.pop()
        self._check_size(int(np.max(sizes, initial=0)))
        self._write(values)
        self._sizes.frombytes(np.asarray(sizes, np.int32).tobytes())
        self.tokens += len(values)

    def end_documents(self, ends: npt.ArrayLike) -> None:
        """End a document before each of these sequences, in ascending order; 0 is the first.

        No end may lie before an earlier one. A document without sequences is not counted.
        """
        assert self._ends is not None
        new = np.unique(np.asarray(ends, np.int64))
        assert not len(new) or (self._ends[-1] <= new[0] and new[-1] <= len(self))
        self._ends.frombytes(new[new > self._ends[-1]].tobytes())

    @property
    def documents(self) -> int:
        """The number of documents so far, including the one that has not ended."""
        if self._ends is None:
            return len(self)
        return len(self._ends) - (self._ends[-1] == len(self))

    def _check_size(self, size: int) -> None:
        if size > MAX_SIZE:
            raise MetaseqError(
                f"{self._final[0]}: a document of {size} tokens; the format holds {MAX_SIZE}. "
                "Split it."
            )

    def _write(self, values: np.ndarray) -> None:
        stored = np.asarray(values)
        if stored.dtype != self.dtype:
            stored = stored.astype(self.dtype)
            if self.dtype.kind in "iu" and not np.array_equal(stored, values):
                raise ValueError(f"a value does not fit {self.dtype}: max {np.max(values)}")
        with full_disk_message(self._final[0], self._needed):
            self._file.write(stored.data if len(stored) else b"")

    def _needed(self) -> int:
        tokens = self.tokens * self.dtype.itemsize
        return int((tokens + 20 * len(self._sizes) + 1) / max(self.fraction, 1e-9))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # Closing flushes, which fails again on the full disk that may have brought us here; the
            # file is closed all the same and about to be removed.
            with contextlib.suppress(OSError):
                self._file.close()
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def _finish(self) -> None:
        with full_disk_message(self._final[0], self._needed):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._write_index()
        data, index = self._final
        # An old index must not meet the new tokens after a kill between the renames.
        index.unlink(missing_ok=True)
        os.replace(self._temporary[0], data)
        os.replace(self._temporary[1], index)
        sync_folder(data.parent)

    def _write_index(self) -> None:
        count, documents = len(self._sizes), self.documents
        sizes = np.frombuffer(self._sizes, np.int32)
        with open(self._temporary[1], "xb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", _VERSION, self._code, count, documents + 1))
            file.write(sizes.astype("<i4").data if count else b"")
            # In pieces, because a corpus may have very many sequences.
            offset = 0
            for first in range(0, count, CHUNK):
                part = sizes[first : first + CHUNK].astype(np.int64) * self.dtype.itemsize
                ends = np.cumsum(part) + offset
                file.write((ends - part).astype("<i8").tobytes())
                offset = int(ends[-1])
            if self._ends is None:
                for first in range(0, count + 1, CHUNK):
                    last = min(first + CHUNK, count + 1)
                    file.write(np.arange(first, last, dtype="<i8").tobytes())
            else:
                self.end_documents([count])
                file.write(np.frombuffer(self._ends, np.int64).astype("<i8").data)
            file.flush()
            os.fsync(file.fileno())
