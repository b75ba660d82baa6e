"""The metrics of GLUE, SuperGLUE, CLOTH and BabyLM as suites, and files for leaderboards.

Scores are float arrays: (rows, K) for K classes or candidates, where the greatest one wins, the
first if equal; (rows,) or (rows, 1) for regression, on the scale of the labels. `rows` are the
facts in `LabelledSet.rows`, `label_names` the classes in order. All metrics are fractions, not per
cent.
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
from metaseq_lm.core.output import inert
from metaseq_lm.core.registry import SUITES
from metaseq_lm.data.benchmarks import Benchmark, find_benchmark, leaderboard_file
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.evaluation import classification
from metaseq_lm.evaluation.classification import (
    accuracy,
    f1_binary,
    f1_macro,
    matthews,
    pearson,
    spearman,
)
from metaseq_lm.evaluation.squad import exact_match, token_f1
from metaseq_lm.evaluation.suites import (
    OVERALL,
    PREDICTIONS,
    GroupMetrics,
    Results,
    Suite,
)

Facts = Sequence[dict[str, Any]]
_LABELLED = "labelled"  # the suite of sets without a benchmark
THRESHOLD = 0.5  # a row has all classes of greater probability
_AVERAGES = ("micro", "macro")


@dataclass(frozen=True)
class LabelledItems:
    """The rows of a labelled set.

    Attributes:
        benchmark: Name of its benchmark, such as "glue/CoLA"; "" for none.
        gold: Index of each row's label in `names`, or a number, (rows,); boolean (rows, classes)
            if rows may have any number of classes.
        rows: The facts of each row, if the set has any.
        names: The labels in order; none for regression.
    """

    benchmark: str
    gold: np.ndarray
    rows: Facts | None
    names: list[str]


@dataclass(frozen=True)
class Scored:
    """A scored set: gold indices or numbers (rows,), scores, facts, and the names of the labels."""

    gold: np.ndarray
    scores: np.ndarray
    rows: Facts | None
    names: list[str]

    @property
    def predicted(self) -> np.ndarray:
        """The index of the largest score of each row, (rows,)."""
        indices: np.ndarray = self.scores.argmax(1)
        return indices


_Scorer = Callable[[Scored], dict[str, float]]


class LabelledSuite(Suite[LabelledItems, np.ndarray]):
    """The metrics of a labelled set, given the scores of its rows by a run.

    Args:
        config: Which split is scored.
        scorer: Returns the metrics of a scored set, the main one first.
        group: The fact of rows by which accuracies are grouped, if they have it.
    """

    patterns = ("manifest.json", "{split}.*")
    takes = PREDICTIONS

    def __init__(self, config: SplitConfig, scorer: _Scorer, group: str = "") -> None:
        super().__init__(config)
        self.scorer, self.group = scorer, group

    def read(self, folder: Path) -> LabelledItems:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name that of a labelled set, DATA/NAME")
        data = LabelledSet(folder, self.config.split)
        if data.benchmark != self.name and self.name != _LABELLED:
            other = data.benchmark or _LABELLED
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
        """Return the metrics of all rows, and the accuracy of each group of them.

        If a benchmark has two metrics, the first entry is their "mean", as on the leaderboards. All
        are nan if a score is not finite, because nothing can be ranked then.

        Raises:
            MetaseqError: The parts do not belong together, or needed facts are missing.
        """
        gold, scores = np.asarray(items.gold), np.asarray(probabilities, np.float64)
        if items.benchmark:
            task = find_benchmark(items.benchmark)
            scores = _checked_scores(items.benchmark, task, scores, items.names)
        elif not items.names:
            scores = scores.reshape(len(scores))
        if len(gold) != len(scores):
            raise MetaseqError(
                f"{items.benchmark or _LABELLED}: {len(gold)} gold labels and {len(scores)} scores "
                "do not pair up"
            )
        if items.benchmark and not np.isfinite(scores).all():
            return {OVERALL: GroupMetrics(len(gold), dict.fromkeys(task.metrics, nan))}
        scored = Scored(gold, scores, items.rows, items.names)
        return {OVERALL: GroupMetrics(len(gold), self.scorer(scored)), **self._groups(scored)}

    def _groups(self, scored: Scored) -> Results:
        """Return the accuracy of the rows by the value of the fact `group`."""
        members: dict[str, list[int]] = {}
        for number, row in enumerate(scored.rows or () if self.group else ()):
            members.setdefault(str(row[self.group]), []).append(number)
        right = scored.gold == scored.predicted if members else scored.gold
        return {
            name: GroupMetrics(len(rows), {"accuracy": float(right[rows].mean())})
            for name, rows in sorted(members.items())
        }


def metrics(
    benchmark: str,
    gold: Any,
    scores: Any,
    rows: Facts | None,
    label_names: Sequence[str],
) -> dict[str, float]:
    """Return the official metrics of a task, the main one first: see `LabelledSuite.score`.

    `gold` (rows,) are indices in `label_names`, or numbers; ReCoRD uses the answers in `rows`.
    """
    find_benchmark(benchmark)
    items = LabelledItems(benchmark, np.asarray(gold), rows, list(label_names))
    return labelled_results(items, scores)[OVERALL].metrics


def labelled_results(items: LabelledItems, scores: Any) -> Results:
    """Return the results of a labelled set with the suite of its benchmark."""
    results: Results = SUITES.build(items.benchmark or _LABELLED, SplitConfig()).score(
        items, scores
    )
    return results


def _checked_scores(
    benchmark: str, task: Benchmark, scores: Any, label_names: Sequence[str]
) -> np.ndarray:
    """Return scores, float64 (rows,) for regression, else (rows, K); MetaseqError if they misfit.

    Tasks without candidates must have a column for each label.
    """
    values = np.asarray(scores, np.float64)
    if not task.labels and (values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)):
        return values.reshape(len(values))
    columns = values.shape[1] if values.ndim == 2 else 0
    if columns < 2 or not task.labels or (task.form != "choices" and columns != len(label_names)):
        expected = f"(rows, {len(label_names)})" if task.labels else "(rows,)"
        raise MetaseqError(f"{benchmark}: scores of shape {values.shape}, expected {expected}")
    return values


def _facts_of(benchmark: str, rows: Facts | None, count: int, names: Sequence[str]) -> Facts:
    """Return `rows`; MetaseqError unless there are `count` and each has the facts `names`."""
    if rows is None or len(rows) != count:
        raise MetaseqError(
            f"{benchmark}: {0 if rows is None else len(rows)} rows of facts for {count} scores; "
            f"make the set with 'metaseq-lm preprocess --benchmark {benchmark}'"
        )
    for i, row in enumerate(rows):
        if missing := [name for name in names if name not in row]:
            raise MetaseqError(f"{benchmark}: row {i + 1} has no '{missing[0]}'")
    return rows


def _class_index(label_names: list[str], name: str) -> int:
    if name not in label_names:
        raise MetaseqError(f"no label '{name}' among {', '.join(label_names)}")
    return label_names.index(name)


def _two(first: str, a: float, second: str, b: float) -> dict[str, float]:
    return {"mean": (a + b) / 2, first: a, second: b}


def _accuracy(task: Scored) -> dict[str, float]:
    return {"accuracy": accuracy(task.gold, task.predicted)}


def _matthews(task: Scored) -> dict[str, float]:
    return {"matthews": matthews(task.gold, task.predicted)}


def _f1_accuracy(task: Scored) -> dict[str, float]:
    f1 = f1_binary(task.gold, task.predicted, _class_index(task.names, "1"))
    return _two("f1", f1, "accuracy", accuracy(task.gold, task.predicted))


def _accuracy_f1(task: Scored) -> dict[str, float]:
    return {"accuracy": accuracy(task.gold, task.predicted), "f1": _f1_accuracy(task)["f1"]}


def _macro_f1_accuracy(task: Scored) -> dict[str, float]:
    f1 = f1_macro(task.gold, task.predicted, range(len(task.names)))
    return _two("f1", f1, "accuracy", accuracy(task.gold, task.predicted))


def _correlations(task: Scored) -> dict[str, float]:
    return _two(
        "pearson", pearson(task.gold, task.scores), "spearman", spearman(task.gold, task.scores)
    )


def _multirc(task: Scored) -> dict[str, float]:
    """Return F1 over all answers, and the share of questions with all answers right."""
    facts = _facts_of("superglue/MultiRC", task.rows, len(task.gold), ("passage", "question"))
    right: dict[Any, bool] = {}
    for row, correct in zip(facts, task.predicted == task.gold):
        key = row["passage"], row["question"]
        right[key] = right.get(key, True) and bool(correct)
    f1a = f1_binary(task.gold, task.predicted, _class_index(task.names, "1"))
    return _two("f1a", f1a, "em", sum(right.values()) / len(right))


def _best_entities(scores: np.ndarray, rows: Facts, names: list[str]) -> dict[int, dict[str, Any]]:
    """Return the row of the entity with the best of ReCoRD's scores (rows, 2), by query number."""
    positive = _class_index(names, "1")
    margin = scores[:, positive] - scores[:, 1 - positive]
    best: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row["idx"] not in best or margin[i] > margin[best[row["idx"]]]:
            best[row["idx"]] = i
    return {query: rows[i] for query, i in best.items()}


