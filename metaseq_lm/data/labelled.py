"""Labelled sets on disk: one token file per text column and one file of labels per split.

`NAME/SPLIT.input0.{bin,idx}`, `.input1` for pairs, `.label` with one number per row (the place
of the label in the list of the manifest, or a float64), and `NAME/manifest.json`.
"""

from pathlib import Path

import numpy as np

from metaseq_lm.data.indexed import IndexedDataset, prefix_path
from metaseq_lm.data.manifest import LABELLED, Manifest, require_sizes
from metaseq_lm.errors import MetaseqError


def input_name(split: str, number: int) -> str:
    """Return the prefix of the token files of one text column."""
    return f"{split}.input{number}"


def label_name(split: str) -> str:
    """Return the prefix of the label file."""
    return f"{split}.label"


class LabelledSet:
    """One split of a labelled set, memory-mapped.

    `inputs` are one or two IndexedDatasets, row i of each belonging together; `labels` is int64
    or, for regression, float64 (rows,); `label_names` lists the classes, empty for regression.
    MetaseqError if files are missing, damaged, or do not belong together.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder)
        self.split = split
        manifest = Manifest.load(self.folder)
        if manifest.kind != LABELLED:
            raise MetaseqError(f"{self.folder}: a corpus, not a labelled set; give DATA/NAME")
        if split not in manifest.splits:
            raise MetaseqError(
                f"{self.folder}: no split '{split}'; there are {', '.join(sorted(manifest.splits))}"
            )
        self.regression: bool = manifest.details["regression"]
        self.label_names: list[str] = manifest.details["labels"]
        self.tokenizer_hash: str = manifest.tokenizer["hash"]
        count: int = manifest.details["inputs"]
        self.inputs = [IndexedDataset(self.folder / input_name(split, i)) for i in range(count)]
        self.labels = self._read_labels()
        # Of two files that were swapped each is sound.
        require_sizes(self.folder)

    def _read_labels(self) -> np.ndarray:
        stored = IndexedDataset(self.folder / label_name(self.split))
        path = prefix_path(self.folder / label_name(self.split), ".bin")
        for data in self.inputs:
            if data.dtype.kind not in "iu":
                raise MetaseqError(f"{data.prefix}.bin: holds {data.dtype}, not tokens")
        for data in (stored, *self.inputs):
            if len(data) != len(stored) or len(stored.tokens) != len(stored):
                raise MetaseqError(
                    f"{path}: {len(stored.tokens)} labels but {data.prefix} has {len(data)} rows; "
                    "the files do not belong together, preprocess again"
                )
        if (stored.dtype.kind == "f") != self.regression:
            raise MetaseqError(f"{path}: holds {stored.dtype}, not what the manifest says")
        if self.regression:
            return np.array(stored.tokens, np.float64)
        labels = np.array(stored.tokens, np.int64)
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.label_names):
            raise MetaseqError(
                f"{path}: a label outside 0..{len(self.label_names) - 1}; preprocess again"
            )
        return labels

    def __len__(self) -> int:
        return len(self.labels)
