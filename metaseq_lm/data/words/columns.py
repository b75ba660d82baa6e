"""Words, labels and heads of the sentences in CoNLL columns and CoNLL-U."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import ClassVar

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.records.conll import FIELDS, FORM, HEAD, ID, RELATION, columns_of, separator
from metaseq_lm.data.records.file_kinds import REMEDIES, Kind
from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import COLUMNS, CONLLU, READERS, Reading, Record
from metaseq_lm.data.records.text_files import TextFile

_MOST_BLANKS = 2  # in the words of a file, on average
_WORD_NAMES = frozenset("word words token tokens form text".split())
_LABEL_NAMES = frozenset("tag tags label labels pos upos xpos ner ner_tag ner_tags chunk".split())
_ID = re.compile(r"\d+(?:[-.]\d+)?")
_HEAD = re.compile(r"(0|[1-9][0-9]*)-(.+)")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, their labels, heads (trees only) and line numbers in `path`."""

    path: Path
    lines: list[int]
    words: list[str]
    labels: list[str]
    heads: list[int] | None = None

    def location(self, word: int) -> str:
        """Return the file and line of a word, for messages."""
        return f"{self.path}:{self.lines[word]}"


@dataclass
class SentenceReader:
    """Iterates over the sentences of a file; `reading` gets the lines skipped and the remarks.

    A subclass takes words and labels from a record of the registered reader `reader`, "" for any.
    If the file skips invalid UTF-8, a sentence that contains some is left out.
    """

    reader: ClassVar[str]
    file: TextFile
    reading: Reading = field(default_factory=Reading)

    def __iter__(self) -> Iterator[Sentence]:
        reader = READERS[self.reader] if self.reader else records
        for record in reader(self.file, self.reading):
            if record.is_bad:
                self.reading.counts["bad_utf8"] += 1
                if self.file.skips_bad:
                    self.reading.counts["skipped"] += 1
                    continue
            if record.fields or not self.reader:
                sentence = self._sentence(record)
                if sentence.words:
                    yield sentence

    def _sentence(self, record: Record) -> Sentence:
        raise NotImplementedError


@dataclass
class ColumnReader(SentenceReader):
    """Reads words and labels from columns, counted from 0 or, if negative, from the right.

    A header row is skipped. Raises MetaseqError with file and line for a row without a requested
    column.
    """

    reader: ClassVar[str] = COLUMNS
    word_column: int = 0
    label_column: int = -1
    _is_first: bool = True

    def __iter__(self) -> Iterator[Sentence]:
        lines = self.file.first_lines
        between = separator(lines)
        rows = [columns_of(line, between) for line in lines if line.strip()]
        texts = [row[self.word_column] for row in rows if -len(row) <= self.word_column < len(row)]
        if sum(text.count(" ") for text in texts) > _MOST_BLANKS * len(texts):
            raise MetaseqError(
                f"{self.file}: column {self.word_column} holds texts, not words; "
                f"{REMEDIES[Kind.TABLE]}"
            )
        return super().__iter__()

    def _sentence(self, record: Record) -> Sentence:
        if self._is_first:
            self._check_columns(len(record.fields), record.where)
        columns = list(record.fields.values())
        words, labels = columns[self.word_column], columns[self.label_column]
        sentence = Sentence(self.file.path, record.lines, words, labels)
        for column, values in ((self.word_column, words), (self.label_column, labels)):
            if "" in values:
                where = sentence.location(values.index(""))
                raise MetaseqError(f"{where}: column {column} is empty")
        if not self._is_first:
            return sentence
        self._is_first = False
        if words[0].lower() in _WORD_NAMES and labels[0].lower() in _LABEL_NAMES:
            self.reading.counts["header"] += 1
            lines = record.lines[1:]
            # The names of the columns stand at the top of the first sentence.
            sentence = replace(sentence, lines=lines, words=words[1:], labels=labels[1:])
        if sentence.words:
            self._check_words(sentence, len(columns))
        return sentence

    def _check_columns(self, count: int, where: str) -> None:
        columns = [self.word_column, self.label_column]
        for place, column in enumerate(columns):
            if column < 0:
                columns[place] = count + column
        same = columns[0] == columns[1] and self.word_column != self.label_column
        if same or not all(0 <= column < count for column in columns):
            raise MetaseqError(
                f"{where}: {count} columns, but the word is column {self.word_column} and its "
                f"label column {self.label_column} (from 0; -1 is the last); a line is a word and "
                "its label with white space between them, a blank line ends a sentence. Choose "
                "with --word-column and --tag-column"
            )

    def _check_words(self, sentence: Sentence, count: int) -> None:
        words, column = sentence.words, self.word_column
        # Also in CoNLL-U without its tabs, with the ids of multi-word tokens (1-2) and empty nodes
        # (3.1).
        ids = [word for word in words if word.isdecimal()]
        from_zero = list(map(str, range(len(ids))))
        from_one = list(map(str, range(1, len(ids) + 1)))
        counts = all(map(_ID.fullmatch, words)) and ids in (from_zero, from_one)
        is_constant = len(words) > 4 and len({*words}) == 1
        if count > 2 and len(words) > 1 and (counts or is_constant):
            fault = "is the same in each row" if is_constant else "counts the words"
            raise MetaseqError(
                f"{sentence.location(0)}: column {column} {fault} of the sentence ({words[0]}, "
                f"{words[1]}, ...); choose the column of the words with --word-column, such as 1"
            )


