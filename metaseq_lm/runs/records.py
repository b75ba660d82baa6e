"""Records in run folders: plan.json, trial.json of a search, tuning.json of a tuned run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import (
    AMOUNT,
    COUNT,
    NUMBER,
    is_altered,
    read_json,
    schema_error,
    to_json,
    with_checksum,
    write_atomic,
)

PLAN_FILE, TRIAL_FILE, TUNING_FILE = "plan.json", "trial.json", "tuning.json"
HASH = re.compile(r"[0-9a-f]{16}")
TRIAL_FORM = {
    "setting": str,
    "number": COUNT,
    "values": dict,
    "state": str,
    "flops": AMOUNT,
    "share": AMOUNT,
    "score?": NUMBER,
    "metric": str,
    "lower_is_better": bool,
    "independent": bool,
}
TUNING_FORM = {"flops": AMOUNT, "trials": COUNT, "metric": str, "values": dict, "edges": dict}


def write_record(file: Path, record: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object with its checksum in one piece."""
    write_atomic(file, (to_json(with_checksum(dict(record)), indent) + "\n").encode())


def write_plan(folder: Path, plan_hash: str) -> None:
    """Record in a run folder, creating it, the hash of the plan that the run belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / PLAN_FILE, {"plan": plan_hash})


def write_trial(folder: Path, record: Mapping[str, Any]) -> None:
    """Record the outcome of a trial in its run folder, in the form of TRIAL_FORM."""
    write_record(folder / TRIAL_FILE, record)


def write_tuning(folder: Path, record: Mapping[str, Any]) -> None:
    """Record in a run folder, creating it, how its options were chosen and the cost of that.

    The form is TUNING_FORM: FLOPs and number of all trials, the metric that chose, the values, and
    the options with a value at an end of its range, or list of numbers, with that end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / TUNING_FILE, record)


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


def read_trial(folder: Path) -> dict[str, Any]:
    """Return the record of a trial; {} if the run is not a trial; MetaseqError if damaged."""
    return _read(folder / TRIAL_FILE, TRIAL_FORM)


def read_tuning(folder: Path) -> dict[str, Any]:
    """Return how a run was tuned; {} if it was not; MetaseqError if the record is damaged."""
    return _read(folder / TUNING_FILE, TUNING_FORM)


def _read(file: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    try:
        record = read_json(file)
        problem = schema_error(record, dict(form))
        if is_altered(record):
            problem = "changed since it was written"
    except FileNotFoundError:
        return {}
    except ValueError as error:
        record, problem = {}, str(error)
    if problem:
        raise MetaseqError(
            f"{file}: damaged ({problem}); give the 'sweep' command again, or delete it"
        )
    return {key: value for key, value in record.items() if key != "checksum"}
