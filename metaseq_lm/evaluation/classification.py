"""Scores of label predictions: one number from gold and predicted labels.

All functions take two sequences of equal, non-zero length, in the same order, and return a float;
otherwise they raise MetaseqError with both lengths.
"""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from metaseq_lm.core.errors import MetaseqError

# scikit-learn and scipy are imported where used: they take a second, and training needs neither.


def accuracy(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return the fraction of items with the gold label predicted."""
    gold_n, predicted_n = _check_pairs(gold, predicted)
    return float(np.mean(gold_n == predicted_n))


def f1_macro(
    gold: npt.ArrayLike, predicted: npt.ArrayLike, labels: Sequence[Any] | None = None
) -> float:
    """Return the unweighted mean of the F1 of each label.

    `labels` defaults to the labels that occur; one that is neither gold nor predicted counts as 0.
    """
    from sklearn.metrics import f1_score

    gold_n, predicted_n = _check_pairs(gold, predicted)
    chosen = None if labels is None else list(labels)
    return float(f1_score(gold_n, predicted_n, labels=chosen, average="macro", zero_division=0))


def f1_multi_label(gold: npt.ArrayLike, predicted: npt.ArrayLike, average: str) -> float:
    """Return the micro or macro F1 of boolean labels (items, classes).

    A class that is neither gold nor predicted counts as 0.
    """
    from sklearn.metrics import f1_score

    pair = [np.asarray(side).astype(int) for side in (gold, predicted)]
    return float(f1_score(*pair, average=average, zero_division=0))


def f1_binary(gold: npt.ArrayLike, predicted: npt.ArrayLike, positive: Any = 1) -> float:
    """Return the F1 of the label `positive`; 0 if it is never correctly predicted."""
    return f1_macro(gold, predicted, [positive])


def matthews(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return Matthews' correlation, in [-1, 1]; 0 if either side has only one label."""
    from sklearn.metrics import matthews_corrcoef

    pair = _check_pairs(gold, predicted)
    # scikit-learn would return 0 with a warning.
    if len(np.unique(np.concatenate(pair))) < 2:
        return 0.0
    return float(matthews_corrcoef(*pair))


def pearson(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return Pearson's correlation, in [-1, 1]; nan if either side is constant."""
    from scipy.stats import pearsonr

    pair = _checked_scores(gold, predicted)
    if _constant(pair):
        return nan
    return float(pearsonr(*pair).statistic)


def spearman(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return Spearman's rank correlation, in [-1, 1]; nan if either side is constant."""
    from scipy.stats import spearmanr

    pair = _checked_scores(gold, predicted)
    if _constant(pair):
        return nan
    return float(spearmanr(*pair).statistic)


def _constant(pair: tuple[np.ndarray, np.ndarray]) -> bool:
    # scipy returns the same, but with a warning that the user of a run cannot act on.
    return any((side == side[0]).all() for side in pair)


def _pearson_spearman(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Return the mean of Pearson's and Spearman's correlation, GLUE's score of STS-B."""
    return (pearson(gold, predicted) + spearman(gold, predicted)) / 2


# Metrics of real values without a benchmark, the main one first.
CORRELATIONS: dict[str, Callable[..., float]] = {
    "pearson_spearman": _pearson_spearman,
    "pearson": pearson,
    "spearman": spearman,
}


def _check_pairs(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides as arrays, (items,) each; raises MetaseqError if they do not pair up."""
    pair = np.asarray(gold), np.asarray(predicted)
    if pair[0].ndim != 1 or pair[0].shape != pair[1].shape or not len(pair[0]):
        raise MetaseqError(
            f"gold labels of shape {pair[0].shape} and predictions of shape {pair[1].shape} do not "
            "pair up: give one prediction for each item, and at least one item"
        )
    return pair


def _checked_scores(gold: npt.ArrayLike, predicted: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides as float arrays of at least two items; correlation needs two."""
    gold_n, predicted_n = _check_pairs(gold, predicted)
    if len(gold_n) < 2:
        raise MetaseqError("a correlation needs at least two items")
    return gold_n.astype(float), predicted_n.astype(float)
