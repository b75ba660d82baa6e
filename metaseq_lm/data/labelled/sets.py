"""Labelled sets on disk: token files for each text column, labels, spans and facts of each row.

The files of a split are `NAME/SPLIT.input0.{bin,idx}`, `.input1` and so on; `.label` with a number
per row (the place of the label in the list of the manifest, or a float64); `.spans` with three
numbers per span; and `.rows.jsonl` with an object per row. The manifest lists the ones that exist.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.benchmarks import benchmark_of
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.data.storage.columns import ROWS, ColumnSet
from metaseq_lm.data.storage.indexed import IndexedDataset, number_outside
from metaseq_lm.data.storage.manifest import LABELLED, require_sizes

CLOZE = "cloze"
# The least and the greatest number of text columns of each form.
_FORMS = {
    "single": (1, 1),
    "pair": (2, 2),
    "choices": (3, 1 << 10),
    "spans": (1, 2),
    "tokens": (2, 2),
    "multi_label": (1, 2),
    CLOZE: (3, 1 << 10),
}
MULTI_LABEL = "multi_label"
WITH_PLACES = ("spans", "tokens", CLOZE)  # forms that have a file of places
_SPANS = 2


class LabelledSet(ColumnSet):
    """One split of a labelled set.

    Attributes:
        inputs: A token file for each text column.
        form: The meaning of the columns. "single" and "pair": one and two texts. "choices": a
            context and K candidates, of which the label names one; a candidate without tokens is
            missing. "spans": one or two texts with two spans in them. "tokens": two texts with any
            number of spans, whose tokens are the answer. "multi_label": one or two texts of any
            number of classes. "cloze": a passage with any number of blanks and K candidates, of
            which the label names the one for the first blank listed.
        labels: int64 or, for regression, float64 (rows,); boolean (rows, classes) of form
            "multi_label"; None for a split without labels.
        label_names: The classes; empty for regression.
        spans: int64 (rows, 2, 3): text column, first token, token after the last; of form "spans".
        places: int64 (places, 4): row and the same three numbers; of forms "tokens", "cloze".
        benchmark: Its benchmark, if it is a set of one.
    """

    kinds = (LABELLED,)
    refusal = "a corpus, not a labelled set; give DATA/NAME"

    def __init__(self, folder: str | Path, split: str) -> None:
        super().__init__(folder, split)
        manifest = self.manifest
        self.regression: bool = manifest.details["regression"]
        self.label_names: list[str] = manifest.details["labels"]
        self.tokenizer_hash: str = manifest.tokenizer["hash"]
        count: int = manifest.details["inputs"]
        self.form: str = manifest.details["form"]
        self.benchmark = benchmark_of(manifest.details)
        least, most = _FORMS.get(self.form, (0, -1))
        if not least <= count <= most:
            raise MetaseqError(
                f"{self.folder}: a set of form {self.form[:20]!r} with {count} text columns; "
                "this program does not read it, preprocess again"
            )
        self.inputs = [self.column(f"input{i}") for i in range(count)]
        for data in self.inputs:
            self.check_rows(data, self.inputs[0], same_sizes=False)
        self.labels = self._read_labels()
        self.spans: np.ndarray | None = None
        self.places: np.ndarray | None = None
        if self.form in WITH_PLACES:
            self._read_spans()
        # Each of two swapped files is sound by itself.
        require_sizes(self.folder)

    def _read_labels(self) -> np.ndarray | None:
        if not self.has("label"):
            return None
        stored = IndexedDataset(self.folder / f"{self.split}.label")
        self.check_rows(stored, self.inputs[0], same_sizes=False)
        if not self.multi_label and len(stored.tokens) != len(self):
            self.refuse(stored, f"{len(stored.tokens)} labels for {len(self)} rows")
        if (stored.dtype.kind == "f") != self.regression:
            raise MetaseqError(
                f"{stored.prefix}.bin: holds {stored.dtype}, not what the manifest says"
            )
        if self.regression:
            return np.array(stored.tokens, np.float64)
        labels = np.array(stored.tokens, np.int64)
        if number_outside(labels, len(self.label_names)) is not None:
            raise MetaseqError(
                f"{stored.prefix}.bin: a label outside 0..{len(self.label_names) - 1}; preprocess "
                "again"
            )
        if not self.multi_label:
            return labels
        has_class = np.zeros((len(self), len(self.label_names)), bool)
        has_class[np.repeat(np.arange(len(self)), stored.sizes), labels] = True
        return has_class

    def _read_spans(self) -> None:
        stored = self.column("spans")
        self.check_rows(stored, self.inputs[0], same_sizes=False)
        if self.form == "spans":
            good, expected = (stored.sizes == 3 * _SPANS).all(), f"{_SPANS} spans"
        else:
            good, expected = not (stored.sizes % 3).any(), "three numbers for each place"
        if not good:
            self.refuse(stored, f"not {expected} in each of the {len(self)} rows")
        rows = np.repeat(np.arange(len(self)), stored.sizes // 3)
        spans = np.array(stored.tokens, np.int64).reshape(-1, 3)
        sizes = np.stack([data.sizes for data in self.inputs])
        column, first, end = spans.T
        inside = (0 <= column) & (column < len(sizes)) & (0 <= first) & (first < end)
        inside &= end <= sizes[np.where(inside, column, 0), rows]
        if not inside.all():
            row = int(rows[np.flatnonzero(~inside)[0]])
            raise MetaseqError(f"{stored.prefix}.bin: row {row + 1} has a span outside its text")
        if self.form == "spans":
            self.spans = spans.reshape(len(self), _SPANS, 3)
        else:
            self.places = np.column_stack([rows, spans])

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]] | None:
        """The fields of each row that scorers and leaderboard files need (ids, answers), or None.

        Read at first use; MetaseqError with file and line if the file is damaged.
        """
        if not self.has(ROWS):
            return None
        return self.lines(ROWS, len(self), lambda text, at: json_object(text, f"{at}: damaged"))

    @property
    def multi_label(self) -> bool:
        """Whether a row has any number of the classes."""
        return self.form == MULTI_LABEL

    def __len__(self) -> int:
        return len(self.inputs[0])


def held_out_from(data: LabelledSet, count: int, size: int) -> int:
    """Return the first held-out row; the last of the first `count` rows are held out.

    Their number is `size` or a few more: neighbours with a text in common, such as answers about
    one passage, or a row and its copy with swapped texts, are not separated.

    Raises:
        UsageError: No row, or no other row, would be held out.
    """

    def texts(row: int) -> set[bytes]:
        return {column[row].tobytes() for column in data.inputs}

    first = count - size
    while 0 < first < count and not texts(first - 1).isdisjoint(texts(first)):
        first -= 1
    if not 0 < first < count:
        raise UsageError(
            f"{data.folder}: of {count} rows of '{data.split}' {size} cannot be held out; a few "
            "must be left to train on, with other texts"
        )
    return first
