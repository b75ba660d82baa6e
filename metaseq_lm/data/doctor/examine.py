"""The report on a data folder: the check of its kind, then the checks of the sets inside it.

A check is a generator of findings; CHECKS names the kinds of manifests that each one reads.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import (
    CHUNK,
    COPIED,
    ERROR,
    GOLDEN,
    MANY_SHARED,
    OK,
    WARNING,
    Finding,
    Subject,
    document_hashes,
    duplicates,
    overlaps,
    same_tokenizer,
    token_file,
    token_files,
    token_offsets,
)
from metaseq_lm.data.doctor.likeness import (
    FEWEST,
    FOREIGN,
    SHIFTED,
    Likeness,
    compare,
    sample_size,
)
from metaseq_lm.data.doctor.passages import WINDOW
from metaseq_lm.data.images import IMAGES, load_images
from metaseq_lm.data.labelled.classes import label_warnings
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.parallel.sets import PARALLEL, SIDES, ParallelSet, references_name
from metaseq_lm.data.records.file_kinds import Kind, recognise_lines
from metaseq_lm.data.records.text_content import DAMAGED_SHARE
from metaseq_lm.data.squad.sets import SQUAD, SquadSet
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import (
    CORPUS,
    LABELLED,
    MANIFEST_FILE,
    VALID_REMEDY,
    Manifest,
    check_sizes,
    is_small,
    verify,
)
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE, Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.unknown_tokens import unknown_shares
from metaseq_lm.data.words.sets import KINDS, TAGS, TEXT, TREES, WordSet, missing_breaks
from metaseq_lm.data.words.tags import SPELLING, span_like
from metaseq_lm.data.words.vocabulary import WordVocabulary
from metaseq_lm.runs.conditions import REMEDY, describe_unknown

_MANY_CLASSES = 20
_MANY_UNKNOWN = 0.2
_SAMPLE, _SAMPLE_TOKENS = (
    200,
    2000,
)  # texts of a corpus whose form is examined, and how much of each
# Sets of these kinds need neither tokenizer nor vocabulary of the folder that they lie in.
STANDS_ALONE = {PARALLEL, IMAGES}
_MADE_OF_TEXT = {CORPUS, LABELLED, SQUAD, PARALLEL, *KINDS}  # by preprocess
T = TypeVar("T")


def examine(folder: Path, full: bool, shifted: bool = False) -> Iterator[Finding]:
    """Yield the findings on a data folder and the sets in it.

    `full` reads every checksum; `shifted` says that other splits of a corpus are meant to be of
    another domain than train.
    """
    if not folder.is_dir():
        yield Finding(ERROR, f"{folder}: no such folder")
        return
    subject = Subject(folder, None, full, shifted)
    set_folders = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}"))
    if (folder / MANIFEST_FILE).is_file():
        yield from _examine_set(subject)
    elif set_folders and not token_files(folder) and (folder / OPTIONS_FILE).is_file():
        yield from _tokenizer_files(subject)
    elif not set_folders or token_files(folder) or not all(map(_stands_alone, set_folders)):
        yield Finding(WARNING, f"{folder}: no {MANIFEST_FILE} to compare the files with")
        yield from corpus(subject)
    # A set that lost its manifest is also reported.
    without = [path for path in folder.iterdir() if path.is_dir() and token_files(path)]
    for set_folder in sorted({*set_folders, *without}):
        yield from _examine_set(replace(subject, folder=set_folder))


def _stands_alone(folder: Path) -> bool:
    """Return whether a set needs nothing of the folder that it lies in."""
    try:
        return Manifest.load(folder).kind in STANDS_ALONE
    except MetaseqError:
        return False


def _examine_set(subject: Subject) -> Iterator[Finding]:
    """Compare the files with the manifest, then yield the findings of the check of its kind."""
    try:
        subject.manifest = manifest = Manifest.load(subject.folder)
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    wrong_sizes = check_sizes(subject.folder)
    full = subject.full or is_small(manifest)
    faults = verify(subject.folder) if full else wrong_sizes
    for fault in faults:
        yield Finding(ERROR, f"{fault}; copy the folder again or preprocess again")
    if not faults:
        checked = "every checksum" if full else "file sizes (--verify reads the checksums)"
        yield Finding(OK, f"{subject.folder}: {MANIFEST_FILE} agrees with {checked}")
    if not manifest.has_valid and manifest.kind in _MADE_OF_TEXT:
        # Sets with a test split may be for scores alone.
        level = WARNING if len(manifest.splits) == 1 else OK
        yield Finding(
            level, f"{subject.folder}: no valid split, which training needs: {VALID_REMEDY}"
        )
    yield from _damaged_text(subject.folder, manifest)
    if manifest.kind != CORPUS and not wrong_sizes:
        yield from _unknown_tokens(subject)
    # Without its files, every reader of a set would repeat the error.
    if manifest.kind in CHECKS and (manifest.kind == CORPUS or not wrong_sizes):
        yield from CHECKS[manifest.kind](subject)


def _unknown_tokens(subject: Subject) -> Iterator[Finding]:
    """Yield the share of [UNK] in the splits of a set with a tokenizer, if it has any."""
    subject.unknown = unknown_shares(subject.folder, most=sys.maxsize)
    if subject.manifest is not None and subject.manifest.kind in KINDS:
        return  # its own check reports unknown words
    if text := describe_unknown(subject.unknown, 0.0):
        is_large = bool(describe_unknown(subject.unknown))
        text = f"{subject.folder}: {text}"
        yield Finding(WARNING, f"{text}; {REMEDY}") if is_large else Finding(OK, text)


def _damaged_text(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Yield a warning for each split that was made of text with much invalid UTF-8."""
    for split, counts in manifest.splits.items():
        damaged = counts.get("bad_utf8", 0)
        units = ("lines", "rows", "sentences", "paragraphs", "pairs")
        unit = next((unit for unit in units if unit in counts), "")
        if unit and damaged > DAMAGED_SHARE * counts[unit]:
            text = f"{damaged:,} lines held invalid UTF-8, of {counts[unit]:,} {unit} read"
            remedy = "preprocess again with --encoding, such as latin-1, or mended files"
            yield Finding(WARNING, f"{folder}: {split}: {text}; {remedy}")


