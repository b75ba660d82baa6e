"""Documents of --json, checked against the tables of docs/reference/json.md."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "json.md"
Rows = dict[tuple[str, ...], str]


def schemas() -> dict[str, Rows]:
    """Return the types of each document by key, such as ("runs", "[]", "name")."""
    tables: dict[str, Rows] = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        rows = tables[section.split("\n")[0]] = {}
        for names, kind in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
            for name in re.findall("`(.*?)`", names):
                rows[tuple(name.replace("[]", ".[]").strip(".").split("."))] = kind
    return tables


def document_in(text: str, name: str) -> Any:
    """Return the one document in the text of standard output, which must fit its table."""
    document = json.loads(text)
    if isinstance(document, dict):
        assert document.pop("schema") == f"metaseq-lm/{name}/1"
    faults = list(faults_of(document, schemas()[name]))
    assert not faults, faults
    return document


def faults_of(value: Any, rows: Rows) -> Iterator[str]:
    """Yield a line for each value of another type, each key without a row, each missing key."""
    if () in rows:
        if not types_of(value) & set(re.split(", | or ", rows[()])):
            yield f"{value!r} is no {rows[()]}"
        return
    below: dict[str, Rows] = {}
    for (name, *rest), kind in rows.items():
        below.setdefault(name, {})[tuple(rest)] = kind
    if isinstance(value, dict):
        items = list(value.items())
        yield from (f"{n} is missing" for n in below if n[-1] not in "?*" and n not in value)
    else:
        items = [("[]", item) for item in value]
    for name, item in items:
        row = next((below[n] for n in (name, f"{name}?", "*") if n in below), None)
        faults = ["has no row"] if row is None else faults_of(item, row)
        yield from (f"{name} {fault}" for fault in faults)


def types_of(value: Any) -> set[str]:
    """Return the types of the page that a value has."""
    if value is None or isinstance(value, bool):
        return {"any", "null" if value is None else "boolean"}
    names = {int: "integer number", float: "number", str: "string", list: "list", dict: "object"}
    return {"any", *names[type(value)].split()}
