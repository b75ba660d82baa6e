"""Word error rate: word edits over reference words, of a whole set, and what chance does to it.

Shapes: H hypotheses of one reference, U utterances.
"""

from collections.abc import Sequence

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.random_streams import generator

DRAWS = 1000


def edit_distances(reference: str, hypotheses: Sequence[str]) -> np.ndarray:
    """Return the fewest insertions, deletions and substitutions of words to each, int64 (H,).

    Words are what stands between white space (Levenshtein 1966; all edits cost 1).
    """
    wanted = reference.split()
    words = [hypothesis.split() for hypothesis in hypotheses]
    longest = max(map(len, words), default=0)
    ids = {word: number for number, word in enumerate(dict.fromkeys(wanted))}
    # -1 is a word that the reference lacks, or padding; neither can match.
    given = np.array(
        [[ids.get(w, -1) for w in ws] + [-1] * (longest - len(ws)) for ws in words], dtype=np.int64
    ).reshape(len(words), longest)
    steps = np.arange(longest + 1)
    row = np.tile(steps, (len(words), 1))  # distance of 0 reference words to j words, (H, J + 1)
    for number, word in enumerate(wanted, 1):
        other = np.empty_like(row)
        other[:, 0] = number
        other[:, 1:] = np.minimum(row[:, 1:] + 1, row[:, :-1] + (given != ids[word]))
        # Insertions run along the row: the least of other[k] + (j - k) over k <= j.
        row = np.minimum.accumulate(other - steps, axis=1) + steps
    return row[np.arange(len(words)), [len(ws) for ws in words]]


def word_count(reference: str) -> int:
    """Return the number of words of a reference, what stands between white space."""
    return len(reference.split())


def error_rate(edits: np.ndarray, words: np.ndarray) -> float:
    """Return all edits (U,) over all reference words (U,), a fraction that may exceed 1.

    An empty reference adds its edits and no words. MetaseqError if there is no word at all.
    """
    if not words.sum():
        raise MetaseqError("the references hold no word, so there is no word error rate")
    return float(edits.sum() / words.sum())


def difference_interval(
    edits: np.ndarray, baseline: np.ndarray, words: np.ndarray, draws: int = DRAWS
) -> tuple[float, float]:
    """Return the central 95 % of WER(edits) - WER(baseline) over resampled utterances.

    Utterances are drawn with replacement (Bisani and Ney 2004), for both systems the same. All
    arguments (U,).
    """
    rng = generator("word error rate", "bootstrap")
    count = len(words)
    differences = []
    for _ in range(draws):
        drawn = rng.integers(count, size=count)
        if total := words[drawn].sum():  # a draw of nothing but empty references has no rate
            differences.append((edits[drawn] - baseline[drawn]).sum() / total)
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)
