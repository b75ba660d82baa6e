"""Starts and lengths of the samples of a corpus, in memory that hardly grows with it."""

from typing import Protocol

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.indexed import MAX_SIZE, IndexedDataset

BLOCK = 256  # documents for which a table of two numbers is kept
CHUNK = 1024 * BLOCK  # documents that are read at once
_WINDOWS, _TOKENS = 0, 1  # rows of the table


class Windows(Protocol):
    """Disjoint windows of a token stream, in order; indexing returns lengths."""

    def __len__(self) -> int: ...

    def __getitem__(self, samples: np.ndarray, /) -> np.ndarray: ...

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Return where `samples` (n,) begin in the token stream, int64 (n,)."""

    def sample_at(self, tokens: np.ndarray) -> np.ndarray:
        """Return the sample that holds each token (n,) of the stream, int64 (n,)."""


class StrideWindows:
    """Consecutive windows of `room` out of `total` tokens, across documents."""

    def __init__(self, total: int, room: int) -> None:
        self.total, self.room = total, room

    def __len__(self) -> int:
        return -(-self.total // self.room)

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(self.room, self.total - samples * self.room))

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return samples * self.room

    def sample_at(self, tokens: np.ndarray) -> np.ndarray:
        return tokens // self.room


class DocumentWindows:
    """Windows of at most `room` tokens of one document each.

    The sizes of the documents are read once, for a table with the windows and the tokens before
    each BLOCK of documents (16 bytes); a window is then found inside its block. Raises MetaseqError
    if the index is damaged; pointers are compared with the sizes where they are used.
    """

    def __init__(self, data: IndexedDataset, room: int) -> None:
        self.data, self.room = data, min(room, MAX_SIZE)
        blocks = -(-len(data) // BLOCK)
        tables = np.zeros((2, blocks + 1), np.int64)
        at = 1
        for sizes in data.read_sizes(CHUNK):
            padded = np.zeros(-(-len(sizes) // BLOCK) * BLOCK, np.uint32)
            padded[: len(sizes)] = sizes
            end = at + len(padded) // BLOCK
            tables[_TOKENS, at:end] = padded.reshape(-1, BLOCK).sum(1, dtype=np.int64)
            padded += np.uint32(self.room - 1)
            padded //= np.uint32(self.room)
            tables[_WINDOWS, at:end] = padded.reshape(-1, BLOCK).sum(1, dtype=np.int64)
            at = end
        self._before = np.cumsum(tables, axis=1)
        total = int(self._before[_TOKENS, -1])
        if total != len(data.tokens):
            raise MetaseqError(
                f"{data.prefix}.idx: its sizes add up to {total} tokens, but {data.prefix}.bin "
                f"has {len(data.tokens)}; copy the pair again or preprocess again"
            )

    def __len__(self) -> int:
        return int(self._before[_WINDOWS, -1])

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return self._locate(samples)[1]

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return self._locate(samples)[0]

    def sample_at(self, tokens: np.ndarray) -> np.ndarray:
        _, (windows, starts) = self._search(tokens, _TOKENS)
        return np.asarray(windows + (tokens - starts) // self.room)

    def _locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return starts and lengths of `samples` (n,)."""
        documents, (windows, starts) = self._search(samples, _WINDOWS)
        self.data.check_pointers(documents, starts)
        offsets = (samples - windows) * self.room
        sizes = self.data.stored_sizes[documents].astype(np.int64)
        return starts + offsets, np.minimum(self.room, sizes - offsets)

    def _search(self, places: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents (n,) of `places` (n,), which are counted in WINDOWS or TOKENS.

        The second result is the windows and tokens before the documents, int64 (2, n).
        """
        blocks = np.unique(np.searchsorted(self._before[unit], places, side="right") - 1)
        documents = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        sizes = self.data.stored_sizes[np.minimum(documents, len(self.data) - 1)].astype(np.int64)
        sizes[documents >= len(self.data)] = 0
        counts = np.stack([-(-sizes // self.room), sizes]).reshape(2, len(blocks), BLOCK)
        ends = np.cumsum(counts, axis=2) + self._before[:, blocks, None]
        at = np.searchsorted(ends[unit].ravel(), places, side="right")
        return documents[at], (ends - counts).reshape(2, -1)[:, at]


class RowLengths:
    """The lengths of windows plus `specials` special tokens."""

    def __init__(self, windows: Windows, specials: int) -> None:
        self.windows, self.specials = windows, specials

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return self.windows[samples] + self.specials
