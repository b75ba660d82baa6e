"""Whether a split of a corpus is of the domain of train, and whether it has text of train."""

from dataclasses import dataclass

import numpy as np

from metaseq_lm.data.doctor.findings import CHUNK, document_hashes, token_offsets
from metaseq_lm.data.doctor.passages import shared_passages
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

SHIFTED = 0.1  # nats from which on a split may be of another domain,
FOREIGN = 0.5  # and from which on it is
FEWEST = 1000  # tokens, below which a split, or half of train, is too small to tell
_MOST = 1 << 22  # most tokens that are compared; more would add nothing


@dataclass(frozen=True)
class Likeness:
    """How a split of a corpus compares with its train split.

    Token frequencies also differ by chance, and the more so the fewer tokens there are. So a sample
    of the split and a sample of train, of the same size and each of whole documents, are both
    compared with the rest of train. Whatever their size, both divergences have the same expectation
    if all documents are of one source. Documents of one subject differ more than tokens drawn one
    by one, which samples of documents allow for. If train is a single document, or one long
    document of each source, its sample is of another source than the rest, `usual` is as large as a
    shift, and nothing is detected: preprocess such texts with shorter documents.

    Attributes:
        divergence: The divergence of the token frequencies of the split, or of a sample of its
            documents, from the frequencies of the rest of train, see `divergence`.
        usual: The same for documents drawn from train with the same number of tokens.
        shared: The share of its tokens in documents that train also has.
        passages: The share of its tokens in passages that train also has, see `shared_passages`;
            None if it is not known, as in archives of earlier versions.
    """

    divergence: float
    usual: float
    shared: float
    passages: float | None = None

    @property
    def shift(self) -> float:
        """The excess of the divergence over its value by chance at this size, in nats per token.

        It is 0 if there are too few tokens to tell, see `sample_size`.
        """
        return max(0.0, self.divergence - self.usual)


def divergence(counts: np.ndarray, reference: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of frequencies from those of a reference, in nats.

    One is added to each count, so that a symbol that the reference lacks does not cost infinity.

    Args:
        counts: How often each symbol occurs, (V,).
        reference: How often each symbol occurs in the reference, (V,).
    """
    shares, others = ((x + 1) / (x.sum() + len(x)) for x in (counts, reference))
    return float(shares @ np.log(shares / others))


def compare(train: IndexedDataset, other: IndexedDataset, vocabulary: Vocabulary) -> Likeness:
    """Return how a split compares with train; special symbols do not count."""
    is_text = ~np.isin(np.arange(len(vocabulary)), vocabulary.specials)
    tokens = sample_size(train, other)
    texts = _draw_tokens(other, tokens), _draw_tokens(train, tokens), train
    sample, chance, whole = (token_counts(text, len(vocabulary))[is_text] for text in texts)
    # Not train itself, which contains the sample: the larger the sample, the less it would diverge,
    # and not at all if it is all of train. A formula, such as (V - 1) / 2 (1 / n + 1 / m) for sizes
    # n and m, fails for samples of unequal size, because of rare symbols and the added one.
    rest = whole - chance
    value, usual = divergence(sample, rest), divergence(chance, rest)
    if tokens < FEWEST:
        usual = value  # too few to tell, so the shift is 0
    passages = shared_passages(train, other, vocabulary)
    return Likeness(value, usual, _shared_tokens(train, other), passages)


def sample_size(train: IndexedDataset, other: IndexedDataset) -> int:
    """Return how many tokens of a split are compared with the rest of train.

    It is the smaller of the split and half of train, at most _MOST. Fewer than FEWEST are too
    few to tell a difference from chance.
    """
    return min(len(other.tokens), len(train.tokens) // 2, _MOST)


def token_counts(data: IndexedDataset | np.ndarray, size: int) -> np.ndarray:
    """Return how often each of `size` symbols occurs, int64 (size,)."""
    tokens = data if isinstance(data, np.ndarray) else data.tokens
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=size)[:size]
    return counts


def _draw_tokens(data: IndexedDataset, tokens: int) -> np.ndarray:
    """Return `tokens` tokens, or all, of documents in random order, the same each time."""
    offsets = token_offsets(data, data.documents)
    order = np.random.default_rng(0).permutation(len(offsets) - 1)
    needed = int(np.searchsorted(np.cumsum(np.diff(offsets)[order]), tokens)) + 1
    parts = [data.tokens[offsets[i] : offsets[i + 1]] for i in order[:needed]]
    return np.concatenate(parts)[:tokens] if parts else np.zeros(0, np.int64)


def _shared_tokens(train: IndexedDataset, other: IndexedDataset) -> float:
    sizes = np.diff(token_offsets(other, other.documents))
    shared = np.isin(
        document_hashes(other, other.documents), document_hashes(train, train.documents)
    )
    return float(sizes[shared].sum() / max(sizes.sum(), 1))
