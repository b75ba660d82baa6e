"""Scores of tagged or parsed sentences.

Predictions are lists with one array over words per sentence, in the order of `sentences`.
"""

from collections.abc import Sequence
from math import nan

import numpy as np
import numpy.typing as npt

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.words.sets import TAGS, TREES, WordSet
from metaseq_lm.data.words.tags import UNLABELLED
from metaseq_lm.evaluation.chunks import conlleval_spans, span_counts

Numbers = Sequence[npt.ArrayLike]
_Tree = tuple[npt.ArrayLike, npt.ArrayLike]


def _tagging_accuracy(
    gold: npt.ArrayLike, predicted: npt.ArrayLike, unseen: int | None = None
) -> float:
    """Return the share of words with the right class, with punctuation; `unseen` is never right.

    MetaseqError for arrays (words,) of unequal length or without words.
    """
    gold_n, predicted_n = np.asarray(gold), np.asarray(predicted)
    if gold_n.shape != predicted_n.shape or not gold_n.size:
        raise MetaseqError(f"{gold_n.shape} gold classes but {predicted_n.shape} predicted ones")
    right = gold_n == predicted_n
    if unseen is not None:
        right &= gold_n != unseen
    return float(right.mean())


def _attachment_scores(
    gold: _Tree, predicted: _Tree, counted: npt.ArrayLike | None = None
) -> tuple[float, float]:
    """Return the share of words with the right head (UAS), and with head and relation right (LAS).

    A tree is heads (words,) and relations (words,) of concatenated sentences; whether the heads
    form a tree is not checked. `counted` (words,) says which words count, all if None; both scores
    are nan if none does. ValueError for arrays of unequal length.
    """
    gold_heads, gold_relations = map(np.asarray, gold)
    heads, relations = map(np.asarray, predicted)
    mask = np.ones(len(gold_heads), bool) if counted is None else np.asarray(counted, bool)
    lengths = [len(part) for part in (gold_heads, gold_relations, heads, relations, mask)]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"{lengths} gold heads and relations, predicted heads and relations, and words that "
            "count"
        )
    right = mask & (gold_heads == heads)
    labelled_right = right & (gold_relations == relations)
    n_words = int(mask.sum())
    if not n_words:
        return nan, nan
    return int(right.sum()) / n_words, int(labelled_right.sum()) / n_words


def score_tags(data: WordSet, sentences: npt.ArrayLike, predicted: Numbers) -> dict[str, float]:
    """Return the scores of predicted classes by name, from 0 to 1.

    Always "accuracy", without words that are tagged as unlabelled; for spans also "f1", "precision"
    and "recall" as in Clark et al. 2018, and "conlleval_f1". MetaseqError if the predictions do not
    fit the sentences.
    """
    rows = np.asarray(sentences, np.int64)
    gold = _gold(data, rows, TAGS, predicted)
    counted = np.ones(len(gold), bool)
    if UNLABELLED in data.label_names:
        counted = gold != data.label_names.index(UNLABELLED)
    accuracy = _tagging_accuracy(gold[counted], _flat(predicted)[counted], data.unseen)
    scores = {"accuracy": accuracy}
    if data.spans:
        by_sentence = np.split(gold, np.cumsum(data.lengths[rows])[:-1])
        tags = tag_names(data, by_sentence), tag_names(data, predicted)
        spans = span_counts(*tags).scores
        scores |= {"f1": spans.f1, "precision": spans.precision, "recall": spans.recall}
        scores["conlleval_f1"] = span_counts(*tags, conlleval_spans).scores.f1
    return scores


def score_trees(
    data: WordSet, sentences: npt.ArrayLike, heads: Numbers, relations: Numbers
) -> dict[str, float]:
    """Return "uas" and "las" without punctuation, "uas_all" and "las_all" with it, from 0 to 1.

    As in the code of Clark et al. 2018, the form of a word decides whether it is punctuation.
    `heads` are positions of words, 1 for the first, 0 for the root. MetaseqError if the predictions
    do not fit the sentences.
    """
    rows = np.asarray(sentences, np.int64)
    gold_relations = _gold(data, rows, TREES, heads)
    _gold(data, rows, TREES, relations)
    assert data.heads is not None
    gold = (data.flat(data.heads, rows), gold_relations)
    predicted = (_flat(heads), _flat(relations))
    uas, las = _attachment_scores(gold, predicted, ~data.punctuation(rows))
    uas_all, las_all = _attachment_scores(gold, predicted)
    return {"uas": uas, "las": las, "uas_all": uas_all, "las_all": las_all}


def tag_names(data: WordSet, classes: Numbers) -> list[list[str]]:
    """Return the names of classes (or relations), sentence by sentence."""
    names = np.array(data.label_names, object)
    return [names[np.asarray(row, np.int64)].tolist() for row in classes]


def _flat(rows: Numbers) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.int64) for row in rows])


def _gold(data: WordSet, rows: np.ndarray, form: str, predicted: Numbers) -> np.ndarray:
    """Return the concatenated gold labels; MetaseqError if the predictions do not fit."""
    if data.form != form or data.labels is None:
        raise MetaseqError(f"{data.folder}: a set of form {data.form}, not {form}")
    lengths = [len(np.asarray(row)) for row in predicted]
    if not len(rows) or lengths != data.lengths[rows].tolist():
        raise MetaseqError(
            f"{data.folder}: predictions for {len(lengths)} sentences and {sum(lengths)} words, "
            f"but {len(rows)} sentences and {int(data.lengths[rows].sum())} words are scored"
        )
    return data.flat(data.labels, rows)
