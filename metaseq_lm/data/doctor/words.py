"""What `metaseq-lm doctor` says of sentences of words."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.corpus import (
    ERROR,
    OK,
    WARNING,
    Finding,
    document_hashes,
    duplicates,
    files,
    overlaps,
)
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest
from metaseq_lm.data.words.sets import KINDS, TEXT, TREES, WordSet
from metaseq_lm.data.words.vocabulary import UNKNOWN, WordVocabulary

MANY_UNKNOWN = 0.2
CHUNK = 1 << 22


def word_data(folder: Path, full: bool) -> Iterator[Finding]:
    """Yield the findings on a data folder of words, its vocabulary, splits and sets."""
    yield from files(folder, full)
    try:
        vocabulary = WordVocabulary.load(folder)
        vectors = vocabulary.vectors
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    about = "no vectors" if vectors is None else f"vectors of {vectors.shape[1]} numbers"
    yield Finding(
        OK,
        f"{folder}: {len(vocabulary):,} words, {len(vocabulary.characters):,} characters, {about}",
    )
    yield from splits(folder, vocabulary)
    for sub in sorted(p.parent for p in folder.glob(f"*/{MANIFEST_FILE}")):
        yield from word_set(sub, full, vocabulary)


def word_set(
    folder: Path, full: bool, vocabulary: WordVocabulary | None = None
) -> Iterator[Finding]:
    """Yield the findings on a tagged set or treebank; `vocabulary` as in WordSet."""
    yield from files(folder, full)
    try:
        if Manifest.load(folder).kind not in KINDS:
            return
    except MetaseqError:
        return  # `files` has said so
    yield from splits(folder, vocabulary)


def splits(folder: Path, vocabulary: WordVocabulary | None) -> Iterator[Finding]:
    """Yield size, share of unknown words, labels and repetitions of each split, train first."""
    hashes: dict[str, np.ndarray] = {}
    train: WordSet | None = None
    for split in sorted(Manifest.load(folder).splits, key=lambda name: (name != "train", name)):
        try:
            data = WordSet(folder, split, vocabulary)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        train = data if split == "train" else train
        words = len(data.words.tokens)
        pieces = range(0, words, CHUNK)
        unknown = sum(
            int(np.count_nonzero(data.words.tokens[i : i + CHUNK] == UNKNOWN)) for i in pieces
        )
        yield Finding(
            WARNING if unknown > MANY_UNKNOWN * words else OK,
            f"{folder}: {split} has {len(data):,} sentences, {words:,} words, "
            f"{100 * unknown / max(words, 1):.1f} % unknown, longest {data.lengths.max(initial=0):,}",
        )
        yield from labels(data, train)
        # Of the forms, not the ids: two unknown words need not be the same.
        text = document_hashes(data.words) if data.form == TEXT else _surface_hashes(data)
        hashes[split] = np.sort(text[data.lengths > 0])
        if data.form == TEXT:
            yield duplicates(f"{folder}: {split}", hashes[split])
    yield from overlaps(folder, hashes, "sentences")


def _surface_hashes(data: WordSet) -> np.ndarray:
    def digest(words: list[str]) -> int:
        text = "\n".join(words).encode("utf-8", "replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    return np.array([digest(words) for words in data.surface(np.arange(len(data)))], np.uint64)


def labels(data: WordSet, train: WordSet | None) -> Iterator[Finding]:
    """Yield how often each label occurs, and labels that train lacks."""
    if data.labels is None:
        return
    counts = np.bincount(np.asarray(data.labels.tokens), minlength=len(data.label_names))
    kind = "relations" if data.form == TREES else "BIOES tags of spans" if data.spans else "tags"
    often = np.argsort(-counts, kind="stable")[:5]
    shares = ", ".join(
        f"{data.label_names[i]} {100 * counts[i] / max(counts.sum(), 1):.1f} %" for i in often
    )
    yield Finding(
        OK,
        f"{data.folder}: {data.split} has {np.count_nonzero(counts)} of {len(counts)} {kind}: {shares}",
    )
    if train is None or train.labels is None or train is data:
        return
    seen = np.bincount(np.asarray(train.labels.tokens), minlength=len(counts)) > 0
    wrong = [data.label_names[i] for i in np.flatnonzero((counts > 0) & ~seen)]
    if wrong:
        text = f"{data.split} has {data.form} that train lacks:"
        yield Finding(WARNING, f"{data.folder}: {text} {', '.join(wrong)}")
