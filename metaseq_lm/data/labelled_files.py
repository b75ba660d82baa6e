"""Rows of labelled TSV and JSONL files, each checked, with file and line in every complaint."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.data.text import OPENERS, numbered_lines
from metaseq_lm.errors import MetaseqError, UsageError
from metaseq_lm.registry import nearest

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Columns:
    """Which fields of a file are used.

    `names` are the columns of a TSV without header row; `texts` is None for `text`, or else
    `text_a` and `text_b`, whichever the file has; `regression` reads labels as numbers.
    """

    names: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None
    label: str = "label"
    regression: bool = False

    def __post_init__(self) -> None:
        if self.texts is not None and len(self.texts) not in (1, 2):
            raise UsageError("--text-columns takes one column, or two with a comma between them")


@dataclass(frozen=True)
class Row:
    """One example: its line in the file, one or two texts, label; bad = invalid UTF-8 replaced."""

    line: int
    texts: tuple[str, ...]
    label: str | float
    bad: bool


@dataclass
class RowReader:
    """Iterates over the rows of a file; `blank` counts the lines without text seen so far."""

    path: Path
    columns: Columns
    policy: str
    blank: int = 0
    used: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[Row]:
        suffixes = [s for s in self.path.suffixes if s not in OPENERS]
        if suffixes and suffixes[-1] == ".csv":
            raise MetaseqError(
                f"{self.path}: comma-separated files are not read; convert it to TSV"
            )
        if suffixes and suffixes[-1] in JSON_SUFFIXES:
            return self._json_rows()
        return self._tsv_rows()

    def _lines(self) -> Iterator[tuple[int, str, bool]]:
        for number, text, bad in numbered_lines(self.path, self.policy):
            if text.strip():
                yield number, text, bad
            else:
                self.blank += 1

    def _tsv_rows(self) -> Iterator[Row]:
        names = self.columns.names
        for number, text, bad in self._lines():
            # No quoting: a quotation mark in these files is part of the text.
            fields = text.split("\t")
            if names is None:
                names = tuple(fields)
                if len(set(names)) != len(names):
                    raise MetaseqError(f"{self.path}:{number}: a column name occurs twice: {names}")
                self._resolve(names, number)
                continue
            if len(fields) != len(names):
                raise MetaseqError(
                    f"{self.path}:{number}: {len(fields)} fields, expected {len(names)} "
                    f"({', '.join(names)}) with tabs between them"
                )
            yield self._row(number, dict(zip(names, fields)), bad)

    def _json_rows(self) -> Iterator[Row]:
        for number, text, bad in self._lines():
            yield self._row(number, json_object(text, f"{self.path}:{number}"), bad)

    def _resolve(self, names: tuple[str, ...], number: int) -> tuple[str, ...]:
        """Decide on the text columns once, from the names of the header or first object."""
        if self.used is None:
            used = self.columns.texts or (("text",) if "text" in names else ("text_a", "text_b"))
            for name in (*used, self.columns.label):
                if name not in names:
                    raise MetaseqError(
                        f"{self.path}:{number}: no column '{name}'.{nearest(name, list(names))} "
                        f"There are: {', '.join(names)}. Choose with --text-columns and "
                        "--label-column (and --columns if the file has no header row)."
                    )
            self.used = used
        return self.used

    def _row(self, number: int, fields: dict[str, Any], bad: bool) -> Row:
        used = self._resolve(tuple(fields), number)
        for name in (*used, self.columns.label):
            if name not in fields:
                raise MetaseqError(f"{self.path}:{number}: no field '{name}'")
        texts = tuple(text_field(fields, name, f"{self.path}:{number}") for name in used)
        return Row(number, texts, self._label(number, fields[self.columns.label]), bad)

    def _label(self, number: int, value: Any) -> str | float:
        if isinstance(value, (dict, list)) or value is None:
            raise MetaseqError(
                f"{self.path}:{number}: label {value!r} is not a single text or number"
            )
        if not self.columns.regression:
            # As JSON writes it, so that true and 1 are the labels "true" and "1".
            return value if isinstance(value, str) else json.dumps(value)
        try:
            label = float(value)
        except (ValueError, OverflowError) as error:
            raise MetaseqError(f"{self.path}:{number}: label {value!r} is not a number") from error
        if not math.isfinite(label):
            raise MetaseqError(f"{self.path}:{number}: label {value!r} is not finite")
        return label


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that `text` is; otherwise a MetaseqError that begins with `where`."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MetaseqError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MetaseqError(f"{where}: not a JSON object but {text[:60]!r}")
    return fields


def text_field(fields: dict[str, Any], name: str, where: str) -> str:
    """Return the text of a field; a MetaseqError that begins with `where` if it has none."""
    if name not in fields:
        raise MetaseqError(f"{where}: no field '{name}'")
    if not isinstance(fields[name], str):
        raise MetaseqError(f"{where}: field '{name}' is not a text")
    # JSON can spell half a character ("\\ud800"), which no UTF-8 text can hold.
    return fields[name].encode("utf-8", "surrogatepass").decode("utf-8", "replace")
