"""Findings on the machine, and the parts that the checks of `metaseq-lm doctor` share."""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import free_bytes, human_bytes
from metaseq_lm.core.registry import Registry
from metaseq_lm.data.storage.indexed import IndexedDataset, prefix_path
from metaseq_lm.data.storage.manifest import CORPUS, Manifest
from metaseq_lm.data.storage.word_starts import open_word_starts
from metaseq_lm.data.tokenizers.base import DICT_FILE, Tokenizer
from metaseq_lm.data.words.vocabulary import WordVocabulary

__all__ = ["Finding", "Subject", "check"]

OK, WARNING, ERROR = "ok", "warning", "error"
_MANY_DUPLICATES = 0.1
MANY_SHARED = 0.01
# The share of tokens in passages of train from which on a split is not another split. Real texts
# share a tenth, such as licences and tables of contents, which league's gate `leak` flags.
COPIED = 0.5
CHUNK = 1 << 21
_LITTLE_SPACE = 2 << 30
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Finding:
    """One line of the report: its level ("ok", "warning" or "error") and its text."""

    level: str
    text: str


@dataclass
class Subject:
    """A folder to check, and facts about the data folder that it lies in.

    `manifest` is None for a data folder without a readable one. `full` reads every checksum. If
    `shifted`, other splits of a corpus are meant to be of another domain than train.
    The check of a data folder sets the tokenizer or vocabulary, which its labelled sets share.
    """

    folder: Path
    manifest: Manifest | None
    full: bool = False
    shifted: bool = False
    tokenizer: Tokenizer | None = None
    vocabulary: WordVocabulary | None = None
    sides: dict[str, Tokenizer] | None = None  # of parallel text
    unknown: dict[str, float | None] = field(default_factory=dict)  # the share of [UNK] by split
    sets: dict[str, Any] = field(default_factory=dict)  # the splits that could be opened
    sound: list[str] = field(default_factory=list)  # splits with all ids in the vocabulary

    def inside(self, folder: Path) -> "Subject":
        """Return the subject of a set in the folder."""
        return replace(
            self, folder=folder, manifest=None, sides=None, unknown={}, sets={}, sound=[]
        )

    @property
    def described(self) -> Manifest:
        """The manifest of a folder that has one."""
        assert self.manifest is not None
        return self.manifest

    @property
    def kind(self) -> str:
        """The kind of the manifest; without one, the folder is taken for a corpus."""
        return self.manifest.kind if self.manifest is not None else CORPUS

    @property
    def splits(self) -> list[str]:
        """The splits of the manifest."""
        return list(self.manifest.splits) if self.manifest is not None else []


Check = Callable[[Subject], Iterator[Finding]]
CHECKS: Registry[Check] = Registry("check")
_kinds: dict[str, tuple[str, ...]] = {}


def check(name: str, *kinds: str) -> Callable[[Check], Check]:
    """Register a check of the folders of some kinds of manifests, without any of every folder.

    Checks of a kind run in the order of their registration, and may use what earlier ones set in
    the subject. A check is a generator of findings.
    """
    _kinds[name] = kinds or ("",)
    return CHECKS.register(name)


def checks_of(kind: str) -> list[Check]:
    """Return the checks of a kind of manifests; of "", those of every folder."""
    return [entry.value for entry in CHECKS.entries.values() if kind in _kinds[entry.name]]


def machine(folders: Iterable[Path]) -> Iterator[Finding]:
    """Yield findings on Python, torch, processors and the disks of some folders."""
    level, text = OK, f"Python {platform.python_version()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        level, text = WARNING, f"{text}, not tested"
    yield Finding(level, text)
    try:
        import torch
    except ImportError as error:
        yield Finding(ERROR, f"torch cannot be imported: {error}; pip install 'torch>=2.11'")
    else:
        cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding(
            OK,
            f"torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} "
            f"processors, {', '.join(cards) or 'no CUDA device'}",
        )
    for folder in folders:
        free = free_bytes(folder)
        level = OK if free >= _LITTLE_SPACE else WARNING
        yield Finding(level, f"{human_bytes(free)} free on the disk of {folder}")


