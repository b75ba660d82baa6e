"""Checks of a data folder and of the machine, before compute is spent on them."""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metaseq_lm.data.indexed import IndexedDataset, prefix_path
from metaseq_lm.data.labelled import LabelledSet
from metaseq_lm.data.manifest import CORPUS, LABELLED, MANIFEST_FILE, Manifest, check_sizes, verify
from metaseq_lm.data.squad import SQUAD, SquadSet
from metaseq_lm.data.tokenizer import load_tokenizer
from metaseq_lm.data.tokenizer_base import Tokenizer
from metaseq_lm.errors import MetaseqError
from metaseq_lm.files import free_bytes, human_bytes

WORDS = ("words", "tags", "trees")  # kinds of manifests that data/words writes
OK, WARNING, ERROR = "ok", "warning", "error"
LITTLE_SPACE = 2 << 30
MANY_DUPLICATES = 0.1
MANY_SHARED = 0.01
CHUNK = 1 << 21
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Finding:
    """One line of the report: "ok", "warning" or "error", and what was found."""

    level: str
    text: str


def document_hashes(data: IndexedDataset, documents: np.ndarray | None = None) -> np.ndarray:
    """Return a 64-bit hash of each sequence, uint64 (sequences,); 0 for empty ones.

    With `documents` (documents + 1,), as in `data`, one of each document. It is the sum of a mixed
    (token, position) over the document, modulo 2**64, so that documents of any length are read in
    pieces. The mixing is the one of SplitMix64 (Steele et al. 2014).
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


def machine(folder: Path) -> Iterator[Finding]:
    """Yield what is to be said of Python, torch, processors and disk."""
    version = platform.python_version()
    tested = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding(OK if tested else WARNING, f"Python {version}{'' if tested else ', not tested'}")
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
    free = free_bytes(folder)
    level = OK if free >= LITTLE_SPACE else WARNING
    yield Finding(level, f"{human_bytes(free)} free on the disk of {folder}")


def examine(folder: Path, full: bool) -> Iterator[Finding]:
    """Yield the findings on a data folder and its labelled sets; `full` reads every checksum."""
    if not folder.is_dir():
        yield Finding(ERROR, f"{folder}: no such folder")
        return
    manifest, tokenizer = None, None
    if (folder / MANIFEST_FILE).is_file():
        try:
            manifest = Manifest.load(folder)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
    else:
        yield Finding(WARNING, f"{folder}: no {MANIFEST_FILE} to compare the files with")
    if manifest is not None and manifest.kind in WORDS:
        from metaseq_lm.data.words import doctor  # it builds on this module

        whole = manifest.kind == WORDS[0]
        yield from doctor.word_data(folder, full) if whole else doctor.word_set(folder, full)
        return
    if manifest is not None and manifest.kind != CORPUS:
        yield from labelled_set(folder, None, full)
        return
    if manifest is not None:
        yield from files(folder, full)
    try:
        tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        yield same_tokenizer(folder, tokenizer, manifest)
    yield from corpus(folder, tokenizer, manifest)
    for sub in sorted(p.parent for p in folder.glob(f"*/{MANIFEST_FILE}")):
        yield from labelled_set(sub, tokenizer, full)


def files(folder: Path, full: bool) -> Iterator[Finding]:
    """Yield the comparison of the files with the manifest: sizes, or (`full`) every block."""
    faults = verify(folder) if full else check_sizes(folder)
    for fault in faults:
        yield Finding(ERROR, f"{fault}; copy the folder again or preprocess again")
    if not faults:
        done = "every checksum" if full else "file sizes (--verify reads the checksums)"
        yield Finding(OK, f"{folder}: {MANIFEST_FILE} agrees with {done}")


def same_tokenizer(folder: Path, tokenizer: Tokenizer, manifest: Manifest | None) -> Finding:
    """Return whether the tokenizer of a folder is the one its token files were made with."""
    if manifest is not None and tokenizer.fingerprint != manifest.tokenizer["hash"]:
        return Finding(ERROR, f"{folder}: its tokenizer is not the one of the token files")
    return Finding(
        OK, f"{folder}: {tokenizer.name}, {len(tokenizer.vocabulary):,} symbols as in dict.txt"
    )


def corpus(
    folder: Path, tokenizer: Tokenizer | None, manifest: Manifest | None
) -> Iterator[Finding]:
    """Yield the findings on the token files of a corpus, train first."""
    found = {p.name[:-4] for s in (".idx", ".bin") for p in folder.glob(f"*{s}")}
    listed = set(manifest.splits) if manifest is not None else set()
    if not found | listed:
        yield Finding(ERROR, f"{folder}: no token files (.bin and .idx)")
    hashes: dict[str, np.ndarray] = {}
    for split in sorted(found | listed, key=lambda name: (name != "train", name)):
        try:
            data = IndexedDataset(folder / split)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        yield from token_file(data, tokenizer)
        if data.dtype.kind in "iu":
            filled = np.diff(token_offsets(data, data.documents)) > 0
            hashes[split] = np.sort(document_hashes(data, data.documents)[filled])
            yield duplicates(str(folder / split), hashes[split])
    yield from overlaps(folder, hashes)


def token_file(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield the size of a token file, ids outside the vocabulary, and empty documents."""
    sizes = np.diff(token_offsets(data, data.documents))
    empty = int(np.count_nonzero(sizes == 0))
    longest = int(sizes.max(initial=0))
    text = f"{len(sizes):,} documents, {len(data.tokens):,} tokens, longest {longest:,}"
    if len(sizes) != len(data):
        text = f"{len(data):,} sequences in {text}"
    yield Finding(OK if len(data.tokens) else ERROR, f"{data.prefix}: {text}")
    if empty:
        yield Finding(WARNING, f"{data.prefix}: {empty:,} empty documents")
    if tokenizer is None or not len(data.tokens):
        return
    pieces = range(0, len(data.tokens), CHUNK)
    largest = max(int(data.tokens[i : i + CHUNK].max()) for i in pieces)
    smallest = min(int(data.tokens[i : i + CHUNK].min()) for i in pieces)
    size = len(tokenizer.vocabulary)
    if not 0 <= smallest <= largest < size:
        wrong = smallest if smallest < 0 else largest
        path = prefix_path(data.prefix, ".bin")
        yield Finding(ERROR, f"{path}: token id {wrong}, but the vocabulary ends at {size - 1}")


