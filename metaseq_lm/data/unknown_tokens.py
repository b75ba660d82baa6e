"""How many tokens of a data set are [UNK], the symbol for text that a tokenizer cannot write."""

from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.squad.sets import SQUAD
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import CORPUS, LABELLED, MANIFEST_FILE, Manifest
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE
from metaseq_lm.data.tokenizers.loading import load_tokenizer

_COUNTED_BYTES = 64 << 20  # most bytes of older files that are counted at the start of a run
_CHUNK = 1 << 21
# The names of the token files of a split, by the kind of the manifest.
TOKENS = {CORPUS: ["{}"], LABELLED: ["{}.input*"], SQUAD: ["{}.context", "{}.question"]}


def count_unknown(values: np.ndarray, unk: int | None) -> int:
    """Return how many token ids (tokens,) are `unk`, which is None where there is no [UNK]."""
    if unk is None:
        return 0
    pieces = range(0, len(values), _CHUNK)
    return sum(int(np.count_nonzero(values[i : i + _CHUNK] == unk)) for i in pieces)


def unknown_share(counts: dict[str, Any]) -> float | None:
    """Return the share of [UNK] from the counts of a split; None if they lack it."""
    unknown, units = counts.get("unknown"), counts.get("tokens", counts.get("words"))
    total = _total(units)
    if unknown is None or not total:
        return None
    return _total(unknown) / total


# A count may be one for each column of texts or side of parallel text.
def _total(count: Any) -> int:
    if isinstance(count, dict):
        return sum(count.values())
    if isinstance(count, list):
        return sum(count)
    return int(count or 0)


def unknown_shares(folder: Path, most: int = _COUNTED_BYTES) -> dict[str, float | None]:
    """Return the share of [UNK] in each split of a data folder; None where it is not known.

    If the manifest is missing or of an earlier version, token files of up to `most` bytes are
    counted.
    """
    if not (folder / MANIFEST_FILE).is_file():
        splits: dict[str, Any] = {path.stem: {} for path in sorted(folder.glob("*.bin"))}
        patterns = TOKENS[CORPUS]
    else:
        manifest = Manifest.load(folder)
        splits, patterns = manifest.splits, TOKENS.get(manifest.kind, [])
    shares = {split: unknown_share(counts) for split, counts in splits.items()}
    for split in [split for split, share in shares.items() if share is None]:
        files = sorted(path for p in patterns for path in folder.glob(f"{p.format(split)}.bin"))
        if files and sum(path.stat().st_size for path in files) <= most:
            shares[split] = _count_share(folder, files)
    return shares


def _count_share(folder: Path, files: list[Path]) -> float | None:
    if not (folder / OPTIONS_FILE).is_file():
        folder = folder.parent  # a set has the tokenizer of the corpus around it
    try:
        unk = load_tokenizer(folder).vocabulary.unk
        tokens = [IndexedDataset(path.with_suffix("")).tokens for path in files]
    except MetaseqError:  # doctor and the task report what is wrong with them
        return None
    total = sum(map(len, tokens))
    if not total:
        return None
    return sum(count_unknown(values, unk) for values in tokens) / total
