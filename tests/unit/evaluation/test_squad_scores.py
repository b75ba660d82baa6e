"""SQuAD's scores against a second implementation written from their definition, and by hand."""

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation.squad import (
    _normalize_answer,
    _squad_v1,
    _squad_v2,
    _token_f1_or_empty,
    exact_match,
    token_f1,
)

word = st.sampled_from(
    [
        "a",
        "an",
        "the",
        "The",
        "cat",
        "Cat.",
        "theory",
        "U.S.",
        "--",
        "!",
        "été",
        "½",
        "«a»",
        "　",
        "don't",
    ]
)
text = st.lists(word, max_size=4).flatmap(
    lambda words: st.sampled_from([" ", "  ", "-", "\t"]).map(lambda gap: gap.join(words))
)


def naive_words(answer: str) -> list[str]:
    """Lower case, no ASCII punctuation, no articles that stand as words of letters and digits."""
    letters = [c for c in answer.lower() if c not in string.punctuation]
    words, current = [], ""
    for c in [*letters, " "]:
        # A word ends where letters, digits and "_" (all gone above) meet something else.
        if c.isalnum():
            current += c
            continue
        words += [current] if current not in ("", "a", "an", "the") else [" "] * bool(current)
        current = ""
        words.append(c)
    return "".join(words).split()


def naive_f1(gold: str, predicted: str) -> float:
    """Precision and recall of words, each used once."""
    left, shared = naive_words(gold), 0
    guessed = naive_words(predicted)
    for one in guessed:
        if one in left:
            left.remove(one)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(guessed), shared / len(naive_words(gold))
    return 2 * precision * recall / (precision + recall)


@given(gold=text, predicted=text)
@settings(max_examples=400, deadline=None)
@example(gold="the", predicted="a")
@example(gold="", predicted="...")
@example(gold="The U.S.", predicted="us")
def test_one_answer(gold: str, predicted: str) -> None:
    same = naive_words(gold) == naive_words(predicted)
    assert _normalize_answer(gold) == " ".join(naive_words(gold))
    assert exact_match(gold, predicted) == same
    assert token_f1(gold, predicted) == pytest.approx(naive_f1(gold, predicted))
    empty = not naive_words(gold) or not naive_words(predicted)
    wanted = float(same) if empty else naive_f1(gold, predicted)
    assert _token_f1_or_empty(gold, predicted) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The  Cat, (a) DOG!", "cat dog"),
        ("theatre an-d", "theatre and"),
        ("a\u00a0b", "b"),
        ("“a” – the é", "“ ” – é"),
        ("The", ""),
        ("...", ""),
        ("A.N. Other", "other"),
        ("the_end", "theend"),
    ],
)
def test_normal_forms(answer: str, normal: str) -> None:
    assert _normalize_answer(answer) == normal


questions = st.dictionaries(
    st.sampled_from([f"q{n}" for n in range(8)]),
    st.tuples(
        st.lists(text, max_size=3),  # gold
        st.none() | text,  # predicted
        st.sampled_from([-3.5, -2.75, -1.0, 0.0, 2.0]) | st.floats(-4, 4),  # odds of no answer
    ),
    min_size=1,
)


def official_sweep(
    scores: dict[str, float], said: dict[str, str], odds: dict[str, float], asked: dict
) -> tuple[float, float]:
    """The search of the official script, step by step: it may stop between questions of equal odds.

    It starts with the questions that have no answer, all of them taken as right.
    """
    order = list(odds)
    for end in range(len(order)):  # a stable sort: equal odds stay as they came
        at = end
        while at and odds[order[at - 1]] > odds[order[at]]:
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    score = best = sum(1 for question in scores if not asked[question][0])
    threshold = 0.0
    for question in order:
        if question not in scores:
            continue
        if asked[question][0]:
            score += scores[question]
        elif said[question]:
            score -= 1
        if score > best:
            best, threshold = score, odds[question]
    return 100 * best / len(scores), threshold


def naive_v2(asked: dict, threshold: float) -> dict[str, float]:
    """The definition, threshold by threshold."""
    scores: dict[str, dict[str, list[float]]] = {"exact": {}, "f1": {}}
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for question, (golds, predicted, odds) in asked.items():
        if predicted is None:
            continue
        kept = [g for g in golds if naive_words(g)] or [""]
        pairs = {
            "exact": max(naive_words(g) == naive_words(predicted) for g in kept),
            "f1": max(
                (
                    naive_f1(g, predicted)
                    if naive_words(g) and naive_words(predicted)
                    else float(naive_words(g) == naive_words(predicted))
                )
                for g in kept
            ),
        }
        group = "HasAns" if golds else "NoAns"
        for name, value in pairs.items():
            final = float(not golds) if odds > threshold else float(value)
            for key in ("", f"{group}_"):
                scores[name].setdefault(key, []).append(final)
            raw[name][question] = float(value)
    found = {
        key + name: 100 * sum(values) / len(values)
        for name in scores
        for key, values in scores[name].items()
    }
    said = {question: predicted for question, (_, predicted, _) in asked.items()}
    odds = {question: one for question, (_, _, one) in asked.items()}
    for name, values in raw.items():
        found[f"best_{name}"], found[f"best_{name}_thresh"] = official_sweep(
            values, said, odds, asked
        )
    return found


