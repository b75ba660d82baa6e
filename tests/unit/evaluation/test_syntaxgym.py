"""SyntaxGym's suites: formulas, texts and regions, chance, with surprisals set by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.formulas import Formula, Region
from metaseq_lm.evaluation.suites import OVERALL, Results, build_suite
from metaseq_lm.evaluation.syntaxgym import _chance_of

VALUES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0, "e": 1.0005}


def holds(text: str) -> tuple[bool, bool]:
    """Evaluate a formula: the surprisal of each condition is in VALUES, of "*" ten times it."""

    def surprisal(region: Region) -> np.ndarray:
        factor = 10 if region.number == "*" else 1
        return np.array(VALUES[region.condition] * factor)

    outcome, tie = Formula(text, "here")(surprisal)
    return bool(outcome), bool(tie)


@pytest.mark.parametrize(
    "text, outcome, tie",
    [
        ("(1;%a%) < (1;%b%)", True, False),
        ("[(1;%a%) < (1;%b%)] & [(1;%c%) < (1;%d%)]", False, True),  # strict
        ("[(1;%a%) < (1;%b%)] | [(1;%c%) < (1;%d%)]", True, True),
        ("(1;%a%) = (1;%e%)", True, False),
        ("(1;%a%)=(1;%b%)", False, False),
        ("(*;%a%) > (1;%c%) + (1;%d%) + 1", True, False),
        ("[(1;%c%) - (1;%b%)] - (1;%a%) = 0", True, False),
        ("(1;%c%) - (1;%b%) - (1;%a%) = 0", True, False),  # from the left
        # The third of three comparisons counts.
        ("[(1;%a%) < (1;%b%)] & [(1;%b%) < (1;%c%)] & [(1;%c%) < (1;%a%)]", False, False),
        ("(1;%a%) < (1;%b%) & (1;%b%) < (1;%c%)", True, False),
    ],
)
def test_formulas(text: str, outcome: bool, tie: bool) -> None:
    assert holds(text) == (outcome, tie)


@pytest.mark.parametrize(
    "text, part",
    [
        ("(1;%a%) <", "ends"),
        ("[(1;%a%) < (1;%b%)", "not closed"),
        ("(1;%a%) + (1;%b%)", "compares nothing"),
        ("(1;%a%) < (1;%b%) < (1;%c%)", "between numbers only"),
        ("(1;%a%) & (1;%b%)", "between comparisons only"),
        ("(1;%a%) < x", "'x'"),
        ("(1;%a%) < (1;%b%) ]", "']'"),
    ],
)
def test_what_is_no_formula(text: str, part: str) -> None:
    with pytest.raises(MetaseqError, match=f"here: .*formula.*{part}"):
        Formula(text, "here")


def test_chance_is_that_of_conditions_in_any_order() -> None:
    def chance(text: str) -> float:
        return _chance_of(Formula(text, "here"), "abcd")

    assert chance("(1;%a%) < (1;%b%)") == 0.5
    two = chance("[(1;%a%) < (1;%b%)] & [(1;%c%) < (1;%d%)]")
    assert two == 0.25
    # The least of three.
    assert chance("[(1;%a%) < (1;%b%)] & [(1;%a%) < (1;%c%)]") == pytest.approx(1 / 3)
    with_interaction = "[(1;%a%) > (1;%b%)] & [(1;%a%) > (1;%c%)] & [[(1;%a%) - (1;%b%)] > "
    third = chance(with_interaction + "[(1;%c%) - (1;%d%)]]")
    assert 0.2 < third < 1 / 3


class Letters:
    """Gives each character but a space the log-probability -ln 2: a bit of surprisal each."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    def score_parts(
        self, sentences: Sequence[SourceSentence], parts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[np.ndarray | None]:
        sums: list[np.ndarray | None] = []
        for sentence, spans in zip(sentences, parts):
            texts = [sentence.text[first:end] for first, end in spans]
            self.asked.append((sentence.text, texts))
            counts = [len(text.replace(" ", "")) for text in texts]
            is_long = "too long" in sentence.text
            sums.append(None if is_long else -np.array(counts) * math.log(2))
        return sums


def suite_of(conditions: dict[str, list[str]], *formulas: str, items: int = 1) -> dict[str, Any]:
    regions = {
        name: [{"region_number": n, "content": text} for n, text in enumerate(texts, 1)]
        for name, texts in conditions.items()
    }
    item = {
        "item_number": 1,
        "conditions": [{"condition_name": n, "regions": r} for n, r in regions.items()],
    }
    return {
        "meta": {"name": "x", "metric": "sum"},
        "region_meta": {"1": "start"},
        "predictions": [{"type": "formula", "formula": text} for text in formulas],
        "items": [item] * items,
    }


def scored(folder: Path, probabilities: Letters, *options: str) -> Results:
    suite = build_suite("syntaxgym", options)
    results: Results = suite.score(suite.read(folder), probabilities)
    return results


COMMA = {"with": ["As he shot", ",", "", " the woman ", "yelled"], "without": ["As", "", "", "a"]}


