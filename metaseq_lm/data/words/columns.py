"""Sentences in CoNLL columns: a word and its label per line, a blank line after each sentence.

Words and labels stand between white space in the first and last column unless other columns are
named; lines of documents (-DOCSTART-) are passed over (Clark et al. 2018, code).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import TextFile, format_suffix

DOCUMENT = "-DOCSTART-"
# Not Python's split: a no-break space may be a part of a word.
_FIELD = re.compile(r"[^ \t\r\f\v]+")
_HEAD = re.compile(r"(0|[1-9][0-9]*)-(.+)")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, their labels, heads (trees only) and line numbers in `path`."""

    path: Path
    lines: list[int]
    words: list[str]
    labels: list[str]
    heads: list[int] | None = None

    def place(self, word: int) -> str:
        """Return the file and line of a word, for complaints."""
        return f"{self.path}:{self.lines[word]}"


@dataclass
class SentenceReader:
    """Iterates over the sentences of a file; `counts` are what it passed over, by reason.

    A subclass parses the lines of a sentence, (number, text) each, in `_sentence`. Where the file
    skips invalid UTF-8, a sentence with some is left out.
    """

    file: TextFile
    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Sentence]:
        lines: list[tuple[int, str]] = []
        bad = False
        for number, text, wrong in self.file.lines():
            bad |= wrong
            if not text.strip():
                yield from self._end(lines, bad)
                lines, bad = [], False
            else:
                lines.append((number, text))
        yield from self._end(lines, bad)

    def _end(self, lines: list[tuple[int, str]], bad: bool) -> Iterator[Sentence]:
        if bad:
            self.counts["bad_utf8"] += 1
            if self.file.skips_bad:
                self.counts["skipped"] += 1
                return
        sentence = self._sentence(lines) if lines else None
        if sentence is not None and sentence.words:
            yield sentence

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence | None:
        raise NotImplementedError


@dataclass
class ColumnReader(SentenceReader):
    """Reads words and labels from columns, counted from 0 or, if negative, from the right.

    MetaseqError with file and line for a row that has not as many columns as the first one, or
    lacks a column that is asked for.
    """

    word_column: int = 0
    label_column: int = -1
    n_columns: int = 0  # of the first row

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence | None:
        numbers, words, labels = [], [], []
        for number, text in lines:
            fields = _FIELD.findall(text)
            if fields[0] == DOCUMENT:
                self.counts["documents"] += 1
                continue
            self._check(fields, number)
            numbers.append(number)
            words.append(fields[self.word_column])
            labels.append(fields[self.label_column])
        return Sentence(self.file.path, numbers, words, labels)

    def _check(self, fields: list[str], number: int) -> None:
        where = f"{self.file}:{number}"
        if not self.n_columns:
            columns = [
                c if c >= 0 else len(fields) + c for c in (self.word_column, self.label_column)
            ]
            same = columns[0] == columns[1] and self.word_column != self.label_column
            if same or not all(0 <= column < len(fields) for column in columns):
                raise MetaseqError(
                    f"{where}: {len(fields)} columns, but the word is column {self.word_column} and its "
                    f"label column {self.label_column} (from 0; -1 is the last); a line is a word and its "
                    "label with white space between them, a blank line ends a sentence. Choose with "
                    "--word-column and --tag-column"
                )
            self.n_columns = len(fields)
        if len(fields) != self.n_columns:
            raise MetaseqError(
                f"{where}: {len(fields)} columns, but the rows before have {self.n_columns}: "
                f"{' '.join(fields)[:60]!r}"
            )


@dataclass
class HeadColumnReader(ColumnReader):
    """Reads trees from columns whose label is HEAD-RELATION, 0 for the root (Clark et al. 2018, code).

    Only the first "-" separates, so a relation may hold more of them, which the author's own reader
    cannot read. MetaseqError with file and line for anything else, and for a head outside the sentence.
    """

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence | None:
        sentence = super()._sentence(lines)
        if sentence is None:
            return None
        heads, relations = [], []
        for word, label in enumerate(sentence.labels):
            match = _HEAD.fullmatch(label)
            if match is None or len(match[1]) > 9:
                raise MetaseqError(
                    f"{sentence.place(word)}: {label[:40]!r} is not HEAD-RELATION, such as 3-nsubj or 0-root"
                )
            heads.append(int(match[1]))
            relations.append(match[2])
        return checked_tree(replace(sentence, labels=relations, heads=heads))


def checked_tree(sentence: Sentence) -> Sentence:
    """Return a sentence whose heads make a tree, of one or more roots; else MetaseqError with file and line.

    Heads are places of words, 1 for the first, and 0 for a root.
    """
    assert sentence.heads is not None
    for word, head in enumerate(sentence.heads):
        if head > len(sentence.words) or head == word + 1:
            fault = "itself" if head == word + 1 else f"{head}, outside the sentence"
            raise MetaseqError(
                f"{sentence.place(word)}: the head of word {word + 1} is {fault} "
                f"({len(sentence.words)} words; 0 is the root)"
            )
    if sentence.words and 0 not in sentence.heads:
        raise MetaseqError(f"{sentence.place(0)}: no word of this sentence has head 0, the root")
    if cycle := _cycle(sentence.heads):
        heads = " -> ".join(map(str, [*cycle, cycle[0]]))
        raise MetaseqError(
            f"{sentence.place(cycle[0] - 1)}: the heads of words {heads} go round in a circle; in a tree "
            "they lead to the root"
        )
    return sentence


def _cycle(heads: list[int]) -> list[int]:
    """Return words, from 1, each the head of the one before, the first that of the last; none in a tree."""
    seen = [0] * (1 + len(heads))  # by which walk
    seen[0] = -1
    for first in range(1, 1 + len(heads)):
        word = first
        while not seen[word]:
            seen[word] = first
            word = heads[word - 1]
        if seen[word] == first:
            cycle = [word]
            while heads[cycle[-1] - 1] != word:
                cycle.append(heads[cycle[-1] - 1])
            return cycle
    return []


def is_conllu(path: Path) -> bool:
    """Return whether the name of a file, packed or not, says that it is CoNLL-U."""
    return format_suffix(path) == ".conllu"
