"""Predictions of several runs put together: means by hand, the choice of runs, what is refused."""

import math

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.evaluation.predictions import best_indices, mean_answers, mean_scores


def member(
    *scores: list[float], gold: str = "ynn", order: tuple[int, ...] = (0, 1, 2)
) -> list[dict]:
    rows = [
        {"index": i, "gold": g, "predicted": "?", "scores": s}
        for i, (g, s) in enumerate(zip(gold, scores))
    ]
    return [rows[i] for i in order if i < len(rows)]


FIRST = member([0.9, 0.1], [0.4, 0.6], [0.5, 0.5])
SECOND = member([0.2, 0.8], [0.1, 0.9], [0.7, 0.3], order=(2, 0, 1))
THIRD = member([0.1, 0.9], [0.4, 0.6], [0.0, 1.0], order=(1, 2, 0))


def test_the_mean_of_probabilities() -> None:
    """Row by row whatever the order they came in; not a vote, which would make 1 of row 0 too."""
    samples, scores = mean_scores([FIRST, SECOND, THIRD])
    assert samples.tolist() == [0, 1, 2]
    np.testing.assert_allclose(scores, [[0.4, 0.6], [0.3, 0.7], [0.4, 0.6]], atol=1e-15)
    _, pair = mean_scores([FIRST, SECOND])
    assert pair.argmax(1).tolist() == [0, 1, 0]
    np.testing.assert_array_equal(mean_scores([THIRD])[1], [[0.1, 0.9], [0.4, 0.6], [0.0, 1.0]])


def test_the_mean_of_real_values() -> None:
    members = [[{"index": 0, "gold": 2.5, "scores": [value]}] for value in (1.0, 2.0, 4.5)]
    assert mean_scores(members)[1].tolist() == [[2.5]]


@pytest.mark.parametrize(
    "other, words",
    [
        (member([0.2, 0.8], [0.1, 0.9]), "3 and 2 rows"),
        (member([0.2, 0.8], [0.1, 0.9], [0.7, 0.3], gold="yyn"), "row 1"),
        (member([0.2, 0.8], [0.1, 0.9], [0.7, 0.2, 0.1]), "row 2"),
    ],
)
def test_other_rows_are_refused(other: list[dict], words: str) -> None:
    with pytest.raises(MetaseqError, match=f"run 1.*run 2.*{words}"):
        mean_scores([FIRST, other])


def test_the_best_runs() -> None:
    values = [0.5, 0.9, math.nan, 0.7, 0.9]
    assert best_indices(values, 2, lower_is_better=False) == [1, 4]
    assert best_indices(values, 1, lower_is_better=False) == [1]
    assert best_indices(values, 2, lower_is_better=True) == [0, 3]
    assert best_indices(values, 4, lower_is_better=True) == [0, 1, 3, 4]
    assert best_indices(values, 5, lower_is_better=False) == [0, 1, 2, 3, 4]
    for most in (0, 6, -1):
        with pytest.raises(UsageError, match=r"\b5 runs"):
            best_indices(values, most, True)


def answers(odds: float, *texts: tuple[str, float], question: str = "q") -> dict:
    """One row of SQuAD's predictions; scores are logarithms of probabilities, shifted by 7."""
    scores = [math.log(p) + 7 if p else -1e4 for _, p in texts]
    nbest = [{"text": t, "score": s, "probability": p} for (t, p), s in zip(texts, scores)]
    said = {"predicted": "?", "null_odds": odds, "nbest": nbest}
    return {"index": 0, "id": question, "question": "?", "gold": ["a"]} | said


def test_answers_by_their_mean_probability() -> None:
    """b is nobody's first choice but one's; a text that a member does not list has 0 there."""
    one = answers(math.log(0.9 / 0.1), ("a", 0.5), ("b", 0.4), ("c", 0.1))
    two = answers(math.log(0.2 / 0.8), ("d", 0.55), ("b", 0.45))
    [row] = mean_answers([[one], [two]], 20)
    found = [(a["text"], a["probability"]) for a in row["nbest"]]
    assert [text for text, _ in found] == ["b", "d", "a", "c"]
    assert [p for _, p in found] == pytest.approx([0.425, 0.275, 0.25, 0.05])
    assert all(a["score"] == pytest.approx(math.log(a["probability"])) for a in row["nbest"])
    # The mean of 0.9 and 0.2, not of their odds, which would be above 0.55.
    assert row["null_odds"] == pytest.approx(math.log(0.55 / 0.45))
    assert (row["id"], row["gold"]) == ("q", ["a"])
    assert [a["text"] for a in mean_answers([[one], [two]], 2)[0]["nbest"]] == ["b", "d"]
    assert mean_answers([[one]], 1) == [one]


def test_answers_far_out() -> None:
    """Odds of 1000 and texts of probability 0, where plain exponentials overflow."""
    one, two = answers(1000.0, ("a", 1.0), ("b", 0.0)), answers(-1000.0)
    [row] = mean_answers([[one], [two]], 20)
    assert row["null_odds"] == pytest.approx(0, abs=1e-12)
    assert [a["text"] for a in row["nbest"]] == ["a", "b"]
    assert [a["probability"] for a in row["nbest"]] == pytest.approx([0.5, 0.0])
    [row] = mean_answers([[answers(-800.0)], [answers(-900.0)]], 20)
    assert row["null_odds"] == pytest.approx(-800 - math.log(2)) and row["nbest"] == []


def test_other_questions_are_refused() -> None:
    with pytest.raises(MetaseqError, match="run 1.*run 2.*row.0"):
        mean_answers([[answers(0.0)], [answers(0.0, question="other")]], 20)
