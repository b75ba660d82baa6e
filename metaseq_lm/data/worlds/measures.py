"""Baselines for a model of a world: exact values, n-grams and chance.

Shapes: N documents, S positions; all cross-entropies are in nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaseq_lm.data.labelled import baselines
from metaseq_lm.data.ngrams import NGram
from metaseq_lm.data.worlds.base import BOTH, LEFT, NO_LABEL, NO_TOKEN, RIGHT, Documents, World

__all__ = ["pair_accuracy"]

_CHANCE = 0.5  # accuracy on minimal pairs
READERS = {"bayes": BOTH, "bayes_left": LEFT, "bayes_right": RIGHT}
EITHER = "either"
_CLEAR, _MOST_OF_ONE, _HALF = 0.9, 0.7, 0.5  # shares of what can be known beyond the word
_GAPS = 10_000  # gaps over which the cloze loss is averaged


@dataclass(frozen=True)
class _Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: np.ndarray) -> "_Estimate":
        """Return the estimate of independent values (N,)."""
        spread = values.std(ddof=1) if len(values) > 1 else np.nan
        return cls(float(values.mean()), float(spread / np.sqrt(len(values))))

    @classmethod
    def ratio(cls, sums: np.ndarray, counts: np.ndarray) -> "_Estimate":
        """Return the estimate of sum(sums) / sum(counts), (N,) each, by the delta method."""
        mean = sums.sum() / counts.sum()
        residuals = (sums - mean * counts) / counts.mean()
        return cls(float(mean), cls.of(residuals).error)


def join_documents(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return documents (N, S) as their tokens end to end, (T,), and their lengths, (N,)."""
    is_token = tokens != NO_TOKEN
    return tokens[is_token], is_token.sum(axis=1)


def pair_accuracy(good: np.ndarray, bad: np.ndarray) -> float:
    """Return the share of pairs whose good score, (M,), is above the bad one; a tie counts 1/2."""
    return float(((good > bad) + (good == bad) / 2).mean())


def pair_references(
    world: World, ngram: NGram, pairs: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    """Return the accuracies on minimal pairs of the exact probabilities, an n-gram and chance.

    Args:
        world: The world.
        ngram: A model of its training documents.
        pairs: The good and the bad documents, (M, S) each.
    """
    good, bad = pairs
    return {
        "pairs": len(good),
        "bayes": pair_accuracy(world.log_probs(good), world.log_probs(bad)),
        "ngram": pair_accuracy(*(ngram.log_probs(*join_documents(side)) for side in pairs)),
        "chance": _CHANCE,
    }


def label_references(world: World, name: str, train: Documents, test: Documents) -> dict[str, Any]:
    """Return the accuracies of the baselines of a probe on a labelled set.

    "bayes" takes the most probable class given the whole document, "bayes_left" and "bayes_right"
    given the labelled token and the tokens on that side of it; they are absent where the world
    cannot compute them. "majority" takes the most frequent class in train, "word" (labels of
    tokens) the most frequent class of the labelled word, and "bag_of_words" (labels of documents)
    the class of a naive Bayes classifier.

    Args:
        world: The world.
        name: The labelled set.
        train: Documents that are counted.
        test: Documents that are scored.
    """
    labels, n_classes = test.labels[name], len(world.label_sets[name])
    mask, counted = labels != NO_LABEL, train.labels[name] != NO_LABEL
    known = train.labels[name][counted]
    scores: dict[str, Any] = {"labels": int(mask.sum()), "chance": 1 / n_classes}
    most = baselines.majority(known, n_classes)
    predictions = {"majority": np.full(mask.sum(), most)}
    if labels.ndim == 1:
        bags = [_bags_of(train.tokens[counted]), _bags_of(test.tokens)]
        predictions["bag_of_words"] = baselines.naive_bayes(
            bags[0], known, bags[1], n_classes, len(world.symbols)
        )[mask]
    else:
        predictions["word"] = baselines.class_of_word(
            train.tokens[counted], known, test.tokens[mask], n_classes
        )
    expected = {}
    for key, sees in READERS.items():
        posterior = world.posterior(name, test.tokens, sees)
        if posterior is not None and (sees == BOTH or labels.ndim > 1):
            predictions[key] = posterior[mask].argmax(axis=-1)
            expected[key] = float(posterior[mask].max(axis=-1).mean())
    for key, predicted in predictions.items():
        scores[key] = float((predicted == labels[mask]).mean())
    if labels.ndim > 1 and expected.keys() == READERS.keys():
        of_word = world.asked_later.get(name)
        # Expected accuracies vary less between samples than measured ones.
        if of_word:
            scores["asks"] = of_word
        else:
            scores["needs"] = _need_of(scores | expected)
    return scores


def _need_of(scores: Mapping[str, float]) -> str:
    """Return which side a label needs: "left", "right", "both", "either", or "" for none of these.

    The accuracy of each side is measured as a share of what both sides add to the labelled word
    alone. One side is needed if it has at least CLEAR and the other at most HALF, both if neither
    has more than MOST_OF_ONE, either if each has at least CLEAR.

    Args:
        scores: The accuracies of the exact readers, see `label_references`.
    """
    whole = scores["bayes"] - scores["word"]
    if whole <= 0:
        return ""
    left, right = ((scores[f"bayes_{side}"] - scores["word"]) / whole for side in (LEFT, RIGHT))
    if min(left, right) >= _CLEAR:
        return EITHER
    if max(left, right) <= _MOST_OF_ONE:
        return BOTH
    if left >= _CLEAR and right <= _HALF:
        return LEFT
    if right >= _CLEAR and left <= _HALF:
        return RIGHT
    return ""


def _bags_of(tokens: np.ndarray) -> baselines.Bags:
    """Return documents (N, S) as bags of words."""
    texts, positions = np.nonzero(tokens != NO_TOKEN)
    return baselines.Bags(tokens[texts, positions], texts, len(tokens))


def measure_losses(
    world: World, ngram: NGram, documents: Documents, gaps: int = _GAPS
) -> dict[str, _Estimate]:
    """Return the cross-entropies of the exact probabilities and of n-grams, with standard errors.

    "document" and "token" are the entropy of the world itself; "unigram" and "ngram" are per token;
    "cloze" is the loss of one gap given the rest of its document, averaged over the gaps of the
    first documents.

    Args:
        world: The world.
        ngram: A model of its training documents.
        documents: Other documents of the world.
        gaps: The approximate number of gaps that "cloze" averages over.
    """
    tokens, lengths = documents.tokens, documents.lengths
    log_probs = world.log_probs(tokens)
    counts = np.bincount(tokens[tokens != NO_TOKEN], minlength=len(world.symbols)) + 1e-9
    log_shares = np.log(counts / counts.sum())
    unigrams = np.where(tokens != NO_TOKEN, log_shares[tokens], 0).sum(axis=1)
    first = tokens[: max(2, int(gaps / lengths.mean()))]
    rows, positions = np.nonzero(first != NO_TOKEN)
    probabilities = world.cloze(first, rows, positions)[
        np.arange(len(rows)), first[rows, positions]
    ]
    of_document = np.bincount(rows, -np.log(probabilities), len(first))
    return {
        "document": _Estimate.of(-log_probs),
        "token": _Estimate.ratio(-log_probs, lengths),
        "unigram": _Estimate.ratio(-unigrams, lengths),
        "ngram": _Estimate.ratio(-ngram.log_probs(*join_documents(tokens)), lengths),
        "cloze": _Estimate.ratio(of_document, lengths[: len(first)]),
    }
