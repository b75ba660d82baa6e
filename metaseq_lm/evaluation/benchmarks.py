"""The official metrics of GLUE, SuperGLUE and CLOTH, and the files their leaderboards take.

Scores are float arrays: (rows, K) for K classes or candidates, the greatest one wins and the first
of equal ones; (rows,) or (rows, 1) for regression, on the scale of the labels. `rows` are the facts
that `LabelledSet.rows` gives, `label_names` the classes in order. All metrics are fractions, not
per cent.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import inert
from metaseq_lm.data.benchmarks import Benchmark, find_benchmark, leaderboard_file
from metaseq_lm.evaluation.classification import (
    accuracy,
    f1_binary,
    f1_macro,
    matthews,
    pearson,
    spearman,
)
from metaseq_lm.evaluation.squad import exact_match, token_f1

Facts = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Scored:
    """A scored set: gold places or numbers (rows,), scores, facts, and the names of the labels."""

    gold: np.ndarray
    scores: np.ndarray
    rows: Facts | None
    names: list[str]

    @property
    def predicted(self) -> np.ndarray:
        """The place of the greatest score of each row, (rows,)."""
        places: np.ndarray = self.scores.argmax(1)
        return places


def metrics(
    benchmark: str,
    gold: Any,
    scores: Any,
    rows: Facts | None,
    label_names: Sequence[str],
) -> dict[str, float]:
    """Return the official metrics of a task, the main one first.

    Where a task has two metrics the first entry is their "mean", as the leaderboards count it.
    `gold` (rows,) are places in `label_names`, or numbers; of ReCoRD the answers in `rows` count.
    All are nan if a score is not finite, for then nothing can be ranked. MetaseqError if the parts
    do not belong together or the facts that the task needs are missing.
    """
    task = find_benchmark(benchmark)
    gold_n, scores_n = np.asarray(gold), checked_scores(benchmark, task, scores, label_names)
    if len(gold_n) != len(scores_n):
        raise MetaseqError(
            f"{benchmark}: {len(gold_n)} gold labels and {len(scores_n)} scores do not pair up"
        )
    if not np.isfinite(scores_n).all():
        return dict.fromkeys(task.metrics, nan)
    return SCORERS.get(benchmark, _accuracy)(Scored(gold_n, scores_n, rows, list(label_names)))


def checked_scores(
    benchmark: str, task: Benchmark, scores: Any, label_names: Sequence[str]
) -> np.ndarray:
    """Return scores, float64 (rows,) for regression, else (rows, K); else MetaseqError.

    Every task but those with candidates has as many columns as labels.
    """
    values = np.asarray(scores, np.float64)
    if not task.labels and (values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)):
        return values.reshape(len(values))
    columns = values.shape[1] if values.ndim == 2 else 0
    if columns < 2 or not task.labels or (task.form != "choices" and columns != len(label_names)):
        expected = f"(rows, {len(label_names)})" if task.labels else "(rows,)"
        raise MetaseqError(f"{benchmark}: scores of shape {values.shape}, expected {expected}")
    return values


def facts_of(benchmark: str, rows: Facts | None, count: int, names: Sequence[str]) -> Facts:
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


def _place(label_names: list[str], name: str) -> int:
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
    f1 = f1_binary(task.gold, task.predicted, _place(task.names, "1"))
    return _two("f1", f1, "accuracy", accuracy(task.gold, task.predicted))


def _macro_f1_accuracy(task: Scored) -> dict[str, float]:
    f1 = f1_macro(task.gold, task.predicted, range(len(task.names)))
    return _two("f1", f1, "accuracy", accuracy(task.gold, task.predicted))


def _correlations(task: Scored) -> dict[str, float]:
    return _two(
        "pearson", pearson(task.gold, task.scores), "spearman", spearman(task.gold, task.scores)
    )


def _multirc(task: Scored) -> dict[str, float]:
    """Return F1 over all answers, and the share of questions whose answers are all right."""
    facts = facts_of("superglue/MultiRC", task.rows, len(task.gold), ("passage", "question"))
    right: dict[Any, bool] = {}
    for row, correct in zip(facts, task.predicted == task.gold):
        key = row["passage"], row["question"]
        right[key] = right.get(key, True) and bool(correct)
    f1a = f1_binary(task.gold, task.predicted, _place(task.names, "1"))
    return _two("f1a", f1a, "em", sum(right.values()) / len(right))


def best_entities(scores: np.ndarray, rows: Facts, names: list[str]) -> dict[int, dict[str, Any]]:
    """Return the row of the entity with the best of ReCoRD's scores (rows, 2), by query number."""
    positive = _place(names, "1")
    margin = scores[:, positive] - scores[:, 1 - positive]
    best: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row["idx"] not in best or margin[i] > margin[best[row["idx"]]]:
            best[row["idx"]] = i
    return {query: rows[i] for query, i in best.items()}


def _record(task: Scored) -> dict[str, float]:
    """Return F1 and EM of the best entity of each query, the maximum over its gold answers."""
    facts = facts_of("superglue/ReCoRD", task.rows, len(task.gold), ("idx", "entity", "answers"))
    best = list(best_entities(task.scores, facts, task.names).values())
    return answer_scores([row["entity"] for row in best], best)