def test_texts_regions_and_results(tmp_path: Path) -> None:
    content = suite_of(COMMA, "(4;%with%) > (4;%without%)", "(*;%with%) < (*;%without%)", items=3)
    (tmp_path / "npz.json").write_text(json.dumps(content, indent=1))
    one = suite_of(COMMA, "(3;%with%) > (3;%without%)")
    (tmp_path / "tie.json").write_text(json.dumps(one))
    letters = Letters()
    results = scored(tmp_path, letters, "first=2")
    assert letters.asked[0] == ("As he shot, the woman yelled", ["the woman"])
    assert letters.asked[2][1] == ["As he shot", ",", "", "the woman", "yelled"]
    metrics = {name: group.metrics for name, group in results.items()}
    assert {name: group.n for name, group in results.items()} == {
        OVERALL: 5,
        "npz": 4,
        "npz/1": 2,
        "npz/2": 2,
        "tie": 1,
    }
    assert metrics["npz/1"]["accuracy"] == 1 and metrics["npz/2"]["accuracy"] == 0
    # Two empty regions are equal, which no strict comparison allows.
    assert metrics["tie"] == {"accuracy": 0, "ties": 1}
    assert metrics[OVERALL]["accuracy"] == 2 / 5
    # Of the suites, of which one has two predictions.
    assert metrics[OVERALL]["accuracy_macro"] == (0.5 + 0) / 2
    assert "accuracy_macro" not in metrics["npz"]
    suite = build_suite("syntaxgym")
    references = suite.references(suite.read(tmp_path), tmp_path)
    assert references["npz/1"]["accuracy"]["chance"] == 0.5


def equal_and_not(folder: Path) -> Path:
    """Write two suites: "mixed", whose second prediction is an equality, and "plain"."""
    texts = {"a": ["ab", "c"], "b": ["a", "d"]}
    mixed = suite_of(texts, "(1;%a%) < (1;%b%)", "(2;%a%) = (2;%b%)", items=2)
    (folder / "mixed.json").write_text(json.dumps(mixed))
    comparison = suite_of(texts, "(1;%a%) > (1;%b%)")
    (folder / "plain.json").write_text(json.dumps(comparison))
    return folder


def test_equalities_are_a_detail_unless_they_are_asked_for(tmp_path: Path) -> None:
    """A model that ignores the context satisfies them, here one that counts letters."""
    folder = equal_and_not(tmp_path)
    results = scored(folder, Letters())
    assert results["mixed/2"].metrics == {"equality_accuracy": 1}
    assert results["mixed"].n == results["mixed/2"].n == 2 and results[OVERALL].n == 3
    assert results["mixed"].metrics["accuracy"] == 0
    assert results[OVERALL].metrics["accuracy"] == pytest.approx(1 / 3)
    assert results[OVERALL].metrics["accuracy_macro"] == 0.5
    official = scored(folder, Letters(), "equalities=true")
    assert official["mixed/2"].metrics["accuracy"] == 1
    assert official["mixed"].metrics["accuracy"] == 0.5
    assert official[OVERALL].metrics["accuracy_macro"] == 0.75


def test_no_chance_where_an_equality_counts(tmp_path: Path) -> None:
    folder = equal_and_not(tmp_path)
    suite = build_suite("syntaxgym")
    chance = {"chance": 0.5}
    means = {"accuracy": chance, "accuracy_macro": chance}
    assert suite.references(suite.read(folder), folder) == {
        OVERALL: means,
        **{name: {"accuracy": chance} for name in ("mixed", "mixed/1", "plain")},
    }
    suite = build_suite("syntaxgym", ["equalities=true"])
    assert suite.references(suite.read(folder), folder) == {
        name: {"accuracy": chance} for name in ("mixed/1", "plain")
    }


def test_a_suite_of_equalities_alone_is_refused(tmp_path: Path) -> None:
    content = suite_of({"a": ["a"], "b": ["b"]}, "(1;%a%) = (1;%b%)")
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="equalities=true counts them"):
        build_suite("syntaxgym").read(tmp_path)
    assert scored(tmp_path, Letters(), "equalities=true")[OVERALL].metrics["accuracy"] == 1


def test_an_item_with_a_sentence_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    long = suite_of({"a": ["too long"], "b": ["b"]}, "(1;%a%) > (1;%b%)")
    (tmp_path / "x.json").write_text(json.dumps(long))
    with pytest.raises(UsageError, match="'x' is empty"):
        scored(tmp_path, Letters())


@pytest.mark.parametrize(
    "change, part",
    [
        ({"predictions": [{"formula": "(1;%c%) > (1;%b%)"}]}, "no condition 'c'.*a, b"),
        ({"predictions": [{"formula": "(7;%a%) > (1;%b%)"}]}, "no region 7"),
        ({"predictions": []}, "no item with a prediction"),
        ({"meta": {"metric": "mean"}}, "metric is 'mean'"),
        ({"items": [{"conditions": [{"condition_name": "a"}]}]}, "items.0..*'regions'|regions"),
    ],
)
def test_mistakes_in_a_suite(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    content = suite_of({"a": ["x"], "b": ["y"]}, "(1;%a%) > (1;%b%)") | change
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(MetaseqError, match=f"x.json.*{part}"):
        build_suite("syntaxgym").read(tmp_path)
