"""Sentences in CoNLL columns and CoNLL-U: a word per line, a blank line after each sentence.

In CoNLL columns tabs or white space separate words and labels, which are in the first and last
column unless others are named; lines that mark documents (-DOCSTART-, CoNLL-2012's "#begin
document") are skipped (Clark et al. 2018, code). CoNLL-U is the format of Universal Dependencies.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, takewhile
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.storage.file_kinds import REMEDIES, Kind, first_lines
from metaseq_lm.data.storage.text_files import TextFile

FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
ID, _FORM, HEAD, RELATION = 0, 1, 6, 7
DOCUMENT = "-DOCSTART-"
_DOCUMENT = re.compile(rf"\s*(?:{DOCUMENT}(?!\S)|#(?:begin|end) document\b)")
_COMMENTED = 0.9  # share of the sentences that begin with "#" if that marks a comment
_MARKS = ("#", "%", "//", ";")  # of comments; all but "#" only if they open (nearly) every sentence
_LONE_TAG = "is a word with a tag that no other word has; if it is a comment, take it out"
_FEWEST_COMMENTS = 3  # each with a last field of its own, such as the name of a document
# Not Python's split: a no-break space may be a part of a word.
_WHITE = " \t\r\f\v"
_BLANKS, _TAB, _TABS = re.compile(f"[{_WHITE}]+"), re.compile("\t"), re.compile("\t+")
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
    """Iterates over the sentences of a file; `counts` are the numbers skipped, by reason.

    `remarks` are warnings for the end of the run. A subclass parses the lines of a sentence,
    (number, text) each, in `_sentence`. If the file skips invalid UTF-8, a sentence that contains
    some is left out.
    """

    file: TextFile
    counts: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def _groups(self) -> Iterator[list[tuple[int, str, bool]]]:
        """Yield the lines between blank lines."""
        for is_blank, group in groupby(self.file.lines(), lambda line: not line[1].strip()):
            if not is_blank:
                yield list(group)

    def __iter__(self) -> Iterator[Sentence]:
        for lines in self._groups():
            if any(bad for _, _, bad in lines):
                self.counts["bad_utf8"] += 1
                if self.file.skips_bad:
                    self.counts["skipped"] += 1
                    continue
            sentence = self._sentence([(number, text) for number, text, _ in lines])
            if sentence.words:
                yield sentence

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence:
        raise NotImplementedError


@dataclass
class ColumnReader(SentenceReader):
    """Reads words and labels from columns, counted from 0 or, if negative, from the right.

    Tabs separate if each examined row has some, so that a word may contain blanks; else white space
    does. A header row and comments are skipped. Raises MetaseqError with file and line for a row
    with another number of columns than the first one, or without a requested column.
    """

    word_column: int = 0
    label_column: int = -1
    n_columns: int = 0  # columns of the first row
    _separator: re.Pattern[str] = _BLANKS
    _seen: bool = False  # whether the first sentence was checked
    _comment: str = ""  # the first field of comments with as many columns as the rows
    _opens_all: bool = False  # whether a comment opens (nearly) every sentence
    _tags: set[str] = field(default_factory=set)  # the last fields of all rows

    def __iter__(self) -> Iterator[Sentence]:
        lines = first_lines(self.file)
        self._separator = separator(lines)
        rows = [self._fields(line) for line in lines if line.strip()]
        texts = [row[self.word_column] for row in rows if -len(row) <= self.word_column < len(row)]
        if sum(text.count(" ") for text in texts) > _MOST_BLANKS * len(texts):
            raise MetaseqError(
                f"{self.file}: column {self.word_column} holds texts, not words; "
                f"{REMEDIES[Kind.TABLE]}"
            )
        self._find_comments()
        return super().__iter__()

    def _find_comments(self) -> None:
        """Decide whether lines that begin with a mark and are as wide as the rows are comments.

        "#" can also be a word: then other words, or at least other "#", have its tag.
        """
        openers: Counter[tuple[str, str]] = Counter()
        places: dict[tuple[str, str], str] = {}
        inside: dict[str, str] = {}  # the places of tags of "#" after the first word
        others: set[str] = set()
        sentences = 0
        for group in self._groups():
            numbered = [
                (n, self._fields(text)) for n, text, _ in group if not _DOCUMENT.match(text)
            ]
            lines = [row for _, row in numbered]
            marked = list(takewhile(lambda row: row[0].startswith(_MARKS), lines))
            rows = numbered[len(marked) :]
            sentences += bool(rows)
            for number, row in rows:
                self._tags.add(row[-1])
                if row[0] == "#":
                    line = f"{self.file}:{number}: {' '.join(row)[:40]!r}"
                    inside.setdefault(row[-1], line)
                else:
                    others.add(row[-1])
            if opener := next((row for row in marked if len(row) == len(lines[-1])), None):
                key = opener[0], opener[-1]
                openers[key] += 1
                places.setdefault(key, f"{self.file}:{group[0][0]}: {' '.join(opener)[:40]!r}")
        unshared = Counter({key: n for key, n in openers.items() if key[1] not in self._tags})
        firsts: Counter[str] = Counter()
        for (first, _), count in unshared.items():
            firsts[first] += count
        lone = [
            place
            for tag, place in inside.items()
            if any(map(str.isalnum, tag)) and tag not in others
        ]
        self.remarks += [f"{where} {_LONE_TAG}" for where in lone[:1]]
        if not firsts:
            return
        first, count = firsts.most_common(1)[0]
        tags = {tag for mark, tag in unshared if mark == first}
        where = next(places[key] for key in unshared if key[0] == first)
        self._opens_all = sentences > 1 and count >= _COMMENTED * sentences
        has_own_tags = first.startswith("#") and _FEWEST_COMMENTS <= count == len(tags)
        if self._opens_all or has_own_tags:
            self._comment = first
            self.remarks.append(f"{where} and lines like it are comments, not words")
        elif first == "#" and any(map(str.isalnum, "".join(tags))):
            self.remarks.append(f"{where} {_LONE_TAG}")

    def _is_comment(self, fields: list[str], width: int, is_first: bool) -> bool:
        """Return whether fields before the words of a sentence belong to a comment."""
        if fields[0].startswith("#") and len(fields) != width:
            return True
        opens = self._opens_all and is_first
        return fields[0] == self._comment and (opens or fields[-1] not in self._tags)

    def _fields(self, text: str) -> list[str]:
        return [field.strip(_WHITE) for field in self._separator.split(text.strip(_WHITE))]

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence:
        numbers: list[int] = []
        words: list[str] = []
        labels: list[str] = []
        is_first = not self.n_columns
        for i, (number, text) in enumerate(lines):
            fields = self._fields(text)
            rest = lines[i + 1 :]
            # A comment has another number of columns than the rows; "#" can be a word.
            width = len(self._fields(rest[-1][1])) if rest else self.n_columns
            if _DOCUMENT.match(text):
                self.counts["documents"] += 1
                continue
            if not words and self._is_comment(fields, width, not i):
                self.counts["comments"] += 1
                continue
            self._check(fields, number)
            word, label = fields[self.word_column], fields[self.label_column]
            if is_first and word.lower() in _WORD_NAMES and label.lower() in _LABEL_NAMES:
                self.counts["header"] += 1
                is_first = False
                continue
            is_first = False
            numbers.append(number)
            words.append(word)
            labels.append(label)
        sentence = Sentence(self.file.path, numbers, words, labels)
        if words and not self._seen:
            self._check_words(sentence)
            self._seen = True
        return sentence

    def _check(self, fields: list[str], number: int) -> None:
        where = f"{self.file}:{number}"
        if not self.n_columns:
            columns = [
                c if c >= 0 else len(fields) + c for c in (self.word_column, self.label_column)
            ]
            same = columns[0] == columns[1] and self.word_column != self.label_column
            if same or not all(0 <= column < len(fields) for column in columns):
                raise MetaseqError(
                    f"{where}: {len(fields)} columns, but the word is column {self.word_column} "
                    f"and its label column {self.label_column} (from 0; -1 is the last); a line is "
                    "a word and its label with white space between them, a blank line ends a "
                    "sentence. Choose with --word-column and --tag-column"
                )
            self.n_columns = len(fields)
        if len(fields) != self.n_columns:
            between = "white space" if self._separator is _BLANKS else "tabs"
            raise MetaseqError(
                f"{where}: {len(fields)} columns, but the rows before have {self.n_columns} with "
                f"{between} between them, and a blank line ends a sentence: "
                f"{' '.join(fields)[:60]!r}"
            )
        for column in (self.word_column, self.label_column):
            if not fields[column]:
                raise MetaseqError(f"{where}: column {column} is empty")

    def _check_words(self, sentence: Sentence) -> None:
        """Raise a MetaseqError if the first sentence has its words in another column."""
        words, column = sentence.words, self.word_column
        # Also in CoNLL-U without its tabs, with the ids of multi-word tokens (1-2) and empty nodes
        # (3.1).
        ids = [word for word in words if word.isdecimal()]
        from_zero = list(map(str, range(len(ids))))
        from_one = list(map(str, range(1, len(ids) + 1)))
        counts = all(map(_ID.fullmatch, words)) and ids in (from_zero, from_one)
        is_constant = len(words) > 4 and len({*words}) == 1
        if self.n_columns > 2 and len(words) > 1 and (counts or is_constant):
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

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence:
        sentence = super()._sentence(lines)
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

    Comments, lines of multi-word tokens (3-4) and empty nodes (8.1) are skipped; subtypes of
    relations (nsubj:pass) are kept with `subtypes`, else cut off (nsubj). Raises MetaseqError with
    file and line for rows without exactly ten fields, ids out of order, and heads that do not make
    a tree.
    """

    label: int = RELATION
    trees: bool = True
    subtypes: bool = True

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence:
        rows: list[tuple[int, list[str]]] = []
        for number, text in lines:
            if text.startswith("#"):
                continue
            fields = text.split("\t")
            if len(fields) != len(FIELDS):
                raise MetaseqError(
                    f"{self.file}:{number}: {len(fields)} fields, but a row of CoNLL-U has "
                    f"{len(FIELDS)} "
                    'with tabs between them, "_" for what is not known'
                )
            if empty := [name for name, text in zip(FIELDS, fields) if not text.strip()]:
                raise MetaseqError(
                    f'{self.file}:{number}: field {", ".join(empty)} is empty; CoNLL-U has "_" for '
                    "what is not known"
                )
            if "-" in fields[ID] or "." in fields[ID]:
                self.counts["multi_word" if "-" in fields[ID] else "empty_nodes"] += 1
                continue
            if fields[ID] != str(len(rows) + 1):
                raise MetaseqError(
                    f"{self.file}:{number}: id {fields[ID]!r} where {len(rows) + 1} should stand"
                )
            rows.append((number, fields))
        sentence = Sentence(
            self.file.path,
            [number for number, _ in rows],
            [fields[_FORM] for _, fields in rows],
            [self._label(fields) for _, fields in rows],
        )
        if not self.trees:
            return sentence
        heads = [head_number(fields[HEAD], f"{self.file}:{number}") for number, fields in rows]
        return checked_tree(replace(sentence, heads=heads))

    def _label(self, fields: list[str]) -> str:
        label = fields[self.label]
        has_subtype = self.label == RELATION and not self.subtypes
        return label.partition(":")[0] if has_subtype else label


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


def separator(lines: Iterable[str]) -> re.Pattern[str]:
    """Return the separator of columns in a file with these first lines: tabs if each row has some.

    It is a run of tabs if only that makes the rows equally long.
    """
    rows = [line.strip(_WHITE) for line in lines]
    rows = [row for row in rows if row and not row.startswith(("#", DOCUMENT))]
    if not rows or not all("\t" in row for row in rows):
        return _BLANKS
    one = {len(_TAB.split(row)) for row in rows}
    several = {len(_TABS.split(row)) for row in rows}
    return _TABS if len(several) == 1 < len(one) else _TAB


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
        fields[ID], fields[_FORM] = str(number), word
        fields[HEAD], fields[RELATION] = str(head), relation
        rows.append("\t".join(fields))
    return "\n".join(rows) + "\n\n"
