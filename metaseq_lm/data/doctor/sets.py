"""Checks of what holds tokens, corpora, labelled sets, SQuAD and parallel text, and of images."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import (
    ERROR,
    GOLDEN,
    OK,
    WARNING,
    Finding,
    Subject,
    document_hashes,
    duplicates,
    overlaps,
    register_check,
    same_tokenizer,
    token_file,
    token_files,
    token_offsets,
    train_first,
)
from metaseq_lm.data.images import IMAGES, load_images
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.parallel.sets import PARALLEL, SIDES, ParallelSet, references_name
from metaseq_lm.data.squad.sets import SQUAD, SquadSet
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import CORPUS, LABELLED, MANIFEST_FILE
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer

MANY_CLASSES = 20


# -------------------------------------------------------------------- corpora


@register_check(CORPUS)
def corpus(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the tokenizer and the token files of a corpus, train first."""
    folder, manifest = subject.folder, subject.manifest
    try:
        subject.tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        expected = None if manifest is None else manifest.tokenizer["hash"]
        yield same_tokenizer(folder, subject.tokenizer, expected)
    names = token_files(folder) | set(subject.splits)
    if not names:
        yield Finding(ERROR, f"{folder}: no token files (.bin and .idx)")
    hashes: dict[str, np.ndarray] = {}
    for split in train_first(names):
        try:
            data = IndexedDataset(folder / split)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        yield from token_file(data, subject.tokenizer)
        if data.dtype.kind in "iu":
            filled = np.diff(token_offsets(data, data.documents)) > 0
            hashes[split] = np.sort(document_hashes(data, data.documents)[filled])
            yield duplicates(str(folder / split), hashes[split])
    yield from overlaps(folder, hashes)


# -------------------------------------------------------------------- labelled sets, SQuAD


@register_check(LABELLED)
def labelled_set(subject: Subject) -> Iterator[Finding]:
    """Yield size, labels, empty texts and repetitions of each split of a labelled set."""
    folder = subject.folder
    try:
        sets = {split: LabelledSet(folder, split) for split in subject.splits}
        for content in sets.values():
            content.read_rows()  # a damaged file is an error here, not at the end of a run
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    yield from other_tokenizer(subject)
    train = sets["train"].labels if "train" in sets else None
    for split, content in sets.items():
        labels, names = content.labels, content.label_names
        yield Finding(
            OK, f"{folder}: {split} has {len(content):,} rows; {distribution(labels, names)}"
        )
        yield from unseen_labels(f"{folder}: {split}", labels, names, train)
        for data in content.inputs:
            yield from text_faults(data, subject.tokenizer)
    yield from overlaps(folder, {split: row_hashes(data.inputs) for split, data in sets.items()})


@register_check(SQUAD)
def squad_set(subject: Subject) -> Iterator[Finding]:
    """Yield the size of each split of a SQuAD set, answers that were not found, shared contexts."""
    folder = subject.folder
    try:
        sets = {split: SquadSet(folder, split) for split in subject.splits}
        contexts = {split: data.texts[0] for split, data in sets.items()}  # read now, as above
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    yield from other_tokenizer(subject)
    for split, data in sets.items():
        impossible, lost = data.impossible, ~data.impossible & (data.first < 0)
        yield Finding(
            OK,
            f"{folder}: {split} has {len(data):,} questions on {len(contexts[split]):,} paragraphs; "
            f"{100 * impossible.mean():.1f} % impossible",
        )
        if lost.any():
            text = f"{lost.sum():,} answers are not in their context and cannot be trained on"
            yield Finding(WARNING, f"{folder}: {split}: {text}")
    hashes = {split: row_hashes([data.contexts]) for split, data in sets.items()}
    yield from overlaps(folder, hashes)


def other_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Yield an error if a set was made with another tokenizer than the corpus around it."""
    tokenizer, manifest = subject.tokenizer, subject.manifest
    assert manifest is not None
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer["hash"]:
        text = "made with another tokenizer than the corpus; preprocess it again"
        yield Finding(ERROR, f"{subject.folder}: {text}")


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


def distribution(labels: np.ndarray | None, names: Sequence[str]) -> str:
    """Return in words how the labels of a split, numbers of `names`, are spread.

    Without names they are real values.
    """
    if labels is None or not len(labels):
        return "no labels"
    if not names:
        return f"labels {labels.min():g} to {labels.max():g}, mean {labels.mean():.3g}"
    counts = np.bincount(labels, minlength=len(names))
    shares = [f"{name} {100 * n / len(labels):.1f} %" for name, n in zip(names, counts)]
    if len(names) > MANY_CLASSES:
        least, most = shares[counts.argmin()], shares[counts.argmax()]
        return f"labels of {len(names)} classes, from {least} to {most}"
    return f"labels {', '.join(shares)}"


def unseen_labels(
    name: str, labels: np.ndarray | None, names: Sequence[str], train: np.ndarray | None
) -> Iterator[Finding]:
    """Yield a warning for classes of a split, called `name`, that the labels of train lack."""
    if not names or labels is None or train is None:
        return
    present = set(labels.tolist())
    if labels is train:
        wrong, text = set(range(len(names))) - present, "has no example of"
    else:
        wrong = present - set(train.tolist())
        text = "has labels that train has no example of:"
    if wrong:
        yield Finding(WARNING, f"{name} {text} {', '.join(names[i] for i in sorted(wrong))}")


# -------------------------------------------------------------------- parallel text


@register_check(PARALLEL, stands_alone=True)
def parallel_set(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the tokenizers and splits of parallel text."""
    folder, manifest = subject.folder, subject.manifest
    assert manifest is not None
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
    for split in subject.splits:
        try:
            data = ParallelSet(folder, split)
            if references_name(split) in manifest.files:
                _ = data.references  # read now: a damaged file is an error here, not in a run
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


@register_check(IMAGES, stands_alone=True)
def image_set(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the splits of labelled images."""
    folder = subject.folder
    hashes: dict[str, np.ndarray] = {}
    first, first_shape, train = "", (), None
    for split in subject.splits:
        try:
            data = load_images(folder, split)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        shape, names = data.images.shape[1:], list(data.names)
        train = data.labels if split == "train" else train
        about = f"{len(data):,} images {described(shape)}; {distribution(data.labels, names)}"
        yield Finding(OK, f"{folder}: {split} has {about}")
        yield from unseen_labels(f"{folder}: {split}", data.labels, names, train)
        first, first_shape = (first, first_shape) if first else (split, shape)
        if shape != first_shape:
            text = f"{split} has images {described(shape)}, but {first} {described(first_shape)}"
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