def duplicates(name: str, hashes: np.ndarray) -> Finding:
    """Return the share of documents that repeat an earlier one; `hashes` are sorted."""
    share = np.count_nonzero(hashes[1:] == hashes[:-1]) / max(len(hashes), 1)
    return Finding(
        WARNING if share > MANY_DUPLICATES else OK,
        f"{name}: {100 * share:.1f} % of the documents repeat another one",
    )


def overlaps(folder: Path, hashes: dict[str, np.ndarray]) -> Iterator[Finding]:
    """Yield, for each pair of splits, how many documents of the later stand in the earlier too."""
    names = list(hashes)
    for i, later in enumerate(names):
        for earlier in names[:i]:
            shared = np.isin(hashes[later], hashes[earlier])
            count = int(np.count_nonzero(shared))
            share = count / max(len(shared), 1)
            yield Finding(
                WARNING if share > MANY_SHARED else OK,
                f"{folder}: {count:,} of {len(shared):,} documents of {later} "
                f"({100 * share:.1f} %) also stand in {earlier}",
            )


def labelled_set(folder: Path, tokenizer: Tokenizer | None, full: bool) -> Iterator[Finding]:
    """Yield the findings on a labelled set; `tokenizer` is that of the corpus, if there is one."""
    try:
        manifest = Manifest.load(folder)
        if manifest.kind not in (LABELLED, SQUAD):  # of a kind that has a reader of its own
            yield from files(folder, full)
            return
        splits = sorted(manifest.splits, key=lambda name: (name != "train", name))
        if manifest.kind == SQUAD:
            yield from questions(folder, {split: SquadSet(folder, split) for split in splits})
            splits = []
        sets = {split: LabelledSet(folder, split) for split in splits}
        for content in sets.values():
            content.read_rows()  # a damaged file is an error here, not at the end of a run
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    yield from files(folder, full)
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer["hash"]:
        yield Finding(
            ERROR, f"{folder}: made with another tokenizer than the corpus; preprocess it again"
        )
    hashes: dict[str, np.ndarray] = {}
    for split, content in sets.items():
        yield Finding(OK, f"{folder}: {split} has {len(content):,} rows; {distribution(content)}")
        yield from unseen_labels(content, sets.get("train"))
        for i, data in enumerate(content.inputs):
            yield from empty_rows(data)
            ids = list(token_file(data, tokenizer))
            yield from (finding for finding in ids if finding.level == ERROR)
            column = document_hashes(data) * GOLDEN ** np.uint64(i)
            hashes[split] = hashes[split] + column if i else column
    yield from overlaps(folder, {split: np.sort(h) for split, h in hashes.items()})


def questions(folder: Path, sets: dict[str, SquadSet]) -> Iterator[Finding]:
    """Yield the size of each split of a SQuAD set, answers that were not found, shared contexts."""
    for split, data in sets.items():
        contexts, _ = data.texts  # read now: a damaged file is an error here, not in a run
        impossible, lost = data.impossible, ~data.impossible & (data.first < 0)
        yield Finding(
            OK,
            f"{folder}: {split} has {len(data):,} questions on {len(contexts):,} paragraphs; "
            f"{100 * impossible.mean():.1f} % impossible",
        )
        if lost.any():
            text = f"{lost.sum():,} answers are not in their context and cannot be trained on"
            yield Finding(WARNING, f"{folder}: {split}: {text}")
    hashes = {split: np.sort(document_hashes(data.contexts)) for split, data in sets.items()}
    yield from overlaps(folder, hashes)


def empty_rows(data: IndexedDataset) -> Iterator[Finding]:
    """Yield a warning with the first place if rows of a labelled set have no tokens."""
    empty = np.flatnonzero(data.sizes == 0)
    if len(empty):
        yield Finding(
            WARNING, f"{data.prefix}: {len(empty):,} rows without text, first row {empty[0] + 1}"
        )


def distribution(content: LabelledSet) -> str:
    """Return in words how the labels of a split are spread."""
    if content.labels is None:
        return "no labels"
    if content.regression:
        values = content.labels
        return f"labels {values.min():g} to {values.max():g}, mean {values.mean():.3g}"
    counts = np.bincount(content.labels, minlength=len(content.label_names))
    return "labels " + ", ".join(
        f"{name} {100 * count / len(content):.1f} %"
        for name, count in zip(content.label_names, counts)
    )


def unseen_labels(content: LabelledSet, train: LabelledSet | None) -> Iterator[Finding]:
    """Yield a warning for classes of a split that train has no example of."""
    if content.regression or content.labels is None or train is None or train.labels is None:
        return
    seen = set(train.labels.tolist())
    if content is train:
        wrong = [name for i, name in enumerate(content.label_names) if i not in seen]
        text = "train has no example of"
    else:
        wrong = [content.label_names[i] for i in sorted(set(content.labels.tolist()) - seen)]
        text = f"{content.split} has labels that train has no example of:"
    if wrong:
        yield Finding(WARNING, f"{content.folder}: {text} {', '.join(wrong)}")