@given(asked=questions)
@settings(max_examples=300, deadline=None)
def test_version_2(asked: dict) -> None:
    golds = {q: g for q, (g, _, _) in asked.items()}
    predictions = {q: p for q, (_, p, _) in asked.items() if p is not None}
    odds = {q: o for q, (_, _, o) in asked.items()}
    if not predictions:
        with pytest.raises(MetaseqError, match="needs predictions"):
            _squad_v2(golds, predictions, odds, -2.75)
        return
    found = _squad_v2(golds, predictions, odds, -2.75)
    wanted = naive_v2(asked, -2.75)
    # Sums of F1 that are equal but for rounding may stop at another question.
    del wanted["best_f1_thresh"]
    assert wanted.keys() <= found.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name
    assert found["total"] + found["missing"] == len(asked)
    assert found["HasAns_total"] + found["NoAns_total"] == found["total"]


@given(asked=questions)
@settings(max_examples=100, deadline=None)
def test_version_1(asked: dict) -> None:
    golds = {q: g or ["x"] for q, (g, _, _) in asked.items()}
    predictions = {q: p for q, (_, p, _) in asked.items() if p is not None}
    found = _squad_v1(golds, predictions)
    exact, f1 = [], []
    for q, answers in golds.items():
        said = predictions.get(q)
        exact.append(said is not None and any(naive_words(a) == naive_words(said) for a in answers))
        f1.append(0.0 if said is None else max(naive_f1(a, said) for a in answers))
    assert found["exact"] == pytest.approx(100 * sum(exact) / len(exact))
    assert found["f1"] == pytest.approx(100 * sum(f1) / len(f1))
    assert found["missing"] == len(golds) - len(predictions) and found["total"] == len(golds)


def test_the_threshold_is_applied() -> None:
    """-2.75 itself is not above it; of what is, only the questions without answer are right."""
    golds = {"a": ["x"], "b": ["y"], "c": [], "d": []}
    said = {"a": "x", "b": "y", "c": "z", "d": "z"}
    odds = {"a": -2.75, "b": -2.7, "c": 3.0, "d": -9.0}
    found = _squad_v2(golds, said, odds, -2.75)
    assert (found["exact"], found["HasAns_exact"], found["NoAns_exact"]) == (50.0, 50.0, 50.0)
    # Letting d, a and b through: two right, c right, d wrong.
    assert (found["best_exact"], found["best_exact_thresh"]) == (75.0, -2.7)
    nothing = _squad_v2({"c": []}, {"c": "z"}, {"c": -9.0}, 0.0)
    assert (nothing["best_f1"], nothing["best_f1_thresh"], nothing["f1"]) == (100.0, 0.0, 0.0)
    assert "HasAns_f1" not in nothing


def test_questions_of_equal_odds() -> None:
    """The sweep goes through them one by one, so their order counts: no threshold reaches 75 %."""
    golds = {"a": ["x"], "b": ["y"], "c": [], "d": []}
    said = {"a": "x", "b": "y", "c": "z", "d": "z"}
    for order, best in (("abcd", 100.0), ("acbd", 75.0), ("cdab", 50.0)):
        odds = dict.fromkeys(order, 1.0)
        found = _squad_v2(golds, said, odds, 0.0)
        asked = {q: (golds[q], said[q], 1.0) for q in order}
        wanted = official_sweep({"a": 1, "b": 1, "c": 0, "d": 0}, said, odds, asked)
        assert (found["best_exact"], found["best_exact_thresh"]) == wanted
        assert wanted == (best, 1.0 if best > 50 else 0.0)


def test_version_1_has_no_case_for_empty_answers() -> None:
    """Both sides empty once normalised: exact, but F1 0; version 2.0 gives 1."""
    assert _squad_v1({"a": ["the"]}, {"a": "."})["f1"] == 0
    assert _squad_v1({"a": ["the"]}, {"a": "."})["exact"] == 100
    assert _token_f1_or_empty("the", ".") == 1
    with pytest.raises(MetaseqError, match="gold answers"):
        _squad_v1({"a": []}, {})
    with pytest.raises(MetaseqError, match="odds of"):
        _squad_v2({"a": ["x"]}, {"a": "x"}, {}, 0.0)
