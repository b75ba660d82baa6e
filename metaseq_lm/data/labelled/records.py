"""Records of a file: JSON objects, rows of Parquet, Arrow or a table; errors name the line."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.labelled.classes import NO_LABEL
from metaseq_lm.data.storage.arrow_files import ArrowFile
from metaseq_lm.data.storage.arrow_values import unreadable_type
from metaseq_lm.data.storage.file_kinds import JSON_SUFFIXES, is_json
from metaseq_lm.data.storage.json_records import json_records
from metaseq_lm.data.storage.literals import read_literal
from metaseq_lm.data.storage.tables import QUOTING, joins_rows, repeated, table_format, table_rows
from metaseq_lm.data.storage.text_files import TextFile, format_suffix, without_surrogates

TEXT, LABEL = "text", "label"  # the names of the columns unless others are given
_MALFORMED_NAMED = 3  # malformed rows of a file that are named; the others are only counted
_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind_of(value: Any) -> str:
    """Return the JSON type of a value, for messages, or its Parquet type if JSON lacks it."""
    return unreadable_type(value) or _KINDS[type(value)]


@dataclass
class Record:
    """A JSON object of a file; an error names file, line and field, with the objects around it.

    `counts` are the remarks on the file by reason. `remedy` ends the message about a missing field,
    after the list of existing fields.
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
            fields = f"there are {abbreviated(self.fields)}" if self.fields else "there are none"
            hint = f"; {fields}. {self.remedy}" if self.remedy else ""
            raise MetaseqError(f"{self.where}: no field '{self.path(key)}'{hint}")
        value = self.fields[key]
        if kind is not None and type(value) is not kind:
            raise MetaseqError(
                f"{self.where}: field '{self.path(key)}' is not {_KINDS[kind]} but "
                f"{_kind_of(value)}"
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
            if len({*map(len, items.values())}) > 1:
                raise MetaseqError(f"{self.where}: the lists in field '{name}' differ in length")
            items = [dict(zip(items, values)) for values in zip(*items.values())]
        if type(items) is not list:
            raise MetaseqError(f"{self.where}: field '{name}' is not a list but {_kind_of(items)}")
        if any(type(item) is not dict for item in items):
            raise MetaseqError(f"{self.where}: field '{name}' does not hold objects only")
        return [replace(self, fields=item, name=f"{name}[{i}]") for i, item in enumerate(items)]

    def label(self) -> str | None:
        """Return the label as JSON writes it, NO_LABEL for null, None without a field."""
        if "label" not in self.fields:
            return None
        value = self.fields["label"]
        return NO_LABEL if value is None else label_word(value, self.where)


def label_word(value: Any, where: str) -> str:
    """Return a label as JSON writes it (true is "true", 1 is "1"), stripped."""
    if isinstance(value, (dict, list)) or value is None:
        label = unreadable_type(value) or repr(value)
        raise MetaseqError(f"{where}: label {label} is not a single text or number")
    word = (value if isinstance(value, str) else json.dumps(value)).strip()
    if not word:
        raise MetaseqError(f"{where}: the label is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise MetaseqError(f"{where}: label {value!r} is not finite; write null for no label")
    return word


def structured(fields: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Return fields with `columns`, which a table holds as texts, as values such as numbers.

    "idx.query" and "idx.passage" become an object "idx", as before `datasets` flattened it.
    """
    result: dict[str, Any] = {}
    for name, value in fields.items():
        outer, point, inner = name.partition(".")
        is_value = outer in columns and not inner.endswith("_text")
        value = read_literal(value) if is_value and isinstance(value, str) else value
        if point and isinstance(result.setdefault(outer, {}), dict):
            result[outer][inner] = value
        else:
            result[name] = value
    return result


def column_names(file: TextFile) -> tuple[str, ...]:
    """Return the fields of the first object of a file, or the first row of a table."""
    if is_json(file):
        return tuple(next(json_records(file, Counter()), (0, {}, False))[1])
    form = table_format(file, "none", has_header=True)
    first = next((row for _, row, _ in table_rows(file, form) if any(map(str.strip, row))), [])
    return tuple(name.strip('\ufeff \t"') for name in first)


@dataclass
class LineRecords:
    """Iterates as RecordReader over the lines of two files, a text and its label in each.

    MetaseqError if one has more lines than the other, apart from blank ones at the end.
    """

    file: TextFile
    labels: TextFile
    counts: Counter[str]
    is_table = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        self._check_lengths()
        for (number, text, bad), (_, label, bad_label) in zip(
            self.file.lines(), self.labels.lines()
        ):
            if text.strip() or label.strip():
                yield number, {TEXT: text if text.strip() else None, LABEL: label}, bad or bad_label
            else:
                self.counts["blank"] += 1

    def _check_lengths(self) -> None:
        texts, labels = (
            max((number for number, line in file.byte_lines() if line.strip()), default=0)
            for file in (self.file, self.labels)
        )
        if texts != labels:
            raise MetaseqError(
                f"{self.file}: {texts:,} lines of text, but {self.labels}: {labels:,} labels; each "
                "line has the label of the text in the same line"
            )


@dataclass
class RecordReader:
    """Iterates over (number, fields, held bad UTF-8) of the records of a file.

    The number counts lines, or rows in Parquet, Arrow and arrays of JSON; the fields of a table are
    texts. `on_names` gets the names in the header row, or the names of each object, with its
    number.
    """

    file: TextFile
    names: tuple[str, ...] | None = None  # the columns of a table without header row
    quoting: str = QUOTING[0]
    skip_malformed: bool = False  # count and leave out rows with a wrong number of fields
    on_names: Callable[[tuple[str, ...], int], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_table = not is_json(self.file)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        return self._table() if self.is_table else self._objects()

    def _objects(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        is_other = not isinstance(self.file, ArrowFile)
        if is_other and format_suffix(self.file.path) not in JSON_SUFFIXES:
            self.remarks.append("is read as JSON, which it holds whatever its name")
        for number, fields, bad in json_records(self.file, self.counts):
            self._report(tuple(fields), number)
            yield number, fields, bad

    def _report(self, names: tuple[str, ...], number: int) -> None:
        if self.on_names is not None:
            self.on_names(names, number)

    def _table(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        names, first_joined = self.names, 0
        form = table_format(self.file, self.quoting, names is None)
        self.remarks += [form.remark] if form.remark else []
        for number, fields, bad in table_rows(self.file, form):
            if not any(map(str.strip, fields)):
                self.counts["blank"] += 1
                continue
            fields[0] = fields[0].removeprefix("\ufeff")  # BOM inside concatenated files
            stripped = tuple(map(str.strip, fields))
            if names is None:
                names = stripped
                if doubled := repeated(names):
                    raise MetaseqError(
                        f"{self.file}:{number}: a column name occurs twice: {abbreviated(doubled)}"
                    )
                self._report(names, number)
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
                if not self.skip_malformed:
                    raise MetaseqError(message)
                self.counts["malformed"] += 1
                if self.counts["malformed"] <= _MALFORMED_NAMED:
                    show(f"{message}; the row is left out")
                continue
            if form.quoted and joins_rows(fields, form.delimiter):
                self.counts["joined_rows"] += 1
                first_joined = first_joined or number
            yield number, dict(zip(names, fields)), bad
        if first_joined:
            self.remarks.append(
                f"in line {first_joined} quotation marks join lines that look like rows, "
                f"{self.counts['joined_rows']:,} times in all; --quoting none reads them apart"
            )
        if self.counts["malformed"] > _MALFORMED_NAMED:
            show(
                f"{self.file}: {self.counts['malformed']:,} malformed rows are left out, the first "
                f"{_MALFORMED_NAMED} are named above"
            )
