"""Parallel text on disk.

A set is a data folder of its own: `SPLIT.source.{bin,idx}`, `SPLIT.target.{bin,idx}` (none where a
split has only source text), `SPLIT.references.txt`, the original target lines of every split except
"train"; a tokenizer for each side, `source.*` and `target.*`; `manifest.json`.
"""

import functools
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, require_sizes
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer

PARALLEL = "parallel"
SOURCE, TARGET = "source", "target"
SIDES = (SOURCE, TARGET)


def references_name(split: str) -> str:
    """Return the name of the file with the target lines of a split."""
    return f"{split}.references.txt"


def _parallel_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of a set; MetaseqError if the folder holds something else."""
    manifest = Manifest.load(folder)
    if manifest.kind != PARALLEL:
        raise MetaseqError(
            f"{folder}: a {manifest.kind} set, not parallel text; make one with 'metaseq-lm "
            "preprocess --parallel NAME' and give DATA/NAME"
        )
    require_sizes(folder)
    return manifest


def load_sides(folder: str | Path) -> tuple[Tokenizer, Tokenizer]:
    """Open the tokenizers of the source and of the target of a set."""
    _parallel_manifest(folder)
    source, target = (load_tokenizer(folder, f"{side}.") for side in SIDES)
    return source, target


class ParallelSet:
    """One split of a set, memory-mapped: `source` and `target` (None if it has source text only).

    MetaseqError if files are missing, damaged, or do not belong together.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder)
        self.split = split
        manifest = _parallel_manifest(folder)
        manifest.require_split(folder, split)
        self.source = IndexedDataset(self.folder / f"{split}.{SOURCE}")
        self.target: IndexedDataset | None = None
        if f"{split}.{TARGET}.bin" in manifest.files:
            self.target = IndexedDataset(self.folder / f"{split}.{TARGET}")
            if len(self.target) != len(self.source):
                raise MetaseqError(
                    f"{self.source.prefix} has {len(self.source)} sentences but "
                    f"{self.target.prefix} has {len(self.target)}; the files do not belong "
                    "together, preprocess again"
                )

    def __len__(self) -> int:
        return len(self.source)

    @functools.cached_property
    def references(self) -> list[str]:
        """The original target lines of the file; MetaseqError if the split has none."""
        path = self.folder / references_name(self.split)
        if not path.is_file():
            raise MetaseqError(
                f"{self.folder}: '{self.split}' has no reference translations to compare with; "
                "give a split that was made with --validpref, --testpref or --split"
            )
        lines = [text for _, text, _ in TextFile(path, "fail").lines()]
        if len(lines) != len(self):
            raise MetaseqError(
                f"{path}: {len(lines)} lines but {self.source.prefix} has {len(self)} sentences; "
                "the files do not belong together, preprocess again"
            )
        return lines
