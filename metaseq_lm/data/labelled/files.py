"""Rows of labelled CSV, TSV and JSONL files, and sentences to score; errors name file and line."""

import contextlib
import difflib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.labelled.classes import NO_GOLD, NO_LABEL, number_of, spelling_key
from metaseq_lm.data.storage.arrow_files import ArrowFile
from metaseq_lm.data.storage.file_kinds import JSON_SUFFIXES, is_json
from metaseq_lm.data.storage.tables import QUOTING, TableFormat, repeated, table_format, table_rows
from metaseq_lm.data.storage.text_files import (
    BOM,
    TextFile,
    decode,
    format_suffix,
    without_surrogates,
)

STANDARD_INPUT = "-"
MALFORMED_NAMED = 3  # of a file; the others are only counted


@dataclass(frozen=True)
class Columns:
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
    quoting: str = QUOTING[0]  # one of tables.QUOTING: whether quotes around a field are syntax
    separator: str = ""  # what stands between the labels of a row that may have several
    indicators: tuple[str, ...] = ()  # the columns of labels that hold 1 or 0, instead of `label`

    def __post_init__(self) -> None:
        if self.texts is not None and len(self.texts) not in (1, 2):
            raise UsageError("--text-columns takes one column, or two with a comma between them")
        if len(self.indicators) == 1 or len({*self.indicators}) < len(self.indicators):
            raise UsageError("--label-columns takes two or more columns, each once")


Label = str | float | tuple[str, ...] | None


@dataclass(frozen=True)
class Row:
    """One example of a file.

    `label` is None in a file without labels, NO_LABEL in a row without one, a tuple where rows may
    have several or none. `bad` says that invalid UTF-8 was replaced. A span is
    (text, first character, character after the last). `facts` serve scorers and leaderboards.
    """

    line: int
    texts: tuple[str, ...]
    label: Label
    bad: bool
    spans: tuple[tuple[int, int, int], ...] = ()
    facts: dict[str, Any] | None = None


class Rows(Protocol):
    """Iterates over the rows of a file."""

    @property
    def counts(self) -> Counter[str]:
        """The lines it passed over, by reason."""

    @property
    def remarks(self) -> list[str]:
        """What is not as the name of the file promises."""

    def __iter__(self) -> Iterator[Row]: ...


def may_lack_labels(split: str) -> bool:
    """Return whether a split may be without labels: any but train, valid and valid_*."""
    return split.split("_")[0] not in ("train", "valid")