def _open_splits(
    names: Iterable[str], load: Callable[[str], T]
) -> Generator[Finding, None, dict[str, T]]:
    """Yield an error for each split that cannot be read; return the others by name, train first."""
    sets: dict[str, T] = {}
    messages: list[str] = []
    for name in sorted(names, key=lambda name: (name != "train", name)):
        try:
            sets[name] = load(name)
        except MetaseqError as error:
            # Problems of the whole set are reported once.
            if str(error) not in messages:
                messages.append(str(error))
                yield Finding(ERROR, str(error))
    return sets


# -------------------------------------------------------------------- corpora


def corpus(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the tokenizer and the token files of a corpus, train first."""
    folder = subject.folder
    yield from _tokenizer_files(subject)
    yield from _unknown_tokens(subject)
    names = token_files(folder) | set(subject.splits)
    if not names:
        yield Finding(ERROR, f"{folder}: no token files (.bin and .idx)")
    sets = yield from _open_splits(names, lambda split: IndexedDataset(folder / split))
    hashes: dict[str, np.ndarray] = {}
    sizes: dict[str, np.ndarray] = {}
    sound = []  # splits with all ids in the vocabulary, so that they can be counted
    for split, data in sets.items():
        findings = list(token_file(data, subject.tokenizer))
        yield from findings
        if all(finding.level != ERROR for finding in findings):
            sound.append(split)
        if data.dtype.kind in "iu":
            yield from _text_form(data, subject.tokenizer)
            tokens = np.diff(token_offsets(data, data.documents))
            sizes[split] = tokens[tokens > 0]
            if (subject.unknown.get(split) or 0.0) > _MANY_UNKNOWN:  # texts that differ look alike
                continue
            hashes[split] = document_hashes(data, data.documents)[tokens > 0]
            yield duplicates(str(folder / split), np.sort(hashes[split]))
    yield from overlaps(folder, hashes, sizes=sizes)
    if subject.tokenizer is not None and "train" in sound and "train" in hashes:
        for split in [split for split in sound if split != "train" and split in hashes]:
            likeness = compare(sets["train"], sets[split], subject.tokenizer.vocabulary)
            yield passages(f"{folder}: {split}", likeness)
            if sample_size(sets["train"], sets[split]) >= FEWEST:
                yield domain(f"{folder}: {split}", likeness, subject.shifted)
            else:
                text = f"fewer than {FEWEST:,} tokens in it, or in half of train"
                reason = f"is too small to tell whether it is of the domain of train: {text}"
                yield Finding(OK, f"{folder}: {split} {reason}")


def passages(name: str, likeness: Likeness) -> Finding:
    """Return how much of a split called `name` lies in passages of train.

    Unlike documents, passages of WINDOW tokens are not the same by chance.
    """
    share = likeness.passages or 0.0
    text = (
        f"{name}: {100 * share:.1f} % of its tokens, in passages of {WINDOW}, also stand in train"
    )
    if share < COPIED:
        return Finding(WARNING if share > MANY_SHARED else OK, text)
    remedy = "its losses are in part those of training: leave them out of one of the splits"
    return Finding(ERROR, f"{text}; {remedy}")


def domain(name: str, likeness: Likeness, shifted: bool) -> Finding:
    """Return whether a split called `name` is of the domain of train."""
    numbers = (
        f"its token frequencies diverge by {likeness.divergence:.3f} nats, those of documents "
        f"drawn from train by {likeness.usual:.3f}"
    )
    if likeness.shift <= SHIFTED:
        return Finding(OK, f"{name} is of the domain of train: {numbers}")
    if shifted:
        return Finding(OK, f"{name} is of another domain than train, as is intended: {numbers}")
    level, verb = (ERROR, "is") if likeness.shift > FOREIGN else (WARNING, "may be")
    remedy = "hold out documents from everywhere in the text, or say --shifted-valid"
    return Finding(level, f"{name} {verb} of another domain than train: {numbers}; {remedy}")


def _tokenizer_files(subject: Subject) -> Iterator[Finding]:
    """Open the tokenizer of a data folder and yield the finding on it."""
    folder, manifest = subject.folder, subject.manifest
    try:
        subject.tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        expected = None if manifest is None else manifest.tokenizer["hash"]
        yield same_tokenizer(folder, subject.tokenizer, expected)


def _text_form(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield a warning if the first texts are JSON, a table, binary or damaged."""
    if tokenizer is None:
        return
    size, starts = len(tokenizer.vocabulary), data.starts[:_SAMPLE]
    texts = []
    for start, end in zip(starts, starts + np.minimum(data.sizes[:_SAMPLE], _SAMPLE_TOKENS)):
        ids = np.asarray(data.tokens[start:end])
        # Some tokenizers set blanks around punctuation.
        text = tokenizer.decode(ids[(ids >= 0) & (ids < size)].tolist())
        texts.append(re.sub(r" ([,;|]) ", r"\1", text))
    damaged = sum("\ufffd" in text or "\0" in text for text in texts)
    content = recognise_lines(texts)
    if content.kind is not Kind.TEXT:
        remedy = "preprocess its text alone, unless that is intended"
        yield Finding(WARNING, f"{data.prefix}: its text looks like {content}; {remedy}")
    elif damaged > DAMAGED_SHARE * len(texts):
        text = f"{damaged} of the first {len(texts)} texts hold U+FFFD or NUL"
        yield Finding(WARNING, f"{data.prefix}: {text}: binary data, or text of another encoding")


# -------------------------------------------------------------------- labelled sets, SQuAD


# The counts of faulty rows by preprocess.
_ROW_FAULTS = {
    "no_text": "rows without text were left out",
    "no_gold_label": "rows without a gold label were left out",
    "no_pair_id": "rows have no pair_id, as on the Hub, so there is no gender_parity",
    "joined_rows": "rows join lines that look like rows, because of quotation marks; see --quoting",
}


def _labelled_set(subject: Subject) -> Iterator[Finding]:
    """Yield size, labels, empty texts and repetitions of each split of a labelled set."""
    folder = subject.folder

    def load(split: str) -> LabelledSet:
        data = LabelledSet(folder, split)
        _ = data.rows  # a damaged file is an error here, not at the end of a run
        return data

    sets = yield from _open_splits(subject.splits, load)
    yield from _other_tokenizer(subject)
    train = sets["train"].labels if "train" in sets else None
    for split, data in sets.items():
        labels, names = data.labels, data.label_names
        text = f"{len(data):,} rows; {distribution(labels, names)}"
        yield Finding(OK, f"{folder}: {split} has {text}")
        counts_read = subject.manifest.splits[split] if subject.manifest is not None else {}
        for name, meaning in _ROW_FAULTS.items():
            if count := counts_read.get(name):
                yield Finding(WARNING, f"{folder}: {split}: {count:,} {meaning}")
        yield from _unseen_labels(f"{folder}: {split}", labels, names, train)
        if split == "train" and names and labels is not None:
            counts = _class_counts(labels, names).tolist()
            present = {name: count for name, count in zip(names, counts) if count}
            for text in label_warnings(present):
                yield Finding(WARNING, f"{folder}: {split}: {text}")
        for column in data.inputs:
            yield from _text_faults(column, subject.tokenizer)
    yield from overlaps(folder, {split: _row_hashes(data.inputs) for split, data in sets.items()})


def _squad_set(subject: Subject) -> Iterator[Finding]:
    """Yield the size of each split of a SQuAD set, answers that were not found, shared contexts."""
    folder = subject.folder

    def load(split: str) -> SquadSet:
        data = SquadSet(folder, split)
        _ = data.texts  # as above
        return data

    sets = yield from _open_splits(subject.splits, load)
    yield from _other_tokenizer(subject)
    for split, data in sets.items():
        impossible, lost = data.impossible, ~data.impossible & (data.first < 0)
        yield Finding(
            OK,
            f"{folder}: {split} has {len(data):,} questions on {len(data.contexts):,} paragraphs; "
            f"{100 * impossible.mean():.1f} % impossible",
        )
        if lost.any():
            text = f"{lost.sum():,} answers are not in their context and cannot be trained on"
            yield Finding(WARNING, f"{folder}: {split}: {text}")
    hashes = {split: _row_hashes([data.contexts]) for split, data in sets.items()}
    yield from overlaps(folder, hashes)


def _other_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Yield an error if a set was made with another tokenizer than the corpus around it."""
    tokenizer, manifest = subject.tokenizer, subject.manifest
    assert manifest is not None
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer["hash"]:
        text = "made with another tokenizer than the corpus; preprocess it again"
        yield Finding(ERROR, f"{subject.folder}: {text}")


def _text_faults(data: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield the faults of one text of each row: empty, or ids outside the vocabulary."""
    empty = np.flatnonzero(data.sizes == 0)
    if len(empty):
        yield Finding(
            WARNING, f"{data.prefix}: {len(empty):,} rows without text, first row {empty[0] + 1}"
        )
    yield from (finding for finding in token_file(data, tokenizer) if finding.level == ERROR)


def _row_hashes(columns: Sequence[IndexedDataset]) -> np.ndarray:
    """Return a hash of the texts of each row, sorted, uint64 (rows,)."""
    parts = [document_hashes(data) * GOLDEN ** np.uint64(i) for i, data in enumerate(columns)]
    return np.sort(np.sum(parts, axis=0, dtype=np.uint64))


def distribution(labels: np.ndarray | None, names: Sequence[str]) -> str:
    """Describe the distribution of the labels of a split; without `names` they are real values."""
    if labels is None or not len(labels):
        return "no labels"
    if not names:
        return f"labels {labels.min():g} to {labels.max():g}, mean {labels.mean():.3g}"
    counts = _class_counts(labels, names)
    shares = [f"{name} {100 * n / len(labels):.1f} %" for name, n in zip(names, counts)]
    if len(names) > _MANY_CLASSES:
        least, most = shares[counts.argmin()], shares[counts.argmax()]
        return f"labels of {len(names)} classes, from {least} to {most}"
    return f"labels {', '.join(shares)}"


def _class_counts(labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return how many rows have each class, of labels (N,), or booleans (N, K)."""
    if labels.ndim == 2:
        counts: np.ndarray = labels.sum(0)
        return counts
    return np.bincount(labels, minlength=len(names))


def _unseen_labels(
    name: str, labels: np.ndarray | None, names: Sequence[str], train: np.ndarray | None
) -> Iterator[Finding]:
    """Yield a warning for classes of a split, called `name`, that the labels of train lack."""
    if not names or labels is None or train is None:
        return
    present = set(np.flatnonzero(_class_counts(labels, names)).tolist())
    if labels is train:
        missing, text = set(range(len(names))) - present, "has no example of"
    else:
        missing = present - set(np.flatnonzero(_class_counts(train, names)).tolist())
        text = "has labels that train has no example of:"
    if missing:
        yield Finding(WARNING, f"{name} {text} {', '.join(names[i] for i in sorted(missing))}")


# -------------------------------------------------------------------- parallel text


def _parallel_set(subject: Subject) -> Iterator[Finding]:
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

    def load(split: str) -> ParallelSet:
        data = ParallelSet(folder, split)
        if references_name(split) in manifest.files:
            _ = data.references  # as above
        return data

    sets = yield from _open_splits(subject.splits, load)
    hashes: dict[str, np.ndarray] = {}
    for split, data in sets.items():
        texts = [data.source] if data.target is None else [data.source, data.target]
        means = [f"{len(text.tokens) / max(len(data), 1):.1f}" for text in texts]
        if len(texts) == 1:
            text = f"sentences of {languages[0]} alone, on average {means[0]} tokens"
        else:
            text = "pairs, on average {} tokens of {} and {} of {}"
            text = text.format(means[0], languages[0], means[1], languages[1])
        yield Finding(OK, f"{folder}: {split} has {len(data):,} {text}")
        for side, column in zip(SIDES, texts):
            yield from _text_faults(column, tokenizers.get(side))
        if data.target is not None and all(column.dtype.kind in "iu" for column in texts):
            hashes[split] = _row_hashes(texts)
    yield from overlaps(folder, hashes, "pairs")


# -------------------------------------------------------------------- images


def _image_set(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the splits of labelled images."""
    folder = subject.folder
    sets = yield from _open_splits(subject.splits, lambda split: load_images(folder, split))
    train = sets["train"].labels if "train" in sets else None
    first = next(iter(sets), "")
    for split, data in sets.items():
        shape, first_shape = data.images.shape[1:], sets[first].images.shape[1:]
        names = list(data.names)
        text = f"{len(data):,} images {_described(shape)}; {distribution(data.labels, names)}"
        yield Finding(OK, f"{folder}: {split} has {text}")
        counts_read = subject.manifest.splits[split] if subject.manifest is not None else {}
        for name, meaning in _ROW_FAULTS.items():
            if count := counts_read.get(name):
                yield Finding(WARNING, f"{folder}: {split}: {count:,} {meaning}")
        yield from _unseen_labels(f"{folder}: {split}", data.labels, names, train)
        if shape != first_shape:
            text = f"{split} has images {_described(shape)}, but {first} {_described(first_shape)}"
            yield Finding(ERROR, f"{folder}: {text}; make all of one size")
    hashes = {split: _byte_hashes(map(np.ndarray.tobytes, d.images)) for split, d in sets.items()}
    yield from overlaps(folder, hashes, "images")


def _described(shape: Sequence[int]) -> str:
    """Return in words the shape (H, W, C) of images."""
    height, width, channels = shape
    return f"of {height} x {width} pixels in {channels} channel{'s' if channels > 1 else ''}"


def _byte_hashes(rows: Iterable[bytes]) -> np.ndarray:
    """Return a hash of the bytes of each row, uint64 (rows,)."""
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<u8")


# -------------------------------------------------------------------- sentences of words


def _word_set(subject: Subject) -> Iterator[Finding]:
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
        text = "no vectors" if vectors is None else f"vectors of {vectors.shape[1]} numbers"
        words, characters = len(vocabulary), len(vocabulary.characters)
        yield Finding(OK, f"{folder}: {words:,} words, {characters:,} characters, {text}")
    sets = yield from _open_splits(
        subject.splits, lambda split: WordSet(folder, split, subject.vocabulary)
    )
    hashes: dict[str, np.ndarray] = {}
    for split, data in sets.items():
        words = len(data.words.tokens)
        pieces = range(0, words, CHUNK)
        unknown = sum(
            int(np.count_nonzero(data.words.tokens[i : i + CHUNK] == data.vocabulary.unknown))
            for i in pieces
        )
        yield Finding(
            WARNING if unknown > _MANY_UNKNOWN * words else OK,
            f"{folder}: {split} has {len(data):,} sentences, {words:,} words, "
            f"{100 * unknown / max(words, 1):.1f} % unknown, longest "
            f"{data.lengths.max(initial=0):,}",
        )
        if reason := missing_breaks(data.lengths, data.form):
            yield Finding(WARNING, f"{folder}: {split}: {reason}")
        yield from _word_labels(data, sets.get("train"))
        # Hash the forms, not the ids: two unknown words need not be the same.
        if data.form == TEXT:
            rows = document_hashes(data.words)
        else:
            forms = data.surface(np.arange(len(data)))
            rows = _byte_hashes("\n".join(form).encode("utf-8", "replace") for form in forms)
        hashes[split] = np.sort(rows[data.lengths > 0])
        if data.form == TEXT:
            yield duplicates(f"{folder}: {split}", hashes[split])
    yield from overlaps(folder, hashes, "sentences")


def _word_labels(data: WordSet, train: WordSet | None) -> Iterator[Finding]:
    """Yield how often each tag or relation occurs, and the ones that train lacks."""
    if data.labels is None:
        return
    labels, names = np.asarray(data.labels.tokens), data.label_names
    counts = np.bincount(labels, minlength=len(names))
    kind = "relations" if data.form == TREES else "BIOES tags of spans" if data.spans else "tags"
    most_frequent = np.argsort(-counts, kind="stable")[:5]
    shares = [f"{names[i]} {100 * counts[i] / max(counts.sum(), 1):.1f} %" for i in most_frequent]
    text = f"{np.count_nonzero(counts)} of {len(counts)} {kind}: {', '.join(shares)}"
    yield Finding(OK, f"{data.folder}: {data.split} has {text}")
    tags = Counter({name: int(count) for name, count in zip(names, counts) if count})
    if data.form == TAGS and not data.spans and (reason := span_like(tags)):
        yield Finding(WARNING, f"{data.folder}: {data.split}: {reason}; {SPELLING}")
    if train is not None and train is not data and train.labels is not None:
        seen, name = np.asarray(train.labels.tokens), f"{data.folder}: {data.split}"
        yield from _unseen_labels(name, labels, names, seen)


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    CORPUS: corpus,
    LABELLED: _labelled_set,
    SQUAD: _squad_set,
    PARALLEL: _parallel_set,
    IMAGES: _image_set,
    **dict.fromkeys(KINDS, _word_set),
}
