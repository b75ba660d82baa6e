"""Predictions of runs: files with a JSON object per example, ensembles, choice of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import to_json, write_atomic


def write_predictions(
    folder: Path, split: str, rows: Sequence[dict[str, Any]], submissions: Mapping[str, str]
) -> None:
    """Write predictions.SPLIT.jsonl, one line per row by "index", and the `submissions`.

    Rows of several labelled sets name theirs as "set"; each set has a file
    predictions.SPLIT.SET.jsonl.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["index"]):
        name = f"{split}.{row['set']}" if "set" in row else split
        files.setdefault(name, []).append(row)
    for name, members in files.items():
        lines = "".join(to_json(row) + "\n" for row in members)
        write_atomic(folder / f"predictions.{name}.jsonl", lines.encode())
    for name, text in submissions.items():
        write_atomic(folder / name, text.encode())


def mean_scores(members: Sequence[Sequence[dict[str, Any]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the "index" of the rows, int64 (N,), and the mean of the members' "scores", (N, K).

    A member is the prediction rows of one run, in any order. Scores are probabilities, or one real
    value (K = 1). Raises MetaseqError if the members are not predictions of the same rows.
    """
    ordered = _same_rows(members, lambda row: (row["gold"], len(row["scores"])))
    scores = []
    for rows in ordered:
        scores.append([row["scores"] for row in rows])
    index = np.array([row["index"] for row in ordered[0]], np.int64)
    return index, np.array(scores, np.float64).mean(0)


def mean_answers(members: Sequence[Sequence[dict[str, Any]]], n_best: int) -> list[dict[str, Any]]:
    """Return SQuAD's prediction rows with the "nbest" and "null_odds" of an ensemble.

    The probability of a text is its mean over the members' lists (0 in a list without it), and its
    score the logarithm; the `n_best` most probable ones stay. The no-answer odds come from the mean
    of the members' probabilities, which are the sigmoids of their odds. A single member is returned
    unchanged. Raises MetaseqError if the members are not predictions of the same questions.
    """
    ordered = _same_rows(members, lambda row: row["id"])
    if len(ordered) == 1:
        return ordered[0]
    together = []
    for rows in zip(*ordered):
        shares: dict[str, list[float]] = {}
        for row in rows:
            scores = np.array([answer["score"] for answer in row["nbest"]], np.float64)
            # In log space: the probability of a much worse text underflows to 0.
            log_probs = scores - np.logaddexp.reduce(scores) - math.log(len(rows))
            for answer, share in zip(row["nbest"], log_probs):
                shares.setdefault(answer["text"], []).append(share)
        pooled = {text: float(np.logaddexp.reduce(parts)) for text, parts in shares.items()}
        best = sorted(pooled.items(), key=lambda pair: -pair[1])[:n_best]
        odds = np.array([row["null_odds"] for row in rows], np.float64)
        none = np.logaddexp.reduce(-np.logaddexp(0, -odds))
        some = np.logaddexp.reduce(-np.logaddexp(0, odds))
        nbest = [{"text": t, "score": s, "probability": math.exp(s)} for t, s in best]
        together.append({**rows[0], "null_odds": float(none - some), "nbest": nbest})
    return together


def _same_rows(
    members: Sequence[Sequence[dict[str, Any]]], facts: Callable[[dict[str, Any]], Any]
) -> list[list[dict[str, Any]]]:
    """Return the members' rows in the order of their "index".

    Raises MetaseqError if the rows of two members differ in number or in their `facts`.
    """
    ordered = [sorted(member, key=lambda row: row["index"]) for member in members]
    kinds = []
    for rows in ordered:
        kinds.append([(row["index"], facts(row)) for row in rows])
    for number, other in enumerate(kinds[1:], 2):
        differing = [a[0] for a, b in zip(kinds[0], other) if a != b]
        if differing or len(other) != len(kinds[0]):
            where = f"row {differing[0]}" if differing else f"{len(kinds[0])} and {len(other)} rows"
            raise MetaseqError(
                f"the predictions of run 1 and run {number} are not of the same rows and classes "
                f"({where}); an ensemble takes runs on one data set"
            )
    return ordered


def best_indices(values: Sequence[float], most: int, lower_is_better: bool) -> list[int]:
    """Return the indices of the `most` best values, in ascending order; the first of equals wins.

    NaN is worst. Raises UsageError for fewer values than `most`, or a `most` below 1.
    """
    if not 1 <= most <= len(values):
        raise UsageError(f"--best {most}: there are {len(values)} runs, take 1 to {len(values)}")
    keys = np.array(values, np.float64) * (1 if lower_is_better else -1)
    # NaN comes last.
    ranked = np.argsort(keys, kind="stable")
    return sorted(ranked[:most].tolist())
