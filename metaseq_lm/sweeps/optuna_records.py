"""Journals of searches of earlier versions, which hold Optuna's records.

A line has a list of records, or, in still earlier versions, one record. Optuna numbers studies and
trials of all studies in the order of their creation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from metaseq_lm.core.files import as_numbers
from metaseq_lm.sweeps.space import Choice, Space

# The kinds of records that matter, by Optuna's number.
_CREATE_STUDY, _STUDY_ATTRIBUTE, _CREATE_TRIAL, _PARAMETER, _END, _SCORE, _TRIAL_ATTRIBUTE = (
    *(0, 2, 4, 5),
    *(6, 7, 8),
)
_CODES = range(10)
_COMPLETE = 1  # state of a trial
T = TypeVar("T")


class OptunaRecords:
    """Converts Optuna's records to those of `studies`.

    Args:
        space: The distributions of the searched options.
        share: The part of a run that a trial may spend before any record says so.
    """

    def __init__(self, space: Space, share: float) -> None:
        self.space, self.share = space, share
        self.settings: list[dict[str, Any]] = []
        self.trials: list[dict[str, Any]] = []

    def convert(self, row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return the settings and trials that a line changed, each with its kind.

        Raises LookupError, TypeError, ValueError or AttributeError for records that no search
        wrote.
        """
        changed: dict[int, tuple[str, dict[str, Any]]] = {}
        for record in [row] if "op_code" in row else row["records"]:
            kind, content = self._apply(record)
            changed[id(content)] = kind, content
        # A kill could tear a change of a setting, which the next command completed.
        return [
            (kind, dict(content))
            for kind, content in changed.values()
            if kind == "trial" or content.keys() >= {"values", "run_flops"}
        ]

    def _apply(self, record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Apply a record; return what it changed."""
        code = record["op_code"]
        if code not in _CODES:
            raise ValueError(f"op_code is {str(code)[:40]!r}, which no search writes")
        if code == _CREATE_STUDY:
            self.settings.append({"name": record["study_name"], "tries_from": 0})
            return "setting", self.settings[-1]
        if code == _CREATE_TRIAL:
            return "trial", self._create_trial(_item(self.settings, record["study_id"])["name"])
        if "study_id" in record:
            setting = _item(self.settings, record["study_id"])
            setting |= record["user_attr"] if code == _STUDY_ATTRIBUTE else {}
            return "setting", setting
        trial = _item(self.trials, record["trial_id"])
        if code == _PARAMETER:
            name, value = record["param_name"], record["param_value_internal"]
            trial["values"] = {**trial["values"], name: self._value(name, value)}
        elif code == _TRIAL_ATTRIBUTE:
            for key, value in record["user_attr"].items():
                if key == "interrupted":
                    key, value = "state", "interrupted" if value else "running"
                trial["state" if key == "ended" else key] = value
        elif code == _SCORE and record["step"]:  # step 0 has the score of diverged trials, infinite
            trial["at_rungs"] = [*trial["at_rungs"], as_numbers(record["intermediate_value"])]
        elif code == _END and record["state"] == _COMPLETE:
            trial["at_rungs"] = [*trial["at_rungs"], *as_numbers(record["values"])]
        return "trial", trial

    def _create_trial(self, setting: str) -> dict[str, Any]:
        number = sum(trial["setting"] == setting for trial in self.trials)
        trial = {"setting": setting, "number": number, "values": {}, "state": "running"}
        trial |= {"flops": 0.0, "share": self.share, "at_rungs": [], "worker": "", "message": ""}
        self.trials.append(trial)
        return trial

    def _value(self, key: str, internal: float) -> Any:
        item = self.space[key]
        if isinstance(item, Choice):
            return _item(item.values, int(internal))
        if internal not in item:
            raise ValueError(f"param_value_internal of {key} is {internal}, not of its range")
        return item.rounded(internal)


def _item(items: Sequence[T], index: int) -> T:
    if not 0 <= index < len(items):
        raise LookupError(f"number {index} of {len(items)}")
    return items[index]
