"""Comparison of runs of a league with their repetitions.

Equal weights have equal scores. With other vector instructions or other code, training rounds
differently and takes another course: a repetition is then another draw from what seeds show, so
runs are compared with the spread over the seeds of their row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from metaseq_lm.league.assembly import LeagueRuns
from metaseq_lm.league.expansion import BUDGET
from metaseq_lm.referee.merge import name_in_league
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run, read_run
from metaseq_lm.reporting.settings import finished

EQUAL, CLOSE, DIFFERENT, MISSING = "equal", "close", "different", "missing"
# An honest archive has a run that is called different in this share of verifications at most.
LEVEL = 0.01
_LOSS = "valid.loss"
_FEWEST = 4  # seeds of a row whose spread says what a repetition may be
_TOLERANCE = {"loss": 0.05, "score": 0.1}  # largest differences in rows of fewer seeds
_NEGLIGIBLE = 0.005  # difference that is called close, however little the seeds differ
_ROUNDING = 1e-6  # largest difference of scores of the same weights


@dataclass(frozen=True)
class Repetition:
    """A run of an archive and its repetition.

    Attributes:
        run: The name of the run, PHASE/OBJECTIVE/NAME.
        outcome: EQUAL (the same weights and scores), CLOSE, DIFFERENT or MISSING.
        reason: What differs; "" for equal ones.
        largest: The largest difference of a loss and of a score.
    """

    run: str
    outcome: str
    reason: str = ""
    largest: Mapping[str, float] = field(default_factory=dict)


def compare(league: LeagueRuns, folders: Mapping[Run, Path]) -> list[Repetition]:
    """Return how drawn runs of a league differ from their repetitions in `folders`."""
    repetitions = {run: _compare_alone(run, folder) for run, folder in folders.items()}
    others = {
        run: replace(read_run(folders[run]), means=run.means)
        for run, item in repetitions.items()
        if item.outcome == CLOSE
    }
    deviations = list(_deviations(league, others))
    for deviation in deviations:
        if deviation.p * len(deviations) >= LEVEL or deviation.size <= _NEGLIGIBLE:
            continue
        for run in deviation.runs:
            repetitions[run] = replace(repetitions[run], outcome=DIFFERENT, reason=deviation.text)
    return list(repetitions.values())


def _compare_alone(run: Run, folder: Path) -> Repetition:
    """Compare a run and its repetition by what must be equal; CLOSE if training differed."""
    name = name_in_league(run)
    if not (folder / "results.json").is_file():
        return Repetition(name, MISSING, "it could not be trained again")
    other = replace(read_run(folder), means=run.means)
    if other.status != run.status:
        return Repetition(name, DIFFERENT, f"{run.status}, and {other.status} here")
    largest: dict[str, float] = {}
    worst, size = "", 0.0
    for metric in sorted(run.metrics):  # later versions may have further ones
        values = [one.metrics.get(metric, math.nan) for one in (run, other)]
        difference = abs(values[0] - values[1])
        if not difference <= math.inf:
            return Repetition(name, DIFFERENT, f"only one of the two has a finite {metric}")
        if not (kind := _kind_of(metric)):
            continue
        largest[kind] = max(largest.get(kind, 0.0), difference)
        if difference > size:
            size = difference
            worst = f"{metric} {values[0]:.6g}, and {values[1]:.6g} here"
    updates = [one.recorded.get("updates") for one in (run, other)]
    if updates[0] != updates[1]:
        return Repetition(name, DIFFERENT, f"{updates[0]} updates, and {updates[1]} here", largest)
    if _weights_of(run) != _weights_of(other):
        return Repetition(name, CLOSE, worst, largest)
    if size <= _ROUNDING:
        # A run without suites has no hash of its weights.
        return Repetition(name, EQUAL if _weights_of(run) or not size else CLOSE, "", largest)
    if _weights_of(run):
        return Repetition(name, DIFFERENT, f"the same weights score differently: {worst}", largest)
    return Repetition(name, CLOSE, worst, largest)


def _kind_of(metric: str) -> str:
    """Return the kind of a metric in `_TOLERANCE`; "" for rates and what follows from others."""
    if metric.endswith("loss"):
        return "loss"
    return "score" if Metric.of(metric, ()).percent else ""


def _weights_of(run: Run) -> set[str]:
    return {suite.weights for suite in run.suites}


# ---------------------------------------------------------------- of another course


@dataclass(frozen=True)
class _Deviation:
    """A difference between runs and their repetitions, and its p if they are draws of one kind."""

    runs: Sequence[Run]
    size: float
    p: float
    text: str


def _deviations(league: LeagueRuns, others: Mapping[Run, Run]) -> Iterator[_Deviation]:
    """Yield the deviations of runs and of their rows, in the loss and in the league's metric."""
    rows: dict[tuple[str, ...], list[Run]] = {}  # of one phase and setting, over seeds
    names = {run.path.parts[-2] for run in others}
    for run in dict.fromkeys([*finished(league.runs), *others]):
        if run.path.parts[-2] not in names:
            continue
        keys = ("label", BUDGET, *league.plan.objective(run.path.parts[-2]).grid)
        rows.setdefault(tuple(str(run.values.get(key)) for key in keys), []).append(run)
    metrics = dict.fromkeys((_LOSS, league.plan.comparison.metric))
    for row, metric in product(rows.values(), metrics):
        # Trials have no score.
        values = {run: run.metrics[metric] for run in row if metric in run.metrics}
        again = {run: others[run].metrics[metric] for run in values if run in others}
        for run, repeated in again.items():
            size, p = abs(values[run] - repeated), 0.0
            if len(values) >= _FEWEST:
                beside = [value for other, value in values.items() if other is not run]
                size, p = compare_means([values[run]], [repeated], beside)
            elif size <= _TOLERANCE.get(_kind_of(metric), math.inf):
                p = 1.0
            yield _Deviation([run], size, p, f"{metric} {values[run]:.6g}, and {repeated:.6g} here")
        if again and len(values) >= _FEWEST:
            archived, repeats = list(values.values()), list(again.values())
            means = f"{np.mean(archived):.6g}, and {np.mean(repeats):.6g} here"
            text = f"mean {metric} of the row {means}"
            yield _Deviation(list(again), *compare_means(archived, repeats, archived), text)


def compare_means(
    archived: Sequence[float], repeated: Sequence[float], seeds: Sequence[float]
) -> tuple[float, float]:
    """Return the difference of two means and its two-sided p.

    The sd of a score is that of `seeds`, with Student's t of one degree of freedom less than seeds.
    """
    from scipy.stats import t as student_t

    size = abs(float(np.mean(archived) - np.mean(repeated)))
    error = float(np.std(seeds, ddof=1)) * math.sqrt(1 / len(archived) + 1 / len(repeated))
    if not error:
        return size, float(not size)
    return size, 2 * float(student_t.sf(size / error, len(seeds) - 1))
