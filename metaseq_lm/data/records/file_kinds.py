"""The kind of a file, recognised by its first lines whatever its name, for all readers.

`check_kind` refuses a file of another kind than expected, and says what it is and which option
reads it.
"""

import csv
import enum
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.record import ARROW, signed_reader
from metaseq_lm.data.records.text_content import COLUMN_REMEDY
from metaseq_lm.data.records.text_files import TextFile, format_suffix

_MOST = 0.95  # share of the examined lines
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
ROWS = "data"  # the field of a JSON object that holds rows, as in SQuAD and pandas' orient="table"
FASTTEXT = "__label__"
_OPENS_JSON = re.compile(r'\s*\[?\s*\{\s*"[^"\n]*"\s*:')
_OPENS_MARKUP = re.compile(r"\s*<(?:(\?xml)\b|!doctype html|html[\s>])", re.IGNORECASE)
_SQUAD = re.compile(r'"data"\s*:\s*\[\s*\{.*?"paragraphs"\s*:', re.DOTALL)
_BLANK = re.compile(r"[ \t\r\f\v]+")
_SPAN_TAG = re.compile(r"O|[BIESLUMW][-_:/|.]\S+|\S+[-_:/|.][BIESLUMW]", re.IGNORECASE)
_WORD_CLASS = re.compile(r"[A-Z]{1,6}\$?|[^\w\s]{1,5}|-[A-Z]{3}-")
# An id, a head (the seventh field) that is a number, and exactly ten fields, because tables also
# have ids.
_CONLLU_ROW = re.compile(r"\d+(?:[-.]\d+)?(?:\t[^\t]*){5}\t(?:\d*|_)(?:\t[^\t]*){3}")
# A quoted text or a number, with the next field right after it.
_FIRST_FIELD = re.compile(r'("([^"]|"")*"|-?\d+(\.\d+)?)([,;|])\S')
_COLUMN_NAME = re.compile(r"\w[\w .:/()#-]{0,39}")
_DELIMITER_NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


class Kind(enum.Enum):
    """The kind of a file; the values are the names in messages."""

    TEXT = "plain text"
    JSON_LINES = "JSON lines"
    JSON_LISTS = "JSON lines of lists"
    JSON_ARRAY = "JSON in an array"
    JSON_OBJECTS = "JSON, objects over several lines"
    JSON_COLUMNS = "JSON, one object of columns"
    SQUAD = "JSON of SQuAD"
    TABLE = "a table"
    COLUMNS = "words and tags in columns (CoNLL)"
    CONLLU = "CoNLL-U"
    FASTTEXT = "fastText's labelled lines"
    HTML = "HTML"
    XML = "XML"
    ARROW = "Parquet or Arrow"
    OTHER = "a file that a plug-in reads"


_JSON_RECORDS = frozenset((Kind.JSON_LINES, Kind.JSON_ARRAY, Kind.JSON_OBJECTS))
JSON = _JSON_RECORDS | {Kind.JSON_LISTS, Kind.JSON_COLUMNS, Kind.SQUAD}
RECORDS = _JSON_RECORDS | {Kind.TABLE, Kind.ARROW, Kind.OTHER}
PLAIN = frozenset((Kind.TEXT,))
# What to type for a file of each kind.
REMEDIES = {
    **dict.fromkeys(RECORDS, COLUMN_REMEDY),
    Kind.TABLE: f"{COLUMN_REMEDY}; --columns A,B,... names those of a table without header row",
    Kind.TEXT: "a corpus is made of it with --trainpref alone, sentences of words with --words",
    Kind.JSON_LISTS: "write an object for each row, for example with "
    "jq -c '{text: .[0], label: .[1]}'",
    Kind.JSON_COLUMNS: "write an object for each row, for example with pandas' "
    "to_json(orient='records', lines=True)",
    Kind.SQUAD: "make a set of questions of it with --benchmark squad/v1.1 or squad/v2.0",
    Kind.COLUMNS: "make a set of it with --tagged NAME",
    Kind.CONLLU: "make a set of it with --treebank NAME or --tagged NAME",
    Kind.FASTTEXT: rf"write a table, for example with sed 's/^{FASTTEXT}\([^ ]*\) */\1\t/', "
    "and make a set of it with --labelled NAME --columns label,text",
    Kind.HTML: "extract its text first",
    Kind.XML: "extract its text first",
}


@dataclass(frozen=True)
class _Content:
    """The content of a file by its first lines.

    Attributes:
        kind: The kind.
        names: The columns of the header row of a table, the fields of the first JSON object; else
            ().
        delimiter: The character between the fields of a table.
        width: How many fields the rows of a table have.
    """

    kind: Kind
    names: tuple[str, ...] = ()
    delimiter: str = ""
    width: int = 0

    def __str__(self) -> str:
        if self.kind is not Kind.TABLE:
            return str(self.kind.value)
        if not self.delimiter:
            return "a table without a header row"
        between = _DELIMITER_NAMES[self.delimiter]
        if self.delimiter == "\t":
            return f"a table of {self.width} columns with {between} between them"
        return f"a table ({', '.join(self.names)}) with {between} between its columns"


