"""Numbers of words of the text in the rows of a corpus.

A word is counted in the row that holds its first token, so every word of a corpus is counted once
in an epoch, however rows cut the text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.word_starts import WordStarts, open_word_starts

# (sample numbers, a key per row, the width that rows are cut to or 0) -> starts and lengths of the
# runs of tokens in these rows, (runs,) each
Runs = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RowWords:
    """The words of rows that consist of runs of a token stream.

    Attributes:
        data: The token stream.
        runs: Returns the runs of some rows.
    """

    data: IndexedDataset
    runs: Runs

    @cached_property
    def word_starts(self) -> WordStarts | None:
        """Where words begin; None if the data folder does not record it."""
        return open_word_starts(self.data.prefix, len(self.data.tokens))

    @property
    def missing(self) -> str:
        """Why words cannot be counted, with the remedy; "" if they can."""
        if self.word_starts is not None:
            return ""
        folder, name = Path(self.data.prefix).parent, Path(self.data.prefix).name
        return (
            f"{folder} does not say where the words of its text begin ({name}.words), as data of "
            "earlier versions and imported token files; preprocess the text again with "
            f"--tokenizer-from {folder}, which gives the same tokens, so that runs go on with them"
        )

    def count(self, samples: np.ndarray, keys: np.ndarray, width: int) -> int:
        """Return the number of words in rows `samples` (B,) of keys (B,), cut to `width`."""
        assert self.word_starts is not None
        return int(self.word_starts.count(*self.runs(samples, keys, width)).sum())
