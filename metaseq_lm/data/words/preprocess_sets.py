"""Files in CoNLL columns or CoNLL-U to tagged sets and treebanks inside a data folder."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.corpus.preprocess import Job
from metaseq_lm.data.storage.manifest import Manifest, classes_of
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.words.columns import (
    ColumnReader,
    HeadColumnReader,
    Sentence,
    SentenceReader,
    is_conllu,
)
from metaseq_lm.data.words.conllu import ConlluReader, field_number
from metaseq_lm.data.words.overlap import besides, evaluation_overlap
from metaseq_lm.data.words.preprocess import describe, split_counts, summary
from metaseq_lm.data.words.sets import ROOT
from metaseq_lm.data.words.tags import (
    SCHEMES,
    TagError,
    bioes_names,
    bioes_tags,
    guess_scheme,
    read_spans,
)
from metaseq_lm.data.words.vocabulary import WordVocabulary
from metaseq_lm.data.words.writing import SentenceWriter

UNSEEN = "<unseen>"
UNSEEN_TAGS = ("own", "one")


@dataclass(frozen=True)
class SetChoice:
    """What a labelled set of sentences is.

    `trees` makes a treebank, else it is tags, read by `scheme` (tags.SCHEMES). `tag_column` is a
    number, or the name of a field for .conllu files; '' is the last column. With `unseen` "one" the
    tags that train lacks are one class, which no prediction gets right (CCG categories; Clark et al.
    2018), with "own" each is a class. `hold_out` random sentences of train become the valid split.
    `drop` is as in TextChoice. `classes` is a set made before, whose classes these are.
    """

    trees: bool = False
    scheme: str = "auto"
    word_column: int = 0
    tag_column: str = ""
    unseen: str = "own"
    hold_out: int = 0
    seed: int = 0
    drop: tuple[str, ...] = ()
    classes: Path | None = None

    def check(self, splits: dict[str, list[Path]]) -> None:
        """Raise UsageError for options that cannot be used with these splits."""
        if self.scheme not in SCHEMES:
            hint = nearest(self.scheme, list(SCHEMES))
            raise UsageError(
                f"--tag-scheme {self.scheme}: choose one of {', '.join(SCHEMES)}.{hint}"
            )
        if self.unseen not in UNSEEN_TAGS:
            raise UsageError(f"--unseen-tags {self.unseen}: choose one of {', '.join(UNSEEN_TAGS)}")
        if self.hold_out and ("valid" in splits or "train" not in splits):
            raise UsageError(
                "--hold-out takes sentences of --trainpref for the missing --validpref"
            )
        if self.unseen != "own" and self.classes:
            raise UsageError("--labels-from says what --unseen-tags asks; leave that out")
        if self.unseen == "one" and "train" not in splits:
            raise UsageError("--unseen-tags one needs --trainpref to know which tags are seen")

    def reader(self, path: Path, policy: str) -> SentenceReader:
        """Return the reader of a file, by its name."""
        if is_conllu(path):
            if self.trees:
                if self.tag_column:
                    raise UsageError(
                        f"--tag-column {self.tag_column} does not apply to {path}: the relations of a "
                        "treebank in CoNLL-U are its field deprel"
                    )
                return ConlluReader(path, policy)
            if not self.tag_column or _is_number(self.tag_column):
                raise UsageError(
                    f"{path}: name the field of the tags, for example --tag-column upos"
                )
            return ConlluReader(path, policy, label=field_number(self.tag_column), trees=False)
        column = self.tag_column or "-1"
        if not _is_number(column):
            raise UsageError(
                f"{path}: --tag-column {column} is for .conllu files; give a number, from 0, or "
                "negative from the right"
            )
        kind = HeadColumnReader if self.trees else ColumnReader
        return kind(path, policy, word_column=self.word_column, label_column=int(column))


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 9


@dataclass
class _Split:
    """The sentences of a split and what was counted on the way."""

    sentences: list[Sentence] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    paths: list[Path] = field(default_factory=list)


def preprocess_set(job: Job, choice: SetChoice, data: Path) -> Manifest:
    """Write a labelled set into `job.destdir` with the vocabulary of `data`; return its manifest.

    MetaseqError with file and line for input that cannot be used; then nothing is written.
    """
    job.check()
    choice.check(job.splits)
    vocabulary = WordVocabulary.load(data)
    with staging(job.destdir, job.overwrite) as folder:
        splits = _read(job, choice, data)
        if choice.trees:
            _check_roots(splits)
        scheme = "none" if choice.trees else _scheme(splits, choice.scheme)
        if scheme != "none":
            _to_bioes(splits, scheme)
        names, unseen = _label_names(splits, choice, scheme)
        if choice.classes is not None:
            names, unseen = _taken_over(choice.classes, splits, names)
        manifest = Manifest(
            "trees" if choice.trees else "tags", describe(vocabulary), {}, job.command
        )
        manifest.details = {
            "labels": names,
            "spans": scheme != "none",
            "scheme": scheme,
            "unseen": unseen,
        }
        files: list[str] = []
        for split, content in splits.items():
            with SentenceWriter(folder, split, vocabulary, len(names), choice.trees) as writer:
                _write(writer, content.sentences, names, unseen)
            files += writer.names
            manifest.splits[split] = split_counts(writer, content.counts, content.paths)
            print(summary(split, manifest.splits[split]), flush=True)
        print(_about(names, scheme, choice.trees), flush=True)
        manifest.add_files(folder, files)
        publish(folder, job.destdir, manifest)
    return manifest


def _read(job: Job, choice: SetChoice, data: Path) -> dict[str, _Split]:
    overlap = evaluation_overlap(choice.drop, data, choice.word_column, job.on_bad_utf8)
    splits = {}
    for split, paths in job.splits.items():
        content = splits[split] = _Split(paths=paths)
        for path in paths:
            reader = choice.reader(path, job.on_bad_utf8)
            content.sentences += reader
            content.counts += reader.counts
        if split == "train" and len(overlap):
            kept = [s for s in content.sentences if s.words not in overlap]
            content.counts["dropped_overlap"] = len(content.sentences) - len(kept)
            content.sentences = kept
        if not content.sentences:
            but = besides(content.counts["dropped_overlap"])
            raise MetaseqError(f"{', '.join(map(str, paths))}: no sentences{but}")
    if choice.hold_out:
        _hold_out(splits, choice)
    return splits


def _hold_out(splits: dict[str, _Split], choice: SetChoice) -> None:
    """Move random sentences of train, in their order, to a new split valid."""
    train = splits["train"]
    count = len(train.sentences)
    if choice.hold_out >= count:
        raise UsageError(f"--hold-out {choice.hold_out}: train has {count} sentences")
    order = random_streams.generator(choice.seed, "hold out").permutation(count)
    held = set(order[: choice.hold_out].tolist())
    splits["valid"] = _Split([train.sentences[i] for i in sorted(held)], Counter(), train.paths)
    train.sentences = [s for i, s in enumerate(train.sentences) if i not in held]


def _all(splits: dict[str, _Split]) -> list[Sentence]:
    return list(chain.from_iterable(content.sentences for content in splits.values()))


def _check_roots(splits: dict[str, _Split]) -> None:
    """Raise MetaseqError with the place unless exactly the words with head 0 have the relation root."""
    for sentence in _all(splits):
        assert sentence.heads is not None
        for word, (head, relation) in enumerate(zip(sentence.heads, sentence.labels)):
            if relation.lower() == ROOT:
                sentence.labels[word] = relation = ROOT
            if (head == 0) != (relation == ROOT):
                raise MetaseqError(
                    f"{sentence.place(word)}: relation {relation!r} to head {head}; the words with head 0, "
                    f"and no others, have the relation {ROOT}"
                )


def _scheme(splits: dict[str, _Split], scheme: str) -> str:
    if scheme != "auto":
        return scheme
    try:
        return guess_scheme(sentence.labels for sentence in _all(splits))
    except UsageError as error:
        first = next(iter(splits.values())).paths[0]
        raise UsageError(f"{first}: {error}") from error


def _to_bioes(splits: dict[str, _Split], scheme: str) -> None:
    for content in splits.values():
        for i, sentence in enumerate(content.sentences):
            try:
                spans = read_spans(sentence.labels, scheme)
            except TagError as error:
                raise MetaseqError(
                    f"{sentence.place(error.word)}: tag {sentence.labels[error.word]!r}: {error} "
                    f"(--tag-scheme {scheme})"
                ) from error
            content.sentences[i] = replace(sentence, labels=bioes_tags(spans, len(sentence.words)))


def _label_names(
    splits: dict[str, _Split], choice: SetChoice, scheme: str
) -> tuple[list[str], int | None]:
    """Return the classes, and which of them stands for tags that train lacks."""
    found = {label for sentence in _all(splits) for label in sentence.labels}
    if choice.trees:
        return [ROOT, *sorted(found - {ROOT})], None
    if scheme != "none":
        if choice.unseen == "one":
            raise UsageError("--unseen-tags one is for tags of words, not for spans")
        return bioes_names(label[2:] for label in found if label != "O"), None
    if choice.unseen == "own":
        return sorted(found), None
    seen = {label for sentence in splits["train"].sentences for label in sentence.labels}
    return [*sorted(seen), UNSEEN], len(seen)


def _taken_over(
    folder: Path, splits: dict[str, _Split], found: list[str]
) -> tuple[list[str], int | None]:
    """Return the classes of an earlier set, and which of them stands for tags that it lacks."""
    names, unseen = classes_of(folder), Manifest.load(folder).details.get("unseen")
    if unseen is None and (lacking := set(found) - set(names)):
        for sentence in _all(splits):
            for word, label in enumerate(sentence.labels):
                if label in lacking:
                    raise MetaseqError(
                        f"{sentence.place(word)}: {label!r} is no class of {folder} (--labels-from); a "
                        "model of that set cannot be scored on it"
                    )
    return names, unseen


def _write(
    writer: SentenceWriter, sentences: Sequence[Sentence], names: list[str], unseen: int | None
) -> None:
    number: dict[str, int] = {name: i for i, name in enumerate(names)}
    labels = [number.get(label, unseen) for s in sentences for label in s.labels]
    heads = [head for s in sentences for head in s.heads or ()]
    writer.extend([s.words for s in sentences], np.array(labels), np.array(heads))


def _about(names: list[str], scheme: str, trees: bool) -> str:
    if trees:
        return f"{len(names)} relations: {', '.join(names)}"
    if scheme == "none":
        return f"{len(names)} tags of words: {', '.join(names)}"
    kinds = [name[2:] for name in names[1::4]]
    return f"spans read as {scheme}, stored as bioes, {len(kinds)} types: {', '.join(kinds)}"
