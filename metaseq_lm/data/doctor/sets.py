"""What `metaseq-lm doctor` says of labelled sets, SQuAD, parallel text and images."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.corpus import (
    ERROR,
    GOLDEN,
    OK,
    WARNING,
    Finding,
    corpus,
    document_hashes,
    files,
    overlaps,
    same_tokenizer,
    token_file,
    token_files,
    train_first,
)
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.squad.sets import SQUAD, SquadSet
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import CORPUS, LABELLED, MANIFEST_FILE, Manifest, check_sizes
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer

# Kinds of manifests. The modules that write these need torch, and the doctor runs without it.
WORDS = ("words", "tags", "trees")
PARALLEL, IMAGES = "parallel", "images"
MANY_CLASSES = 20


class Classified(Protocol):
    """Rows with labels as of LabelledSet, which is one."""

    @property
    def labels(self) -> np.ndarray | None:
        """Numbers of classes or real values (rows,)."""

    @property
    def label_names(self) -> list[str]:
        """The names of the classes."""

    @property
    def regression(self) -> bool:
        """Whether the labels are real values."""


def stands_alone(folder: Path) -> bool:
    """Return whether a set needs neither tokenizer nor vocabulary of the folder that it lies in."""
    try:
        return Manifest.load(folder).kind in (PARALLEL, IMAGES)
    except MetaseqError:
        return False


def any_set(folder: Path, tokenizer: Tokenizer | None, full: bool) -> Iterator[Finding]:
    """Yield the findings on a set of any kind; `tokenizer` is that of the corpus, if there is one."""
    try:
        manifest = Manifest.load(folder)
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    try:
        if manifest.kind in (LABELLED, SQUAD):
            yield from labelled_set(folder, manifest, tokenizer, full)
            return
        if manifest.kind in WORDS:
            from metaseq_lm.data.doctor import words

            whole = manifest.kind == WORDS[0]
            yield from words.word_data(folder, full) if whole else words.word_set(folder, full)
            return
        yield from files(folder, full)
        if check_sizes(folder):
            return  # every reader would say so again
        if manifest.kind == PARALLEL:
            yield from parallel_set(folder, manifest)
        elif manifest.kind == IMAGES:
            yield from image_set(folder, manifest)
    except ImportError as error:  # `machine` says what to install
        yield Finding(ERROR, f"{folder}: cannot be read: {error}")


def examine(folder: Path, full: bool) -> Iterator[Finding]:
    """Yield the findings on a data folder and the sets in it; `full` reads every checksum."""
    if not folder.is_dir():
        yield Finding(ERROR, f"{folder}: no such folder")
        return
    manifest, tokenizer = None, None
    sets = sorted(p.parent for p in folder.glob(f"*/{MANIFEST_FILE}"))
    if (folder / MANIFEST_FILE).is_file():
        try:
            manifest = Manifest.load(folder)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
    elif sets and not token_files(folder) and all(map(stands_alone, sets)):
        for sub in sets:
            yield from any_set(sub, None, full)
        return
    else:
        yield Finding(WARNING, f"{folder}: no {MANIFEST_FILE} to compare the files with")
    if manifest is not None and manifest.kind != CORPUS:
        yield from any_set(folder, None, full)
        return
    if manifest is not None:
        yield from files(folder, full)
    try:
        tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        expected = None if manifest is None else manifest.tokenizer["hash"]
        yield same_tokenizer(folder, tokenizer, expected)
    yield from corpus(folder, tokenizer, manifest)
    for sub in sets:
        yield from any_set(sub, tokenizer, full)


# -------------------------------------------------------------------- labelled sets, SQuAD


def labelled_set(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer | None, full: bool
) -> Iterator[Finding]:
    """Yield the findings on a labelled set or SQuAD; `tokenizer` as of `any_set`."""
    try:
        splits = train_first(manifest.splits)
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
    seen = sets["train"].labels if "train" in sets else None
    for split, content in sets.items():
        yield Finding(OK, f"{folder}: {split} has {len(content):,} rows; {distribution(content)}")
        yield from unseen_labels(f"{folder}: {split}", content, seen)
        for data in content.inputs:
            yield from text_faults(data, tokenizer)
    yield from overlaps(folder, {split: row_hashes(data.inputs) for split, data in sets.items()})


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
    yield from overlaps(
        folder, {split: row_hashes([data.contexts]) for split, data in sets.items()}
    )


def text_faults(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield what is wrong with one text of each row: none there, or no tokens of the vocabulary."""
    empty = np.flatnonzero(data.sizes == 0)
    if len(empty):
        yield Finding(
            WARNING, f"{data.prefix}: {len(empty):,} rows without text, first row {empty[0] + 1}"
        )
    yield from (finding for finding in token_file(data, tokenizer) if finding.level == ERROR)


def row_hashes(columns: Sequence[IndexedDataset]) -> np.ndarray:
    """Return a hash of the texts of each row, sorted, uint64 (rows,)."""
    parts = [document_hashes(data) * GOLDEN ** np.uint64(i) for i, data in enumerate(columns)]
    return np.sort(np.sum(parts, axis=0, dtype=np.uint64))


