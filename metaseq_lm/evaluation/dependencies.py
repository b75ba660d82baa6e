"""Scores of dependency trees: the share of words with the right head (UAS), and relation too (LAS).

As in the code of Clark et al. 2018 words of punctuation, known by their form alone, do not count;
nothing makes a tree of heads that are none.
"""

from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TreeScores:
    """How many words count, have the right head, and the right head and relation."""

    words: int = 0
    heads: int = 0
    both: int = 0

    @property
    def uas(self) -> float:
        """The share of the words with the right head, from 0 to 1; nan if no word counts."""
        return self.heads / self.words if self.words else nan

    @property
    def las(self) -> float:
        """The share of the words with the right head and relation; nan if no word counts."""
        return self.both / self.words if self.words else nan


Tree = tuple[npt.ArrayLike, npt.ArrayLike]


def tree_scores(gold: Tree, predicted: Tree, counted: npt.ArrayLike | None = None) -> TreeScores:
    """Return the scores of words end to end; a tree is heads (words,) and relations (words,).

    `counted` (words,) says which words count, all if None. ValueError for arrays of unequal length.
    """
    true, found = ([np.asarray(part) for part in tree] for tree in (gold, predicted))
    keep = np.ones(len(true[0]), bool) if counted is None else np.asarray(counted, bool)
    if len({len(part) for part in (*true, *found, keep)}) != 1:
        raise ValueError(
            f"{[len(part) for part in (*true, *found, keep)]} gold heads and relations, predicted heads and "
            "relations, and words that count"
        )
    right = keep & (true[0] == found[0])
    both = right & (true[1] == found[1])
    return TreeScores(int(keep.sum()), int(right.sum()), int(both.sum()))
