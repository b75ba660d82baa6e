"""Prediction files: one JSON object per example."""

import json
from collections.abc import Sequence
from pathlib import Path

from metaseq_lm.files import write_atomic


def write_predictions(path: Path, rows: Sequence[dict]) -> None:
    """Write one line per row of predictions, in the order of the rows' "index"."""
    ordered = sorted(rows, key=lambda row: row["index"])
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in ordered).encode())
