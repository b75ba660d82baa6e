"""Probabilities of sentences by n-grams of a run's corpus, as references for the run's scores."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.ngrams import NGram, sequences_of
from metaseq_lm.data.storage.indexed import IndexedDataset, prefix_path
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.suites import SentenceScore

NGRAM = "ngram"
_ORDERS = {"unigram": 1, NGRAM: 3}  # the name of a reference, and its n


class _NGramProbabilities:
    """The log-probabilities of sentences' tokens given earlier ones, as `SentenceProbabilities`.

    Args:
        tokenizer: Splits sentences into tokens.
        ngram: The n-grams of such tokens.
        order: The n to use.
    """

    def __init__(self, tokenizer: Tokenizer, ngram: NGram, order: int) -> None:
        self.tokenizer, self.ngram, self.order = tokenizer, ngram, order

    def score(self, sentences: Sequence[SourceSentence]) -> list[SentenceScore]:
        values, sizes = encode_texts(self.tokenizer, [sentence.text for sentence in sentences])
        log_probs = self.ngram.token_log_probs(values, sizes, self.order)
        ends = np.cumsum(sizes)[:-1]
        return list(map(SentenceScore, np.split(values, ends), np.split(log_probs, ends)))

    def score_changed(
        self, pairs: Sequence[tuple[SourceSentence, SourceSentence]]
    ) -> list[tuple[SentenceScore, SentenceScore]]:
        scores = self.score(list(chain.from_iterable(pairs)))
        changed = []
        for pair in zip(scores[::2], scores[1::2]):
            differs = pair[0].tokens != pair[1].tokens
            good, bad = (SentenceScore(x.tokens[differs], x.log_probs[differs]) for x in pair)
            changed.append((good, bad))
        return changed

    def score_parts(
        self, sentences: Sequence[SourceSentence], parts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[np.ndarray]:
        sums = []
        for sentence, score, spans in zip(sentences, self.score(sentences), parts):
            starts = np.array(self.tokenizer.encode_with_offsets(sentence.text)[1], np.int64)
            inside = [(starts >= first) & (starts < end) for first, end in spans]
            sums.append(np.array([score.log_probs[choice].sum() for choice in inside]))
        return sums


@lru_cache(maxsize=1)
def ngrams_of(data: Path) -> dict[str, _NGramProbabilities]:
    """Return the probabilities by n-grams of the train split of a corpus, by name in `_ORDERS`.

    {} for a folder without such a split.

    Args:
        data: The data folder, with the tokenizer.

    Raises:
        MetaseqError: A file is damaged.
    """
    if not all(prefix_path(data / "train", ending).is_file() for ending in (".idx", ".bin")):
        return {}
    tokenizer = load_tokenizer(data)
    tokens, sizes = sequences_of(IndexedDataset(data / "train"))
    ngram = NGram(tokens, sizes, len(tokenizer.vocabulary))
    return {name: _NGramProbabilities(tokenizer, ngram, n) for name, n in _ORDERS.items()}
