"""From the best spans of windows to the best texts of questions, as BERT and ELECTRA decode SQuAD.

Shapes: B windows, K starts of a beam and ends for each.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from metaseq_lm.data.squad.windows import SquadWindows


@dataclass(frozen=True)
class WindowAnswers:
    """What a window says of its question: a score of "no answer", and (score, text), best first."""

    window: int
    null: float
    texts: list[tuple[float, str]]


@dataclass
class Answers:
    """What all windows of a question say: the lowest score of "no answer", and (score, text)."""

    null: float = math.inf
    texts: list[tuple[float, str]] = field(default_factory=list)

    @property
    def best(self) -> str:
        """The best text, "" if there is none."""
        return self.texts[0][1] if self.texts else ""

    @property
    def best_score(self) -> float:
        """The score of the best text, 0 if there is none."""
        return self.texts[0][0] if self.texts else 0.0

    @property
    def probabilities(self) -> list[float]:
        """The softmax of the scores of the texts."""
        weights = [math.exp(score - self.best_score) for score, _ in self.texts]
        return [weight / sum(weights) for weight in weights]


def window_texts(
    windows: SquadWindows,
    window: int,
    spans: tuple[np.ndarray, np.ndarray, np.ndarray],
    n_best: int,
    longest: int,
) -> list[tuple[float, str]]:
    """Return the `n_best` different texts of a window with their scores, best first.

    `spans` are positions in its row, starts (K,) and ends (K, K) for each, and scores (K, K). A
    span lies within the context, has at most `longest` tokens, and starts at a token that no other
    window shows with more context. Equal scores keep the order of the beam.
    """
    starts, ends, scores = spans
    begin, length = int(windows.context_at(np.array([window]))[0]), int(windows.length[window])
    if not length:
        return []
    first, last = starts[:, None] - begin, ends - begin
    good = (first >= 0) & (first < length) & (last < length)
    good &= (last >= first) & (last - first < longest)
    good &= windows.max_context(window)[np.clip(first, 0, length - 1)]
    i, j = np.nonzero(good)
    order = np.argsort(-scores[i, j], kind="stable")
    question, shift = int(windows.question[window]), int(windows.start[window])
    found: dict[str, float] = {}
    for a, b in zip(i[order], j[order]):
        if len(found) == n_best:
            break
        text = windows.data.text(question, shift + int(first[a, 0]), shift + int(last[a, b]))
        if text:
            found.setdefault(text, float(scores[a, b]))
    return [(score, text) for text, score in found.items()]


def merged(
    windows: SquadWindows, found: Iterable[WindowAnswers], n_best: int
) -> dict[int, Answers]:
    """Return the answers of each question from those of all its windows, in any order."""
    together: dict[int, Answers] = {}
    for window in sorted(found, key=lambda answers: answers.window):
        answers = together.setdefault(int(windows.question[window.window]), Answers())
        answers.null = min(answers.null, window.null)
        answers.texts += window.texts
    for answers in together.values():
        best: dict[str, float] = {}
        for score, text in sorted(answers.texts, key=lambda pair: -pair[0]):
            best.setdefault(text, score)
        answers.texts = [(score, text) for text, score in best.items()][:n_best]
    return together
