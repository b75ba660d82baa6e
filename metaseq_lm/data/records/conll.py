"""Sentences in CoNLL columns and CoNLL-U: a word per line, a blank line after each sentence.

A record has a list for each column, whose names are the column's number, or the field of CoNLL-U
(Universal Dependencies). Lines that mark documents (-DOCSTART-, CoNLL-2012's "#begin document") are
skipped (Clark et al. 2018, code).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.record import COLUMNS, CONLLU, Reading, Record, register_reader
from metaseq_lm.data.records.text_files import TextFile

FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
ID, FORM, HEAD, RELATION = 0, 1, 6, 7
DOCUMENT = "-DOCSTART-"
_DOCUMENT = re.compile(rf"\s*(?:{DOCUMENT}(?!\S)|#(?:begin|end) document\b)")
_COMMENTED = 0.9  # share of the sentences that begin with "#" if that marks a comment
_MARKS = ("#", "%", "//", ";")  # of comments; all but "#" only if they open (nearly) every sentence
_LONE_TAG = "is a word with a tag that no other word has; if it is a comment, take it out"
_FEWEST_COMMENTS = 3  # each with a last field of its own, such as the name of a document
# Not Python's split: a no-break space may be a part of a word.
_WHITE = " \t\r\f\v"
_BLANKS, _TAB, _TABS = re.compile(f"[{_WHITE}]+"), re.compile("\t"), re.compile("\t+")
_Line = tuple[int, str]


def _sentences(file: TextFile) -> Iterator[tuple[list[_Line], bool]]:
    for is_blank, group in groupby(file.lines(), lambda line: not line[1].strip()):
        if not is_blank:
            lines = list(group)
            yield [line[:2] for line in lines], any(is_bad for _, _, is_bad in lines)


@register_reader(CONLLU)
def _conllu_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the sentences without comments, lines of multi-word tokens (3-4), empty nodes (8.1).

    MetaseqError with file and line for rows without exactly ten fields, and ids out of order.
    """
    for lines, is_bad in _sentences(file):
        rows: list[tuple[int, list[str]]] = []
        for number, text in lines:
            if text.startswith("#") or (is_bad and file.skips_bad):
                continue
            fields = text.split("\t")
            if len(fields) != len(FIELDS):
                raise MetaseqError(
                    f"{file}:{number}: {len(fields)} fields, but a row of CoNLL-U has "
                    f'{len(FIELDS)} with tabs between them, "_" for what is not known'
                )
            if empty := [name for name, field in zip(FIELDS, fields) if not field.strip()]:
                raise MetaseqError(
                    f"{file}:{number}: field {', '.join(empty)} is empty; CoNLL-U has "
                    '"_" for what is not known'
                )
            if "-" in fields[ID]:
                reading.counts["multi_word"] += 1
                continue
            if "." in fields[ID]:
                reading.counts["empty_nodes"] += 1
                continue
            if fields[ID] != str(len(rows) + 1):
                raise MetaseqError(
                    f"{file}:{number}: id {fields[ID]!r} where {len(rows) + 1} should stand"
                )
            rows.append((number, fields))
        yield _record(file, reading, FIELDS, rows, is_bad)


def _record(
    file: TextFile,
    reading: Reading,
    names: Iterable[str],
    rows: list[tuple[int, list[str]]],
    is_bad: bool,
) -> Record:
    numbers, columns = [number for number, _ in rows], zip(*(fields for _, fields in rows))
    fields, first = dict(zip(names, map(list, columns))), next(iter(numbers), 0)
    where = f"{file}:{first}"
    return Record(fields, where, reading.counts, is_bad=is_bad, line=first, lines=numbers)


@register_reader(COLUMNS)
def _column_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the sentences without comments, their columns named "0", "1", ...

    MetaseqError with file and line for a row with another number of columns than the first one.
    """
    columns = _Columns(file, reading)
    for lines, is_bad in _sentences(file):
        rows = [] if is_bad and file.skips_bad else columns.rows(lines)
        yield _record(file, reading, map(str, range(columns.width)), rows, is_bad)


class _Columns:
    """Tells the rows of a file from its comments, and divides them."""

    def __init__(self, file: TextFile, reading: Reading) -> None:
        self.file, self._counts, self.remarks = file, reading.counts, reading.remarks
        # Where tabs separate, a word may contain blanks.
        self._separator = separator(file.first_lines)
        self.width = 0  # columns of the first row
        self._comment = ""  # the first field of comments with as many columns as the rows
        self._opens_all = False  # whether a comment opens (nearly) every sentence
        self._tags: set[str] = set()  # the last fields of all rows
        self._find_comments()

    def rows(self, lines: list[_Line]) -> list[tuple[int, list[str]]]:
        """Return the numbers and fields of the rows of a sentence."""
        rows: list[tuple[int, list[str]]] = []
        for i, (number, text) in enumerate(lines):
            fields = self._fields(text)
            rest = lines[i + 1 :]
            # A comment has another number of columns than the rows; "#" can be a word.
            width = len(self._fields(rest[-1][1])) if rest else self.width
            if _DOCUMENT.match(text):
                self._counts["documents"] += 1
                continue
            if not rows and self._is_comment(fields, width, not i):
                self._counts["comments"] += 1
                continue
            self.width = self.width or len(fields)
            if len(fields) != self.width:
                between = "white space" if self._separator is _BLANKS else "tabs"
                raise MetaseqError(
                    f"{self.file}:{number}: {len(fields)} columns, but the rows before have "
                    f"{self.width} with {between} between them, and a blank line ends a sentence: "
                    f"{' '.join(fields)[:60]!r}"
                )
            rows.append((number, fields))
        return rows

    def _fields(self, text: str) -> list[str]:
        return columns_of(text, self._separator)

    def _find_comments(self) -> None:
        """Decide whether lines that begin with a mark and are as wide as the rows are comments.

        "#" can also be a word: then other words, or at least other "#", have its tag.
        """
        openers: Counter[tuple[str, str]] = Counter()
        places: dict[tuple[str, str], str] = {}
        inside: dict[str, str] = {}  # the places of tags of "#" after the first word
        others: set[str] = set()
        sentences = 0
        for group, _ in _sentences(self.file):
            numbered = [(n, self._fields(text)) for n, text in group if not _DOCUMENT.match(text)]
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
        for tag, place in inside.items():
            if any(map(str.isalnum, tag)) and tag not in others:
                self.remarks.append(f"{place} {_LONE_TAG}")
                break
        if not firsts:
            return
        first, count = firsts.most_common(1)[0]
        tags = {tag for mark, tag in unshared if mark == first}
        where = next(places[key] for key in unshared if key[0] == first)
        self._opens_all = sentences > 1 and count >= _COMMENTED * sentences
        # Last fields that no word has, each once, are names rather than tags.
        has_own_tags = first.startswith("#") and _FEWEST_COMMENTS <= count == len(tags)
        if self._opens_all or has_own_tags:
            self._comment = first
            self.remarks.append(f"{where} and lines like it are comments, not words")
        elif first == "#" and any(map(str.isalnum, "".join(tags))):
            self.remarks.append(f"{where} {_LONE_TAG}")

    def _is_comment(self, fields: list[str], width: int, is_first: bool) -> bool:
        if fields[0].startswith("#") and len(fields) != width:
            return True
        opens = self._opens_all and is_first
        return fields[0] == self._comment and (opens or fields[-1] not in self._tags)


def columns_of(text: str, between: re.Pattern[str]) -> list[str]:
    """Return the fields of a row."""
    return [field.strip(_WHITE) for field in between.split(text.strip(_WHITE))]


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
