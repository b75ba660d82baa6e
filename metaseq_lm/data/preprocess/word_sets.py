"""Tagged sets and treebanks: files in CoNLL columns or CoNLL-U, with the vocabulary of words of D."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    Split,
    batches,
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
from metaseq_lm.data.storage.text_files import TextFile
from metaseq_lm.data.words.columns import (
    ColumnReader,
    HeadColumnReader,
    Sentence,
    SentenceReader,
    is_conllu,
)
from metaseq_lm.data.words.conllu import ConlluReader, field_number
from metaseq_lm.data.words.overlap import dropped_sentences, evaluation_overlap, words_reader
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

    tag_column: str = option(
        "",
        "column of the tags, or of HEAD-RELATION (default: -1, the last); of .conllu files with "
        "--tagged a field such as upos",
    )
    hold_out: int | None = option(
        None,
        "tagged, treebank: N random sentences of train become the missing valid split",
        at_least=1,
    )
    hold_out_seed: int | None = option(None, "seed of --hold-out (default: 0)", metavar="S")
    word_column: int | None = option(None, "")
    drop_overlap_with: tuple[str, ...] = option((), "")
    labels_from: Path | None = option(None, "")

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

    tagged: str = option("", "the files are words with tags, written to D/NAME", metavar="NAME")
    tag_scheme: str = option(
        "auto",
        "tagged: how tags spell spans, which become BIOES; conlleval reads all of them and faulty "
        "ones, none is one class per word",
        choices=SCHEMES,
    )
    unseen_tags: str = option(
        "own",
        "tagged: tags of words that train lacks are classes of their own, or one class that counts as "
        "wrong whatever is predicted",
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

    treebank: str = option("", "the files are dependency trees, written to D/NAME", metavar="NAME")


@dataclass
class _Content:
    """The sentences of a split and what was counted on the way."""

    sources: list[Path]
    sentences: list[Sentence] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class WordSetPipeline(Pipeline[Sentence, EncodedSentences]):
    """Sentences with a tag, or a head and a relation, for each word.

    All sentences are read first, as the classes depend on all splits.
    """

    unit = "sentences"
    encoder: SentenceEncoder

    def __init__(self, options: TaggedOptions | TreebankOptions, request: Request) -> None:
        trees = isinstance(options, TreebankOptions)
        name = options.treebank if isinstance(options, TreebankOptions) else options.tagged
        super().__init__(request.inside(name))
        options.check(request.splits)
        self.kind = "trees" if trees else "tags"  # type: ignore[misc]
        self.options = options
        self.data_folder = request.destdir
        self.vocabulary = WordVocabulary.load(self.data_folder)
        self.scheme = "none"
        self.labels: list[str] = []
        self.unseen: int | None = None  # the class of tags that train lacks
        self._contents: dict[str, _Content] = {}

    # ------------------------------------------------------------ sentences and classes

    def prepare(self) -> dict[str, Any]:
        """Read all sentences and decide on the classes."""
        self._read_all()
        if self.options.hold_out:
            self._hold_out(self.options.hold_out)
        if isinstance(self.options, TreebankOptions):
            self._choose_relations()
        else:
            self._choose_tags(self.options)
        if self.options.labels_from is not None:
            self._take_labels(self.options.labels_from)
        return describe_vocabulary(self.vocabulary)

    def _read_all(self) -> None:
        options, open_file = self.options, self.request.text_file

        def words_of(path: Path) -> SentenceReader:
            return words_reader(open_file(path), options.word_column or 0)

        overlap = evaluation_overlap(options.drop_overlap_with, self.data_folder, words_of)
        for split, paths in self.request.splits.items():
            content = self._contents[split] = _Content(paths)
            for path in paths:
                reader = sentence_reader(open_file(path), options)
                content.sentences += reader
                content.counts += reader.counts
            if split == TRAIN and len(overlap):
                kept = [s for s in content.sentences if s.words not in overlap]
                content.counts["dropped_overlap"] = len(content.sentences) - len(kept)
                content.sentences = kept
            if not content.sentences:
                dropped = dropped_sentences(content.counts["dropped_overlap"])
                raise MetaseqError(f"{', '.join(map(str, paths))}: no sentences{dropped}")

    def _hold_out(self, wanted: int) -> None:
        """Move random sentences of train, in their order, to a new split valid."""
        train = self._contents[TRAIN]
        count = len(train.sentences)
        if wanted >= count:
            raise UsageError(f"--hold-out {wanted}: train has {count} sentences")
        seed = self.options.hold_out_seed or 0
        order = random_streams.generator(seed, "hold out").permutation(count)
        held = set(order[:wanted].tolist())
        self._contents[VALID] = _Content(train.sources, [train.sentences[i] for i in sorted(held)])
        train.sentences = [s for i, s in enumerate(train.sentences) if i not in held]

    def _sentences(self) -> Iterator[Sentence]:
        for content in self._contents.values():
            yield from content.sentences

    def _choose_relations(self) -> None:
        """Take the relations of all sentences, root first.

        MetaseqError with the place unless the words with head 0, and no others, have the relation root.
        """
        relations = set()
        for sentence in self._sentences():
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
        self.labels = [ROOT, *sorted(relations - {ROOT})]

    def _choose_tags(self, options: TaggedOptions) -> None:
        """Find out how the tags spell spans, turn spans into BIOES, take the classes."""
        self.scheme = options.tag_scheme
        if self.scheme == "auto":
            try:
                self.scheme = guess_scheme(sentence.labels for sentence in self._sentences())
            except UsageError as error:
                first = next(iter(self._contents.values())).sources[0]
                raise UsageError(f"{first}: {error}") from error
        if self.scheme != "none":
            self._to_bioes()
            if options.unseen_tags == "one":
                raise UsageError("--unseen-tags one is for tags of words, not for spans")
        tags = {tag for sentence in self._sentences() for tag in sentence.labels}
        if self.scheme != "none":
            self.labels = bioes_names(tag[2:] for tag in tags if tag != "O")
        elif options.unseen_tags == "own":
            self.labels = sorted(tags)
        else:
            seen = {tag for s in self._contents[TRAIN].sentences for tag in s.labels}
            self.labels, self.unseen = [*sorted(seen), UNSEEN], len(seen)

    def _to_bioes(self) -> None:
        for content in self._contents.values():
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

    def _take_labels(self, folder: Path) -> None:
        """Take the classes of an earlier set, and which of them stands for tags that it lacks."""
        lacking = set(self.labels)
        self.labels, self.unseen = classes_of(folder), Manifest.load(folder).details.get("unseen")
        lacking -= set(self.labels)
        if self.unseen is not None or not lacking:
            return
        for sentence in self._sentences():
            for word, label in enumerate(sentence.labels):
                if label in lacking:
                    raise MetaseqError(
                        f"{sentence.place(word)}: {label!r} is no class of {folder} (--labels-from); a "
                        "model of that set cannot be scored on it"
                    )

    # ------------------------------------------------------------ splits

    def splits(self) -> Iterable[Split]:
        return [Split(name, c.sources, c.counts) for name, c in self._contents.items()]

    def read(self, split: Split) -> Iterator[Sentence]:
        return iter(self._contents[split.name].sentences)

    def encode(self, split: Split, records: Iterator[Sentence]) -> Iterator[EncodedSentences]:
        self.encoder = SentenceEncoder(self.vocabulary)
        return map(self._encode_batch, batches(records, BATCH))

    def _encode_batch(self, sentences: list[Sentence]) -> EncodedSentences:
        number: dict[str, int] = {label: i for i, label in enumerate(self.labels)}
        labels = [number.get(label, self.unseen) for s in sentences for label in s.labels]
        encoded = self.encoder.encode([s.words for s in sentences])
        encoded.columns["labels"] = np.array(labels)
        encoded.columns["heads"] = np.array([head for s in sentences for head in s.heads or ()])
        return encoded

    def write(self, split: Split, encoded: Iterator[EncodedSentences]) -> None:
        types = word_types(self.vocabulary) | {"labels": smallest_dtype(len(self.labels))}
        if self.kind == "trees":
            types["heads"] = np.dtype("<i4")
        write_sentences(split, encoded, self.folder, self.encoder, types)

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        about = {"labels": self.labels, "scheme": self.scheme, "unseen": self.unseen}
        return {**about, "spans": self.scheme != "none"}

    def summary(self, split: Split) -> str:
        return summarise_sentences(split)

    def report(self, manifest: Manifest) -> str:
        labels = self.labels
        if self.kind == "trees":
            return f"{len(labels)} relations: {', '.join(labels)}"
        if self.scheme == "none":
            return f"{len(labels)} tags of words: {', '.join(labels)}"
        types = [label[2:] for label in labels[1::4]]
        return (
            f"spans read as {self.scheme}, stored as bioes, {len(types)} types: {', '.join(types)}"
        )


register_dataset_kind("tagged", TaggedOptions)(WordSetPipeline)
register_dataset_kind("treebank", TreebankOptions)(WordSetPipeline)


def sentence_reader(file: TextFile, options: TaggedOptions | TreebankOptions) -> SentenceReader:
    """Return the reader of a file of tags or trees, CoNLL-U or in columns by its name."""
    trees, column = isinstance(options, TreebankOptions), options.tag_column
    if not is_conllu(file.path):
        column = column or "-1"
        if not _is_number(column):
            raise UsageError(
                f"{file}: --tag-column {column} is for .conllu files; give a number, from 0, or "
                "negative from the right"
            )
        reader = HeadColumnReader if trees else ColumnReader
        word_column = options.word_column or 0
        return reader(file, word_column=word_column, label_column=int(column))
    if trees:
        if column:
            raise UsageError(
                f"--tag-column {column} does not apply to {file}: the relations of a treebank in "
                "CoNLL-U are its field deprel"
            )
        return ConlluReader(file)
    if not column or _is_number(column):
        raise UsageError(f"{file}: name the field of the tags, for example --tag-column upos")
    return ConlluReader(file, label=field_number(column), trees=False)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 9
