"""Checks of sentences of words: unlabelled text with its vocabulary, tagged sets, treebanks."""

import hashlib
from collections.abc import Iterator

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import (
    CHUNK,
    ERROR,
    OK,
    WARNING,
    Finding,
    Subject,
    document_hashes,
    duplicates,
    overlaps,
    register_check,
)
from metaseq_lm.data.words.sets import KINDS, TEXT, TREES, WordSet
from metaseq_lm.data.words.vocabulary import UNKNOWN, WordVocabulary

MANY_UNKNOWN = 0.2


@register_check(*KINDS)
def sentences(subject: Subject) -> Iterator[Finding]:
    """Yield size, share of unknown words, labels and repetitions of each split, train first."""
    folder, manifest = subject.folder, subject.manifest
    assert manifest is not None
    if KINDS[manifest.kind] == TEXT:
        try:
            vocabulary = subject.vocabulary = WordVocabulary.load(folder)
            vectors = vocabulary.vectors
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            return
        about = "no vectors" if vectors is None else f"vectors of {vectors.shape[1]} numbers"
        words, characters = len(vocabulary), len(vocabulary.characters)
        yield Finding(OK, f"{folder}: {words:,} words, {characters:,} characters, {about}")
    hashes: dict[str, np.ndarray] = {}
    train: WordSet | None = None
    for split in subject.splits:
        try:
            data = WordSet(folder, split, subject.vocabulary)
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
    in_train = np.bincount(np.asarray(train.labels.tokens), minlength=len(counts)) > 0
    wrong = [data.label_names[i] for i in np.flatnonzero((counts > 0) & ~in_train)]
    if wrong:
        text = f"{data.split} has {data.form} that train lacks:"
        yield Finding(WARNING, f"{data.folder}: {text} {', '.join(wrong)}")