def distribution(content: Classified) -> str:
    """Return in words how the labels of a split are spread."""
    labels, names = content.labels, content.label_names
    if labels is None or not len(labels):
        return "no labels"
    if content.regression:
        return f"labels {labels.min():g} to {labels.max():g}, mean {labels.mean():.3g}"
    counts = np.bincount(labels, minlength=len(names))
    shares = [f"{name} {100 * n / len(labels):.1f} %" for name, n in zip(names, counts)]
    if len(names) > MANY_CLASSES:
        least, most = shares[counts.argmin()], shares[counts.argmax()]
        return f"labels of {len(names)} classes, from {least} to {most}"
    return f"labels {', '.join(shares)}"


def unseen_labels(name: str, content: Classified, train: np.ndarray | None) -> Iterator[Finding]:
    """Yield a warning for classes of a split, named `name`, that the labels of train lack."""
    labels, names = content.labels, content.label_names
    if content.regression or labels is None or train is None:
        return
    own, seen = set(labels.tolist()), set(train.tolist())
    if labels is train:
        wrong, text = set(range(len(names))) - own, "has no example of"
    else:
        wrong, text = own - seen, "has labels that train has no example of:"
    if wrong:
        yield Finding(WARNING, f"{name} {text} {', '.join(names[i] for i in sorted(wrong))}")


# -------------------------------------------------------------------- parallel text


def parallel_set(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Yield the findings on the tokenizers and splits of parallel text."""
    from metaseq_lm.data.parallel.sets import SIDES, ParallelSet, references_name

    try:
        languages = [str(manifest.details[side]) for side in SIDES]
        expected = {side: str(manifest.details["tokenizers"][side]["hash"]) for side in SIDES}
    except (KeyError, TypeError) as error:
        text = f"{folder / MANIFEST_FILE}: unknown content: {error!r}; preprocess again"
        yield Finding(ERROR, text)
        return
    tokenizers: dict[str, Tokenizer] = {}
    for side in SIDES:
        try:
            tokenizers[side] = load_tokenizer(folder, f"{side}.")
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
        else:
            yield same_tokenizer(folder, tokenizers[side], expected[side], side)
    hashes: dict[str, np.ndarray] = {}
    for split in train_first(manifest.splits):
        try:
            data = ParallelSet(folder, split)
            if references_name(split) in manifest.files:
                data.references  # read now: a damaged file is an error here, not in a run
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        texts = [data.source] if data.target is None else [data.source, data.target]
        yield Finding(OK, f"{folder}: {split} has {mean_lengths(texts, languages)}")
        for side, column in zip(SIDES, texts):
            yield from text_faults(column, tokenizers.get(side))
        if data.target is not None and all(column.dtype.kind in "iu" for column in texts):
            hashes[split] = row_hashes(texts)
    yield from overlaps(folder, hashes, "pairs")


def mean_lengths(texts: Sequence[IndexedDataset], languages: Sequence[str]) -> str:
    """Return in words how many rows parallel text has, and how long its sides (one or two) are."""
    count = len(texts[0])
    means = [len(text.tokens) / max(count, 1) for text in texts]
    if len(texts) == 1:
        return f"{count:,} sentences of {languages[0]} alone, on average {means[0]:.1f} tokens"
    (one, other), (first, second) = means, languages
    return f"{count:,} pairs, on average {one:.1f} tokens of {first} and {other:.1f} of {second}"


# -------------------------------------------------------------------- images


def image_set(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Yield the findings on the splits of labelled images."""
    from metaseq_lm.data.images import ClassifiedImages, load_images

    hashes: dict[str, np.ndarray] = {}
    first, shape, train = "", (), None
    for split in train_first(manifest.splits):
        try:
            data = load_images(folder, split)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        content, own = ClassifiedImages(data), data.images.shape[1:]
        train = data.labels if split == "train" else train
        about = f"{len(data):,} images {described(own)}; {distribution(content)}"
        yield Finding(OK, f"{folder}: {split} has {about}")
        yield from unseen_labels(f"{folder}: {split}", content, train)
        first, shape = (first, shape) if first else (split, own)
        if own != shape:
            text = f"{split} has images {described(own)}, but {first} {described(shape)}"
            yield Finding(ERROR, f"{folder}: {text}; make all of one size")
        hashes[split] = image_hashes(data.images)
    yield from overlaps(folder, hashes, "images")


def described(shape: Sequence[int]) -> str:
    """Return in words the shape (H, W, C) of images."""
    height, width, channels = shape
    return f"of {height} x {width} pixels in {channels} channel{'s' if channels > 1 else ''}"


def image_hashes(images: np.ndarray) -> np.ndarray:
    """Return a hash of the bytes of each image, sorted, uint64 (N,)."""
    digests = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return np.sort(np.frombuffer(b"".join(digests), np.uint64))
