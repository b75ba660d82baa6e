"""How well word frequencies alone predict a corpus: the level of the gates ceiling and plateau."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metaseq_lm.data.storage.indexed import open_integers
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

CHUNK = 1 << 22  # tokens, which are counted as int64


@dataclass(frozen=True)
class Frequencies:
    """What a model can reach that ignores context.

    Attributes:
        vocabulary: The number of symbols, V. A uniform guess has a cross-entropy of ln V.
        unigram: The cross-entropy of a split under the counts of the train split, in nats a token.
    """

    vocabulary: int
    unigram: float


def read_frequencies(data: Path, split: str = "valid") -> Frequencies:
    """Return what ignores context in a data folder of a corpus.

    Of each symbol's count one is added, so that a symbol that training does not have costs no
    infinite loss. Special symbols do not count: they are no targets.

    Args:
        data: The folder, with `dict.txt` and the token files of both splits.
        split: The split whose tokens are predicted.

    Raises:
        MetaseqError: A file is missing or damaged.
    """
    vocabulary = Vocabulary.load(data / "dict.txt")
    is_text = ~np.isin(np.arange(len(vocabulary)), vocabulary.specials)
    train, other = (counts_of(data / name, len(vocabulary)) for name in ("train", split))
    log_shares = np.log((train + 1) / (train + 1)[is_text].sum())
    counted = other * is_text
    return Frequencies(len(vocabulary), float(-(counted @ log_shares) / max(counted.sum(), 1)))


def counts_of(prefix: Path, size: int) -> np.ndarray:
    """Return how often each of `size` symbols occurs in a pair of token files, int64 (size,)."""
    tokens, counts = open_integers(prefix).tokens, np.zeros(size, np.int64)
    for start in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=size)[:size]
    return counts
