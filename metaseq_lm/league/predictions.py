"""Predictions: the score at a further budget, recorded before its runs and scored after them.

`L/predictions.jsonl` and the archive of a league have a line for each prediction, with the time,
the hashes of the plan and of the code, and a checksum.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
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
from metaseq_lm.league.curves import (
    FEWEST_HELD_OUT,
    Fit,
    Form,
    naive_predictions,
    obstacle,
    rejection,
)
from metaseq_lm.league.ladders import Ladder
from metaseq_lm.league.standings import finished
from metaseq_lm.reporting.provenance import times
from metaseq_lm.reporting.runs import Run

FILE = "predictions.jsonl"
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


@dataclass(frozen=True)
class Prediction:
    """The expected mean score of an objective at a budget.

    Attributes:
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
class Registered:
    """A prediction with its time and the hashes of plan and code."""

    prediction: Prediction
    time: str
    plan: str
    code: str


@dataclass(frozen=True)
class Outcome:
    """A prediction and when its runs began.

    Attributes:
        registered: The prediction.
        is_open: Whether no run of its rung has ended.
        is_before: Whether it was made before the runs began; None if they do not record when.
    """

    registered: Registered
    is_open: bool
    is_before: bool | None = None

    @property
    def budget(self) -> float:
        """The FLOPs of the predicted runs."""
        return self.registered.prediction.budget

    @classmethod
    def of(cls, registered: Registered, runs: Sequence[Run]) -> Outcome:
        """Return the outcome of a prediction, given the runs of its rung in all phases."""
        over = finished(runs)
        starts = times(over, "started")
        if not over or len(starts) < len(over):
            return cls(registered, not over)
        return cls(registered, False, min(starts) >= datetime.fromisoformat(registered.time))


def predict_from(
    ladder: Ladder,
    form: Form,
    about: tuple[str, float, str],
    level: float,
    errors: Sequence[float] = (),
) -> Prediction:
    """Return the prediction of a ladder's curve; raises UsageError with the reason if impossible.

    Args:
        ladder: The ladder of lower budgets.
        form: The form of the curve.
        about: The objective, the budget, the metric.
        level: The level of the interval and of the misfit test.
        errors: Errors of the form on the ladders of other objectives, see `held_out_errors`.
    """
    objective, budget, metric = about
    if reason := obstacle(ladder, form, budget):
        raise UsageError(reason)
    rng = np.random.default_rng(0)
    fit = Fit.of(ladder, form, rng)
    if reason := rejection(fit, level):
        raise UsageError(reason)
    ends = fit.interval(budget, level, rng, errors)
    assert ends is not None  # every budget has a spread
    naive, value = naive_predictions(ladder, budget), fit.value(budget)
    held_out = len(errors) if len(errors) >= FEWEST_HELD_OUT else 0
    return Prediction(
        objective, budget, metric, form.name, ladder.budgets, value, ends, naive, held_out
    )


def read_predictions(folder: Path) -> list[Registered]:
    """Return the predictions of a league, the earliest first; [] without a file.

    Raises MetaseqError for a damaged or changed line, but not for a torn last line.
    """
    journal = _journal(folder)
    registered = [parse(row) for _, row in journal.rows()]
    journal.warn_of_torn_line()
    return registered


def _journal(folder: Path) -> Journal:
    return Journal(
        folder / FILE,
        lambda row, number: schema_error(row, _SCHEMA),
        "Restore the file or delete it",
        LARGEST_SWEEP,
    )


def parse_lines(text: str, source: str) -> list[Registered]:
    """Return the predictions in lines of JSON.

    Raises MetaseqError, which names the source, for a damaged or changed line.
    """
    registered = []
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
        registered.append(parse(content))
    return registered


def parse(content: dict[str, Any]) -> Registered:
    """Return the prediction of a line."""
    low, high = content["interval"]
    prediction = Prediction(
        content["objective"],
        content["budget"],
        content["metric"],
        content["form"],
        tuple(content["rungs"]),
        content["value"],
        (low, high),
        content["naive"],
        content.get("held_out", 0),
    )
    return Registered(prediction, content["time"], content["plan"], content["code"])


def add_predictions(folder: Path, predictions: Sequence[Registered]) -> None:
    """Append predictions to the file of a league."""
    read_predictions(folder)  # raises an error if a line is damaged
    _journal(folder).append(list(map(_content_of, predictions)))


def _content_of(item: Registered) -> dict[str, Any]:
    about = {"time": item.time, "plan": item.plan, "code": item.code}
    return about | asdict(item.prediction)


def as_lines(predictions: Sequence[Registered]) -> str:
    """Return a line for each prediction; `parse_lines` is the inverse."""
    return "".join(to_json(with_checksum(_content_of(item))) + "\n" for item in predictions)
