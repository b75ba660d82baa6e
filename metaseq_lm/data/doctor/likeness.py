"""Whether a split of a corpus is of the domain of train, and whether it has documents of train."""

from dataclasses import dataclass

import numpy as np

from metaseq_lm.data.doctor.findings import CHUNK, document_hashes, token_offsets
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

SHIFTED = 0.1  # nats from which on a split may be of another domain,
FOREIGN = 0.5  # and from which on it is
FEWEST = 1000  # tokens, below which a split is too small to tell


@dataclass(frozen=True)
class Likeness:
    """How a split of a corpus compares with its train split.

    Attributes:
        divergence: The divergence of its token frequencies from those of train, see `divergence`.
        usual: The same for documents drawn from train that have as many tokens.
        shared: The share of its tokens that are in documents which train has, too.
    """

    divergence: float
    usual: float
    shared: float

    @property
    def shift(self) -> float:
        """By how many nats a token the divergence is above what chance makes of such a size.

        0 for a split of fewer than FEWEST tokens.
        """
        return max(0.0, self.divergence - self.usual)


def divergence(counts: np.ndarray, reference: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of frequencies from those of a reference, in nats.

    Of each count one is added, so that a symbol that the reference lacks costs no infinity.

    Args:
        counts: How often each symbol occurs, (V,).
        reference: The same of the reference, (V,).
    """
    shares, others = ((x + 1) / (x.sum() + len(x)) for x in (counts, reference))
    return float(shares @ np.log(shares / others))


def compare(train: IndexedDataset, other: IndexedDataset, vocabulary: Vocabulary) -> Likeness:
    """Return how a split compares with train; special symbols do not count."""
    size = len(vocabulary)
    is_text = ~np.isin(np.arange(size), vocabulary.specials)
    reference = token_counts(train, size)[is_text]
    value, usual = (
        divergence(token_counts(data, size)[is_text], reference)
        for data in (other, drawn(train, len(other.tokens)))
    )
    if len(other.tokens) < FEWEST:
        usual = value
    return Likeness(value, usual, shared_tokens(train, other))


def token_counts(data: IndexedDataset | np.ndarray, size: int) -> np.ndarray:
    """Return how often each of `size` symbols occurs, int64 (size,)."""
    tokens = data if isinstance(data, np.ndarray) else data.tokens
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=size)[:size]
    return counts


def drawn(data: IndexedDataset, tokens: int) -> np.ndarray:
    """Return the tokens of documents that are drawn until they have so many, the same each time."""
    offsets = token_offsets(data, data.documents)
    order = np.random.default_rng(0).permutation(len(offsets) - 1)
    needed = int(np.searchsorted(np.cumsum(np.diff(offsets)[order]), tokens)) + 1
    parts = [data.tokens[offsets[i] : offsets[i + 1]] for i in order[:needed]]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def shared_tokens(train: IndexedDataset, other: IndexedDataset) -> float:
    """Return the share of the tokens of a split that are in documents which train has, too."""
    sizes = np.diff(token_offsets(other, other.documents))
    shared = np.isin(
        document_hashes(other, other.documents), document_hashes(train, train.documents)
    )
    return float(sizes[shared].sum() / max(sizes.sum(), 1))
