"""Rows of labelled CSV, TSV and JSONL files, and sentences to score; errors name file and line."""

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.labelled.classes import NO_GOLD, NO_LABEL, number_of, spelling_key
from metaseq_lm.data.records.literals import read_literal
from metaseq_lm.data.records.reading import reader_name, records
from metaseq_lm.data.records.record import QUOTING, TABLE, TEXT, Reading, Record, label_word
from metaseq_lm.data.records.text_files import STANDARD_INPUT, TextFile

__all__ = ["SourceSentence", "source_lines"]

NO_COLUMN = "\0"  # the label column of a file that is read for its texts alone
# A missing value in a table, as pandas and the library datasets read it.
_NULL_CELLS = {
    *("", "#N/A N/A"),
    *"#N/A #NA -1.#IND -1.#QNAN 1.#IND 1.#QNAN -NaN -nan NaN nan".split(),
    *"NaT <NA> N/A n/a NA NULL null None".split(),
}
# Names of columns, in lower case, that a message suggests.
_LIKELY_TEXTS = (
    "sentence sentence1 sentence2 content contents body title headline review review_text "
    "review_body comment comment_text tweet post document article abstract message utterance "
    "question question1 question2 premise hypothesis input description summary passage"
).split()
_LIKELY_LABELS = (
    "labels class category target sentiment gold_label gold y tag stars rating score intent "
    "emotion topic output polarity"
).split()


@dataclass(frozen=True)
class TableColumns:
    """Which fields of a file are used."""

    names: tuple[str, ...] | None = None  # the columns of a CSV or TSV file without header row
    # The text columns; None is `text`, or `text_a` and `text_b`, whichever the file has.
    texts: tuple[str, ...] | None = None
    label: str = "label"
    regression: bool = False
    # The column from which each row gets an {"idx": number}, or the number of the row if the file
    # lacks the column; None gives no index.
    index: str | None = None
    skip_malformed: bool = False  # count and leave out rows with a wrong number of fields
    null_is_empty: bool = False  # whether a null text is an empty one, as in a corpus
    quoting: str = QUOTING[0]  # one of tables.QUOTING: whether quotes around a field are syntax
    text_separator: str | None = None  # joins the text columns into one text
    separator: str = ""  # between the labels of a row that may have several
    indicators: tuple[str, ...] = ()  # the columns of labels that hold 1 or 0, instead of `label`

    def __post_init__(self) -> None:
        count = len(self.texts or ())
        if self.text_separator is not None and count < 2:
            raise UsageError("--text-separator joins two or more --text-columns A,B")
        if self.text_separator is None and count > 2:
            raise UsageError(
                "--text-columns takes one column, or two with a comma between them; "
                "--text-separator S joins any number to one text"
            )
        if len(self.indicators) == 1 or len({*self.indicators}) < len(self.indicators):
            raise UsageError("--label-columns takes two or more columns, each once")


Label = str | float | tuple[str, ...] | None


@dataclass(frozen=True)
class LabelledRow:
    """One example of a file.

    `label` is None in a file without labels, NO_LABEL in a row without one, a tuple if rows may
    have several or none. `bad` says that invalid UTF-8 was replaced. A span is (text, first
    character, character after the last). `facts` serve scorers and leaderboards.
    """

    line: int
    texts: tuple[str, ...]
    label: Label
    bad: bool
    spans: tuple[tuple[int, int, int], ...] = ()
    facts: dict[str, Any] | None = None


def may_lack_labels(split: str) -> bool:
    """Return whether a split may be without labels: any but train, valid and valid_*."""
    return split.split("_")[0] not in ("train", "valid")


