"""Tagged sets and treebanks: files in CoNLL columns or CoNLL-U, with D's vocabulary of words."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.options import option
from metaseq_lm.data.preprocess.options import ClassOptions, TokenizerFromOptions, WordColumnOptions
from metaseq_lm.data.preprocess.pipeline import TRAIN, VALID, Request, Split, register_dataset_kind
from metaseq_lm.data.preprocess.tokenizer import save_tokenizer, tokenizer_for_set
from metaseq_lm.data.preprocess.words import SentencePipeline
from metaseq_lm.data.records.conll import FIELDS, RELATION
from metaseq_lm.data.records.file_kinds import PLAIN, RECORDS, Kind, recognise
from metaseq_lm.data.records.reading import reader_name
from metaseq_lm.data.records.record import COLUMNS, CONLLU, Reading
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.storage.indexed import smallest_dtype
from metaseq_lm.data.storage.manifest import Manifest, classes_of
from metaseq_lm.data.words.columns import (
    ColumnReader,
    ConlluReader,
    HeadColumnReader,
    Sentence,
    field_number,
)
from metaseq_lm.data.words.overlap import dropped_sentences, evaluation_overlap
from metaseq_lm.data.words.sets import ROOT
from metaseq_lm.data.words.tags import (
    OUTSIDE,
    SCHEMES,
    SPELLING,
    TagError,
    bioes_names,
    bioes_tags,
    guess_scheme,
    read_spans,
    span_like,
    split_tag,
    standard_tags,
)
from metaseq_lm.data.words.token_lists import RELATIONS, TokenListReader
from metaseq_lm.data.words.vocabulary import SubwordVocabulary, WordVocabulary, load_vocabulary

_UNSEEN = "<unseen>"
_UPOS, _UNKNOWN_FIELD = "upos", "_"  # of CoNLL-U
_KEEP = "keep"


@dataclass(frozen=True)
class _WordSetOptions(WordColumnOptions, ClassOptions):
    tag_column: str = option(
        "",
        "column of the tags, or of HEAD-RELATION (default: -1, the last); of .conllu files with "
        "--tagged a field such as upos, of JSON lines one such as ner_tags",
    )
    relation_subtypes: str = option(
        _KEEP,
        "of relations in .conllu files, such as pass in nsubj:pass: keep them, or drop them, which "
        "leaves the universal relations",
        choices=(_KEEP, "drop"),
    )


@dataclass(frozen=True)
class TaggedOptions(_WordSetOptions, TokenizerFromOptions):
    """Options of tagged sets.

    With `unseen_tags` "one" the tags that train lacks are one class, which no prediction gets right
    (CCG categories; Clark et al. 2018); with "own" each is a class.
    """

    NOUN: ClassVar[str] = "tagged sets"

    tagged: str = option("", "the files are words with tags, written to D/NAME", metavar="NAME")
    tag_scheme: str = option(
        "auto",
        "tagged: scheme in which tags mark spans, stored as BIOES; conlleval reads every scheme "
        "and faulty tags; none: each tag is the class of a word",
        choices=SCHEMES,
    )
    tag_names: tuple[str, ...] | None = option(
        None,
        "tagged: names of the tags 0, 1, ... in JSON lines with lists of tokens and of numbers",
        metavar="A,B,...",
    )
    unseen_tags: str = option(
        "own",
        "tagged: tags that train lacks are a class each (own), or one class that always counts as "
        "wrong (one)",
        choices=("own", "one"),
    )


@dataclass(frozen=True)
class _TreebankOptions(_WordSetOptions):
    NOUN: ClassVar[str] = "treebanks"

    treebank: str = option("", "the files are dependency trees, written to D/NAME", metavar="NAME")


class _WordSetPipeline(SentencePipeline[Sentence]):
    """Sentences with labels for each word."""

    reads_records = holds_out = True
    # Rows with blanks between the columns can look like text; an object of lists can be one
    # sentence.
    reads = RECORDS | PLAIN | {Kind.COLUMNS, Kind.CONLLU, Kind.JSON_COLUMNS}
    column_reader: type[ColumnReader] = ColumnReader

    def __init__(self, name: str, options: _WordSetOptions, request: Request) -> None:
        request = request.expanded()
        splits = request.splits
        files = chain.from_iterable(splits.values())
        labelled_files = [*files, *map(Path, options.drop_overlap_with)]
        super().__init__(request.inside(name), options.word_column, labelled_files)
        request.with_valid()  # which the sentences are drawn for
        self.options = options
        self.data_folder = request.destdir
        self.vocabulary = self.open_vocabulary()
        self.scheme = "none"
        self.labels: list[str] = []
        self.unseen: int | None = None  # the class of tags that train lacks
        self._splits: dict[str, Split] = {}
        self.sentences: dict[str, list[Sentence]] = {}

    def check_file(self, path: Path) -> None:
        super().check_file(path)
        file = self.request.text_file(path)
        content = recognise(file)
        if content.kind is Kind.TABLE and content.delimiter != "\t":
            raise MetaseqError(
                f"{file}: is {content}, not {self.expected}; write tabs between the columns, and a "
                "blank line behind each sentence"
            )

    def is_read_first(self, path: Path) -> bool:
        return True

    def open_vocabulary(self) -> WordVocabulary | SubwordVocabulary:
        return WordVocabulary.load(self.data_folder)

    def open_file(self, path: Path, reading: Reading) -> Iterable[Sentence]:
        """Return the sentences of a file; UsageError for options that it has no use for."""
        file, options = self.request.text_file(path), self.options
        name, subtypes = reader_name(file, COLUMNS), options.relation_subtypes
        if name == CONLLU:
            label = self.conllu_field(file)
            if subtypes != _KEEP and label != RELATION:
                raise UsageError(
                    f"--relation-subtypes {subtypes}: the tags of {file} are its field "
                    f"{FIELDS[label]}, not relations; they are --tag-column deprel"
                )
            return ConlluReader(file, reading, label, self.kind == "trees", subtypes == _KEEP)
        if name != COLUMNS:
            return TokenListReader(file, reading, **self.list_options())
        column = options.tag_column or "-1"
        if subtypes != _KEEP:
            raise UsageError(f"{file}: --relation-subtypes {subtypes} is for CoNLL-U")
        if not re.fullmatch("-?[0-9]{1,8}", column):
            raise UsageError(
                f"{file}: --tag-column {column} is for CoNLL-U; give a number, from 0, or "
                "negative from the right"
            )
        return self.column_reader(file, reading, self.word_column, int(column))

    def conllu_field(self, file: TextFile) -> int:
        """Return the place of the field of CoNLL-U that holds the labels."""
        raise NotImplementedError

    def list_options(self) -> dict[str, Any]:
        """Return the options of the reader of lists of words and labels."""
        raise NotImplementedError

    def choose_labels(self) -> None:
        """Take the classes of all sentences."""
        raise NotImplementedError

    def prepare(self) -> dict[str, Any]:
        # All sentences are read first, because the classes depend on all splits.
        self._read_all()
        if self.request.hold_out is not None:
            # Sentences of train, in their order, move to a new split.
            train = self.sentences[TRAIN]
            held = self.request.hold_out.choose(len(train), "sentences")
            self._splits[VALID] = Split(VALID, self._splits[TRAIN].sources)
            self.sentences[VALID] = list(compress(train, held))
            self.sentences[TRAIN] = list(compress(train, ~held))
        self.choose_labels()
        if self.options.labels_from is not None:
            self._take_labels(self.options.labels_from)
        return self.describe_vocabulary()

    def _read_all(self) -> None:
        overlap = evaluation_overlap(
            self.options.drop_overlap_with, self.data_folder, self.labelled_reader
        )
        for split in super().splits():
            sentences: list[Sentence] = []
            for path in split.sources:
                reading = Reading()
                sentences += self.open_file(path, reading)
                split.counts.update(reading.counts)
                self.remarks += reading.remarks
            if split.name == TRAIN and len(overlap):
                n_sentences = len(sentences)
                sentences = [s for s in sentences if s.words not in overlap]
                split.counts["dropped_overlap"] = n_sentences - len(sentences)
            if not sentences:
                dropped = dropped_sentences(split.counts["dropped_overlap"])
                raise MetaseqError(f"{split}: no sentences{dropped}")
            self._splits[split.name], self.sentences[split.name] = split, sentences

    def all_sentences(self) -> Iterator[Sentence]:
        return chain.from_iterable(self.sentences.values())

    def _take_labels(self, folder: Path) -> None:
        unknown = set(self.labels)
        self.labels, self.unseen = classes_of(folder), Manifest.load(folder).details.get("unseen")
        unknown -= set(self.labels)
        if self.unseen is not None or not unknown:
            return
        for sentence in self.all_sentences():
            for word, label in enumerate(sentence.labels):
                if label in unknown:
                    raise MetaseqError(
                        f"{sentence.location(word)}: {label!r} is no class of {folder} "
                        "(--labels-from); a model of that set cannot be scored on it"
                    )

    def splits(self) -> Iterable[Split]:
        return self._splits.values()

    def read(self, split: Split) -> Iterator[Sentence]:
        return iter(self.sentences[split.name])

    def words_of(self, record: Sentence) -> list[str]:
        return record.words

    def label_columns(self, batch: list[Sentence]) -> dict[str, np.ndarray]:
        numbers: dict[str, int] = {label: i for i, label in enumerate(self.labels)}
        tags = chain.from_iterable(sentence.labels for sentence in batch)
        labels = [numbers.get(tag, self.unseen) for tag in tags]
        return {"labels": np.array(labels, smallest_dtype(len(self.labels)))}

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        if isinstance(self.vocabulary, SubwordVocabulary):
            save_tokenizer(self.vocabulary.tokenizer, self.data_folder)
        labels = {"labels": self.labels, "scheme": self.scheme, "unseen": self.unseen}
        return {**labels, "spans": self.scheme != "none"}


@register_dataset_kind("tagged", TaggedOptions)
class TagsPipeline(_WordSetPipeline):
    """Sentences with a tag for each word."""

    kind = "tags"
    expected = "words and tags in columns"
    options: TaggedOptions
    _spelling = ""  # how the files spell the tags, if differently
    _field = ""  # the field of CoNLL-U that holds them, if none was chosen

    def __init__(self, options: TaggedOptions, request: Request) -> None:
        super().__init__(options.tagged, options, request)
        if options.unseen_tags != "own" and options.labels_from:
            raise UsageError(
                "--labels-from decides on unseen tags already; leave --unseen-tags out"
            )
        if options.unseen_tags == "one" and TRAIN not in request.splits:
            raise UsageError("--unseen-tags one needs --trainpref to know which tags are seen")

    def open_vocabulary(self) -> WordVocabulary | SubwordVocabulary:
        """Return the vocabulary or tokenizer of the data folder, or of `tokenizer_from`."""
        if self.options.tokenizer_from is None:
            return load_vocabulary(self.data_folder)
        return SubwordVocabulary(tokenizer_for_set(self.data_folder, self.options.tokenizer_from))

    def conllu_field(self, file: TextFile) -> int:
        if not self.options.tag_column:
            self._field = f" (the field {_UPOS} of CoNLL-U; choose with --tag-column)"
        return field_number(self.options.tag_column or _UPOS)

    def list_options(self) -> dict[str, Any]:
        options = self.options
        names, keeps_numbers = options.tag_names or (), options.tag_scheme == "none"
        return {
            "tag_field": options.tag_column,
            "tag_names": names,
            "keeps_numbers": keeps_numbers,
        }

    def all_tags(self) -> Iterator[str]:
        """Yield the tags of all sentences."""
        return chain.from_iterable(sentence.labels for sentence in self.all_sentences())

    def choose_labels(self) -> None:
        """Detect how the tags spell spans, turn spans into BIOES, take the classes."""
        options = self.options
        self.scheme = options.tag_scheme
        first = next(iter(self._splits.values())).sources[0]
        counts = Counter(self.all_tags())
        if set(counts) == {_UNKNOWN_FIELD}:
            raise MetaseqError(
                f"{first}: each tag is '{_UNKNOWN_FIELD}'; choose another column with --tag-column"
            )
        if self.scheme != "none":
            # Schemes are told apart by their prefixes, so the spelling comes first.
            standard = standard_tags(counts)
            if others := [tag for tag in standard if split_tag(tag) == ("", "")]:
                other = max(others, key=lambda tag: standard[tag] != OUTSIDE)
                self._spelling = f" (with {other!r} as {standard[other]!r})"
                for sentences in self.sentences.values():
                    for number, sentence in enumerate(sentences):
                        labels = [standard[tag] for tag in sentence.labels]
                        sentences[number] = replace(sentence, labels=labels)
        if self.scheme == "auto":
            try:
                self.scheme = guess_scheme(sentence.labels for sentence in self.all_sentences())
            except UsageError as error:
                raise UsageError(f"{first}: {error}") from error
            if self.scheme == "none" and (reason := span_like(counts)):
                self.remarks.append(f"{first}: {reason}; {SPELLING}")
        if self.scheme != "none":
            for sentences in self.sentences.values():
                sentences[:] = map(self._to_bioes, sentences)
            if options.unseen_tags == "one":
                raise UsageError("--unseen-tags one is for tags of words, not for spans")
        tags = set(self.all_tags())
        if self.scheme != "none":
            self.labels = bioes_names(tag[2:] for tag in tags if tag != "O")
        elif options.unseen_tags == "own":
            self.labels = sorted(tags)
        else:
            seen = set(chain.from_iterable(s.labels for s in self.sentences[TRAIN]))
            self.labels, self.unseen = [*sorted(seen), _UNSEEN], len(seen)

    def _to_bioes(self, sentence: Sentence) -> Sentence:
        try:
            spans = read_spans(sentence.labels, self.scheme)
        except TagError as error:
            raise MetaseqError(
                f"{sentence.location(error.word)}: tag {sentence.labels[error.word]!r}: {error} "
                f"(--tag-scheme {self.scheme})"
            ) from error
        return replace(sentence, labels=bioes_tags(spans, len(sentence.words)))

    def report(self) -> str:
        text = f"{len(self.labels)} tags of words{self._field}: {', '.join(self.labels)}"
        if self.scheme != "none":
            types = [label[2:] for label in self.labels[1::4]]
            text = f"spans read as {self.scheme}{self._spelling}, stored as bioes, "
            text += f"{len(types)} types: {', '.join(types)}"
        return "\n".join([text, *self.warnings()])


@register_dataset_kind("treebank", _TreebankOptions)
class _TreesPipeline(_WordSetPipeline):
    """Sentences with a head and a relation for each word."""

    kind = "trees"
    expected = "trees in CoNLL-U or in columns"
    column_reader = HeadColumnReader

    def __init__(self, options: _TreebankOptions, request: Request) -> None:
        super().__init__(options.treebank, options, request)

    def conllu_field(self, file: TextFile) -> int:
        if self.options.tag_column:
            raise UsageError(
                f"--tag-column {self.options.tag_column} does not apply to {file}: the relations "
                "of a treebank in CoNLL-U are its field deprel"
            )
        return RELATION

    def list_options(self) -> dict[str, Any]:
        return {"tag_field": self.options.tag_column or RELATIONS, "trees": True}

    def choose_labels(self) -> None:
        """Take the relations of all sentences, root first."""
        relations = set()
        for sentence in self.all_sentences():
            assert sentence.heads is not None
            for word, (head, relation) in enumerate(zip(sentence.heads, sentence.labels)):
                if relation.lower() == ROOT:
                    sentence.labels[word] = relation = ROOT
                if (head == 0) != (relation == ROOT):
                    raise MetaseqError(
                        f"{sentence.location(word)}: relation {relation!r} to head {head}; the "
                        f"words with head 0, and no others, have the relation {ROOT}"
                    )
                relations.add(relation)
        self.labels = [ROOT, *sorted(relations - {ROOT})]

    def label_columns(self, batch: list[Sentence]) -> dict[str, np.ndarray]:
        heads = chain.from_iterable(sentence.heads or () for sentence in batch)
        return super().label_columns(batch) | {"heads": np.array(list(heads), "<i4")}

    def report(self) -> str:
        text = f"{len(self.labels)} relations: {', '.join(self.labels)}"
        return "\n".join([text, *self.warnings()])
