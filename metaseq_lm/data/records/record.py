"""Records, which all readers of files yield, and the register of these readers.

A reader is a function of a file and a `Reading` that yields a `Record` for each JSON object, row,
line or sentence. It is registered by a name, and may recognise its files by their first bytes.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.labelled.classes import NO_LABEL
from metaseq_lm.data.records.literals import read_literal
from metaseq_lm.data.records.text_files import TextFile, open_source, without_surrogates

TEXT = "text"  # the field of the text unless another is named
ARROW, COLUMNS, CONLLU, JSON, LINES, TABLE = "arrow", "columns", "conllu", "json", "lines", "table"
QUOTING = ("auto", "csv", "none")
_SIGN_BYTES = 1024  # of a file on the disk, by which a reader recognises it
_TYPE = "type of Arrow"
_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def unreadable(type_name: str) -> dict[str, str]:
    """Return the value of a field whose type JSON lacks."""
    return {_TYPE: type_name}


def _unreadable_type(value: Any) -> str:
    """Return the type of a value that `unreadable` returned; "" for any other value."""
    return str(value[_TYPE]) if isinstance(value, dict) and value.keys() == {_TYPE} else ""


def _kind_of(value: Any) -> str:
    return _unreadable_type(value) or _KINDS[type(value)]


@dataclass
class Record:
    """A JSON object or row of a file; an error names file, line and field, and objects around it.

    Attributes:
        fields: The values by name.
        where: The file and the number, for messages.
        counts: The remarks on the file by reason.
        name: The name of the object inside the record of the file, "" for the record itself.
        remedy: Ends the message about a missing field, after the list of existing fields.
        is_bad: Whether it held invalid UTF-8, which is U+FFFD now.
        line: The line on which it begins, or its number in Parquet, Arrow and arrays of JSON.
        lines: The line of each word, if it is a sentence with a word on each line.
    """

    fields: dict[str, Any]
    where: str
    counts: Counter[str] = field(default_factory=Counter)
    name: str = ""
    remedy: str = ""
    is_bad: bool = False
    line: int = 0
    lines: list[int] = field(default_factory=list)

    def path(self, key: str) -> str:
        """Return the name of a field with the names of the objects around it."""
        return f"{self.name}.{key}".lstrip(".")

    def get(self, key: str, kind: type | None = None) -> Any:
        """Return a field, of type `kind` if that is given."""
        outer, point, inner = key.partition(".")
        # A dot may be a part of a name, which comes before a field of an object.
        if key not in self.fields and point and type(self.fields.get(outer)) is dict:
            return self.record(outer).get(inner, kind)
        name = self.path(key)
        if key not in self.fields:
            known = [self.path(field) for field in self.fields]
            fields = f"there are {abbreviated(self.fields)}" if known else "there are none"
            hint = f"; {fields}. {self.remedy}" if self.remedy else f".{nearest(name, known)}"
            raise MetaseqError(f"{self.where}: no field '{name}'{hint}")
        value = self.fields[key]
        if kind is not None and type(value) is not kind:
            hint = ""
            if kind is str and type(value) is dict and value and not _unreadable_type(value):
                hint = f"; choose one of {abbreviated(f'{name}.{field}' for field in value)}"
            raise MetaseqError(
                f"{self.where}: field '{name}' is not {_KINDS[kind]} but {_kind_of(value)}{hint}"
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
        if self.fields["label"] is None:
            return NO_LABEL
        return label_word(self.fields["label"], self.where)


@dataclass
class Reading:
    """How to read the records of a file, and what is noted on the way.

    Attributes:
        names: The columns of a table without a header row.
        quoting: Whether quotes around a field of a table are syntax, one of QUOTING.
        skip_malformed: Whether to count and leave out rows with a wrong number of fields.
        column: The only column that is needed, None for all.
        on_names: Gets the names in the header row of a table, and its line.
        counts: The numbers of skipped lines, by reason.
        remarks: Warnings about a file, for the end.
    """

    names: tuple[str, ...] | None = None
    quoting: str = QUOTING[0]
    skip_malformed: bool = False
    column: str | None = None
    on_names: Callable[[tuple[str, ...], int], None] = lambda names, number: None
    counts: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)


Reader = Callable[[TextFile, Reading], Iterator[Record]]
READERS: dict[str, Reader] = {}
_SIGNS: dict[str, Callable[[TextFile, bytes], bool]] = {}


def register_reader(
    name: str, recognises: Callable[[TextFile, bytes], bool] | None = None
) -> Callable[[Reader], Reader]:
    """Register the reader of a kind of file.

    `recognises` gets a file and its first 1024 bytes on the disk; without it the reader is chosen
    by the content of the lines. All commands that take records take a file that a plug-in's reader
    recognises; a corpus is made of the field "text" unless --text-column names another one.

    Example:
        @register_reader("tar", lambda file, head: head[257:262] == b"ustar")
        def tar_records(file: TextFile, reading: Reading) -> Iterator[Record]:
            with tarfile.open(file.path) as archive:
                for number, member in enumerate(archive, 1): ...
    """

    def register(reader: Reader) -> Reader:
        READERS[name] = reader
        if recognises is not None:
            _SIGNS[name] = recognises
        return reader

    return register


def signed_reader(file: TextFile) -> str:
    """Return the name of the reader that recognises the first bytes of a file, "" if none does."""
    if str(file.path) != "-" and not file.path.is_file():  # opening a pipe could block for ever
        return ""
    try:
        with open_source(file.path) as raw:
            head = raw.read(_SIGN_BYTES)
    except OSError:  # reading it reports why
        return ""
    return next((name for name, recognises in _SIGNS.items() if recognises(file, head)), "")


def label_word(value: Any, where: str) -> str:
    """Return a label as JSON writes it (true is "true", 1 is "1"), stripped."""
    if isinstance(value, (dict, list)) or value is None:
        label = _unreadable_type(value) or repr(value)
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
        if isinstance(value, str) and outer in columns and not inner.endswith("_text"):
            value = read_literal(value)
        if point and isinstance(result.setdefault(outer, {}), dict):
            result[outer][inner] = value
        else:
            result[name] = value
    return result
