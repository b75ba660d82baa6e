"""The report on a data folder: the checks of its kind, then those of the sets inside it.

Each check is registered with the kinds of manifests that it is for, see `findings.check`.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import (
    COPIED,
    ERROR,
    GOLDEN,
    MANY_SHARED,
    OK,
    WARNING,
    Finding,
    Subject,
    check,
    checks_of,
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
    compare,
    sample_size,
)
from metaseq_lm.data.doctor.passages import WINDOW
from metaseq_lm.data.images import IMAGES, Images, load_images
from metaseq_lm.data.labelled.classes import label_warnings
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.parallel.sets import PARALLEL, REFERENCES, SIDES, ParallelSet
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
from metaseq_lm.data.unknown_tokens import count_unknown, unknown_shares
from metaseq_lm.data.words.sets import KINDS, TAGS, TEXT, TREES, WordSet, missing_breaks
from metaseq_lm.data.words.tags import SPELLING, span_like
from metaseq_lm.data.words.vocabulary import WordVocabulary
from metaseq_lm.runs.conditions import REMEDY, describe_unknown

_MANY_CLASSES = 20
_MANY_UNKNOWN = 0.2
_SAMPLE, _SAMPLE_TOKENS = 200, 2000  # texts of a corpus that are examined, and how much of each
# Sets of these kinds need neither tokenizer nor vocabulary of the folder that they lie in.
STANDS_ALONE = {PARALLEL, IMAGES}
_WORDS = tuple(KINDS)
_READERS: dict[str, Callable[[Path, str], Any]] = {
    LABELLED: LabelledSet,
    SQUAD: SquadSet,
    PARALLEL: ParallelSet,
    IMAGES: load_images,
}
_SETS = (*_READERS, *_WORDS)
_MADE_OF_TEXT = {CORPUS, LABELLED, SQUAD, PARALLEL, *KINDS}  # by preprocess


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
        yield from _tokenizer(subject)
    elif not set_folders or token_files(folder) or not all(map(_stands_alone, set_folders)):
        yield Finding(WARNING, f"{folder}: no {MANIFEST_FILE} to compare the files with")
        yield from _run_checks(subject, CORPUS)
    # A set that lost its manifest is also reported.
    without = [path for path in folder.iterdir() if path.is_dir() and token_files(path)]
    for set_folder in sorted({*set_folders, *without}):
        yield from _examine_set(subject.inside(set_folder))


def _stands_alone(folder: Path) -> bool:
    try:
        return Manifest.load(folder).kind in STANDS_ALONE
    except MetaseqError:
        return False


def _examine_set(subject: Subject) -> Iterator[Finding]:
    try:
        subject.manifest = Manifest.load(subject.folder)
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    yield from _run_checks(subject, "")
    # Without its files, every reader of a set would repeat the error; a corpus is read as it is.
    if subject.manifest.kind == CORPUS or not check_sizes(subject.folder):
        yield from _run_checks(subject, subject.manifest.kind)


def _run_checks(subject: Subject, kind: str) -> Iterator[Finding]:
    for run in checks_of(kind):
        yield from run(subject)


# -------------------------------------------------------------------- every kind


@check("files")
def _files(subject: Subject) -> Iterator[Finding]:
    """Compare the files with the manifest."""
    folder, manifest = subject.folder, subject.described
    full = subject.full or is_small(manifest)
    faults = verify(folder) if full else check_sizes(folder)
    for fault in faults:
        yield Finding(ERROR, f"{fault}; copy the folder again or preprocess again")
    if not faults:
        checked = "every checksum" if full else "file sizes (--verify reads the checksums)"
        yield Finding(OK, f"{folder}: {MANIFEST_FILE} agrees with {checked}")


@check("valid split")
def _valid_split(subject: Subject) -> Iterator[Finding]:
    """Training needs a valid split; sets with a test split may be for scores alone."""
    manifest = subject.described
    if not manifest.has_valid and manifest.kind in _MADE_OF_TEXT:
        level = WARNING if len(manifest.splits) == 1 else OK
        text = f"no valid split, which training needs: {VALID_REMEDY}"
        yield Finding(level, f"{subject.folder}: {text}")


@check("damaged text")
def _damaged_text(subject: Subject) -> Iterator[Finding]:
    for split, counts in subject.described.splits.items():
        damaged = counts.get("bad_utf8", 0)
        units = ("lines", "rows", "sentences", "paragraphs", "pairs")
        unit = next((unit for unit in units if unit in counts), "")
        if unit and damaged > DAMAGED_SHARE * counts[unit]:
            text = f"{damaged:,} lines held invalid UTF-8, of {counts[unit]:,} {unit} read"
            remedy = "preprocess again with --encoding, such as latin-1, or mended files"
            yield Finding(WARNING, f"{subject.folder}: {split}: {text}; {remedy}")


@check("tokenizer", CORPUS)
def _tokenizer(subject: Subject) -> Iterator[Finding]:
    """Open the tokenizer of a data folder, which must be the one of its token files."""
    folder, manifest = subject.folder, subject.manifest
    try:
        subject.tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        expected = None if manifest is None else manifest.tokenizer["hash"]
        yield same_tokenizer(folder, subject.tokenizer, expected)


@check("unknown tokens", CORPUS, LABELLED, SQUAD, PARALLEL)
def _unknown_tokens(subject: Subject) -> Iterator[Finding]:
    subject.unknown = unknown_shares(subject.folder, most=sys.maxsize)
    if text := describe_unknown(subject.unknown, 0.0):
        level = OK
        if describe_unknown(subject.unknown):
            level, text = WARNING, f"{text}; {REMEDY}"
        yield Finding(level, f"{subject.folder}: {text}")


@check("vocabulary", *(kind for kind in KINDS if KINDS[kind] == TEXT))
def _vocabulary(subject: Subject) -> Iterator[Finding]:
    """Open the vocabulary of words of a data folder; its sets share it."""
    try:
        subject.vocabulary = vocabulary = WordVocabulary.load(subject.folder)
        vectors = vocabulary.vectors
    except MetaseqError as error:
        yield Finding(ERROR, str(error))
        return
    text = "no vectors" if vectors is None else f"vectors of {vectors.shape[1]} numbers"
    words, characters = len(vocabulary), len(vocabulary.characters)
    yield Finding(OK, f"{subject.folder}: {words:,} words, {characters:,} characters, {text}")


@check("other tokenizer", LABELLED, SQUAD)
def _other_tokenizer(subject: Subject) -> Iterator[Finding]:
    """A set must be made with the tokenizer of the corpus around it."""
    tokenizer = subject.tokenizer
    if tokenizer is not None and tokenizer.fingerprint != subject.described.tokenizer["hash"]:
        text = "made with another tokenizer than the corpus; preprocess it again"
        yield Finding(ERROR, f"{subject.folder}: {text}")


@check("sides", PARALLEL)
def _sides(subject: Subject) -> Iterator[Finding]:
    """Open the tokenizer of each language, which must be the one of its token files."""
    folder, details = subject.folder, subject.described.details
    try:
        _ = [details[side] for side in SIDES]
        expected = {side: str(details["tokenizers"][side]["hash"]) for side in SIDES}
    except (KeyError, TypeError) as error:
        text = f"{folder / MANIFEST_FILE}: unknown content: {error!r}; preprocess again"
        yield Finding(ERROR, text)
        return
    subject.sides = {}
    for side in SIDES:
        try:
            subject.sides[side] = load_tokenizer(folder, f"{side}.")
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
        else:
            yield same_tokenizer(folder, subject.sides[side], expected[side], side)


@check("splits", CORPUS, *_SETS)
def _splits(subject: Subject) -> Iterator[Finding]:
    """Open the splits, train first; a problem of the whole set is reported once."""
    names = set(subject.splits)
    # An earlier check has reported the error.
    if subject.kind == PARALLEL and subject.sides is None:
        return
    if KINDS.get(subject.kind) == TEXT and not subject.vocabulary:
        return
    if subject.kind == CORPUS:
        names |= token_files(subject.folder)
        if not names:
            yield Finding(ERROR, f"{subject.folder}: no token files (.bin and .idx)")
    messages: list[str] = []
    for name in sorted(names, key=lambda name: (name != "train", name)):
        try:
            subject.sets[name] = _open_split(subject, name)
        except MetaseqError as error:
            if str(error) not in messages:
                messages.append(str(error))
                yield Finding(ERROR, str(error))


def _open_split(subject: Subject, split: str) -> Any:
    """Return a split; a damaged file of its rows is an error here, not at the end of a run."""
    folder, kind = subject.folder, subject.kind
    if kind in KINDS:
        return WordSet(folder, split, subject.vocabulary)
    if kind == CORPUS:
        return IndexedDataset(folder / split)
    data = _READERS[kind](folder, split)
    if kind == SQUAD:
        _ = data.texts
    elif kind == LABELLED:
        _ = data.rows
    elif kind == PARALLEL and data.has(REFERENCES):
        _ = data.references
    return data


# -------------------------------------------------------------------- corpora


@check("token files", CORPUS)
def _token_files(subject: Subject) -> Iterator[Finding]:
    """Sizes, empty documents, and ids outside the vocabulary; the sound splits can be counted."""
    for split, data in subject.sets.items():
        findings = list(token_file(data, subject.tokenizer))
        yield from findings
        if all(finding.level != ERROR for finding in findings):
            subject.sound.append(split)


@check("text", CORPUS)
def _text(subject: Subject) -> Iterator[Finding]:
    """The first texts are JSON, a table, binary or damaged."""
    tokenizer = subject.tokenizer
    if tokenizer is None:
        return
    for data in subject.sets.values():
        if data.dtype.kind not in "iu":
            continue
        texts = _first_texts(data, tokenizer)
        damaged = sum("\ufffd" in text or "\0" in text for text in texts)
        content = recognise_lines(texts)
        if content.kind is not Kind.TEXT:
            remedy = "preprocess its text alone, unless that is intended"
            yield Finding(WARNING, f"{data.prefix}: its text looks like {content}; {remedy}")
        elif damaged > DAMAGED_SHARE * len(texts):
            text = f"{damaged} of the first {len(texts)} texts hold U+FFFD or NUL"
            remedy = "binary data, or text of another encoding"
            yield Finding(WARNING, f"{data.prefix}: {text}: {remedy}")


def _first_texts(data: IndexedDataset, tokenizer: Tokenizer) -> list[str]:
    """Return the beginnings of the first texts; some tokenizers set blanks around punctuation."""
    size, starts = len(tokenizer.vocabulary), data.starts[:_SAMPLE]
    texts = []
    for start, end in zip(starts, starts + np.minimum(data.sizes[:_SAMPLE], _SAMPLE_TOKENS)):
        ids = np.asarray(data.tokens[start:end])
        text = tokenizer.decode(ids[(ids >= 0) & (ids < size)].tolist())
        texts.append(re.sub(r" ([,;|]) ", r"\1", text))
    return texts


@check("documents", CORPUS)
def _documents(subject: Subject) -> Iterator[Finding]:
    hashes: dict[str, np.ndarray] = {}
    sizes: dict[str, np.ndarray] = {}
    for split, data in subject.sets.items():
        if data.dtype.kind in "iu" and not _is_mostly_unknown(subject, split):
            tokens = np.diff(token_offsets(data, data.documents))
            sizes[split] = tokens[tokens > 0]
            hashes[split] = document_hashes(data, data.documents)[tokens > 0]
            yield duplicates(str(subject.folder / split), np.sort(hashes[split]))
    yield from overlaps(subject.folder, hashes, sizes=sizes)


# Texts that differ look alike where most of their tokens are [UNK].
def _is_mostly_unknown(subject: Subject, split: str) -> bool:
    return (subject.unknown.get(split) or 0.0) > _MANY_UNKNOWN


@check("likeness", CORPUS)
def _likeness(subject: Subject) -> Iterator[Finding]:
    """Other splits hold passages of train, or are of another domain."""
    sound = [split for split in subject.sound if not _is_mostly_unknown(subject, split)]
    if subject.tokenizer is None or "train" not in sound:
        return
    train = subject.sets["train"]
    sound.remove("train")
    for split in sound:
        name, data = f"{subject.folder}: {split}", subject.sets[split]
        likeness = compare(train, data, subject.tokenizer.vocabulary)
        # Unlike documents, passages of WINDOW tokens are not the same by chance.
        share = likeness.passages or 0.0
        text = f"{100 * share:.1f} % of its tokens, in passages of {WINDOW}, also stand in train"
        level = WARNING if share > MANY_SHARED else OK
        if share >= COPIED:
            level, remedy = ERROR, "leave them out of one of the splits"
            text += f"; its losses are in part those of training: {remedy}"
        yield Finding(level, f"{name}: {text}")
        numbers = (
            f"its token frequencies diverge by {likeness.divergence:.3f} nats, those of documents "
            f"drawn from train by {likeness.usual:.3f}"
        )
        level, text = OK, f"is of the domain of train: {numbers}"
        if sample_size(train, data) < FEWEST:
            reason = f"fewer than {FEWEST:,} tokens in it, or in half of train"
            text = f"is too small to tell whether it is of the domain of train: {reason}"
        elif likeness.shift > SHIFTED and subject.shifted:
            text = f"is of another domain than train, as is intended: {numbers}"
        elif likeness.shift > SHIFTED:
            level, verb = (ERROR, "is") if likeness.shift > FOREIGN else (WARNING, "may be")
            remedy = "hold out documents from everywhere in the text, or say --shifted-valid"
            text = f"{verb} of another domain than train: {numbers}; {remedy}"
        yield Finding(level, f"{name} {text}")


# -------------------------------------------------------------------- sets inside a data folder


@check("size", *_SETS)
def _size(subject: Subject) -> Iterator[Finding]:
    for split, data in subject.sets.items():
        level, text = OK, ""
        if subject.kind == LABELLED:
            text = f"{len(data):,} rows; {_distribution(data.labels, data.label_names)}"
        elif subject.kind == IMAGES:
            text = f"{len(data):,} images {_describe_shape(data.images.shape[1:])}; "
            text += _distribution(data.labels, data.label_names)
        elif subject.kind == SQUAD:
            text = f"{len(data):,} questions on {len(data.contexts):,} paragraphs; "
            text += f"{100 * data.impossible.mean():.1f} % impossible"
        elif subject.kind == PARALLEL:
            source, target = (subject.described.details[side] for side in SIDES)
            mean = f"on average {len(data.source.tokens) / max(len(data), 1):.1f} tokens"
            text = f"{len(data):,} sentences of {source} alone, {mean}"
            if data.target is not None:
                target_mean = f"{len(data.target.tokens) / max(len(data), 1):.1f}"
                text = f"{len(data):,} pairs, {mean} of {source} and {target_mean} of {target}"
        else:
            words = len(data.words.tokens)
            unknown = count_unknown(data.words.tokens, data.vocabulary.unknown)
            text = f"{len(data):,} sentences, {words:,} words, "
            text += f"{100 * unknown / max(words, 1):.1f} % unknown, "
            text += f"longest {data.lengths.max(initial=0):,}"
            if unknown > _MANY_UNKNOWN * words:
                level = WARNING
        yield Finding(level, f"{subject.folder}: {split} has {text}")


# The counts of faulty rows by preprocess.
_ROW_FAULTS = {
    "no_text": "rows without text were left out",
    "no_gold_label": "rows without a gold label were left out",
    "no_pair_id": "rows have no pair_id, as on the Hub, so there is no gender_parity",
    "joined_rows": "rows join lines that look like rows, because of quotation marks; see --quoting",
}


@check("row faults", LABELLED, IMAGES)
def _row_faults_of(subject: Subject) -> Iterator[Finding]:
    for split in subject.sets:
        counts = subject.described.splits[split]
        for name, meaning in _ROW_FAULTS.items():
            if count := counts.get(name):
                yield Finding(WARNING, f"{subject.folder}: {split}: {count:,} {meaning}")


@check("tags", *_WORDS)
def _tags(subject: Subject) -> Iterator[Finding]:
    """How often each tag or relation occurs, breaks of sentences, tags that look like spans."""
    for split, data in subject.sets.items():
        name = f"{subject.folder}: {split}"
        if reason := missing_breaks(data.lengths, data.form):
            yield Finding(WARNING, f"{name}: {reason}")
        if data.labels is None:
            continue
        names = data.label_names
        counts = np.bincount(np.asarray(data.labels.tokens), minlength=len(names))
        kind = "tags"
        if data.form == TREES:
            kind = "relations"
        elif data.spans:
            kind = "BIOES tags of spans"
        most = np.argsort(-counts, kind="stable")[:5]
        shares = [f"{names[i]} {100 * counts[i] / max(counts.sum(), 1):.1f} %" for i in most]
        text = f"{np.count_nonzero(counts)} of {len(counts)} {kind}: {', '.join(shares)}"
        yield Finding(OK, f"{name} has {text}")
        tags = Counter({name: int(count) for name, count in zip(names, counts) if count})
        if data.form == TAGS and not data.spans and (reason := span_like(tags)):
            yield Finding(WARNING, f"{name}: {reason}; {SPELLING}")


@check("labels", LABELLED, IMAGES, *_WORDS)
def _labels(subject: Subject) -> Iterator[Finding]:
    """Classes that train lacks, or has few examples of."""
    labels: dict[str, np.ndarray | None] = {}
    for split, data in subject.sets.items():
        is_words = isinstance(data, WordSet) and data.labels is not None
        labels[split] = np.asarray(data.labels.tokens) if is_words else data.labels
    train = labels.get("train")
    for split, of_split in labels.items():
        names, name = subject.sets[split].label_names, f"{subject.folder}: {split}"
        if not names or of_split is None or train is None:
            continue
        counts, of_train = _class_counts(of_split, names), _class_counts(train, names)
        missing, text = (counts > 0) & (of_train == 0), "has labels that train has no example of:"
        if of_split is train and subject.kind not in KINDS:
            missing, text = counts == 0, "has no example of"
        if missing.any():
            listed = ", ".join(names[i] for i in np.flatnonzero(missing))
            yield Finding(WARNING, f"{name} {text} {listed}")
        if split == "train" and subject.kind == LABELLED:
            present = {n: count for n, count in zip(names, counts.tolist()) if count}
            for text in label_warnings(present):
                yield Finding(WARNING, f"{name}: {text}")


@check("shapes", IMAGES)
def _shapes(subject: Subject) -> Iterator[Finding]:
    first = next(iter(subject.sets), "")
    for split, data in subject.sets.items():
        shape, first_shape = data.images.shape[1:], subject.sets[first].images.shape[1:]
        if shape != first_shape:
            text = f"{split} has images {_describe_shape(shape)}"
            text = f"{text}, but {first} {_describe_shape(first_shape)}; make all of one size"
            yield Finding(ERROR, f"{subject.folder}: {text}")


@check("answers", SQUAD)
def _answers(subject: Subject) -> Iterator[Finding]:
    for split, data in subject.sets.items():
        if count := int((~data.impossible & (data.first < 0)).sum()):
            text = f"{count:,} answers are not in their context and cannot be trained on"
            yield Finding(WARNING, f"{subject.folder}: {split}: {text}")


@check("texts", LABELLED, PARALLEL)
def _texts(subject: Subject) -> Iterator[Finding]:
    """Rows without text, or with ids outside the vocabulary."""
    for data in subject.sets.values():
        if subject.kind == LABELLED:
            columns = [(column, subject.tokenizer) for column in data.inputs]
        else:
            sides = zip(SIDES, (data.source, data.target))
            columns = [(text, (subject.sides or {}).get(side)) for side, text in sides]
        for column, tokenizer in columns:
            if column is None:
                continue
            if len(empty := np.flatnonzero(column.sizes == 0)):
                text = f"{len(empty):,} rows without text, first row {empty[0] + 1}"
                yield Finding(WARNING, f"{column.prefix}: {text}")
            yield from (f for f in token_file(column, tokenizer) if f.level == ERROR)


@check("repeated rows", *_SETS)
def _repeated_rows(subject: Subject) -> Iterator[Finding]:
    """Rows also stand in another split."""
    hashes = {}
    for split, data in subject.sets.items():
        if (of_split := _hashes(data)) is not None:
            hashes[split] = of_split
            if KINDS.get(subject.kind) == TEXT:
                yield duplicates(f"{subject.folder}: {split}", of_split)
    noun = {PARALLEL: "pairs", IMAGES: "images", **dict.fromkeys(KINDS, "sentences")}
    yield from overlaps(subject.folder, hashes, noun.get(subject.kind, "documents"))


def _hashes(data: Any) -> np.ndarray | None:
    """Return a hash of each row of a split, sorted, uint64 (rows,); None without a target."""
    if isinstance(data, LabelledSet):
        return _row_hashes(data.inputs)
    if isinstance(data, SquadSet):
        return _row_hashes([data.contexts])
    if isinstance(data, ParallelSet):
        if data.target is None or {data.source.dtype.kind, data.target.dtype.kind} - {"i", "u"}:
            return None
        return _row_hashes([data.source, data.target])
    if isinstance(data, Images):
        return _byte_hashes(map(np.ndarray.tobytes, data.images))
    # Hash the forms, not the ids: two unknown words need not be the same.
    if data.form == TEXT:
        rows = document_hashes(data.words)
    else:
        forms = data.surface(np.arange(len(data)))
        rows = _byte_hashes("\n".join(form).encode("utf-8", "replace") for form in forms)
    return np.sort(rows[data.lengths > 0])


def _row_hashes(columns: Sequence[IndexedDataset]) -> np.ndarray:
    # Powers of an odd number tell the columns apart: swapped texts make another row.
    parts = [document_hashes(data) * GOLDEN ** np.uint64(i) for i, data in enumerate(columns)]
    return np.sort(np.sum(parts, axis=0, dtype=np.uint64))


def _distribution(labels: np.ndarray | None, names: Sequence[str]) -> str:
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
        return np.asarray(labels.sum(0))
    return np.bincount(labels, minlength=len(names))


def _describe_shape(shape: Sequence[int]) -> str:
    height, width, channels = shape
    return f"of {height} x {width} pixels in {channels} channel{'s' if channels > 1 else ''}"


def _byte_hashes(rows: Iterable[bytes]) -> np.ndarray:
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<u8")