def _record(task: Scored) -> dict[str, float]:
    """Return F1 and EM of the best entity of each query, the maximum over its gold answers."""
    facts = _facts_of("superglue/ReCoRD", task.rows, len(task.gold), ("idx", "entity", "answers"))
    best = list(_best_entities(task.scores, facts, task.names).values())
    return answer_scores([row["entity"] for row in best], best)


def answer_scores(predictions: Sequence[str], rows: Facts | None) -> dict[str, float]:
    """Return F1 and EM of ReCoRD's queries, their mean first, for one predicted text per query.

    Each is the maximum over the query's gold "answers" in `rows`; 0 if there are none.
    """
    facts = _facts_of("superglue/ReCoRD", rows, len(predictions), ("answers",))
    if not facts:
        raise MetaseqError("superglue/ReCoRD: no rows")
    f1, em = [], []
    for text, row in zip(predictions, facts):
        f1.append(max((token_f1(answer, text) for answer in row["answers"]), default=0.0))
        em.append(max((exact_match(answer, text) for answer in row["answers"]), default=0.0))
    mean_f1, mean_em = np.column_stack([f1, em]).mean(0).tolist()
    return _two("f1", mean_f1, "em", mean_em)


def _gender_parity(task: Scored) -> dict[str, float]:
    """Return accuracy, and the share of pairs (differing in one gendered word) with one prediction.

    The share is nan if the rows do not say which form a pair.
    """
    name, count = "superglue/AX-g", len(task.gold)
    if not any("pair_id" in row for row in _facts_of(name, task.rows, count, ())):
        # As on the Hub.
        return {"accuracy": accuracy(task.gold, task.predicted), "gender_parity": nan}
    facts = _facts_of(name, task.rows, count, ("pair_id",))
    pairs: dict[Any, set[int]] = {}
    for row, label in zip(facts, task.predicted.tolist()):
        pairs.setdefault(row["pair_id"], set()).add(label)
    same = [len(labels) == 1 for labels in pairs.values()]
    return {"accuracy": accuracy(task.gold, task.predicted), "gender_parity": float(np.mean(same))}


