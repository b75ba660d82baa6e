"""Sets on disk as columns: labelled texts, questions, parallel text, sentences of words.

A column of a split is a pair of files `SPLIT.NAME.{bin,idx}`, a sequence of whole numbers for each
row (tokens, tags, a class, a span), or a text file `SPLIT.NAME` with a line for each row. The
manifest lists the files that exist.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.storage.indexed import IndexedDataset, open_integers
from metaseq_lm.data.storage.manifest import Manifest

T = TypeVar("T")
ROWS = "rows.jsonl"  # the column with one JSON object per row (of SQuAD, per paragraph)


class ColumnSet:
    """One split of a set, memory-mapped.

    Attributes:
        kinds: The kinds of manifests that it reads; `refusal` is what it says of another.

    Raises:
        MetaseqError: Files are missing, damaged, or do not belong together.
    """

    kinds: ClassVar[Sequence[str]]
    refusal: ClassVar[str]

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self.manifest = Manifest.load(self.folder)
        if self.manifest.kind not in self.kinds:
            raise MetaseqError(f"{self.folder}: {self.refusal}")
        self.manifest.require_split(self.folder, split)

    def has(self, name: str) -> bool:
        """Return whether the split has a column."""
        column = f"{self.split}.{name}"
        return column in self.manifest.files or f"{column}.bin" in self.manifest.files

    def column(self, name: str) -> IndexedDataset:
        """Open a column of whole numbers; "" is the one without a name."""
        return open_integers(self.folder / ".".join(filter(None, (self.split, name))))

    def check_rows(self, data: IndexedDataset, rows: IndexedDataset, same_sizes: bool) -> None:
        """Raise MetaseqError unless two columns have as many rows, or rows of `same_sizes`."""
        if len(data) != len(rows):
            self.refuse(data, f"{len(data):,} rows, but {rows.prefix}.bin has {len(rows):,}")
        if same_sizes and not np.array_equal(data.sizes, rows.sizes):
            self.refuse(data, f"its rows have other sizes than those of {rows.prefix}.bin")

    def refuse(self, data: IndexedDataset, fault: str) -> None:
        """Raise MetaseqError for a column with a fault."""
        raise MetaseqError(
            f"{data.prefix}.bin: {fault}; the files do not belong together, preprocess again"
        )

    def lines(self, name: str, count: int, read: Callable[[str, str], T]) -> list[T]:
        """Return the lines of a text column; MetaseqError unless there are `count`.

        `read` returns the content of a line, given its text and its place, FILE:LINE.
        """
        path = self.folder / f"{self.split}.{name}"
        numbered = TextFile(path, "fail").lines()
        lines = [read(text, f"{path}:{number}") for number, text, _ in numbered]
        if len(lines) != count:
            raise MetaseqError(
                f"{path}: {len(lines):,} lines but {count:,} rows; the files do not belong "
                "together, preprocess again"
            )
        return lines
