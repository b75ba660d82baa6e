"""SQuAD: answers from the scored spans of windows, and the official scores, in per cent.

Scores follow SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018); answers are decoded as in BERT and
ELECTRA. `golds` maps the id of each question to its gold answers, none for a question without an
answer; `predictions` maps ids to texts, "" for "no answer". Version 1.1 also scores MRQA.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metaseq_lm.config.suites import SquadSuiteConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import SUITES
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.squad.windows import SquadWindows
from metaseq_lm.evaluation.suites import (
    OVERALL,
    PREDICTIONS,
    GroupMetrics,
    Results,
    Suite,
)

_Golds = Mapping[str, Sequence[str]]
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Scores of the official scripts in per cent; the others are counts and thresholds.
_PER_CENT = re.compile("((HasAns|NoAns|best)_)?(exact|f1)")
_GROUPS = ("HasAns", "NoAns")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _normalize_answer(text: str) -> str:
    """Lower-case, then drop ASCII punctuation, articles and surplus white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """Return 1 if both texts are equal after normalisation, else 0."""
    return float(_normalize_answer(gold) == _normalize_answer(predicted))


def token_f1(gold: str, predicted: str) -> float:
    """Return the F1 of two bags of normalised words; 0 if either is empty (version 1.1)."""
    first, second = _normalize_answer(gold).split(), _normalize_answer(predicted).split()
    shared = sum((Counter(first) & Counter(second)).values())
    if not shared:
        return 0.0
    return 2 * shared / (len(first) + len(second))


def _token_f1_or_empty(gold: str, predicted: str) -> float:
    """Return `token_f1`, but 1 if both are empty after normalisation, as in version 2.0."""
    if not _normalize_answer(gold) and not _normalize_answer(predicted):
        return 1.0
    return token_f1(gold, predicted)


def _best_of(
    score: Callable[[str, str], float], golds: _Golds, predictions: Mapping[str, str]
) -> dict[str, float]:
    """Return the best score of each predicted question over its gold answers."""
    scores = {}
    for question, answers in golds.items():
        if question in predictions:
            scores[question] = max(score(gold, predictions[question]) for gold in answers)
    return scores


def _squad_v1(golds: _Golds, predictions: Mapping[str, str]) -> dict[str, float]:
    """Return "exact" and "f1" over all questions, their "total", and the number "missing".

    A question without a prediction counts as 0. Raises MetaseqError if there are no questions, or
    one has no gold answer.
    """
    if not golds or not all(golds.values()):
        raise MetaseqError("version 1.1 needs at least one question, and gold answers for each")
    exact = _best_of(exact_match, golds, predictions)
    f1 = _best_of(token_f1, golds, predictions)
    return {
        "exact": 100 * sum(exact.values()) / len(golds),
        "f1": 100 * sum(f1.values()) / len(golds),
        "total": len(golds),
        "missing": len(golds) - len(exact),
    }


def _squad_v2(
    golds: _Golds,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    threshold: float,
) -> dict[str, float]:
    """Return the scores of version 2.0: over all, HasAns, NoAns, and with the best threshold.

    `null_odds` above `threshold` count as a prediction of no answer. Gold answers that normalise to
    nothing are left out; a question with none left has the answer "". As in the official script, a
    question without a prediction is left out of all means; "missing" counts these. best_exact and
    best_f1 use the best threshold for the gold answers. Raises MetaseqError if no question has a
    prediction, or a prediction has no odds.
    """
    non_empty = {}
    for question, answers in golds.items():
        non_empty[question] = list(filter(_normalize_answer, answers)) or [""]
    exact = _best_of(exact_match, non_empty, predictions)
    f1 = _best_of(_token_f1_or_empty, non_empty, predictions)
    if not exact or not exact.keys() <= null_odds.keys():
        raise MetaseqError("version 2.0 needs predictions, and the odds of no answer for each")
    answerable = {question: bool(golds[question]) for question in exact}
    odds = {question: null_odds[question] for question in null_odds if question in exact}
    scores: dict[str, float] = {}
    for name, raw in (("exact", exact), ("f1", f1)):
        final = dict(raw)
        for question in raw:
            if odds[question] > threshold:
                final[question] = float(not answerable[question])
        scores[name] = _mean_percent(final.values())
        for group, has_answer in (("HasAns", True), ("NoAns", False)):
            chosen = [score for q, score in final.items() if answerable[q] is has_answer]
            if chosen:
                scores[f"{group}_{name}"] = _mean_percent(chosen)
    for name, raw in (("exact", exact), ("f1", f1)):
        best = _best_threshold(raw, predictions, odds, answerable)
        scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best
    counts = {"total": len(exact), "missing": len(golds) - len(exact)}
    groups = {"HasAns_total": sum(answerable.values())}
    groups["NoAns_total"] = len(exact) - groups["HasAns_total"]
    return scores | counts | groups


def _mean_percent(scores: Iterable[float]) -> float:
    values = list(scores)
    return 100 * sum(values) / len(values)


