"""The official metrics of benchmarks by name: functions of a scored set.

A benchmark's file names its metric. The first of the results is the main one; with two metrics it
is their "mean", as on the leaderboards. All are fractions, not per cent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation import classification
from metaseq_lm.evaluation.squad import exact_match, token_f1

Facts = Sequence[dict[str, Any]]
THRESHOLD = 0.5  # a row has all classes of greater probability
_AVERAGES = ("micro", "macro")


@dataclass(frozen=True)
class ScoredRows:
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


def facts_of(benchmark: str, rows: Facts | None, count: int, names: Sequence[str]) -> Facts:
    """Return `rows`; MetaseqError unless there are `count` and each has the facts `names`."""
    if rows is None or len(rows) != count:
        raise MetaseqError(
            f"{benchmark}: {len(rows or ())} rows of facts for {count} scores; "
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


def _with_mean(**metrics: float) -> dict[str, float]:
    return {"mean": sum(metrics.values()) / 2, **metrics}


def accuracy(task: ScoredRows) -> dict[str, float]:
    """Return the accuracy."""
    return {"accuracy": classification.accuracy(task.gold, task.predicted)}


def matthews(task: ScoredRows) -> dict[str, float]:
    """Return Matthews' correlation."""
    return {"matthews": classification.matthews(task.gold, task.predicted)}


def f1_accuracy(task: ScoredRows) -> dict[str, float]:
    """Return F1 of the label "1" and accuracy."""
    f1 = classification.f1_binary(task.gold, task.predicted, _class_index(task.names, "1"))
    return _with_mean(f1=f1, **accuracy(task))


def accuracy_f1(task: ScoredRows) -> dict[str, float]:
    """Return accuracy, and F1 of the label "1"."""
    return accuracy(task) | {"f1": f1_accuracy(task)["f1"]}


def macro_f1_accuracy(task: ScoredRows) -> dict[str, float]:
    """Return macro-averaged F1 and accuracy."""
    f1 = classification.f1_macro(task.gold, task.predicted, range(len(task.names)))
    return _with_mean(f1=f1, **accuracy(task))


def correlations(task: ScoredRows) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation."""
    return _with_mean(
        pearson=classification.pearson(task.gold, task.scores),
        spearman=classification.spearman(task.gold, task.scores),
    )


def multirc(task: ScoredRows) -> dict[str, float]:
    """Return F1 over all answers, and the share of questions with all answers right."""
    facts = facts_of("superglue/MultiRC", task.rows, len(task.gold), ("passage", "question"))
    right: dict[Any, bool] = {}
    for row, correct in zip(facts, task.predicted == task.gold):
        key = row["passage"], row["question"]
        right[key] = right.get(key, True) and bool(correct)
    f1a = classification.f1_binary(task.gold, task.predicted, _class_index(task.names, "1"))
    return _with_mean(f1a=f1a, em=sum(right.values()) / len(right))


def best_entities(scores: np.ndarray, rows: Facts, names: list[str]) -> dict[int, dict[str, Any]]:
    """Return the row of the entity with the best of ReCoRD's scores (rows, 2), by query number."""
    positive = _class_index(names, "1")
    margin = scores[:, positive] - scores[:, 1 - positive]
    best: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row["idx"] not in best or margin[i] > margin[best[row["idx"]]]:
            best[row["idx"]] = i
    return {query: rows[i] for query, i in best.items()}


def record(task: ScoredRows) -> dict[str, float]:
    """Return F1 and EM of the best entity of each query, the maximum over its gold answers."""
    facts = facts_of("superglue/ReCoRD", task.rows, len(task.gold), ("idx", "entity", "answers"))
    best = list(best_entities(task.scores, facts, task.names).values())
    return answer_scores([row["entity"] for row in best], best)


def answer_scores(predictions: Sequence[str], rows: Facts | None) -> dict[str, float]:
    """Return F1 and EM of ReCoRD's queries, their mean first, for one predicted text per query.

    Each is the maximum over the query's gold "answers" in `rows`; 0 if there are none.
    """
    facts = facts_of("superglue/ReCoRD", rows, len(predictions), ("answers",))
    if not facts:
        raise MetaseqError("superglue/ReCoRD: no rows")
    f1, em = [], []
    for text, row in zip(predictions, facts):
        f1.append(max((token_f1(answer, text) for answer in row["answers"]), default=0.0))
        em.append(max((exact_match(answer, text) for answer in row["answers"]), default=0.0))
    mean_f1, mean_em = np.column_stack([f1, em]).mean(0).tolist()
    return _with_mean(f1=mean_f1, em=mean_em)


def gender_parity(task: ScoredRows) -> dict[str, float]:
    """Return accuracy, and the share of pairs (differing in one gendered word) with one prediction.

    The share is nan if the rows do not say which form a pair.
    """
    name, count = "superglue/AX-g", len(task.gold)
    if not any("pair_id" in row for row in facts_of(name, task.rows, count, ())):
        # As on the Hub.
        return accuracy(task) | {"gender_parity": nan}
    facts = facts_of(name, task.rows, count, ("pair_id",))
    pairs: dict[Any, set[int]] = {}
    for row, label in zip(facts, task.predicted.tolist()):
        pairs.setdefault(row["pair_id"], set()).add(label)
    same = [len(labels) == 1 for labels in pairs.values()]
    return accuracy(task) | {"gender_parity": float(np.mean(same))}


def accuracy_by_level(task: ScoredRows) -> dict[str, float]:
    """Return the accuracy over all questions, and over middle and high school questions."""
    facts = facts_of("cloth/CLOTH", task.rows, len(task.gold), ("level",))
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
        "accuracy": classification.accuracy(gold, predicted),
        "f1_macro": classification.f1_macro(gold, predicted, range(scores.shape[1])),
    }
