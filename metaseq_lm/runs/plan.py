"""The plan of a league that a run belongs to: plan.json in its folder."""

from __future__ import annotations

import re
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import is_altered, read_json, to_json, with_checksum, write_atomic

PLAN_FILE = "plan.json"
HASH = re.compile(r"[0-9a-f]{16}")


def write_plan(folder: Path, plan_hash: str) -> None:
    """Record in a run folder, creating it, the hash of the plan that the run belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    content = to_json(with_checksum({"plan": plan_hash})) + "\n"
    write_atomic(folder / PLAN_FILE, content.encode())


def read_plan_hash(folder: Path) -> str:
    """Return the hash of the plan that a run belongs to; "" if none is recorded.

    Raises MetaseqError for a damaged record.
    """
    file = folder / PLAN_FILE
    try:
        record = read_json(file)
        plan_hash = str(record.get("plan"))
        if is_altered(record) or not HASH.fullmatch(plan_hash):
            raise ValueError("changed since it was written")
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise MetaseqError(
            f"{file}: damaged ({error}); delete it if the run is of the plan of its league"
        ) from error
    return plan_hash
