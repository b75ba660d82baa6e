"""Re-ranking of n-best lists by score + lambda * PLL, and the word error rate that it gives.

Salazar et al. 2020: the language model's part is added to the unscaled score, without a length
normalisation; lambda is chosen on a development set.

Shapes: H hypotheses of an utterance, U utterances.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaseq_lm.evaluation.nbest import NBest
from metaseq_lm.evaluation.wer import difference_interval, error_rate


@dataclass(frozen=True)
class SplitResult:
    """Word error rates of one set, as fractions of its reference words.

    `difference` is `wer` minus `one_best_wer` (below 0: re-ranking helps), `interval` the central
    95 % of it over resampled utterances.
    """

    utterances: int
    hypotheses: int
    words: int
    one_best_wer: float
    oracle_wer: float
    wer: float
    difference: float
    interval: tuple[float, float]


def combined(lists: Sequence[NBest], plls: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
    """Return score + weight * PLL of the hypotheses of each list, (H,) each."""
    return [nbest.scores + weight * own for nbest, own in zip(lists, plls)]


def edits_of_best(lists: Sequence[NBest], scores: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edits (U,) of each list's best hypothesis, the first one of equals."""
    return np.array([nbest.edits[own.argmax()] for nbest, own in zip(lists, scores)])


def choose_weight(
    lists: Sequence[NBest], plls: Sequence[np.ndarray], grid: Sequence[float]
) -> float:
    """Return the weight of the fewest edits on `lists`, the smallest one of equals."""
    edits = [(edits_of_best(lists, combined(lists, plls, w)).sum(), w) for w in grid]
    return min(edits)[1]


def result(lists: Sequence[NBest], plls: Sequence[np.ndarray], weight: float) -> SplitResult:
    """Return the word error rates of a set without re-ranking, at best, and with it."""
    words = np.array([nbest.words for nbest in lists])
    plain = edits_of_best(lists, [nbest.scores for nbest in lists])
    edits = edits_of_best(lists, combined(lists, plls, weight))
    one_best, wer = error_rate(plain, words), error_rate(edits, words)
    return SplitResult(
        utterances=len(lists),
        hypotheses=sum(len(nbest.texts) for nbest in lists),
        words=int(words.sum()),
        one_best_wer=one_best,
        oracle_wer=error_rate(np.array([nbest.edits.min() for nbest in lists]), words),
        wer=wer,
        difference=wer - one_best,
        interval=difference_interval(edits, plain, words),
    )
