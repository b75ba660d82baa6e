"""Tagged sets and treebanks: files in CoNLL columns or CoNLL-U, with the vocabulary of words of D."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    Split,
    batches,
    flag,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.words import (
    BATCH,
    EncodedSentences,
    SentenceEncoder,
    check_word_column,
    describe_vocabulary,
    summarise_sentences,
    word_types,
    write_sentences,
)
from metaseq_lm.data.storage.indexed import smallest_dtype
from metaseq_lm.data.storage.manifest import Manifest, classes_of
from metaseq_lm.data.words.columns import (
    ColumnReader,
    HeadColumnReader,
    Sentence,
    SentenceReader,
    is_conllu,
)
from metaseq_lm.data.words.conllu import ConlluReader, field_number
from metaseq_lm.data.words.overlap import dropped_sentences, evaluation_overlap
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

VALID = "valid"
UNSEEN = "<unseen>"


@dataclass(frozen=True)
class WordSetOptions:
    """Options of all labelled sets of sentences."""

    tag_column: str = flag(
        "",
        "column of the tags, or of HEAD-RELATION (default: -1, the last); of .conllu files with "
        "--tagged a field such as upos",
        metavar="N",
    )
    hold_out: int = flag(
        0,
        "tagged, treebank: N random sentences of train become the missing valid split",
        metavar="N",
        at_least=1,
    )
    hold_out_seed: int | None = flag(None, "seed of --hold-out (default: 0)", metavar="S")
    word_column: int | None = flag()
    drop_overlap_with: tuple[str, ...] = flag(())
    labels_from: Path | None = flag()

    def check(self, splits: dict[str, list[Path]]) -> None:
        """Raise UsageError for options that cannot be used with these splits."""
        if self.hold_out_seed is not None and not self.hold_out:
            raise UsageError("--hold-out-seed needs --hold-out N, whose sentences it draws")
        if self.hold_out and (VALID in splits or TRAIN not in splits):
            raise UsageError(
                "--hold-out takes sentences of --trainpref for the missing --validpref"
            )
        files = [path for paths in splits.values() for path in paths]
        check_word_column(self.word_column, [*files, *self.drop_overlap_with])


@dataclass(frozen=True)
class TaggedOptions(WordSetOptions):
    """Options of tagged sets.

    With `unseen_tags` "one" the tags that train lacks are one class, which no prediction gets right
    (CCG categories; Clark et al. 2018); with "own" each is a class.
    """

    NOUN: ClassVar[str] = "tagged sets"

    tagged: str = flag("", "the files are words with tags, written to D/NAME", metavar="NAME")
    tag_scheme: str = flag(
        "auto",
        "tagged: how tags spell spans, which become BIOES; conlleval reads all of them and faulty "
        "ones, none is one class per word (default: auto)",
        choices=SCHEMES,
    )
    unseen_tags: str = flag(
        "own",
        "tagged: tags of words that train lacks are classes of their own, or one class that counts as "
        "wrong whatever is predicted (default: own)",
        choices=("own", "one"),
    )

    def check(self, splits: dict[str, list[Path]]) -> None:
        """Raise UsageError for options that cannot be used with these splits."""
        super().check(splits)
        if self.unseen_tags != "own" and self.labels_from:
            raise UsageError("--labels-from says what --unseen-tags asks; leave that out")
        if self.unseen_tags == "one" and TRAIN not in splits:
            raise UsageError("--unseen-tags one needs --trainpref to know which tags are seen")


@dataclass(frozen=True)
class TreebankOptions(WordSetOptions):
    """Options of treebanks."""

    NOUN: ClassVar[str] = "treebanks"

    treebank: str = flag("", "the files are dependency trees, written to D/NAME", metavar="NAME")


@dataclass
class Content:
    """The sentences of a split and what was counted on the way."""

    sources: list[Path]
    sentences: list[Sentence] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


Contents = dict[str, Content]


def all_sentences(contents: Contents) -> Iterator[Sentence]:
    """Yield the sentences of all splits."""
    for content in contents.values():
        yield from content.sentences


class Annotation(Protocol):
    """What the labels of a set are: how they are read, and which classes there are."""

    kind: str
    heads: bool
    scheme: str

    def open_file(self, path: Path, policy: str) -> SentenceReader:
        """Return the reader of a file, by its name."""

    def choose_labels(self, contents: Contents) -> tuple[list[str], int | None]:
        """Return the classes, and which of them stands for tags that train lacks.

        The labels of the sentences may be rewritten.
        """

    def report(self, labels: list[str]) -> str:
        """Return the classes in words."""


class WordSetPipeline(Pipeline[Sentence, EncodedSentences]):
    """Sentences with a label for each word; all are read first, as the classes depend on all splits."""

    unit = "sentences"
    encoder: SentenceEncoder

    def __init__(
        self, name: str, options: WordSetOptions, annotation: Annotation, request: Request
    ) -> None:
        super().__init__(request.inside(name))
        options.check(request.splits)
        self.kind = annotation.kind  # type: ignore[misc]
        self.options = options
        self.annotation = annotation
        self.data_folder = request.destdir
        self.vocabulary = WordVocabulary.load(self.data_folder)
        self.contents: Contents = {}
        self.labels: list[str] = []
        self.unseen: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Read all sentences and decide on the classes."""
        self._read_all()
        if self.options.hold_out:
            self._hold_out()
        self.labels, self.unseen = self.annotation.choose_labels(self.contents)
        if self.options.labels_from is not None:
            self._take_labels(self.options.labels_from)
        return describe_vocabulary(self.vocabulary)

    def _read_all(self) -> None:
        options, policy = self.options, self.request.on_bad_utf8
        overlap = evaluation_overlap(
            options.drop_overlap_with, self.data_folder, options.word_column or 0, policy
        )
        for split, paths in self.request.splits.items():
            content = self.contents[split] = Content(paths)
            for path in paths:
                reader = self.annotation.open_file(path, policy)
                content.sentences += reader
                content.counts += reader.counts
            if split == TRAIN and len(overlap):
                kept = [s for s in content.sentences if s.words not in overlap]
                content.counts["dropped_overlap"] = len(content.sentences) - len(kept)
                content.sentences = kept
            if not content.sentences:
                dropped = dropped_sentences(content.counts["dropped_overlap"])
                raise MetaseqError(f"{', '.join(map(str, paths))}: no sentences{dropped}")

    def _hold_out(self) -> None:
        """Move random sentences of train, in their order, to a new split valid."""
        train, wanted = self.contents[TRAIN], self.options.hold_out
        count = len(train.sentences)
        if wanted >= count:
            raise UsageError(f"--hold-out {wanted}: train has {count} sentences")
        seed = self.options.hold_out_seed or 0
        order = random_streams.generator(seed, "hold out").permutation(count)
        held = set(order[:wanted].tolist())
        self.contents[VALID] = Content(train.sources, [train.sentences[i] for i in sorted(held)])
        train.sentences = [s for i, s in enumerate(train.sentences) if i not in held]

    def _take_labels(self, folder: Path) -> None:
        """Take the classes of an earlier set, and which of them stands for tags that it lacks."""
        lacking = set(self.labels)
        self.labels, self.unseen = classes_of(folder), Manifest.load(folder).details.get("unseen")
        lacking -= set(self.labels)
        if self.unseen is not None or not lacking:
            return
        for sentence in all_sentences(self.contents):
            for word, label in enumerate(sentence.labels):
                if label in lacking:
                    raise MetaseqError(
                        f"{sentence.place(word)}: {label!r} is no class of {folder} (--labels-from); a "
                        "model of that set cannot be scored on it"
                    )

    def splits(self) -> Iterable[Split]:
        """Return the splits, with the held-out one."""
        return [
            Split(name, content.sources, content.counts) for name, content in self.contents.items()
        ]

    def read(self, split: Split) -> Iterator[Sentence]:
        """Yield the sentences of a split."""
        return iter(self.contents[split.name].sentences)

    def encode(self, split: Split, records: Iterator[Sentence]) -> Iterator[EncodedSentences]:
        """Yield the numbers of words, labels and heads of batches of sentences."""
        self.encoder = SentenceEncoder(self.vocabulary)
        return map(self._encode_batch, batches(records, BATCH))

    def _encode_batch(self, sentences: list[Sentence]) -> EncodedSentences:
        number: dict[str, int] = {label: i for i, label in enumerate(self.labels)}
        labels = [number.get(label, self.unseen) for s in sentences for label in s.labels]
        encoded = self.encoder.encode([s.words for s in sentences])
        encoded.columns["labels"] = np.array(labels)
        if self.annotation.heads:
            heads = [head for s in sentences for head in s.heads or ()]
            encoded.columns["heads"] = np.array(heads)
        return encoded

    def write(self, split: Split, encoded: Iterator[EncodedSentences]) -> None:
        """Write the files of a split."""
        types = word_types(self.vocabulary) | {"labels": smallest_dtype(len(self.labels))}
        if self.annotation.heads:
            types["heads"] = np.dtype("<i4")
        write_sentences(split, encoded, self.folder, self.encoder, types)

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        """Return what the manifest says of the classes."""
        scheme = self.annotation.scheme
        return {
            "labels": self.labels,
            "spans": scheme != "none",
            "scheme": scheme,
            "unseen": self.unseen,
        }

    def summary(self, split: Split) -> str:
        """Return the line of a split for the end of the run."""
        return summarise_sentences(split)

    def report(self, manifest: Manifest) -> str:
        """Return the classes in words."""
        return self.annotation.report(self.labels)


