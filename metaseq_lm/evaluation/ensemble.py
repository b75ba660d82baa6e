"""Predictions of several runs put together: the mean of what they give, the choice of the best runs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from metaseq_lm.errors import MetaseqError, UsageError


def mean_scores(members: Sequence[Sequence[dict[str, Any]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the "index" of the rows, int64 (N,), and the mean of the members' "scores", (N, K).

    A member is the prediction rows of one run, in any order. Scores are probabilities, or one real
    value (K = 1). Raises MetaseqError if the members are not predictions of the same rows.
    """
    ordered = [sorted(member, key=lambda row: row["index"]) for member in members]
    about = [[(row["index"], row["gold"], len(row["scores"])) for row in rows] for rows in ordered]
    for number, other in enumerate(about[1:], 2):
        differing = [a[0] for a, b in zip(about[0], other) if a != b]
        if differing or len(other) != len(about[0]):
            where = f"row {differing[0]}" if differing else f"{len(about[0])} and {len(other)} rows"
            raise MetaseqError(
                f"the predictions of run 1 and run {number} are not of the same rows and classes "
                f"({where}); an ensemble takes runs on one data set"
            )
    scores = np.array([[row["scores"] for row in rows] for rows in ordered], np.float64)
    return np.array([index for index, *_ in about[0]], np.int64), scores.mean(0)


def best(values: Sequence[float], most: int, lower_is_better: bool) -> list[int]:
    """Return the numbers of the `most` best values, in their order; of equal ones the first wins.

    NaN is worst. Raises UsageError for fewer values than `most`, or none wanted.
    """
    if not 1 <= most <= len(values):
        raise UsageError(f"--best {most}: there are {len(values)} runs, take 1 to {len(values)}")
    keys = [value if lower_is_better else -value for value in values]
    ranked = sorted(range(len(keys)), key=lambda i: math.inf if math.isnan(keys[i]) else keys[i])
    return sorted(ranked[:most])
