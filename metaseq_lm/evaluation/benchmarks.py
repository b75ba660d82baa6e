"""The official metrics of benchmarks as suites, and files for leaderboards.

Scores are float arrays: (rows, K) for K classes or candidates, where the greatest one wins, the
first if equal; (rows,) or (rows, 1) for regression, on the scale of the labels. `rows` are the
facts in `LabelledSet.rows`, `label_names` the classes in order.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.config.suites import SplitConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import escape_formula
from metaseq_lm.core.registry import METRICS, SUITES
from metaseq_lm.data.benchmarks import Benchmark
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.evaluation.official import (
    Facts,
    ScoredRows,
    best_entities,
    facts_of,
    general_metrics,
)
from metaseq_lm.evaluation.suites import (
    OVERALL,
    PREDICTIONS,
    GroupMetrics,
    Results,
    Suite,
)

_LABELLED = "labelled"  # the suite of sets without a benchmark of the package


@dataclass(frozen=True)
class LabelledItems:
    """The rows of a labelled set.

    Attributes:
        benchmark: Its benchmark; None for none.
        gold: Index of each row's label in `names`, or a number, (rows,); boolean (rows, classes)
            if rows may have any number of classes.
        rows: The facts of each row, if the set has any.
        names: The labels in order; none for regression.
    """

    benchmark: Benchmark | None
    gold: np.ndarray
    rows: Facts | None
    names: list[str]


class LabelledSuite(Suite[LabelledItems, np.ndarray]):
    """The metrics of a labelled set: its benchmark's; else accuracy, macro F1 or correlations."""

    patterns = ("manifest.json", "{split}.*")
    takes = PREDICTIONS
    config: SplitConfig

    def read(self, folder: Path) -> LabelledItems:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name that of a labelled set, DATA/NAME")
        data = LabelledSet(folder, self.config.split)
        name = data.benchmark.name if data.benchmark else _LABELLED
        if self.name not in (name, _LABELLED):
            other = name if name in SUITES.entries else _LABELLED
            raise UsageError(
                f"--data {folder}: is no set of {self.name}; score it with --suite {other}"
            )
        if data.labels is None:
            raise UsageError(
                f"--data {folder}: split '{data.split}' has no labels; choose another: split=NAME"
            )
        return LabelledItems(data.benchmark, data.labels, data.rows, data.label_names)

    def from_predictions(self, rows: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the scores of the rows, (rows, K)."""
        ordered = sorted(rows, key=lambda row: row["index"])
        return np.array([row["scores"] for row in ordered], np.float64)

    def score(self, items: LabelledItems, probabilities: np.ndarray) -> Results:
        return labelled_results(items, probabilities)


def labelled_results(items: LabelledItems, scores: Any) -> Results:
    """Return the metrics of all rows, the main one first, and the accuracy of each group of them.

    All are nan if a benchmark's score is not finite, because nothing can be ranked then.

    Raises:
        MetaseqError: The parts do not belong together, or needed facts are missing.
    """
    benchmark, gold = items.benchmark, np.asarray(items.gold)
    scores = np.asarray(scores, np.float64)
    if benchmark is not None:
        scores = _checked_scores(benchmark, scores, items.names)
    elif not items.names:
        scores = scores.reshape(len(scores))
    if len(gold) != len(scores):
        raise MetaseqError(
            f"{benchmark.name if benchmark else _LABELLED}: {len(gold)} gold labels and "
            f"{len(scores)} scores do not pair up"
        )
    if benchmark is None:
        return {OVERALL: GroupMetrics(len(gold), general_metrics(gold, scores))}
    metric = METRICS.entry(benchmark.metric).value
    scored = ScoredRows(gold, np.where(np.isfinite(scores), scores, 0.0), items.rows, items.names)
    metrics = metric(scored)
    if not np.isfinite(scores).all():
        return {OVERALL: GroupMetrics(len(gold), dict.fromkeys(metrics, nan))}
    return {OVERALL: GroupMetrics(len(gold), metrics), **_by_group(scored, benchmark.group)}


def _by_group(scored: ScoredRows, group: str) -> Results:
    """Return the accuracy of the rows by the value of the fact `group`; {} without a group."""
    if not group or not scored.rows:
        return {}
    members: dict[str, list[int]] = {}
    for number, row in enumerate(scored.rows):
        members.setdefault(str(row[group]), []).append(number)
    right, results = scored.gold == scored.predicted, {}
    for name, rows in sorted(members.items()):
        results[name] = GroupMetrics(len(rows), {"accuracy": float(right[rows].mean())})
    return results


def _checked_scores(task: Benchmark, scores: Any, label_names: Sequence[str]) -> np.ndarray:
    """Return scores, float64 (rows,) for regression, else (rows, K); MetaseqError if they misfit.

    Tasks without candidates must have a column for each label.
    """
    values = np.asarray(scores, np.float64)
    if not task.labels and (values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)):
        return values.reshape(len(values))
    columns = values.shape[1] if values.ndim == 2 else 0
    if columns < 2 or not task.labels or (task.form != "choices" and columns != len(label_names)):
        expected = f"(rows, {len(label_names)})" if task.labels else "(rows,)"
        raise MetaseqError(f"{task.name}: scores of shape {values.shape}, expected {expected}")
    return values


# ------------------------------------------------------------------------ leaderboard files


def format_submission(
    task: Benchmark,
    split: str,
    scores: Any,
    rows: Facts | None,
    label_names: Sequence[str],
) -> tuple[str, str]:
    """Return the name and the content of the leaderboard's file for a split.

    STS-B's numbers are clipped to [0, 5]. MetaseqError if a score is not finite, or as in
    `labelled_results`.
    """
    values, benchmark = _checked_scores(task, scores, label_names), task.name
    if not np.isfinite(values).all():
        raise MetaseqError(f"{benchmark}: scores that are not finite rank nothing")
    facts = facts_of(benchmark, rows, len(values), ("idx",))
    name = task.leaderboard_file(split)
    if not task.labels:
        written = [f"{value:.3f}" for value in np.clip(values, 0.0, 5.0)]
    else:
        written = [label_names[index] for index in values.argmax(1)]
    if name.endswith(".tsv"):
        lines = [f"{row['idx']}\t{escape_formula(label)}" for row, label in zip(facts, written)]
        return name, "\n".join(["index\tprediction", *lines, ""])
    if benchmark == "superglue/MultiRC":
        answers = _nested(facts_of(benchmark, facts, len(facts), ("passage", "question")), written)
    elif benchmark == "superglue/ReCoRD":
        best = best_entities(
            values, facts_of(benchmark, facts, len(facts), ("entity",)), list(label_names)
        )
        answers = [{"idx": query, "label": row["entity"]} for query, row in best.items()]
    else:
        convert = _LEADERBOARD_LABELS.get(benchmark, str)
        answers = [{"idx": row["idx"], "label": convert(word)} for row, word in zip(facts, written)]
    return name, "".join(json.dumps(answer) + "\n" for answer in answers)


# COPA's labels are numbers; WSC's, unlike other tasks', begin with a capital letter (as written by
# the benchmark's tool jiant 1).
_LEADERBOARD_LABELS: dict[str, Callable[[str], Any]] = {
    "superglue/COPA": int,
    "superglue/WSC": str.capitalize,
}


def _nested(rows: Facts, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return MultiRC's answers under their questions and passages, in the order of the rows."""
    passages: dict[int, dict[int, list[dict[str, int]]]] = {}
    for row, label in zip(rows, labels):
        questions = passages.setdefault(row["passage"], {})
        answers = questions.setdefault(row["question"], [])
        answers.append({"idx": row["idx"], "label": int(label)})
    nested = []
    for passage, questions in passages.items():
        records = [{"idx": question, "answers": a} for question, a in questions.items()]
        nested.append({"idx": passage, "passage": {"questions": records}})
    return nested