@dataclass
class HeadColumnReader(ColumnReader):
    """Reads trees from columns with labels HEAD-RELATION, 0 for the root (Clark et al. 2018, code).

    Only the first "-" separates, so a relation may contain more of them, which the author's own
    reader cannot read. MetaseqError with file and line for anything else, and for a head outside
    the sentence.
    """

    def _sentence(self, record: Record) -> Sentence:
        sentence = super()._sentence(record)
        heads, relations = [], []
        for word, label in enumerate(sentence.labels):
            match = _HEAD.fullmatch(label)
            if match is None or len(match[1]) > 9:
                raise MetaseqError(
                    f"{sentence.location(word)}: {label[:40]!r} is not HEAD-RELATION, such as "
                    "3-nsubj or 0-root"
                )
            heads.append(int(match[1]))
            relations.append(match[2])
        return checked_tree(replace(sentence, labels=relations, heads=heads))


@dataclass
class ConlluReader(SentenceReader):
    """Reads the words of .conllu files with one column as their label, and with heads if `trees`.

    Subtypes of relations (nsubj:pass) are kept with `subtypes`, else cut off (nsubj). Raises
    MetaseqError with file and line for heads that do not make a tree.
    """

    reader: ClassVar[str] = CONLLU
    label: int = RELATION
    trees: bool = True
    subtypes: bool = True

    def _sentence(self, record: Record) -> Sentence:
        labels = record.fields[FIELDS[self.label]]
        if self.label == RELATION and not self.subtypes:
            labels = [label.partition(":")[0] for label in labels]
        words = record.fields[FIELDS[FORM]]
        sentence = Sentence(self.file.path, record.lines, words, labels)
        if not self.trees:
            return sentence
        heads = []
        for text, number in zip(record.fields[FIELDS[HEAD]], record.lines):
            heads.append(head_number(text, f"{self.file}:{number}"))
        return checked_tree(replace(sentence, heads=heads))


def head_number(text: str, where: str) -> int:
    """Return the place of a head; MetaseqError that begins with `where` if it is not a number."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MetaseqError(f"{where}: head {text[:20]!r} is not a whole number")
    return int(text)


def checked_tree(sentence: Sentence) -> Sentence:
    """Return a sentence; MetaseqError unless its heads make a tree.

    Heads are places of words, 1 for the first, and 0 for the root.
    """
    assert sentence.heads is not None
    for word, head in enumerate(sentence.heads):
        if head > len(sentence.words) or head == word + 1:
            fault = "itself" if head == word + 1 else f"{head}, outside the sentence"
            raise MetaseqError(
                f"{sentence.location(word)}: the head of word {word + 1} is {fault} "
                f"({len(sentence.words)} words; 0 is the root)"
            )
    if sentence.words and 0 not in sentence.heads:
        raise MetaseqError(f"{sentence.location(0)}: no word of this sentence has head 0, the root")
    roots = [word for word, head in enumerate(sentence.heads) if not head]
    if len(roots) > 1:
        raise MetaseqError(
            f"{sentence.location(roots[1])}: words {roots[0] + 1} and {roots[1] + 1} both have "
            "head 0; a sentence has one root (Universal Dependencies). Attach one to the other, or "
            "write a blank line between two sentences"
        )
    try:
        TopologicalSorter({word: [head] for word, head in enumerate(sentence.heads, 1)}).prepare()
    except CycleError as error:
        cycle = error.args[1][:0:-1]  # each word is followed by its head
        start = cycle.index(min(cycle))
        heads = " -> ".join(map(str, [*cycle[start:], *cycle[: start + 1]]))
        raise MetaseqError(
            f"{sentence.location(min(cycle) - 1)}: the heads of words {heads} go round in a "
            "circle; in a tree they lead to the root"
        ) from error
    return sentence


def field_number(name: str) -> int:
    """Return the column of a field of CoNLL-U by its name or number; UsageError for others."""
    with contextlib.suppress(ValueError, IndexError):
        return FIELDS.index(FIELDS[int(name)])
    if name not in FIELDS:
        raise UsageError(
            f"--tag-column {name}: CoNLL-U has the columns {', '.join(FIELDS)}."
            f"{nearest(name, list(FIELDS))}"
        )
    return FIELDS.index(name)


def conllu_text(words: Sequence[str], heads: Sequence[int], relations: Sequence[str]) -> str:
    """Return a sentence as rows of CoNLL-U with its blank line; heads from 1, 0 for the root.

    Unknown fields are "_". ValueError if the three differ in length.
    """
    if not len(words) == len(heads) == len(relations):
        raise ValueError(f"{len(words)} words, {len(heads)} heads, {len(relations)} relations")
    rows = []
    for number, (word, head, relation) in enumerate(zip(words, heads, relations), 1):
        fields = ["_"] * len(FIELDS)
        fields[ID], fields[FORM] = str(number), word
        fields[HEAD], fields[RELATION] = str(head), relation
        rows.append("\t".join(fields))
    return "\n".join(rows) + "\n\n"
