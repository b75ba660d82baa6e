"""Predictions: the score at a further budget, recorded before its runs and scored after them.

`L/predictions.jsonl` and the archive of a league have a line for each prediction, with the time,
the hashes of the plan and of the code, and a checksum.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import (
    COUNT,
    FINITE,
    LARGEST_SWEEP,
    NAME,
    POSITIVE,
    TIME,
    is_altered,
    schema_error,
    to_json,
    with_checksum,
)
from metaseq_lm.core.journal import Journal
from metaseq_lm.reporting.provenance import times
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import finished

FILE = "predictions.jsonl"
OPEN = "open"  # no run has ended
_SCHEMA = {
    "time": TIME,
    "plan": str,
    "code": str,
    "objective": NAME,
    "budget": POSITIVE,
    "metric": str,
    "form": str,
    "rungs": [POSITIVE],
    "value": FINITE,
    "interval": [FINITE, FINITE],
    "naive": {"*": FINITE},
    "held_out?": COUNT,
    "checksum": str,
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected mean score of an objective at a budget, a line of the file.

    Attributes:
        time: When it was recorded.
        plan: Hash of the plan.
        code: Hash of the code.
        objective: Its name.
        budget: The FLOPs of a run.
        metric: The metric.
        form: The name of the curve.
        rungs: The budgets that the curve was fitted to.
        value: The expected mean score.
        interval: Contains the mean over seeds with a probability of 1 - the plan's level.
        naive: Expected scores without a curve, see `curves.naive_predictions`.
        held_out: Number of other objectives whose errors widen the interval; 0 if only seeds do.
    """

    time: str = ""
    plan: str = ""
    code: str = ""
    objective: str
    budget: float
    metric: str
    form: str
    rungs: tuple[float, ...]
    value: float
    interval: tuple[float, float]
    naive: dict[str, float]
    held_out: int = 0


@dataclass(frozen=True)
class Outcome:
    """A prediction and why it cannot be scored by its runs, "" if it can."""

    prediction: Prediction
    unscored: str = ""

    @classmethod
    def of(cls, prediction: Prediction, runs: Sequence[Run]) -> Outcome:
        """Return the outcome of a prediction, given the runs of its rung in all phases."""
        over, reason = finished(runs), ""
        starts = times(over, "started")
        if not over:
            reason = OPEN
        elif len(starts) < len(over):
            reason = "its runs do not say when they began"
        elif min(starts) < datetime.fromisoformat(prediction.time):
            reason = "made after its runs began"
        return cls(prediction, reason)


def read_predictions(folder: Path) -> list[Prediction]:
    """Return the predictions of a league, the earliest first; [] without a file.

    Raises MetaseqError for a damaged or changed line, but not for a torn last line.
    """
    journal = _journal(folder)
    predictions = [_parse(row) for _, row in journal.rows()]
    journal.warn_of_torn_line()
    return predictions


def add_predictions(folder: Path, predictions: Sequence[Prediction]) -> None:
    """Append predictions to the file of a league."""
    read_predictions(folder)  # raises an error if a line is damaged
    _journal(folder).append(list(map(asdict, predictions)))


def _journal(folder: Path) -> Journal:
    remedy = "Restore the file or delete it"
    return Journal(folder / FILE, lambda row, _: schema_error(row, _SCHEMA), remedy, LARGEST_SWEEP)


def as_lines(predictions: Sequence[Prediction]) -> str:
    """Return a line for each prediction; `parse_lines` is the inverse."""
    return "".join(to_json(with_checksum(asdict(item))) + "\n" for item in predictions)


def parse_lines(text: str, source: str) -> list[Prediction]:
    """Return the predictions in lines of JSON.

    Raises MetaseqError, which names the source, for a damaged or changed line.
    """
    predictions = []
    for i, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
            problem = schema_error(content, _SCHEMA)
        except (ValueError, RecursionError) as error:
            content, problem = {}, f"not readable as JSON: {error}"
        if not problem and is_altered(content):
            problem = "changed after it was written"
        if problem:
            raise MetaseqError(f"{source}, line {i}: damaged ({problem}). Restore it or delete it")
        predictions.append(_parse(content))
    return predictions


def _parse(content: dict[str, Any]) -> Prediction:
    # Earlier versions knew no errors of other objectives.
    known = {**content, "held_out": content.get("held_out") or 0}
    values = {field.name: known[field.name] for field in fields(Prediction)}
    return Prediction(**values | {key: tuple(known[key]) for key in ("rungs", "interval")})