# ---------------------------------------------------------------- tags


class TagAnnotation:
    """Words with tags: spans, which become BIOES, or a class for each word."""

    kind, heads = "tags", False

    def __init__(self, options: TaggedOptions) -> None:
        self.options = options
        self.scheme = options.tag_scheme  # "auto" until the tags are read

    def open_file(self, path: Path, policy: str) -> SentenceReader:
        """Return the reader of a file: CoNLL-U by a named field, else by a numbered column."""
        column = self.options.tag_column
        if not is_conllu(path):
            word_column = self.options.word_column or 0
            return ColumnReader(
                path, policy, word_column=word_column, label_column=label_column(path, column)
            )
        if not column or _is_number(column):
            raise UsageError(f"{path}: name the field of the tags, for example --tag-column upos")
        return ConlluReader(path, policy, label=field_number(column), trees=False)

    def choose_labels(self, contents: Contents) -> tuple[list[str], int | None]:
        """Find out how the tags spell spans; turn spans into BIOES; return the classes."""
        if self.scheme == "auto":
            try:
                self.scheme = guess_scheme(s.labels for s in all_sentences(contents))
            except UsageError as error:
                first = next(iter(contents.values())).sources[0]
                raise UsageError(f"{first}: {error}") from error
        if self.scheme != "none":
            self._to_bioes(contents)
            if self.options.unseen_tags == "one":
                raise UsageError("--unseen-tags one is for tags of words, not for spans")
        labels = {label for sentence in all_sentences(contents) for label in sentence.labels}
        if self.scheme != "none":
            return bioes_names(label[2:] for label in labels if label != "O"), None
        if self.options.unseen_tags == "own":
            return sorted(labels), None
        seen = {label for sentence in contents[TRAIN].sentences for label in sentence.labels}
        return [*sorted(seen), UNSEEN], len(seen)

    def _to_bioes(self, contents: Contents) -> None:
        for content in contents.values():
            for i, sentence in enumerate(content.sentences):
                try:
                    spans = read_spans(sentence.labels, self.scheme)
                except TagError as error:
                    raise MetaseqError(
                        f"{sentence.place(error.word)}: tag {sentence.labels[error.word]!r}: {error} "
                        f"(--tag-scheme {self.scheme})"
                    ) from error
                tags = bioes_tags(spans, len(sentence.words))
                content.sentences[i] = replace(sentence, labels=tags)

    def report(self, labels: list[str]) -> str:
        """Return the classes in words."""
        if self.scheme == "none":
            return f"{len(labels)} tags of words: {', '.join(labels)}"
        types = [label[2:] for label in labels[1::4]]
        return (
            f"spans read as {self.scheme}, stored as bioes, {len(types)} types: {', '.join(types)}"
        )