def text_lines(file: TextFile, counts: Counter[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield (number, text, held bad UTF-8) of the lines that have text, counting the blank ones."""
    for number, text, bad in file.lines():
        if text.strip():
            yield number, text, bad
        else:
            counts["blank"] += 1


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that `text` is; otherwise a MetaseqError that begins with `where`."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MetaseqError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MetaseqError(f"{where}: not a JSON object but {text[:60]!r}")
    return fields


_KINDS = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclass
class Record:
    """A JSON object of a file; an error names file, line and field, with the objects around it.

    `counts` are the remarks on the file by reason. `remedy` ends the message on a missing field.
    """

    fields: dict[str, Any]
    where: str
    counts: Counter[str] = field(default_factory=Counter)
    name: str = ""
    remedy: str = ""

    def path(self, key: str) -> str:
        """Return the name of a field with the names of the objects around it."""
        return f"{self.name}.{key}".lstrip(".")

    def get(self, key: str, kind: type | None = None) -> Any:
        """Return a field, of type `kind` if that is given."""
        outer, point, inner = key.partition(".")
        if key not in self.fields and point and outer in self.fields:
            return self.record(outer).get(inner, kind)
        if key not in self.fields:
            raise MetaseqError(f"{self.where}: no field '{self.path(key)}'{self.remedy}")
        value = self.fields[key]
        if kind is not None and type(value) is not kind:
            remark = " but null" if value is None else ""
            raise MetaseqError(
                f"{self.where}: field '{self.path(key)}' is not {_KINDS[kind]}{remark}"
            )
        return value

    def text(self, key: str) -> str:
        """Return a text."""
        return without_surrogates(self.get(key, str))

    def number(self, key: str) -> int:
        """Return a whole number."""
        return int(self.get(key, int))

    def record(self, key: str) -> "Record":
        """Return an object."""
        return replace(self, fields=self.get(key, dict), name=self.path(key))

    def records(self, key: str) -> list["Record"]:
        """Return a list of objects; an object of lists, as `datasets` exports it, is transposed."""
        items, name = self.get(key), self.path(key)
        if items and type(items) is dict and all(type(v) is list for v in items.values()):
            items = [dict(zip(items, values)) for values in zip(*items.values())]
        if type(items) is not list:
            raise MetaseqError(f"{self.where}: field '{name}' is not a list")
        if any(type(item) is not dict for item in items):
            raise MetaseqError(f"{self.where}: field '{name}' does not hold objects only")
        return [replace(self, fields=item, name=f"{name}[{i}]") for i, item in enumerate(items)]

    def label(self) -> str | None:
        """Return the label as JSON writes it, None if there is none."""
        return label_word(self.fields["label"], self.where) if "label" in self.fields else None


def json_objects(
    file: TextFile, counts: Counter[str]
) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Yield (line, object, held bad UTF-8); MetaseqError with file and line for anything else."""
    for number, text, bad in text_lines(file, counts):
        yield number, json_object(text.removeprefix("\ufeff"), f"{file}:{number}"), bad


def _written_list(text: str) -> Any:
    """Return the list that a text is, as JSON or Python writes it, or the text."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    for written in (text, text.replace("'", '"')):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(written)
    return text


def label_word(value: Any, where: str) -> str:
    """Return a label as JSON writes it, so that true and 1 are the labels "true" and "1", without blanks around it."""
    if isinstance(value, (dict, list)) or value is None:
        raise MetaseqError(f"{where}: label {value!r} is not a single text or number")
    word = (value if isinstance(value, str) else json.dumps(value)).strip()
    if not word:
        raise MetaseqError(f"{where}: the label is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise MetaseqError(f"{where}: label {value!r} is not finite; write null for no label")
    return word


@dataclass
class RowReader:
    """Iterates over the rows of a file; `counts` are the lines it passed over, by reason.

    `remarks` say what is not as the name of the file promises. A file without the label column has
    rows without labels, if not `required`. `expand` turns a row into those that count.
    """

    file: TextFile
    columns: Columns
    required: bool = True
    expand: Callable[[Row], Iterable[Row]] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    text_columns: tuple[str, ...] | None = None
    labelled: bool = True
    remarks: list[str] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def __iter__(self) -> Iterator[Row]:
        objects = self._objects() if is_json(self.file) else self._table()
        rows = (self._row(*item) for item in objects)
        return rows if self.expand is None else chain.from_iterable(map(self.expand, rows))

    def _table(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        names = self.columns.names
        form = TableFormat()  # of the official files of benchmarks
        if self.columns.index is None:
            form = table_format(self.file, self.columns.quoting, names is None)
            self.remarks += [form.remark] if form.remark else []
        for number, fields, bad in table_rows(self.file, form):
            if not any(map(str.strip, fields)):
                self.counts["blank"] += 1
                continue
            fields[0] = fields[0].removeprefix("\ufeff")  # of files put together
            stripped = tuple(map(str.strip, fields))
            if names is None:
                names = stripped
                if doubled := repeated(names):
                    raise MetaseqError(
                        f"{self.file}:{number}: a column name occurs twice: {abbreviated(doubled)}"
                    )
                self._resolve(names, number)
                continue
            if stripped == names:
                self.counts["repeated_header"] += 1
                if self.counts["repeated_header"] == 1:
                    self.remarks.append(f"holds the header again in line {number}")
                continue
            if len(fields) != len(names):
                between = "tabs" if form.delimiter == "\t" else repr(form.delimiter)
                message = (
                    f"{self.file}:{number}: {len(fields)} fields, expected {len(names)} "
                    f"({abbreviated(names)}) with {between} between them"
                )
                if not self.columns.skip_malformed:
                    raise MetaseqError(message)
                self.counts["malformed"] += 1
                if self.counts["malformed"] <= MALFORMED_NAMED:
                    show(f"{message}; the row is left out")
                continue
            yield number, dict(zip(names, fields)), bad
        if self.counts["malformed"] > MALFORMED_NAMED:
            show(
                f"{self.file}: {self.counts['malformed']:,} malformed rows are left out, the first "
                f"{MALFORMED_NAMED} are named above"
            )

    def _objects(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        is_other = not isinstance(self.file, ArrowFile)
        if is_other and format_suffix(self.file.path) not in JSON_SUFFIXES:
            self.remarks.append("is read as JSON lines, which it holds whatever its name")
        yield from json_objects(self.file, self.counts)

    def _resolve(self, names: tuple[str, ...], number: int) -> None:
        """Decide on the columns once, from the names of the header or first object."""
        if self.text_columns is not None:
            return
        has_pair = not {"text_a", "text_b"}.isdisjoint(names) and "text" not in names
        texts = self.columns.texts or (("text_a", "text_b") if has_pair else ("text",))
        labels = self.columns.indicators or (self.columns.label,)
        # "labl" is a mistake to point out, not a file without labels.
        is_present = any(
            label in names or difflib.get_close_matches(label, names, 1, 0.8) for label in labels
        )
        self.labelled = is_present or self.required
        for name in (*texts, *(labels if self.labelled else ())):
            if name not in names and not (is_json(self.file) and name.partition(".")[0] in names):
                remedy = (
                    "Choose with --text-column and --label-column, or --label-columns where each "
                    "label has a column of 0 and 1 (and --columns if the file has no header row)."
                    if self.columns.index is None
                    else "It is not the official file of this benchmark."
                )
                raise MetaseqError(
                    f"{self.file}:{number}: no column '{name}'.{nearest(name, list(names))} "
                    f"There are: {abbreviated(names)}. {remedy}"
                )
        self.text_columns = texts

    def _row(self, number: int, fields: dict[str, Any], bad: bool) -> Row:
        self._resolve(tuple(fields), number)
        assert self.text_columns is not None
        record, label = Record(fields, f"{self.file}:{number}", self.counts), self.columns.label
        if not self.labelled and label in fields:
            raise MetaseqError(f"{record.where}: a label, but the rows before have none")
        texts = tuple(map(record.text, self.text_columns))
        value: Label = None
        if self.labelled and self.columns.indicators:
            value = self._indicated(record)
        elif self.labelled:
            value = self._label(record.where, record.get(label))
        return Row(number, texts, value, bad, facts=self._facts(record.where, fields))

    def _indicated(self, record: Record) -> Label:
        """Return the labels whose columns hold 1; no gold label if all are empty or -1."""
        values = {name: record.get(name) for name in self.columns.indicators}
        words = {
            name: NO_LABEL if value is None else str(value).strip()
            for name, value in values.items()
        }
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

    def _facts(self, where: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        if self.columns.index is None:
            return None
        value = fields.get(self.columns.index, len(self._seen))
        try:
            index = int(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise MetaseqError(
                f"{where}: {self.columns.index} {value!r} is not a whole number"
            ) from error
        if index in self._seen:
            raise MetaseqError(f"{where}: {self.columns.index} {index} occurs twice")
        self._seen.add(index)
        return {"idx": index}

    def _label(self, where: str, value: Any) -> Label:
        if isinstance(value, str) and self.columns.separator:
            value = value.split(self.columns.separator) if value.strip() else []
        elif isinstance(value, str):
            value = _written_list(value)
        if isinstance(value, list):
            if self.columns.regression:
                raise MetaseqError(f"{where}: several labels, but --regression is for one number")
            words = [label_word(word, where) for word in value if word != ""]
            return tuple(sorted(set(words)))
        if value is None or (isinstance(value, str) and not value.strip()):
            return NO_LABEL
        word = label_word(value, where)
        self.counts["stripped_labels"] += isinstance(value, str) and word != value
        if not self.columns.regression:
            return word
        try:
            label = float(value)
        except (ValueError, OverflowError) as error:
            remedy = "; write a decimal point" if number_of(word) is not None else ""
            remedy = "; write 0.12 for 12 %" if word.endswith("%") else remedy
            raise MetaseqError(f"{where}: label {value!r} is not a number{remedy}") from error
        if not math.isfinite(label):
            raise MetaseqError(f"{where}: label {value!r} is not finite")
        return label


# -------------------------------------------------------------------- sentences to score


@dataclass(frozen=True)
class Sentence:
    """A text and where it stands, such as "good.txt:3"."""

    text: str
    place: str


def _lines(source: str, policy: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (place, text, held bad UTF-8) for each line of a file or of standard input."""
    if source != STANDARD_INPUT:
        for number, text, bad in TextFile(Path(source), policy).lines():
            yield f"{source}:{number}", text, bad
        return
    number = 0
    for number, line in enumerate(sys.stdin.buffer, 1):
        line = line.removeprefix(BOM) if number == 1 else line
        place = f"standard input:{number}"
        yield place, *decode(line.removesuffix(b"\n").removesuffix(b"\r"), place, policy)
    if not number:
        raise MetaseqError("standard input: is empty (0 bytes)")


def read_sentences(source: str, policy: str) -> tuple[list[Sentence], int]:
    """Return the lines of a file ("-" is standard input), and how many bad UTF-8 made it skip.

    `policy` is what becomes of invalid UTF-8: replace, skip or fail. A blank line is a sentence
    without tokens. MetaseqError for a file that is missing, empty or no text.
    """
    lines = list(_lines(source, policy))
    sentences = [
        Sentence(text, place) for place, text, bad in lines if not (bad and policy == "skip")
    ]
    return sentences, len(lines) - len(sentences)


def read_pairs(source: str, policy: str) -> tuple[list[tuple[Sentence, Sentence]], int]:
    """Return the minimal pairs (good, bad) of JSON lines, and how many bad UTF-8 made it skip.

    Fields sentence_good and sentence_bad, as in BLiMP (Warstadt et al. 2020); others and blank
    lines are passed over. MetaseqError with file and line for anything else.
    """
    pairs, skipped = [], 0
    for place, text, bad in _lines(source, policy):
        if bad and policy == "skip":
            skipped += 1
        elif text.strip():
            record = Record(json_object(text, place), place)
            texts = record.text("sentence_good"), record.text("sentence_bad")
            pairs.append((Sentence(texts[0], place), Sentence(texts[1], place)))
    if not pairs:
        raise MetaseqError(f"{source}: holds no pair")
    return pairs, skipped
