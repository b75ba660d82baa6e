"""Scores of a split of sentences, from the numbers that a model predicts.

Predictions are lists with one array per sentence of its words, in the order of `sentences`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.words.sets import TAGS, TREES, WordSet
from metaseq_lm.evaluation.chunks import span_counts
from metaseq_lm.evaluation.conlleval import conlleval_spans
from metaseq_lm.evaluation.dependencies import tree_scores

Numbers = Sequence[npt.ArrayLike]


def tagging_accuracy(
    gold: npt.ArrayLike, predicted: npt.ArrayLike, unseen: int | None = None
) -> float:
    """Return the share of words with the right class, punctuation too; `unseen` is never right.

    MetaseqError for arrays (words,) of unequal length or without words.
    """
    true, found = np.asarray(gold), np.asarray(predicted)
    if true.shape != found.shape or not true.size:
        raise MetaseqError(f"{true.shape} gold classes but {found.shape} predicted ones")
    right = true == found
    if unseen is not None:
        right &= true != unseen
    return float(right.mean())


def score_tags(data: WordSet, sentences: npt.ArrayLike, predicted: Numbers) -> dict[str, float]:
    """Return the scores of predicted classes by name, from 0 to 1.

    "accuracy" always; for spans "f1", "precision" and "recall" as by Clark et al. 2018, and
    "conlleval_f1". MetaseqError if the predictions do not fit the sentences.
    """
    rows = np.asarray(sentences, np.int64)
    gold = _gold(data, rows, TAGS, predicted)
    assert data.labels is not None
    scores = {"accuracy": tagging_accuracy(gold, _flat(predicted), data.unseen)}
    if data.spans:
        true, found = tag_names(data, _split(data, rows, gold)), tag_names(data, predicted)
        spans = span_counts(true, found).scores
        scores |= {"f1": spans.f1, "precision": spans.precision, "recall": spans.recall}
        scores["conlleval_f1"] = span_counts(true, found, conlleval_spans).scores.f1
    return scores


def score_trees(
    data: WordSet, sentences: npt.ArrayLike, heads: Numbers, relations: Numbers
) -> dict[str, float]:
    """Return "uas" and "las" without punctuation, "uas_all" and "las_all" with it, from 0 to 1.

    `heads` are places of words, 1 for the first, 0 for the root. MetaseqError if the predictions do
    not fit the sentences.
    """
    rows = np.asarray(sentences, np.int64)
    gold = _gold(data, rows, TREES, heads)
    _gold(data, rows, TREES, relations)
    assert data.heads is not None
    true = data.flat(data.heads, rows), gold
    found = _flat(heads), _flat(relations)
    most, every = tree_scores(true, found, ~data.punctuation(rows)), tree_scores(true, found)
    return {"uas": most.uas, "las": most.las, "uas_all": every.uas, "las_all": every.las}


def tag_names(data: WordSet, classes: Numbers) -> list[list[str]]:
    """Return the names of classes (or relations), sentence by sentence."""
    names = np.array(data.label_names, object)
    return [names[np.asarray(row, np.int64)].tolist() for row in classes]


def _flat(rows: Numbers) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.int64) for row in rows])


def _split(data: WordSet, rows: np.ndarray, flat: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(data.lengths[rows])[:-1])


def _gold(data: WordSet, rows: np.ndarray, form: str, predicted: Numbers) -> np.ndarray:
    """Return the gold labels end to end; MetaseqError if the predictions do not fit."""
    if data.form != form or data.labels is None:
        raise MetaseqError(f"{data.folder}: a set of form {data.form}, not {form}")
    lengths = [len(np.asarray(row)) for row in predicted]
    if not len(rows) or lengths != data.lengths[rows].tolist():
        raise MetaseqError(
            f"{data.folder}: predictions for {len(lengths)} sentences and {sum(lengths)} words, but "
            f"{len(rows)} sentences and {int(data.lengths[rows].sum())} words are scored"
        )
    return data.flat(data.labels, rows)