def _accuracy_by_level(task: Scored) -> dict[str, float]:
    """Return the accuracy over all questions, and over middle and high school questions."""
    facts = _facts_of("cloth/CLOTH", task.rows, len(task.gold), ("level",))
    levels = np.array([row["level"] for row in facts])
    hits = task.gold == task.predicted
    parts = {f"accuracy_{level}": hits[levels == level] for level in ("middle", "high")}
    means = {name: float(part.mean()) if len(part) else nan for name, part in parts.items()}
    return {"accuracy": float(hits.mean()), **means}


def general_metrics(gold: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Return the metrics of a set without a benchmark.

    For scores (N, K) these are accuracy and macro F1, for values (N,) classification.CORRELATIONS.
    For boolean gold labels (N, K) and probabilities they are micro- and macro-averaged F1, and the
    share of rows that are right in all classes.

    Every class counts in macro-averaged F1; one that is neither gold nor predicted counts as 0. For
    single labels, micro-averaged F1 is the accuracy.
    """
    if scores.ndim == 1:
        return {n: metric(gold, scores) for n, metric in classification.CORRELATIONS.items()}
    if gold.ndim == 2:
        chosen = scores > THRESHOLD
        averages = {f"f1_{n}": classification.f1_multi_label(gold, chosen, n) for n in _AVERAGES}
        return averages | {"exact_match": float((gold == chosen).all(1).mean())}
    predicted = scores.argmax(1)
    return {
        "accuracy": accuracy(gold, predicted),
        "f1_macro": f1_macro(gold, predicted, range(scores.shape[1])),
    }


# ------------------------------------------------------------------------ the suites


def labelled_suite(config: SplitConfig) -> LabelledSuite:
    """A labelled set of no benchmark: accuracy and macro F1, or correlations."""
    return LabelledSuite(config, lambda task: general_metrics(task.gold, task.scores))


def accuracy_suite(config: SplitConfig) -> LabelledSuite:
    """A task whose official metric is the accuracy."""
    return LabelledSuite(config, _accuracy)


def matthews_suite(config: SplitConfig) -> LabelledSuite:
    """A task whose official metric is Matthews' correlation."""
    return LabelledSuite(config, _matthews)


def f1_accuracy_suite(config: SplitConfig) -> LabelledSuite:
    """A task with F1 of the label "1" and accuracy."""
    return LabelledSuite(config, _f1_accuracy)


def accuracy_f1_suite(config: SplitConfig) -> LabelledSuite:
    """A task with accuracy, and F1 of the label "1"."""
    return LabelledSuite(config, _accuracy_f1)


def correlation_suite(config: SplitConfig) -> LabelledSuite:
    """STS-B: Pearson's and Spearman's correlation."""
    return LabelledSuite(config, _correlations)


def macro_f1_accuracy_suite(config: SplitConfig) -> LabelledSuite:
    """CB: macro F1 and accuracy."""
    return LabelledSuite(config, _macro_f1_accuracy)


def multirc_suite(config: SplitConfig) -> LabelledSuite:
    """MultiRC: F1 over all answers, and the share of questions with all answers right."""
    return LabelledSuite(config, _multirc)


def record_suite(config: SplitConfig) -> LabelledSuite:
    """ReCoRD: F1 and exact match of the best entity of each query."""
    return LabelledSuite(config, _record)


def gender_parity_suite(config: SplitConfig) -> LabelledSuite:
    """AX-g (Winogender): accuracy, and the share of pairs with one prediction."""
    return LabelledSuite(config, _gender_parity)


def cloth_suite(config: SplitConfig) -> LabelledSuite:
    """CLOTH: accuracy, and by the level of the school."""
    return LabelledSuite(config, _accuracy_by_level, group="level")


# ------------------------------------------------------------------------ leaderboard files


def submission(
    benchmark: str,
    split: str,
    scores: Any,
    rows: Facts | None,
    label_names: Sequence[str],
) -> tuple[str, str]:
    """Return the name and the content of the leaderboard's file for a split.

    STS-B's numbers are clipped to [0, 5]. MetaseqError if a score is not finite, or as in
    `metrics`.
    """
    task = find_benchmark(benchmark)
    values = _checked_scores(benchmark, task, scores, label_names)
    if not np.isfinite(values).all():
        raise MetaseqError(f"{benchmark}: scores that are not finite rank nothing")
    facts = _facts_of(benchmark, rows, len(values), ("idx",))
    name = leaderboard_file(benchmark, split)
    if not task.labels:
        written = [f"{value:.3f}" for value in np.clip(values, 0.0, 5.0)]
    else:
        written = [label_names[index] for index in values.argmax(1)]
    if benchmark.startswith("glue/"):
        lines = [f"{row['idx']}\t{inert(label)}" for row, label in zip(facts, written)]
        return name, "\n".join(["index\tprediction", *lines, ""])
    if benchmark == "superglue/MultiRC":
        answers = _nested(_facts_of(benchmark, facts, len(facts), ("passage", "question")), written)
    elif benchmark == "superglue/ReCoRD":
        best = _best_entities(
            values, _facts_of(benchmark, facts, len(facts), ("entity",)), list(label_names)
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
