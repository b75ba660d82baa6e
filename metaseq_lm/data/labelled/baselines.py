"""Classifiers that see only words: baselines for a model of a labelled set.

Shapes: N items to learn from, M to classify, K classes; tokens and words are numbers below V.
"""

from dataclasses import dataclass

import numpy as np

_SMOOTHING = 0.5  # added to every count


@dataclass(frozen=True)
class Bags:
    """Texts as bags of words.

    Attributes:
        tokens: The tokens of all texts, int64 (tokens,).
        texts: The number of each token's text, int64 (tokens,).
        count: The number of texts.
    """

    tokens: np.ndarray
    texts: np.ndarray
    count: int


def majority(labels: np.ndarray, n_classes: int) -> int:
    """Return the most frequent of the classes (N,), the first one of a tie."""
    return int(np.bincount(labels, minlength=n_classes).argmax())


def class_of_word(
    words: np.ndarray, labels: np.ndarray, others: np.ndarray, n_classes: int
) -> np.ndarray:
    """Return the most frequent class of each word in `others`, (M,).

    A word that does not occur gets the most frequent class of all words, which also wins ties.

    Args:
        words: Words with a class, (N,).
        labels: Their classes, (N,).
        others: The words to classify, (M,).
        n_classes: K.
    """
    known, number = np.unique(words, return_inverse=True)
    table = np.zeros((len(known) + 1, n_classes))  # the last row is for unknown words
    np.add.at(table, (number, labels), 1)
    table[:, majority(labels, n_classes)] += _SMOOTHING
    position = np.minimum(np.searchsorted(known, others), len(known) - 1)
    row = np.where(known[position] == others, position, len(known))
    return np.asarray(table.argmax(axis=1)[row])


def naive_bayes(
    train: Bags, labels: np.ndarray, others: Bags, n_classes: int, n_words: int
) -> np.ndarray:
    """Return the class of each of the texts `others`, (M,), by a naive Bayes classifier.

    p(class) and p(word | class) are relative frequencies with 1/2 added to every count.

    Args:
        train: N texts with a class.
        labels: Their classes, (N,).
        others: The texts to classify.
        n_classes: K.
        n_words: V.
    """
    table = np.full((n_classes, n_words), _SMOOTHING)
    np.add.at(table, (labels[train.texts], train.tokens), 1)
    log_table = np.log(table / table.sum(axis=1, keepdims=True))
    scores = np.empty((others.count, n_classes))
    for label, prior in enumerate(np.log(np.bincount(labels, minlength=n_classes) + _SMOOTHING)):
        log_probs = log_table[label, others.tokens]
        scores[:, label] = prior + np.bincount(others.texts, log_probs, others.count)
    return np.asarray(scores.argmax(axis=1))
