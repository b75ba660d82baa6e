"""Generated text with word frequencies like a natural language."""

from __future__ import annotations

import numpy as np

SYLLABLES = [c + v for c in ("b", "d", "h", "l", "m", "n", "s", "st", "t", "th") for v in "aeiou"]
ENDINGS = ("", "n", "r", "s")
# Zipf-Mandelbrot: probability ~ (rank + SHIFT) ** -EXPONENT, without a last rank. With these values
# a million words have the same number of distinct words as a million words of English novels.
SHIFT, EXPONENT = 3.0, 1.42


def word(rank: int) -> str:
    """Return a word that depends only on the rank; frequent words are short."""
    rank, ending = divmod(rank, len(ENDINGS))
    parts = [ENDINGS[ending]]
    while True:
        rank, syllable = divmod(rank, len(SYLLABLES))
        parts.append(SYLLABLES[syllable])
        if not rank:
            return "".join(reversed(parts))
        rank -= 1


def ranks(count: int, random: np.random.Generator) -> np.ndarray:
    """Draw ranks by inverting the distribution function of its continuous form."""
    u = 1.0 - random.random(count)
    drawn = (1 + SHIFT) * u ** (-1 / (EXPONENT - 1)) - 1 - SHIFT
    return np.minimum(drawn, 1e12).astype(np.int64)


def lines(megabytes: float, seed: int = 1) -> list[str]:
    """Return paragraphs with sentences, commas, capitals and numbers."""
    random = np.random.default_rng(seed)
    known: dict[int, str] = {}
    found: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        drawn = ranks(120, random).tolist()
        signs = random.random(120).tolist()
        pieces, capital = [], True
        for rank, sign in zip(drawn, signs):
            text = known.get(rank) or known.setdefault(rank, word(rank))
            text = text.capitalize() if capital else text
            if sign < 0.01:
                text = str(rank)
            capital = sign > 0.94
            pieces.append(text + ("." if capital else "," if sign > 0.88 else ""))
        found.append(" ".join(pieces))
        size += len(found[-1]) + 1
    return found
