"""The authors' rules of masking, row by row in loops, for comparison with the package's."""

from collections.abc import Sequence

import numpy as np

from metaseq_lm.data.corpus.units import SpanLengths


def spanbert_spans(words: Sequence[int], budget: int, generator: np.random.Generator) -> set[int]:
    """Return the tokens that SpanBERT's code masks (Joshi et al. 2020).

    `words` are the sizes of the words of a row in tokens, `budget` is the number of tokens.
    """
    word = np.repeat(np.arange(len(words)), words)
    lengths = SpanLengths()
    chosen: set[int] = set()
    while len(chosen) < budget:
        span = generator.choice(np.arange(1, 11), p=lengths.probabilities)
        anchor = generator.integers(len(word))
        if anchor in chosen:
            continue
        for at in np.flatnonzero((word >= word[anchor]) & (word < word[anchor] + span)):
            if len(chosen) < budget:
                chosen.add(int(at))
    return chosen


def gpt_bert_spans(length: int, rate: float, generator: np.random.Generator) -> np.ndarray:
    """Return which tokens GPT-BERT's code masks at the first reading of a text, boolean (length,).

    See Charpentier and Samuel 2024.
    """
    draws: list[float] = []
    while len(draws) < length:
        draws += [generator.random()] * generator.integers(1, 4)
    ratios = np.array(draws[:length])
    count = max(1, int(length * rate + generator.random()))
    return np.asarray(ratios <= np.sort(ratios)[count - 1])


def t5_noise(length: int, density: float, mean_span: float, generator: np.random.Generator) -> list:
    """Return the sizes of alternating rest and noise spans in T5's code (Raffel et al. 2020)."""
    noise = min(max(int(np.round(length * density)), 1), length - 1)
    spans = max(int(np.round(noise / mean_span)), 1)

    def parts(items: int) -> np.ndarray:
        ends = generator.permutation(np.arange(items - 1) < spans - 1)
        return np.bincount(np.cumsum(np.concatenate([[False], ends])))

    return [size for pair in zip(parts(length - noise), parts(noise)) for size in pair]