@dataclass
class RowReader:
    """Iterates over the rows of a file; `reading` gets the skipped lines and the remarks.

    A file without the label column has rows without labels, unless it is `required`. With a
    `label_file` the lines of the two files are texts and labels.
    """

    file: TextFile
    columns: TableColumns
    required: bool = True
    label_file: TextFile | None = None
    reading: Reading = field(default_factory=Reading)
    _text_columns: tuple[str, ...] | None = field(default=None, init=False)
    _label_columns: tuple[str, ...] = field(default=(), init=False)
    _labelled: bool = field(default=True, init=False)
    _seen: set[int] = field(default_factory=set, init=False)
    _is_table: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[LabelledRow]:
        columns = self.columns
        self._is_table = self.label_file is None and reader_name(self.file) == TABLE
        if self.label_file is None:
            reading = replace(
                self.reading,
                names=columns.names,
                quoting=columns.quoting,
                skip_malformed=columns.skip_malformed,
                column=columns.texts[0] if columns.texts and columns.label == NO_COLUMN else None,
                on_names=self._resolve,
            )
            read_records = records(self.file, reading)
        else:
            read_records = _line_pairs(self.file, self.label_file, self.reading.counts)
        # Each row of an official file counts, and an empty text is a text there.
        is_plain = columns.index is None and not columns.null_is_empty
        null_cells = _NULL_CELLS if self._is_table and is_plain else set()
        for record in read_records:
            if (row := self._row(record, null_cells)) is not None:
                yield row

    def _resolve(self, names: tuple[str, ...], number: int) -> None:
        if self._text_columns is not None:
            return
        lower = {name.casefold() for name in names}
        texts = self.columns.texts or ("text",)
        if not self.columns.texts and "text" not in lower and lower & {"text_a", "text_b"}:
            texts = ("text_a", "text_b")
        labels = self.columns.indicators or (self.columns.label,)
        # "labl" is a mistake to point out, not a file without labels.
        is_present = any(
            n.casefold() in lower or difflib.get_close_matches(n.casefold(), lower, 1, 0.8)
            for n in labels
        )
        self._labelled = is_present or self.required

        def column(name: str, likely: Collection[str]) -> str:
            alike = [other for other in names if other.casefold() == name.casefold()]
            if name in names or (not self._is_table and name.partition(".")[0] in names):
                return name
            if len(alike) == 1:
                return alike[0]
            near = [other for other in names if other.casefold() in likely]
            hint = nearest(name, list(names))
            if near and not hint:
                hint = f" Perhaps it is {' or '.join(map(repr, near))}."
            several = ", or --label-columns of preprocess where each label has one of 0 and 1"
            raise MetaseqError(
                f"{self.file}:{number}: no column '{name}'.{hint} There are: {abbreviated(names)}. "
                f"Choose with --text-column and --label-column{several * (name in labels)} (and "
                "--columns if the file has no header row)."
            )

        self._text_columns = tuple(column(name, _LIKELY_TEXTS) for name in texts)
        if self._labelled:
            self._label_columns = tuple(column(name, _LIKELY_LABELS) for name in labels)

    def _row(self, record: Record, null_cells: Collection[str]) -> LabelledRow | None:
        self._resolve(tuple(record.fields), record.line)
        if not self._labelled and self.columns.label in record.fields:
            raise MetaseqError(f"{record.where}: a label, but the rows before have none")
        texts = self._texts(record, null_cells)
        if texts is None:
            return None
        value: Label = None
        if self._labelled and self.columns.indicators:
            value = self._indicated(record)
        elif self._labelled:
            value = self._label(record.where, record.get(self._label_columns[0]))
        facts = None
        if self.columns.index is not None:
            facts = {"idx": self._index(record.where, record.fields, self.columns.index)}
        return LabelledRow(record.line, texts, value, record.is_bad, facts=facts)

    def _texts(self, record: Record, null_cells: Collection[str]) -> tuple[str, ...] | None:
        """Return the texts of a row; None if one is null or, if they are joined, if all are."""
        assert self._text_columns is not None
        texts, nulls = [], []
        for name in self._text_columns:
            value = record.get(name)
            is_null = value is None or (isinstance(value, str) and value.strip() in null_cells)
            if value is None and self.columns.null_is_empty:
                texts.append("")
            elif is_null and self.columns.index is None:
                nulls.append(f"column '{name}' is {'null' if value is None else repr(value)}")
            else:
                texts.append(record.text(name))
        joint = self.columns.text_separator
        if joint is not None and texts:
            return (joint.join(texts),)
        if not nulls:
            return tuple(texts)
        self.reading.counts["no_text"] += 1
        if self.reading.counts["no_text"] == 1:
            self.reading.remarks.append(
                f"row {record.where.rpartition(':')[2]} has no text ({nulls[0]}); it and others "
                "like it are left out"
            )
        return None

    def _indicated(self, record: Record) -> Label:
        """Return the labels whose columns hold 1; no gold label if all are empty or -1."""
        columns = zip(self.columns.indicators, self._label_columns)
        words = {}
        for name, column in columns:
            value = record.get(column)
            words[name] = NO_LABEL if value is None else str(value).strip()
        different = {*words.values()}
        if len(different) == 1 and different <= {NO_LABEL, *NO_GOLD}:
            return different.pop()
        for name, word in words.items():
            if spelling_key(word) not in ("0.0", "1.0"):
                is_text = "empty" if word == NO_LABEL else repr(word[:60])
                raise MetaseqError(
                    f"{record.where}: column '{name}' of --label-columns is {is_text}, not 0 or 1"
                )
        return tuple(sorted(name for name, word in words.items() if spelling_key(word) == "1.0"))

    def _index(self, where: str, fields: dict[str, Any], name: str) -> int:
        value = fields.get(name, len(self._seen))
        try:
            index = int(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise MetaseqError(f"{where}: {name} {value!r} is not a whole number") from error
        if index in self._seen:
            raise MetaseqError(f"{where}: {name} {index} occurs twice")
        self._seen.add(index)
        return index

    def _label(self, where: str, value: Any) -> Label:
        if isinstance(value, str) and self.columns.separator:
            value = value.split(self.columns.separator) if value.strip() else []
        elif isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            items = read_literal(value)
            if isinstance(items, list):
                value = items
        if isinstance(value, list):
            if self.columns.regression:
                raise MetaseqError(f"{where}: several labels, but --regression is for one number")
            words = [label_word(word, where) for word in value if word != ""]
            return tuple(sorted(set(words)))
        nulls = _NULL_CELLS if self.columns.regression else {""}
        if value is None or (isinstance(value, str) and value.strip() in nulls):
            return NO_LABEL
        word = label_word(value, where)
        self.reading.counts["stripped_labels"] += isinstance(value, str) and word != value
        if not self.columns.regression:
            return word
        try:
            label = float(word.replace("_", " "))  # to Python 1_0 is ten
        except (ValueError, OverflowError) as error:
            remedy = ""
            if word.endswith("%"):
                remedy = "; write 0.12 for 12 %"
            elif number_of(word) is not None:
                remedy = "; write a decimal point"
            raise MetaseqError(f"{where}: label {value!r} is not a number{remedy}") from error
        if not math.isfinite(label):
            raise MetaseqError(f"{where}: label {value!r} is not finite")
        return label


def _line_pairs(file: TextFile, labels: TextFile, counts: Counter[str]) -> Iterator[Record]:
    """Yield the lines of two files, a text and its label in each, counting blank ones.

    MetaseqError if one has more lines than the other, apart from blank ones at the end.
    """
    last = [0, 0]  # the last lines that are not blank
    lines = zip_longest(file.lines(), labels.lines(), fillvalue=(0, "", False))
    for number, ((_, text, is_bad), (_, label, is_bad_label)) in enumerate(lines, 1):
        last = [number if line.strip() else n for n, line in zip(last, (text, label))]
        if not (text.strip() or label.strip()):
            counts["blank"] += 1
        else:
            fields = {TEXT: text if text.strip() else None, "label": label}
            is_bad = is_bad or is_bad_label
            yield Record(fields, f"{file}:{number}", counts, is_bad=is_bad, line=number)
    if last[0] != last[1]:
        raise MetaseqError(
            f"{file}: {last[0]:,} lines of text, but {labels}: {last[1]:,} labels; each line has "
            "the label of the text in the same line"
        )


# -------------------------------------------------------------------- sentences to score


@dataclass(frozen=True)
class SourceSentence:
    """A text and its place, such as "good.txt:3"."""

    text: str
    location: str


def source_lines(source: str, policy: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (place, text, held bad UTF-8) for each line of a file or of standard input."""
    file = TextFile(Path(source), policy)
    name = str(file) if source == STANDARD_INPUT else source
    for number, text, bad in file.lines():
        yield f"{name}:{number}", text, bad


def read_sentences(source: str, policy: str) -> tuple[list[SourceSentence], int]:
    """Return the lines of a file ("-" is standard input), and the number skipped for bad UTF-8.

    `policy` says how to treat invalid UTF-8: replace, skip or fail. A blank line is a sentence
    without tokens. MetaseqError for a file that is missing, empty or not text.
    """
    lines = list(source_lines(source, policy))
    sentences = [
        SourceSentence(text, location)
        for location, text, bad in lines
        if not (bad and policy == "skip")
    ]
    return sentences, len(lines) - len(sentences)
