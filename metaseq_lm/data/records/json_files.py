"""JSON objects: one a line, over several lines, in an array, or in the array of field "data"."""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.file_kinds import JSON_SUFFIXES, ROWS
from metaseq_lm.data.records.record import JSON, Reading, Record, register_reader
from metaseq_lm.data.records.text_files import TextFile, check_length, format_suffix

__all__ = ["json_object"]

_SPACE = "\ufeff \t\r\n"
_CHUNK = 1 << 16  # characters
_FILLED = re.compile(r"[^ \t\r\n]")
_LISTS = (
    "no objects but values without names; write objects, for example with jq -c "
    "'{text: .[0], label: .[1]}'"
)
_Object = tuple[int, dict[str, Any], bool]


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object; ValueError if a name has two different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if value != fields[name]:
                raise ValueError(f"the key {name[:60]!r} stands twice in one object")
    return fields


# The decoder of json, as ijson names neither the line of a damaged object nor keys that repeat.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_fields)


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that `text` is; otherwise a MetaseqError that begins with `where`.

    An object in which a key occurs twice with different values is also an error.
    """
    try:
        fields = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise MetaseqError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MetaseqError(f"{where}: not a JSON object but {text[:60]!r}")
    return fields


@register_reader(JSON)
def _json_records(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the objects, counting blank lines; MetaseqError with file and number for others.

    The number is the line on which the object begins, or the object's number in an array.
    """
    if format_suffix(file.path) not in JSON_SUFFIXES:
        reading.remarks.append("is read as JSON, which it holds whatever its name")
    objects = _Stream(file).objects() if _is_stream(file) else _lines(file, reading)
    counts = reading.counts
    for number, fields, is_bad in objects:
        yield Record(fields, f"{file}:{number}", counts, is_bad=is_bad, line=number)


def _is_stream(file: TextFile) -> bool:
    """Return whether a file holds an array, objects over several lines or in one field."""
    filled = filter(None, (text.strip(_SPACE) for _, text, _ in file.lines()))
    first = next(filled, "")
    if first[:1] != "{":
        return first[:1] == "["
    try:
        rows = json.loads(first).get(ROWS)
    except json.JSONDecodeError as error:
        return error.pos >= len(first)  # not an object that ends, or is damaged, within its line
    except (ValueError, RecursionError):
        return False
    has_rows = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    return bool(has_rows) and next(filled, None) is None


def _lines(file: TextFile, reading: Reading) -> Iterator[_Object]:
    for number, text, is_bad in file.lines():
        if text.strip():
            yield number, json_object(text.removeprefix("\ufeff"), f"{file}:{number}"), is_bad
        else:
            reading.counts["blank"] += 1


class _Stream:
    """Objects read from left to right, with at most one of them in memory."""

    def __init__(self, file: TextFile) -> None:
        self._file, self._lines = file, file.lines()
        self._text, self._position, self._line = "", 0, 0
        self._has_bad = False

    def objects(self) -> Iterator[_Object]:
        """Yield the objects of a file that is not one object a line."""
        if self._peek() == "[":
            yield from self._array()
        while self._peek() == "{":
            yield from self._object()
        if self._peek():
            self._refuse("text behind the last object")

    def _refuse(self, reason: object) -> NoReturn:
        line = self._line - self._text.count("\n", self._position)
        raise MetaseqError(f"{self._file}:{line}: not valid JSON: {reason}")

    def _read(self) -> bool:
        """Append lines until the text has doubled; return whether there were any."""
        parts, size = [self._text[self._position :]], 0
        for number, text, bad in self._lines:
            self._line = number
            parts.append(text.removeprefix("\ufeff"))
            size += len(text) + 1
            self._has_bad = self._has_bad or bad
            if size > max(len(parts[0]), _CHUNK):
                break
        self._text, self._position = "\n".join(parts), 0
        line = self._line - self._text.count("\n")
        check_length(len(self._text), "line", f"{self._file}:{line}")
        return size > 0

    def _peek(self, after: int = 0) -> str:
        """Return the next character that is not blank, "" at the end of the file.

        With `after`, it is the one behind as many characters, and the position stays.
        """
        while True:
            match = _FILLED.search(self._text, self._position + after)
            if not after:
                self._position = match.start() if match else len(self._text)
            if match is not None:
                return match[0]
            if not self._read():
                return ""

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            rest = self._text[self._position : self._position + 20]
            self._refuse(f"no {sign!r} before {rest!r}" if rest else "the file ends within it")
        self._position += 1

    def _value(self) -> tuple[Any, bool]:
        """Return the next value, and whether it held invalid UTF-8."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
                break
            except json.JSONDecodeError as error:
                # A value at the end of the text may continue in the next line.
                if error.pos < len(self._text.rstrip(_SPACE)) or not self._read():
                    self._refuse(error.msg)
            except (ValueError, RecursionError) as error:
                self._refuse(error)
        bad = self._has_bad and "\ufffd" in self._text[self._position : end]
        self._position = end
        return value, bad

    def _array(self) -> Iterator[_Object]:
        self._expect("[")
        number = 0
        while self._peek() != "]":
            if number:
                self._expect(",")
            number += 1
            fields, bad = self._value()
            if not isinstance(fields, dict):
                reason = _LISTS if number == 1 else f"not a JSON object but {str(fields)[:60]!r}"
                raise MetaseqError(f"{self._file}:{number}: {reason}")
            yield number, fields, bad
        self._expect("]")

    def _object(self) -> Iterator[_Object]:
        """Yield an object, or the objects in its field "data"."""
        line = self._line - self._text.count("\n", self._position)
        self._expect("{")
        fields: dict[str, Any] = {}
        has_bad = has_rows = False
        while self._peek() != "}":
            if fields:
                self._expect(",")
            name, bad = self._value()
            self._expect(":")
            if name == ROWS and self._peek() == "[" and self._peek(1) == "{":
                yield from self._array()
                fields[name], has_rows = None, True
                continue
            value, bad_value = self._value()
            if not isinstance(name, str) or fields.get(name, value) != value:
                self._refuse(
                    f"the key {str(name)[:60]!r} stands twice in one object, or is no text"
                )
            fields[name] = value
            has_bad = has_bad or bad or bad_value
        self._expect("}")
        if not has_rows:
            yield line, fields, has_bad
