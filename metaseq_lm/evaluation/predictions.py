"""Prediction files: one JSON object per example, and what leaderboards want."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from metaseq_lm.files import write_atomic


def write_predictions(
    folder: Path, split: str, rows: Sequence[dict], submissions: Mapping[str, str]
) -> None:
    """Write predictions.SPLIT.jsonl, one line per row in the order of "index", and the `submissions`."""
    ordered = sorted(rows, key=lambda row: row["index"])
    lines = "".join(json.dumps(row) + "\n" for row in ordered)
    write_atomic(folder / f"predictions.{split}.jsonl", lines.encode())
    for name, text in submissions.items():
        write_atomic(folder / name, text.encode())