def document_hashes(data: IndexedDataset, documents: np.ndarray | None = None) -> np.ndarray:
    """Return a 64-bit hash of each sequence or document, uint64 (N,); 0 for empty ones.

    It is the sum of mixed (token, position) pairs modulo 2**64, so that documents of any length are
    read in pieces. The mixing is the one of SplitMix64 (Steele et al. 2014).
    """
    offsets = token_offsets(data, documents)
    filled = np.flatnonzero(np.diff(offsets))
    starts = offsets[filled]
    sums = np.zeros(len(filled), np.uint64)
    total = len(data.tokens)
    for begin in range(0, total, CHUNK):
        end = min(begin + CHUNK, total)
        first = int(np.searchsorted(starts, begin, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        cuts = np.maximum(starts[first:last], begin) - begin
        lengths = np.diff(np.append(cuts, end - begin))
        positions = np.arange(begin, end) - np.repeat(starts[first:last], lengths)
        x = data.tokens[begin:end].astype(np.uint64) + GOLDEN * (positions + 1).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        sums[first:last] += np.add.reduceat(x ^ (x >> np.uint64(31)), cuts)
    hashes = np.zeros(len(offsets) - 1, np.uint64)
    hashes[filled] = sums
    return hashes


def token_offsets(data: IndexedDataset, documents: np.ndarray | None = None) -> np.ndarray:
    """Return where each sequence (or document) begins, in tokens, and where the last one ends."""
    offsets = np.append(data.starts, len(data.tokens))
    return offsets if documents is None else offsets[documents]


def same_tokenizer(
    folder: Path, tokenizer: Tokenizer, expected: str | None, side: str = ""
) -> Finding:
    """Return whether a tokenizer has the hash that its token files were made with, if it is known.

    `side` is "source" or "target" of parallel text.
    """
    if expected not in (None, tokenizer.fingerprint):
        name = f"{side} tokenizer" if side else "tokenizer"
        return Finding(ERROR, f"{folder}: its {name} is not the one of the token files")
    text = f"{tokenizer.name}, {len(tokenizer.vocabulary):,} symbols as in"
    prefix = f"{folder}: {side} text: {text} {side}." if side else f"{folder}: {text} "
    return Finding(OK, f"{prefix}{DICT_FILE}")


def token_files(folder: Path) -> set[str]:
    """Return the names of the token files in a folder, without .bin or .idx."""
    return {path.name[:-4] for path in folder.iterdir() if path.suffix in (".idx", ".bin")}


def token_file(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield the size of a token file, ids outside the vocabulary, and empty documents."""
    path = prefix_path(data.prefix, ".bin")
    sizes = np.diff(token_offsets(data, data.documents))
    empty = int(np.count_nonzero(sizes == 0))
    longest = int(sizes.max(initial=0))
    words = ""
    try:
        if (word_starts := open_word_starts(data.prefix, len(data.tokens))) is not None:
            words = f"{word_starts.total:,} words, "
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
    text = f"{len(sizes):,} documents, {words}{len(data.tokens):,} tokens, longest {longest:,}"
    if len(sizes) != len(data):
        text = f"{len(data):,} sequences in {text}"
    yield Finding(OK if len(data.tokens) else ERROR, f"{data.prefix}: {text}")
    if empty:
        yield Finding(WARNING, f"{data.prefix}: {empty:,} empty documents")
    if data.dtype.kind not in "iu":
        yield Finding(ERROR, f"{path}: holds {data.dtype}, not tokens")
        return
    if tokenizer is None or not len(data.tokens):
        return
    pieces = range(0, len(data.tokens), CHUNK)
    largest = max(int(data.tokens[i : i + CHUNK].max()) for i in pieces)
    smallest = min(int(data.tokens[i : i + CHUNK].min()) for i in pieces)
    size = len(tokenizer.vocabulary)
    if not 0 <= smallest <= largest < size:
        invalid = smallest if smallest < 0 else largest
        yield Finding(ERROR, f"{path}: token id {invalid}, but the vocabulary ends at {size - 1}")


def duplicates(name: str, hashes: np.ndarray) -> Finding:
    """Return the share of documents that repeat an earlier one; `hashes` are sorted."""
    share = np.count_nonzero(hashes[1:] == hashes[:-1]) / max(len(hashes), 1)
    return Finding(
        WARNING if share > _MANY_DUPLICATES else OK,
        f"{name}: {100 * share:.1f} % of the documents repeat another one",
    )


def overlaps(
    folder: Path,
    hashes: dict[str, np.ndarray],
    noun: str = "documents",
    sizes: dict[str, np.ndarray] | None = None,
) -> Iterator[Finding]:
    """Yield, for each pair of splits, how many rows (`noun`) of the later are also in the earlier.

    With the number of tokens of each row in `sizes`, the share of tokens decides, because short
    lines, such as headings, are in every split of a text.
    """
    names = list(hashes)
    for i, later in enumerate(names):
        for earlier in names[:i]:
            shared = np.isin(hashes[later], hashes[earlier])
            count = int(np.count_nonzero(shared))
            share = count / max(len(shared), 1)
            text = f"{count:,} of {len(shared):,} {noun} of {later} ({100 * share:.1f} %)"
            if sizes is not None:
                share = sizes[later][shared].sum() / max(sizes[later].sum(), 1)
                text += f", {100 * share:.1f} % of its tokens,"
            level = WARNING if share > MANY_SHARED else OK
            yield Finding(level, f"{folder}: {text} also stand in {earlier}")
