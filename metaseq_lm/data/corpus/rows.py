"""A binarised corpus cut into samples: one line each, or windows of the whole token stream.

Shapes: B rows, S the longest sample of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import ALL_VISIBLE, Layout, TokenBatch, as_tensor, count_targets
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.masking import Masking, mask_tokens
from metaseq_lm.data.corpus.row_words import RowWords
from metaseq_lm.data.corpus.windows import DocumentWindows, RowLengths, StrideWindows, Windows
from metaseq_lm.data.storage.indexed import (
    IndexedDataset,
    concatenate_ranges,
    number_outside,
    open_integers,
)
from metaseq_lm.data.storage.manifest import FILE_NAME, MANIFEST_FILE, Manifest
from metaseq_lm.data.streams import Lengths
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

__all__ = ["Samples", "layout_of", "masked_batch", "row_layout"]


class Samples(ABC):
    """The rows of a split: `Corpus`, `PackedDocuments`, or `Packed` with two segments.

    Attributes:
        data: The token stream that rows are made of.
        vocabulary: The tokens.
        shuffle_key: If not None, the tokens of each row are permuted, see `shuffle_tokens`. The
            permutation depends only on this key and the number of the sample.
    """

    data: IndexedDataset
    vocabulary: Vocabulary
    shuffle_key: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def row_lengths(self) -> Lengths:
        """The number of tokens of each row, special ones included, int64 (samples,)."""

    def rows(
        self, samples: np.ndarray, cls: int = 0, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `samples` (B,) as int64 rows (B, S) with `[CLS{cls}]` in front, and lengths (B,).

        Rows are padded to the longest of them, or padded and cut to `width` if that is not 0. Rows
        of two segments are not cut.
        """
        rows, lengths = self.read(samples, cls, width)
        if self.shuffle_key is not None:
            keys = random_streams.row_keys(self.shuffle_key, samples)
            rows = shuffle_tokens(rows, self.vocabulary, keys)
        return rows, lengths

    @abstractmethod
    def read(self, samples: np.ndarray, cls: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and lengths, as `rows` does, with the tokens in their order."""

    @abstractmethod
    def runs(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return starts and lengths of the runs of the token stream in the rows, (runs,) each.

        Arguments are as of `rows`.
        """

    @property
    def words(self) -> RowWords:
        """The numbers of words in the rows."""
        return RowWords(self.data, lambda samples, keys, width: self.runs(samples, width))

    def segments(self, samples: np.ndarray, width: int) -> np.ndarray | None:
        """Return the segment, 0 or 1, of each token, int64 (B, width); None for a single one."""
        return None

    def documents(self, samples: np.ndarray, width: int) -> np.ndarray | None:
        """Return the index of each token's document in its row, int64 (B, width); None for one."""
        return None


class Corpus(Samples):
    """Samples `[CLSn] tokens [SEP]` of at most `tokens_per_sample` tokens, read from a memory map.

    `break_mode` "eos": a sample is a document; a document that is too long is cut into disjoint
    windows. "none": windows of the stream, across documents. Start-up and memory do not grow with
    the corpus, except that "eos" reads the sizes of the documents. Raises the errors of
    `open_tokens`.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary: Vocabulary,
        tokens_per_sample: int,
        break_mode: str,
    ) -> None:
        self.data = open_tokens(folder, split, vocabulary, tokens_per_sample, least=3)
        self.vocabulary = vocabulary
        room = tokens_per_sample - 2
        self.windows: Windows
        if break_mode == "eos":
            self.windows = DocumentWindows(self.data, room)
        else:
            self.windows = StrideWindows(len(self.data.tokens), room)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def row_lengths(self) -> Lengths:
        return RowLengths(self.windows, 2)

    def read(self, samples: np.ndarray, cls: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        # Twice as fast as `fill`, because each row is one run.
        starts, lengths = self.runs(samples, width)
        rows = blank_rows(self.vocabulary, cls, lengths, lengths + 2, width)
        at = np.arange(rows.shape[1] - 2)
        inside = at < lengths[:, None]
        offsets = np.where(inside, starts[:, None] + at, 0)
        np.copyto(rows[:, 1:-1], self.data.tokens[offsets], where=inside)
        return rows, lengths + 2

    def runs(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.windows[samples]
        if width:
            lengths = np.minimum(lengths, width - 2)
        return self.windows.starts(samples), lengths


def shuffle_tokens(rows: np.ndarray, vocabulary: Vocabulary, keys: np.ndarray) -> np.ndarray:
    """Return rows (B, S) in which the tokens of each row i are permuted by keys[i].

    All permutations are equally likely. Special tokens stay in place; [UNK] is a token of the text.
    """
    is_text = ~np.isin(rows, list(vocabulary.unwritten), kind="table")
    draws = random_streams.words(keys, 0, rows.shape[1])
    # Special tokens come last in the order, behind all of the text.
    draws[~is_text] = np.iinfo(np.uint64).max
    order = np.argsort(draws, axis=1, kind="stable")
    first = np.arange(rows.shape[1]) < is_text.sum(1)[:, None]
    shuffled = rows.copy()
    shuffled[is_text] = np.take_along_axis(rows, order, 1)[first]
    return shuffled


def open_tokens(
    folder: Path, split: str, vocabulary: Vocabulary, tokens_per_sample: int, least: int
) -> IndexedDataset:
    """Open the token files of a split for samples of `tokens_per_sample`, at least `least`.

    Raises UsageError for a wrong option, MetaseqError for files without tokens or with tokens that
    the vocabulary lacks.
    """
    if tokens_per_sample < least:
        raise UsageError(
            f"task.tokens_per_sample must be at least {least}, got {tokens_per_sample}"
        )
    if not FILE_NAME.fullmatch(split):
        raise UsageError(f"split {split!r}: a name of letters, digits, '_', '-' and '.'")
    if (folder / MANIFEST_FILE).is_file():
        Manifest.load(folder).require_split(folder, split)
    data = open_integers(folder / split)
    if not len(data.tokens):
        raise MetaseqError(
            f"{folder / split}.bin holds no tokens; preprocess a corpus that is not empty"
        )
    check_ids(data, vocabulary)
    return data


def check_ids(data: IndexedDataset, vocabulary: Vocabulary, first: int | None = 1 << 20) -> None:
    """Raise MetaseqError if the `first` tokens (None: all) hold an id that the vocabulary lacks."""
    token = number_outside(data.tokens[:first], len(vocabulary))
    if token is not None:
        raise MetaseqError(
            f"{data.prefix}.bin holds token id {token} but dict.txt has only {len(vocabulary)} "
            "symbols; preprocess again with this tokenizer"
        )


def cut_pair(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens each side of pairs (N,), (N,) keeps, together at most `room`.

    The result is the same as removing tokens one by one from the end of the longer side, or of the
    second if both are equally long (Devlin et al. 2019, code).
    """
    first_kept = np.minimum(first, np.maximum(-(-room // 2), room - second))
    return first_kept, np.minimum(second, np.maximum(room // 2, room - first))


def blank_rows(
    vocabulary: Vocabulary, cls: int, firsts: np.ndarray, lengths: np.ndarray, width: int
) -> np.ndarray:
    """Return rows (B, S) with only their special tokens; A has `firsts` (B,) tokens."""
    shape = len(lengths), max(width, int(lengths.max(initial=0)))
    rows = np.full(shape, vocabulary.pad, np.int64)
    at = np.arange(len(lengths))
    rows[:, 0] = vocabulary.cls(cls)
    rows[at, firsts + 1] = rows[at, lengths - 1] = vocabulary.sep
    return rows


def fill(
    rows: np.ndarray,
    data: IndexedDataset,
    columns: tuple[np.ndarray, np.ndarray],
    runs: tuple[np.ndarray, np.ndarray],
) -> None:
    """Copy runs (start, length) of the token stream to `columns` (row, column); all (pieces,)."""
    (row, column), (start, length) = columns, runs
    # The rows lie end to end in memory, so a run is one there too.
    places = concatenate_ranges(row * rows.shape[1] + column, length)
    rows.reshape(-1)[places] = data.tokens[concatenate_ranges(start, length)]


def text_rows(
    vocabulary: Vocabulary,
    cls: int,
    texts: Sequence[tuple[IndexedDataset, np.ndarray, np.ndarray]],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows `[CLSn] A [SEP]` or `[CLSn] A [SEP] B [SEP]`, int64 (B, S), and lengths (B,).

    A text is a token file with the start and length of its part of each row, (B,) each.
    """
    lengths = 1 + len(texts) + np.sum([counts for _, _, counts in texts], axis=0)
    rows = blank_rows(vocabulary, cls, texts[0][2], lengths, width)
    at, column = np.arange(len(rows)), np.ones(len(rows), np.int64)
    for data, starts, counts in texts:
        fill(rows, data, (at, column), (starts, counts))
        column = column + counts + 1
    return rows, lengths


def segments_of(firsts: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return 1 for B and its [SEP] in rows whose A has `firsts` (B,) tokens; int64 (B, width)."""
    at = np.arange(width)
    return ((at >= firsts[:, None] + 2) & (at < lengths[:, None])).astype(np.int64)


def layout_of(lengths: np.ndarray, width: int) -> Layout:
    """Return the layout of rows of `lengths` (...,) with padding up to `width`, if there is any."""
    if (lengths == width).all():
        return ALL_VISIBLE
    padding = as_tensor(np.arange(width) >= lengths[..., None])
    return Layout(padding, sequences=2 * lengths.size)


def row_layout(corpus: Samples, samples: np.ndarray, lengths: np.ndarray, width: int) -> Layout:
    """Return the layout, with documents, of rows (B, width) of `samples` and `lengths` (B,)."""
    layout, documents = layout_of(lengths, width), corpus.documents(samples, width)
    if documents is None:
        return layout
    sequences = 2 * len(documents) + np.count_nonzero(np.diff(documents))
    return replace(layout, documents=as_tensor(documents), sequences=int(sequences))


def masked_batch(
    corpus: Samples, masking: Masking, samples: np.ndarray, keys: np.ndarray, width: int = 0
) -> TokenBatch:
    """Return the batch of `samples` (B,), masked by `keys` (B,); sizes "targets" and "rows"."""
    rows, lengths = corpus.rows(samples, width=width)
    segments = corpus.segments(samples, rows.shape[1])
    batch = masked_rows(rows, lengths, segments, keys, masking)
    batch.layout = row_layout(corpus, samples, lengths, rows.shape[1])
    return batch


def masked_rows(
    rows: np.ndarray,
    lengths: np.ndarray,
    segments: np.ndarray | None,
    keys: np.ndarray,
    masking: Masking,
) -> TokenBatch:
    """Return the batch of rows (B, S) with `lengths` (B,), masked by `keys` (B,)."""
    masked, positions, targets = mask_tokens(rows, lengths, keys, masking)
    return TokenBatch(
        tokens=as_tensor(masked),
        layout=layout_of(lengths, rows.shape[1]),
        segments=as_tensor(segments),
        positions=as_tensor(positions),
        targets=as_tensor(targets),
        sizes={**count_targets(targets), "rows": len(rows)},
    )