def recognise_lines(lines: Sequence[str]) -> _Content:
    """Return the content of a file, given its first lines without line ends."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return _Content(Kind.TEXT)
    if match := _OPENS_MARKUP.match(filled[0]):
        return _Content(Kind.XML if match[1] else Kind.HTML)
    if _share(line.startswith(FASTTEXT) for line in filled) >= _MOST:
        return _Content(Kind.FASTTEXT)
    return _json(filled) or _conll(lines) or _table(filled) or _Content(Kind.TEXT)


@functools.lru_cache(maxsize=64)
def recognise(file: TextFile) -> _Content:
    """Return the content of a file by its first bytes or lines."""
    if signed_reader(file):
        return _Content(Kind.ARROW if signed_reader(file) == ARROW else Kind.OTHER)
    return recognise_lines(file.first_lines)


def is_json(file: TextFile) -> bool:
    """Return whether a file, packed or not, holds JSON by its name or by its content."""
    return format_suffix(file.path) in JSON_SUFFIXES or recognise(file).kind in JSON


def is_conllu(file: TextFile) -> bool:
    """Return whether a file, packed or not, is CoNLL-U by its name or by its content."""
    return format_suffix(file.path) == ".conllu" or recognise(file).kind is Kind.CONLLU


def check_kind(file: TextFile, kinds: frozenset[Kind], expected: str) -> None:
    """Raise a MetaseqError that names a file's kind and what reads it unless it is in `kinds`.

    `expected` names these kinds. Commands that read PLAIN text have an option --plain-text.
    """
    content = recognise(file)
    if content.kind not in kinds:
        is_text = Kind.TEXT in kinds and Kind.TABLE not in kinds
        remedy = ", or read the file as it is with --plain-text" if is_text else ""
        raise MetaseqError(
            f"{file}: is {content}, not {expected}; {REMEDIES[content.kind]}{remedy}"
        )


def _share(values: Iterable[bool]) -> float:
    answers = list(values)
    return sum(answers) / len(answers)


def _json(lines: Sequence[str]) -> _Content | None:
    values = list(map(_json_value, lines))
    first = values[0]
    if first and _share(value is not None for value in values) >= 0.5:
        if isinstance(first, list):
            is_array = len(lines) == 1 and all(isinstance(item, dict) for item in first)
            names = tuple(first[0]) if is_array else ()
            return _Content(Kind.JSON_ARRAY if is_array else Kind.JSON_LISTS, names)
        kind = Kind.JSON_LINES
        if len(lines) == 1 and _SQUAD.search(lines[0]):
            kind = Kind.SQUAD
        elif len(lines) == 1 and all(isinstance(value, (dict, list)) for value in first.values()):
            kind = Kind.JSON_LINES if ROWS in first else Kind.JSON_COLUMNS
        return _Content(kind, tuple(first))
    text = "\n".join(lines)
    if not _OPENS_JSON.match(text):
        return None
    if text.lstrip().startswith("["):
        return _Content(Kind.JSON_ARRAY)
    if _SQUAD.search(text):
        return _Content(Kind.SQUAD)
    # A first line that is not JSON is longer than the examined part, damaged, or part of an object.
    one_a_line = len(lines) == 1 or _share(v is not None for v in values[1:]) > 0.5
    return _Content(Kind.JSON_LINES if one_a_line else Kind.JSON_OBJECTS)


def _json_value(line: str) -> Any:
    """Return the object or list that a line is; None for an empty one and for anything else."""
    if line.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(line) or None
    except (ValueError, RecursionError):
        return None


def _conll(lines: Sequence[str]) -> _Content | None:
    rows = [line for line in lines if line.strip() and not line.startswith("#")]
    if rows and _share(bool(_CONLLU_ROW.fullmatch(row)) for row in rows) >= _MOST:
        return _Content(Kind.CONLLU)
    columns = [_BLANK.split(row.strip(" \t\r\f\v")) for row in rows]
    has_breaks = any(not line.strip() for line in lines[1:-1])
    if len(rows) < 2 or any(not 1 < len(row) < 11 for row in columns[:1]):
        return None

    last = [row[-1] if 1 < len(row) < 11 else "" for row in columns]
    spans = [_SPAN_TAG.fullmatch(tag) is not None for tag in last]
    # A table may have a column of such values, but it has a header and no breaks.
    if _share(spans) >= _MOST and (has_breaks or spans[0]):
        return _Content(Kind.COLUMNS)
    same_width = _share(len(row) == len(columns[0]) for row in columns) >= _MOST
    classes = [_WORD_CLASS.fullmatch(tag) is not None for tag in last]
    if has_breaks and same_width and _share(classes) >= _MOST:
        return _Content(Kind.COLUMNS)
    return None


def _table(lines: Sequence[str]) -> _Content | None:
    # Tabs at the start of a line indent it.
    tabs = [line.lstrip("\t ").count("\t") for line in lines]
    if len(lines) > 1 and tabs[0] and _share(n == tabs[0] for n in tabs) >= _MOST:
        header = tuple(map(str.strip, lines[0].split("\t")))
        names = header if all(map(_COLUMN_NAME.fullmatch, header)) else ()
        return _Content(Kind.TABLE, names, "\t", tabs[0] + 1)
    for delimiter in (",", ";", "|"):
        if columns := _header(lines, delimiter):
            return _Content(Kind.TABLE, tuple(columns), delimiter, len(columns))
    if len(lines) > 4 and _share(bool(_FIRST_FIELD.match(line)) for line in lines) >= _MOST:
        return _Content(Kind.TABLE)
    return None


def _header(lines: Sequence[str], delimiter: str) -> list[str]:
    """Return the names in the header of a table of two columns or more; [] for other text."""
    try:
        rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter))
    except csv.Error:
        return []
    header = rows[0]
    if len(rows) < 2 or len(header) < 2 or not all(map(_COLUMN_NAME.fullmatch, header)):
        return []
    # The last row may continue after the examined lines.
    rows = rows[1:-1] or rows[1:]
    return header if _share(len(row) == len(header) for row in rows) >= _MOST else []
