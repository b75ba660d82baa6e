"""Prediction files: one JSON object per example, and what leaderboards want."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metaseq_lm.core.files import write_atomic


def write_predictions(
    folder: Path, split: str, rows: Sequence[dict[str, Any]], submissions: Mapping[str, str]
) -> None:
    """Write predictions.SPLIT.jsonl, one line per row in the order of "index", and the `submissions`.

    Rows of several labelled sets say which by "set"; each has a file predictions.SPLIT.SET.jsonl.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["index"]):
        name = f"{split}.{row['set']}" if "set" in row else split
        files.setdefault(name, []).append(row)
    for name, found in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in found)
        write_atomic(folder / f"predictions.{name}.jsonl", lines.encode())
    for name, text in submissions.items():
        write_atomic(folder / name, text.encode())
