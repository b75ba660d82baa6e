"""`SPLIT.words`: how many words of the text begin in each token of `SPLIT.bin`.

All numbers are little-endian: magic `MSLMWRD\\0`, u64 version, u64 tokens n, u64 further words m;
then a bit for each token, the lowest of a byte first, 1 where a word begins, in ceil(n / 8) bytes,
and m int64, ascending: the token of each further word, which begins in the same token as another.
"""

import array
import contextlib
import os
import struct
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import full_disk_message
from metaseq_lm.data.storage.indexed import CHUNK, concatenate_ranges, prefix_path
from metaseq_lm.data.storage.manifest import WORDS

_MAGIC = b"MSLMWRD\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ")
_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


class WordStarts:
    """The words of the token files `prefix.bin`, `prefix.idx`, memory-mapped.

    Raises:
        MetaseqError: The file is damaged, or is not for `tokens` tokens.
    """

    def __init__(self, prefix: str | Path, tokens: int) -> None:
        path = self.path = prefix_path(prefix, WORDS)
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
        # A file that is cut off in its header has a wrong magic rather than no header.
        magic, version, count, extra = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != _VERSION:
            raise MetaseqError(
                f"{path}: not a record of words of version {_VERSION}; preprocess again"
            )
        bits = -(-count // 8)
        if count != tokens or size != _HEADER.size + bits + 8 * extra:
            raise MetaseqError(
                f"{path}: {size} bytes for {count} tokens, but {prefix_path(prefix, '.bin').name} "
                f"has {tokens}; the files do not belong together or one is truncated: copy them "
                "again or preprocess again"
            )
        self.tokens = tokens
        mapped = np.memmap(path, "u1", "r", _HEADER.size, (bits,)) if bits else np.zeros(0, "u1")
        self._bits = np.asarray(mapped)
        self._extra = np.fromfile(path, "<i8", offset=_HEADER.size + bits)
        if extra and (np.diff(self._extra, prepend=0, append=tokens - 1) < 0).any():
            raise MetaseqError(f"{path}: damaged: its further words do not rise; copy it again")

    def count(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return how many words begin in runs of tokens, int64 (runs,).

        Args:
            starts: The first token of each run (runs,).
            lengths: The number of tokens of each run (runs,), possibly 0.
        """
        ends = starts + lengths
        first, sizes = starts >> 3, np.where(lengths > 0, (ends + 7 >> 3) - (starts >> 3), 0)
        values = self._bits[concatenate_ranges(first, sizes)]
        run_ends, filled = np.cumsum(sizes), sizes > 0
        values[(run_ends - sizes)[filled]] &= (0xFF << (starts[filled] & 7) & 0xFF).astype("u1")
        values[run_ends[filled] - 1] &= (0xFF >> (-ends[filled] & 7)).astype("u1")
        total = np.append(0, np.cumsum(_ONES[values], dtype=np.int64))
        extra = np.searchsorted(self._extra, ends) - np.searchsorted(self._extra, starts)
        return np.asarray(total[run_ends] - total[run_ends - sizes] + extra)

    @property
    def total(self) -> int:
        """The number of words in all tokens."""
        total = 0
        for start in np.arange(0, self.tokens, CHUNK)[:, None]:
            total += int(self.count(start, np.minimum(CHUNK, self.tokens - start)).sum())
        return total

    def read(self, first: int, last: int) -> np.ndarray:
        """Return how many words begin in each token from `first` to before `last`, int32."""
        at = np.arange(first, last)
        words: np.ndarray = (self._bits[at >> 3] >> (at & 7).astype("u1") & 1).astype(np.int32)
        begin, end = np.searchsorted(self._extra, [first, last])
        np.add.at(words, self._extra[begin:end] - first, 1)
        return words


def open_word_starts(prefix: str | Path, tokens: int) -> WordStarts | None:
    """Open the words of token files with `tokens` tokens; None if they have no record of them."""
    return WordStarts(prefix, tokens) if prefix_path(prefix, WORDS).is_file() else None


class WordStartsWriter:
    """Writes `prefix.words` in a folder that nobody reads yet; a context manager.

    Attributes:
        tokens: The number of tokens so far.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.path = prefix_path(prefix, WORDS)
        self.tokens = 0
        self._tail = np.zeros(0, bool)  # bits of the last byte, which is not full
        self._extra = array.array("q")

    def __enter__(self) -> "WordStartsWriter":
        with full_disk_message(self.path):
            self._file = open(self.path, "wb")
            self._file.write(bytes(_HEADER.size))
        return self

    def extend(self, words: np.ndarray) -> None:
        """Append how many words begin in each of the next tokens, (tokens,)."""
        bits = np.append(self._tail, words > 0)
        whole = len(bits) - len(bits) % 8
        self._write(np.packbits(bits[:whole], bitorder="little"))
        self._tail = bits[whole:]
        several = np.flatnonzero(words > 1)
        extra = np.repeat(several + self.tokens, words[several] - 1)
        self._extra.frombytes(extra.astype(np.int64).tobytes())
        self.tokens += len(words)

    def _write(self, values: np.ndarray) -> None:
        with full_disk_message(self.path, lambda: self.tokens // 8):
            self._file.write(values.tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # Closing flushes, which fails again on the full disk that may have brought us here.
            with contextlib.suppress(OSError):
                self._file.close()

    def _finish(self) -> None:
        self._write(np.packbits(self._tail, bitorder="little"))
        self._write(np.frombuffer(self._extra, np.int64).astype("<i8"))
        with full_disk_message(self.path, lambda: self.tokens // 8):
            self._file.seek(0)
            self._file.write(_HEADER.pack(_MAGIC, _VERSION, self.tokens, len(self._extra)))
            self._file.flush()
            os.fsync(self._file.fileno())