@register_dataset_kind("tagged", TaggedOptions)
def tagged_set(options: TaggedOptions, request: Request) -> WordSetPipeline:
    """Return what makes a tagged set."""
    return WordSetPipeline(options.tagged, options, TagAnnotation(options), request)


# ---------------------------------------------------------------- trees


class TreeAnnotation:
    """Dependency trees: a head and a relation for each word."""

    kind, heads, scheme = "trees", True, "none"

    def __init__(self, options: TreebankOptions) -> None:
        self.options = options

    def open_file(self, path: Path, policy: str) -> SentenceReader:
        """Return the reader of a file: CoNLL-U, or columns with HEAD-RELATION."""
        column = self.options.tag_column
        if not is_conllu(path):
            word_column = self.options.word_column or 0
            return HeadColumnReader(
                path, policy, word_column=word_column, label_column=label_column(path, column)
            )
        if column:
            raise UsageError(
                f"--tag-column {column} does not apply to {path}: the relations of a treebank in "
                "CoNLL-U are its field deprel"
            )
        return ConlluReader(path, policy)

    def choose_labels(self, contents: Contents) -> tuple[list[str], int | None]:
        """Return the relations of all sentences, root first.

        MetaseqError with the place unless the words with head 0, and no others, have the relation root.
        """
        relations = set()
        for sentence in all_sentences(contents):
            assert sentence.heads is not None
            for word, (head, relation) in enumerate(zip(sentence.heads, sentence.labels)):
                if relation.lower() == ROOT:
                    sentence.labels[word] = relation = ROOT
                if (head == 0) != (relation == ROOT):
                    raise MetaseqError(
                        f"{sentence.place(word)}: relation {relation!r} to head {head}; the words with "
                        f"head 0, and no others, have the relation {ROOT}"
                    )
                relations.add(relation)
        return [ROOT, *sorted(relations - {ROOT})], None

    def report(self, labels: list[str]) -> str:
        """Return the relations in words."""
        return f"{len(labels)} relations: {', '.join(labels)}"


@register_dataset_kind("treebank", TreebankOptions)
def treebank(options: TreebankOptions, request: Request) -> WordSetPipeline:
    """Return what makes a treebank."""
    return WordSetPipeline(options.treebank, options, TreeAnnotation(options), request)


def label_column(path: Path, column: str) -> int:
    """Return the number of the column of labels, the last by default; UsageError for a name."""
    column = column or "-1"
    if not _is_number(column):
        raise UsageError(
            f"{path}: --tag-column {column} is for .conllu files; give a number, from 0, or negative "
            "from the right"
        )
    return int(column)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 9
