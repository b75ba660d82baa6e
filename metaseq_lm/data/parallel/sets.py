"""Parallel text on disk.

A set is a data folder of its own: `SPLIT.source.{bin,idx}`, `SPLIT.target.{bin,idx}` (none where a
split has only source text), `SPLIT.references.txt`, the original target lines of every split except
"train"; a tokenizer for each side, `source.*` and `target.*`; `manifest.json`.
"""

import functools
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.columns import ColumnSet
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, require_sizes
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer

PARALLEL = "parallel"
SOURCE, TARGET = "source", "target"
SIDES = (SOURCE, TARGET)
REFERENCES = "references.txt"  # the column with the target lines


def load_sides(folder: str | Path) -> tuple[Tokenizer, Tokenizer]:
    """Open the tokenizers of the source and of the target of a set."""
    if Manifest.load(folder).kind != PARALLEL:
        raise MetaseqError(f"{folder}: {ParallelSet.refusal}")
    require_sizes(folder)
    source, target = (load_tokenizer(folder, f"{side}.") for side in SIDES)
    return source, target


class ParallelSet(ColumnSet):
    """One split of a set: `source` and `target` (None if it has source text only)."""

    kinds = (PARALLEL,)
    refusal = (
        "not parallel text; make one with 'metaseq-lm preprocess --parallel NAME' and give "
        "DATA/NAME"
    )

    def __init__(self, folder: str | Path, split: str) -> None:
        super().__init__(folder, split)
        require_sizes(folder)
        self.source = IndexedDataset(self.folder / f"{split}.{SOURCE}")
        self.target: IndexedDataset | None = None
        if self.has(TARGET):
            self.target = IndexedDataset(self.folder / f"{split}.{TARGET}")
            self.check_rows(self.target, self.source, same_sizes=False)

    def __len__(self) -> int:
        return len(self.source)

    @functools.cached_property
    def references(self) -> list[str]:
        """The original target lines of the file; MetaseqError if the split has none."""
        if not (self.folder / f"{self.split}.{REFERENCES}").is_file():
            raise MetaseqError(
                f"{self.folder}: '{self.split}' has no reference translations to compare with; "
                "give a split that was made with --validpref, --testpref or --split"
            )
        return self.lines(REFERENCES, len(self), lambda text, _: text)
