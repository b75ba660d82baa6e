"""Rows in the formats of the library `datasets` and of pandas."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def cell(value: Any) -> str:
    """Return a value in the form of a table, where lists are NumPy arrays."""
    if isinstance(value, list):
        return f"[{' '.join(map(repr, value))}]"
    if isinstance(value, dict):
        fields = (f"{name!r}: {_inner(inner)}" for name, inner in value.items())
        return f"{{{', '.join(fields)}}}"
    return "" if value is None else str(value)


def _inner(value: Any) -> str:
    if not isinstance(value, list):
        return repr(value)
    return f"array({value!r}, dtype={'object' if isinstance(value[0], str) else 'int32'})"


def flat(row: Row) -> Row:
    """Return a row with a column for each field of an object, like Dataset.flatten()."""
    result: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            result |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            result[name] = value
    return result


def table(rows: list[Row], delimiter: str = ",", **settings: Any) -> str:
    """Return a table with a header row."""
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n", **settings)
    writer.writerow(rows[0])
    writer.writerows(map(cell, row.values()) for row in rows)
    return stream.getvalue()


def _indexed(rows: list[Row]) -> list[Row]:
    return [{"": number, **row} for number, row in enumerate(rows)]


TEXT_FORMS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {  # suffix, content
    "lines": (".jsonl", lambda rows: "".join(json.dumps(row) + "\n" for row in rows)),
    "array": (".json", json.dumps),
    "indented": (".json", lambda rows: json.dumps(rows, indent=2)),
    "data": (".json", lambda rows: json.dumps({"version": "1", "data": rows})),
    "csv": (".csv", table),
    "tsv": (".tsv", lambda rows: table(rows, "\t", quoting=csv.QUOTE_ALL)),
    "pandas": (".csv", lambda rows: table(_indexed(rows))),
    "flattened": (".csv", lambda rows: table(list(map(flat, rows)))),
}


def write_rows(folder: Path, stem: str, rows: list[Row], form: str) -> None:
    """Write the file of a split in one of TEXT_FORMS or in Parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        path = folder / f"{stem}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    suffix, content = TEXT_FORMS[form]
    (folder / f"{stem}{suffix}").write_text(content(rows))
