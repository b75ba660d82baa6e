"""The journal of a search: Optuna's records, with a line for each change of the account.

A line has its number and a list of records, or, in journals of earlier versions, one record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, json_to_distribution
from optuna.storages.journal import BaseJournalBackend

from metaseq_lm.core.files import as_numbers, as_text, schema_error
from metaseq_lm.core.journal import Journal
from metaseq_lm.sweeps.definition import KEY
from metaseq_lm.sweeps.lock_file import LockFile
from metaseq_lm.sweeps.trials import STATES

NUMBER = (float, int)
_COUNT = range(1 << 31)
# Names of settings are folder names.
NAME = re.compile(r"\w[\w.,=+@-]*")
# The form of each attribute of studies and trials, and of each record by its op_code.
_ATTRIBUTES: dict[str, Any] = {
    "values": dict,
    "run_flops": NUMBER,
    "tries_from": _COUNT,
    "worker": str,
    "share": NUMBER,
    "flops": NUMBER,
    "ended": re.compile("|".join(STATES)),
    "interrupted": bool,
    "message": str,
}
_SCORES = {"intermediate_value", "values"}
_STUDY, _TRIAL = {"study_id": _COUNT}, {"trial_id": _COUNT}
_RECORDS: dict[int, dict[str, Any]] = {
    0: {"study_name": NAME, "directions": [range(1, 3)]},
    2: {**_STUDY, "user_attr": dict},
    3: {**_STUDY, "system_attr": {"*": NUMBER}},
    4: {**_STUDY, "datetime_start": str},
    5: {**_TRIAL, "param_name": str, "param_value_internal": NUMBER, "distribution": str},
    6: {**_TRIAL, "state": range(5), "values?": [NUMBER], "datetime_complete?": str},
    7: {**_TRIAL, "step": _COUNT, "intermediate_value": NUMBER},
    8: {**_TRIAL, "user_attr": dict},
    9: {**_TRIAL, "system_attr": {"*": (*NUMBER, str)}},
}


class StudyJournal(BaseJournalBackend):  # type: ignore[misc]
    """Optuna's records in a journal; they are written once a change is complete.

    Args:
        folder: The folder of the search.
        distributions: The distributions of the searched options.
        shares: The parts of a run's budget at which trials are judged.
    """

    def __init__(
        self, folder: Path, distributions: Mapping[str, Any], shares: Sequence[float]
    ) -> None:
        self.shares = shares
        self.distributions = distributions
        self.lock = LockFile(folder / "account.lock")
        self.journal = Journal(
            folder / "journal.jsonl",
            self._find_problem,
            f"Restore the file from a copy; or delete {folder}, and the search begins anew",
        )
        self.names: set[str] = set()
        self.trial_count = 0
        self.records: list[dict[str, Any]] = []  # records in the file
        self.pending: list[dict[str, Any]] = []  # records of the current change

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock of the account; records made inside are written at the end, as one line.

        If writing or the block fails, nothing is written.
        """
        with self.lock.hold():
            try:
                yield
                self._read()
                if self.pending:
                    self.journal.append([{"line": self.journal.next, "records": self.pending}])
            finally:
                self.pending = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add records to the current change."""
        self.pending += logs

    def read_logs(self, log_number_from: int) -> Sequence[dict[str, Any]]:
        """Return the records from a number on; MetaseqError if a line is damaged."""
        self._read()
        first = max(0, log_number_from - len(self.records))
        return self.records[log_number_from:] + self.pending[first:]

    def _read(self) -> None:
        for _, row in self.journal.new_rows():
            self.records += _records_of(row)
        self.journal.warn_of_torn_line()

    # ---------------------------------------------------------------- checks

    def _find_problem(self, row: dict[str, Any], number: int) -> str:
        if row.get("line", number) != number:
            return f"line {row['line']!r} of the file stands here; lines were added or removed"
        if problem := "op_code" not in row and schema_error(row, {"records": [dict]}):
            return problem
        return next(filter(None, map(self._problem_of, _records_of(row))), "")

    def _problem_of(self, record: dict[str, Any]) -> str:
        code = record.get("op_code")
        if not isinstance(code, int) or code not in _RECORDS:
            return f"op_code is {str(code)[:40]!r}, which no search writes"
        form = {"worker_id": str, **_RECORDS[code]}
        problem = schema_error(record, form) or _find_infinite(record)
        problem = problem or _problem_of_times(record) or _problem_of_attribute(record)
        share = record.get("user_attr", {}).get("share") if code == 8 and not problem else None
        if share is not None and share not in self.shares:
            problem = f"share is {share}, which is no rung"
        if problem or code == 0:
            self.names |= set() if problem else {record["study_name"]}
            return problem
        for key, count in (("study_id", len(self.names)), ("trial_id", self.trial_count)):
            if record.get(key, -1) >= count:
                return f"{key} is {record[key]}, but the lines before have {count}"
        self.trial_count += code == 4
        return self._problem_of_value(record) if code == 5 else ""

    def _problem_of_value(self, record: dict[str, Any]) -> str:
        """Return why a value is not valid for the searched option."""
        name, value = record["param_name"], record["param_value_internal"]
        distribution = self.distributions.get(name)
        try:
            is_same = json_to_distribution(record["distribution"]) == distribution
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_same = False
        if distribution is None:
            return f"param_name is {name[:60]!r}, which this search does not try"
        if not is_same:
            return f"distribution of {name[:60]!r} is not its range in this search"
        if isinstance(distribution, CategoricalDistribution):
            low, high = 0, len(distribution.choices) - 1
        else:
            low, high = distribution.low, distribution.high
        is_inside = low <= value <= high
        return "" if is_inside else f"param_value_internal is {value}, not from {low} to {high}"


def _records_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    records = [row] if "op_code" in row else list(row["records"])
    for record in records:
        for key in record.keys() & _SCORES:
            record[key] = as_numbers(record[key])
    return records


def _find_infinite(record: dict[str, Any]) -> str:
    """Return the number that is not finite; only scores of diverged trials may be infinite."""
    for key, value in record.items():
        if "NaN" in str(as_text(value)) if key in _SCORES else as_text(value) != value:
            name = next(iter(value)) if key == "user_attr" and value else key
            return f"{name} has a number that is not finite"
    return ""


def _problem_of_times(record: dict[str, Any]) -> str:
    for key in ("datetime_start", "datetime_complete"):
        try:
            datetime.fromisoformat(record.get(key) or "2000-01-01").astimezone()
        except (ValueError, OverflowError, OSError):
            return f"{key} is {record[key][:40]!r}, not a time"
    if record.get("state", 0) in (1, 2, 3) and not record.get("datetime_complete"):
        return "it lacks 'datetime_complete'"
    return "it lacks 'values'" if record.get("state") == 1 and not record.get("values") else ""


def _problem_of_attribute(record: dict[str, Any]) -> str:
    for key, value in record.get("system_attr", {}).items():
        if key.startswith("completed_rung") and isinstance(value, str):
            return f"{key} is {value[:40]!r}, not a number"
    attribute = record.get("user_attr", {"message": ""})
    if len(attribute) != 1 or not attribute.keys() <= _ATTRIBUTES.keys():
        return f"user_attr has the keys {', '.join(attribute)[:60] or 'none'}"
    ((key, value),) = attribute.items()
    if problem := schema_error(value, _ATTRIBUTES[key], key):
        return problem
    if _ATTRIBUTES[key] is NUMBER and value < 0:
        return f"{key} is {value}, less than 0"
    # The values of a setting become arguments of runs; `user_dir` is code.
    names = value if key == "values" else ()
    bad = [name for name in names if name in ("user_dir", "save_dir") or not KEY.fullmatch(name)]
    return f"values has the key {bad[0]!r}" if bad else ""
