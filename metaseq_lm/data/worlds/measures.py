"""What to compare a model of a world with: the exact values, n-grams, chance.

Shapes: N documents, S tokens; all cross-entropies are in nats.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from metaseq_lm.data.labelled import baselines
from metaseq_lm.data.worlds.base import NO_LABEL, NO_TOKEN, Documents, World

CHANCE = 0.5  # of a minimal pair
GAPS = 10_000  # gaps of which the cloze loss is the mean


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        """Return the estimate of independent values (N,)."""
        spread = values.std(ddof=1) if len(values) > 1 else np.nan
        return cls(float(values.mean()), float(spread / np.sqrt(len(values))))

    @classmethod
    def ratio(cls, sums: np.ndarray, counts: np.ndarray) -> "Estimate":
        """Return the estimate of sum(sums) / sum(counts), (N,) each, by the delta method."""
        mean = sums.sum() / counts.sum()
        residuals = (sums - mean * counts) / counts.mean()
        return cls(float(mean), cls.of(residuals).error)


class NGram:
    """An n-gram model with the smoothing of Witten and Bell (1991), the baseline of a world.

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)), where T(h) is the number of different
    words after h, h' is h without its first word, and below the unigram is 1/V.

    Args:
        tokens: Documents that it counts, (N, S).
        size: The number of symbols, V.
        order: n; contexts reach over the beginning of a document, which is a symbol of its own.
    """

    def __init__(self, tokens: np.ndarray, size: int, order: int = 3) -> None:
        self.size, self.order = size, order
        grams = self._grams(tokens)
        self._counts = []
        for length in range(1, order + 1):
            codes, counts = np.unique(self._codes(grams, length), return_counts=True)
            contexts, first = np.unique(codes // (size + 1), return_index=True)
            totals = np.add.reduceat(counts, first)
            types = np.diff(np.append(first, len(codes)))
            self._counts.append((codes, counts, contexts, totals, types))

    def _grams(self, tokens: np.ndarray) -> np.ndarray:
        """Return each token with the `order` - 1 before it, (tokens, order)."""
        padding = np.full((len(tokens), self.order - 1), self.size)
        padded = np.concatenate([padding, tokens], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.order, axis=1)
        return np.asarray(windows[tokens != NO_TOKEN])

    def _codes(self, grams: np.ndarray, length: int) -> np.ndarray:
        """Return a number for the last `length` tokens of each gram, (tokens,)."""
        codes = np.zeros(len(grams), np.int64)
        for column in range(self.order - length, self.order):
            codes = codes * (self.size + 1) + grams[:, column]
        return codes

    def token_log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token given those before it, end to end, (tokens,)."""
        grams = self._grams(tokens)
        probs = np.full(len(grams), 1 / self.size)
        for length, (codes, counts, contexts, totals, types) in enumerate(self._counts, 1):
            gram = self._codes(grams, length)
            count = _look_up(codes, counts, gram)
            total = _look_up(contexts, totals, gram // (self.size + 1))
            kinds = _look_up(contexts, types, gram // (self.size + 1))
            seen = total > 0
            probs[seen] = ((count + kinds * probs) / np.maximum(total + kinds, 1))[seen]
        return np.asarray(np.log(probs))

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each document, (N, S) to (N,)."""
        rows = np.nonzero(tokens != NO_TOKEN)[0]
        return np.bincount(rows, self.token_log_probs(tokens), len(tokens))


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the value of each of the queries; 0 for one that is not in the sorted `keys`."""
    positions = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[positions] == queries, values[positions], 0)


def pair_accuracy(good: np.ndarray, bad: np.ndarray) -> float:
    """Return the share of pairs whose good score, (M,), is above the bad one; a tie is 1/2."""
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
        "ngram": pair_accuracy(ngram.log_probs(good), ngram.log_probs(bad)),
        "chance": CHANCE,
    }


def label_references(world: World, name: str, train: Documents, test: Documents) -> dict[str, Any]:
    """Return the accuracies on a labelled set of what a probe of a model is compared with.

    "bayes" takes the most probable class given the whole document, "bayes_left" given the tokens up
    to the labelled one; they are absent where the world does not know them. "majority" takes the
    class that is the most frequent in train, "word" (labels of tokens) that of the labelled word,
    and "bag_of_words" (labels of documents) that of a naive Bayes classifier.

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
        bags = [bags_of(train.tokens[counted]), bags_of(test.tokens)]
        predictions["bag_of_words"] = baselines.naive_bayes(
            bags[0], known, bags[1], n_classes, len(world.symbols)
        )[mask]
    else:
        predictions["word"] = baselines.class_of_word(
            train.tokens[counted], known, test.tokens[mask], n_classes
        )
    for key, left_only in (("bayes", False), ("bayes_left", True)):
        posterior = world.posterior(name, test.tokens, left_only)
        if posterior is not None and not (left_only and labels.ndim == 1):
            predictions[key] = posterior[mask].argmax(axis=-1)
    for key, predicted in predictions.items():
        scores[key] = float((predicted == labels[mask]).mean())
    return scores


def bags_of(tokens: np.ndarray) -> baselines.Bags:
    """Return documents (N, S) as bags of words."""
    texts, positions = np.nonzero(tokens != NO_TOKEN)
    return baselines.Bags(tokens[texts, positions], texts, len(tokens))


def losses(
    world: World, ngram: NGram, documents: Documents, gaps: int = GAPS
) -> dict[str, Estimate]:
    """Return the cross-entropies of the exact probabilities and of n-grams, with standard errors.

    "document" and "token" are those of the world itself, its entropy; "unigram" and "ngram" are per
    token; "cloze" is that of one gap whose document is seen otherwise, the mean over the gaps of
    the first documents.

    Args:
        world: The world.
        ngram: A model of its training documents.
        documents: Other documents of the world.
        gaps: About how many gaps "cloze" is the mean of.
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
        "document": Estimate.of(-log_probs),
        "token": Estimate.ratio(-log_probs, lengths),
        "unigram": Estimate.ratio(-unigrams, lengths),
        "ngram": Estimate.ratio(-ngram.log_probs(tokens), lengths),
        "cloze": Estimate.ratio(of_document, lengths[: len(first)]),
    }