def _best_threshold(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    odds: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """Return the best mean score of any threshold on the no-answer odds, and that threshold."""
    current = best = float(sum(not has for has in answerable.values()))
    threshold = 0.0
    # The sweep begins with "no question has an answer" (threshold 0 if nothing is better) and adds
    # questions by rising odds, equal odds in the order of `odds`. Like the official script, it may
    # stop between equal odds, at a score that no threshold reaches.
    for question in sorted(odds, key=odds.__getitem__):
        if answerable[question]:
            current += scores[question]
        elif predictions[question]:
            current -= 1
        if current > best:
            best, threshold = current, odds[question]
    return 100 * best / len(scores), threshold


# ------------------------------------------------------------------------ the suites


@dataclass(frozen=True)
class _SquadItems:
    """The gold answers of each question by id; `answerable_only` if each has at least one."""

    golds: _Golds
    answerable_only: bool


@dataclass(frozen=True)
class PredictedAnswers:
    """The best text for each question by id, and the odds that it has no answer."""

    texts: Mapping[str, str]
    null_odds: Mapping[str, float]


class SquadSuite(Suite[_SquadItems, PredictedAnswers]):
    """Questions with answers in a text: exact match and F1, with and without an answer."""

    patterns = ("manifest.json", "{split}.*")
    takes = PREDICTIONS

    def read(self, folder: Path) -> _SquadItems:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name that of a set, DATA/NAME")
        data = SquadSet(folder, self.config.split)
        if self.name != _suite_of(data):
            raise UsageError(
                f"--data {folder}: is no set of {self.name}; score it with --suite "
                f"{_suite_of(data)}"
            )
        return _SquadItems(data.golds(), data.answerable_only)

    def from_predictions(self, rows: Sequence[dict[str, Any]]) -> PredictedAnswers:
        texts = {row["id"]: best_text(row) for row in rows}
        return PredictedAnswers(texts, {row["id"]: row["null_odds"] for row in rows})

    def score(self, items: _SquadItems, probabilities: PredictedAnswers) -> Results:
        """Return the official scores as shares, so that one report holds them with other tasks'."""
        texts = probabilities.texts
        if items.answerable_only:
            scores = _squad_v1(items.golds, texts)
        else:
            threshold = self.config.null_threshold
            scores = _squad_v2(items.golds, texts, probabilities.null_odds, threshold)
        shares = dict(scores)
        for name in filter(_PER_CENT.fullmatch, scores):
            shares[name] /= 100
        results = {OVERALL: GroupMetrics(int(shares["total"]), shares)}
        for group in _GROUPS:
            if count := int(shares.get(f"{group}_total", 0)):
                metrics = {name: shares[f"{group}_{name}"] for name in ("exact", "f1")}
                results[group] = GroupMetrics(count, metrics)
        return results


def _suite_of(data: SquadSet) -> str:
    return f"squad/{data.version}"


def squad_results(data: SquadSet, answers: PredictedAnswers, null_threshold: float) -> Results:
    """Return the results of a set with its suite."""
    config = SquadSuiteConfig(data.split, null_threshold)
    items = _SquadItems(data.golds(), data.answerable_only)
    results: Results = SUITES.build(_suite_of(data), config).score(items, answers)
    return results


def best_text(row: dict[str, Any]) -> str:
    """Return the best text of a prediction row, "" if it has none."""
    text: str = row["nbest"][0]["text"] if row["nbest"] else ""
    return text


# ------------------------------------------------------------------------ decoding
# Shapes: B windows, K starts of a beam and K ends for each.


class WindowAnswers(NamedTuple):
    """The answers of one window: a score of "no answer", and (score, text), best first."""

    window: int
    null: float
    texts: list[tuple[float, str]]


@dataclass
class Answers:
    """Answers to a question from its windows: the lowest "no answer" score, and (score, text)."""

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

    `spans` are positions in its row, starts (K,) with ends (K, K), and scores (K, K). A span lies
    within the context, has at most `longest` tokens, and starts at a token that no other window has
    with more context. Equal scores keep the order of the beam.
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
    texts: dict[str, float] = {}
    for a, b in zip(i[order], j[order]):
        if len(texts) == n_best:
            break
        text = windows.data.text(question, shift + int(first[a, 0]), shift + int(last[a, b]))
        if text:
            texts.setdefault(text, float(scores[a, b]))
    return [(score, text) for text, score in texts.items()]


def merge_answers(
    windows: SquadWindows, answers: Iterable[WindowAnswers], n_best: int
) -> dict[int, Answers]:
    """Merge the answers of windows, given in any order, to the answers to each question."""
    by_question: dict[int, Answers] = {}
    for window in sorted(answers, key=lambda one: one.window):
        merged_answers = by_question.setdefault(int(windows.question[window.window]), Answers())
        merged_answers.null = min(merged_answers.null, window.null)
        merged_answers.texts += window.texts
    for merged_answers in by_question.values():
        best: dict[str, float] = {}
        for score, text in sorted(merged_answers.texts, key=lambda pair: -pair[0]):
            best.setdefault(text, score)
        merged_answers.texts = [(score, text) for text, score in best.items()][:n_best]
    return by_question
