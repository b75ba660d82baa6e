"""Journals of searches of earlier versions, which hold Optuna's records.

A line has a list of records, or, in still earlier versions, one record. Optuna numbers studies and
trials of all studies in the order of their creation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from metaseq_lm.core.files import as_numbers
from metaseq_lm.sweeps.search import Choice, Space

_COMPLETE = 1  # state of a trial
T = TypeVar("T")
Records = list[tuple[str, dict[str, Any]]]


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

    def convert(self, row: dict[str, Any]) -> Records:
        """Return the settings and trials that a line changed, each with its kind.

        Raises LookupError, TypeError, ValueError or AttributeError for what no search wrote.
        """
        changed: dict[int, dict[str, Any]] = {}
        for record in [row] if "op_code" in row else row["records"]:
            content = self._apply(record["op_code"], record)
            changed[id(content)] = content
        records: Records = []
        for content in changed.values():
            if "setting" in content:
                records.append(("trial", dict(content)))
            elif content.keys() >= {"values", "run_flops"}:  # else a kill tore it
                records.append(("setting", dict(content)))
        return records

    def _apply(self, code: int, record: dict[str, Any]) -> dict[str, Any]:
        if code == 0:
            self.settings.append({"name": record["study_name"], "tries_from": 0})
            return self.settings[-1]
        if code in (2, 3, 4):
            setting = _item(self.settings, record["study_id"])
            setting |= record["user_attr"] if code == 2 else {}
            return self._create_trial(setting["name"]) if code == 4 else setting
        trial = _item(self.trials, record["trial_id"])
        if code == 5:
            key, value = record["param_name"], record["param_value_internal"]
            trial["values"] = {**trial["values"], key: self._value(key, value)}
        elif code == 6:
            scores = as_numbers(record["values"]) if record["state"] == _COMPLETE else []
            trial["at_rungs"] = [*trial["at_rungs"], *scores]
        elif code == 7 and record["step"]:  # a diverged trial has an infinite score at step 0
            trial["at_rungs"] = [*trial["at_rungs"], as_numbers(record["intermediate_value"])]
        elif code == 8:
            for key, value in record["user_attr"].items():
                if key == "interrupted":
                    value = "interrupted" if value else "running"
                trial["state" if key in ("interrupted", "ended") else key] = value
        elif code not in (7, 9):
            raise ValueError(f"op_code is {str(code)[:40]!r}, which no search writes")
        return trial

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