def answer_scores(predictions: Sequence[str], rows: Facts | None) -> dict[str, float]:
    """Return F1 and EM of ReCoRD's queries, their mean first, for one predicted text per query.

    Each is the maximum over the query's gold "answers" in `rows`; 0 where there are none.
    """
    facts = facts_of("superglue/ReCoRD", rows, len(predictions), ("answers",))
    if not facts:
        raise MetaseqError("superglue/ReCoRD: no rows")
    f1, em = [], []
    for text, row in zip(predictions, facts):
        f1.append(max((token_f1(answer, text) for answer in row["answers"]), default=0.0))
        em.append(max((exact_match(answer, text) for answer in row["answers"]), default=0.0))
    mean_f1, mean_em = np.column_stack([f1, em]).mean(0).tolist()
    return _two("f1", mean_f1, "em", mean_em)


def _gender_parity(task: Scored) -> dict[str, float]:
    """Return accuracy, and the share of pairs (one word of gender changed) with one prediction.

    The share is nan for rows that do not say which are a pair.
    """
    name, count = "superglue/AX-g", len(task.gold)
    if not any("pair_id" in row for row in facts_of(name, task.rows, count, ())):
        # As on the Hub.
        return {"accuracy": accuracy(task.gold, task.predicted), "gender_parity": nan}
    facts = facts_of(name, task.rows, count, ("pair_id",))
    pairs: dict[Any, set[int]] = {}
    for row, label in zip(facts, task.predicted.tolist()):
        pairs.setdefault(row["pair_id"], set()).add(label)
    same = [len(labels) == 1 for labels in pairs.values()]
    return {"accuracy": accuracy(task.gold, task.predicted), "gender_parity": float(np.mean(same))}


def _accuracy_by_level(task: Scored) -> dict[str, float]:
    """Return the accuracy over all questions, and over those of middle and of high schools."""
    facts = facts_of("cloth/CLOTH", task.rows, len(task.gold), ("level",))
    levels = np.array([row["level"] for row in facts])
    hits = task.gold == task.predicted
    parts = {f"accuracy_{level}": hits[levels == level] for level in ("middle", "high")}
    means = {name: float(part.mean()) if len(part) else nan for name, part in parts.items()}
    return {"accuracy": float(hits.mean()), **means}


SCORERS: dict[str, Callable[[Scored], dict[str, float]]] = {
    "glue/CoLA": _matthews,
    "glue/MRPC": _f1_accuracy,
    "glue/QQP": _f1_accuracy,
    "glue/STS-B": _correlations,
    "glue/AX": _matthews,
    "superglue/CB": _macro_f1_accuracy,
    "superglue/MultiRC": _multirc,
    "superglue/ReCoRD": _record,
    "superglue/AX-b": _matthews,
    "superglue/AX-g": _gender_parity,
    "cloth/CLOTH": _accuracy_by_level,
}


# ------------------------------------------------------------------------ leaderboard files


def submission(
    benchmark: str,
    split: str,
    scores: Any,
    rows: Facts | None,
    label_names: Sequence[str],
) -> tuple[str, str]:
    """Return the name and the content of the file a leaderboard takes for a split.

    Numbers of STS-B are cut to 0 to 5. MetaseqError if a score is not finite, or as of `metrics`.
    """
    task = find_benchmark(benchmark)
    values = checked_scores(benchmark, task, scores, label_names)
    if not np.isfinite(values).all():
        raise MetaseqError(f"{benchmark}: scores that are not finite rank nothing")
    facts = facts_of(benchmark, rows, len(values), ("idx",))
    name = leaderboard_file(benchmark, split)
    if not task.labels:
        written = [f"{value:.3f}" for value in np.clip(values, 0.0, 5.0)]
    else:
        written = [label_names[index] for index in values.argmax(1)]
    if benchmark.startswith("glue/"):
        lines = [f"{row['idx']}\t{inert(label)}" for row, label in zip(facts, written)]
        return name, "\n".join(["index\tprediction", *lines, ""])
    if benchmark == "superglue/MultiRC":
        answers = _nested(facts_of(benchmark, facts, len(facts), ("passage", "question")), written)
    elif benchmark == "superglue/ReCoRD":
        best = best_entities(
            values, facts_of(benchmark, facts, len(facts), ("entity",)), list(label_names)
        )
        answers = [{"idx": query, "label": row["entity"]} for query, row in best.items()]
    else:
        convert = LEADERBOARD_LABELS.get(benchmark, str)
        answers = [{"idx": row["idx"], "label": convert(word)} for row, word in zip(facts, written)]
    return name, "".join(json.dumps(answer) + "\n" for answer in answers)


# COPA's labels are numbers; WSC's, unlike those of the other tasks, begin with a capital letter
# (as the benchmark's own tool jiant 1 writes them).
LEADERBOARD_LABELS: dict[str, Callable[[str], Any]] = {
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
