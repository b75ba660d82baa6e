"""COMPS, EWoK, entity tracking and WUG tests, in the official forms, with scores set by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.completions import _world_knowledge, first_is_best
from metaseq_lm.evaluation.minimal_pairs import _pair_metrics
from metaseq_lm.evaluation.suites import OVERALL, Results, SentenceScore, build_suite


class Table:
    """Gives a part, or a sentence, the score in a table, by the text that ends with "|" before the
    part; None to others.
    """

    def __init__(self, table: dict[str, float]) -> None:
        self.table = table

    def score_parts(
        self, sentences: Sequence[SourceSentence], parts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[np.ndarray | None]:
        keys = []
        for sentence, ((first, end),) in zip(sentences, parts, strict=True):
            assert end == len(sentence.text)
            keys.append(sentence.text[:first] + "|" + sentence.text[first:])
        return [np.array([self.table[key]]) if key in self.table else None for key in keys]

    def score(self, sentences: Sequence[SourceSentence]) -> list[SentenceScore | None]:
        texts = [sentence.text for sentence in sentences]
        return [SentenceScore(np.zeros(1), np.array([self.table[text]])) for text in texts]


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def scored(suite: str, folder: Path, table: dict[str, float], *options: str) -> Results:
    built = build_suite(suite, options)
    results: Results = built.score(built.read(folder), Table(table))
    return results


def test_comps_scores_the_property_only(tmp_path: Path) -> None:
    phrase = {"property_phrase": "has a neck."}
    llama = {"prefix_acceptable": "A llama", "prefix_unacceptable": "A snake", **phrase}
    same = {"prefix_acceptable": "A llama", "prefix_unacceptable": "A llama", **phrase}
    write(tmp_path / "comps_base.jsonl", llama, llama, llama)
    write(tmp_path / "comps_wugs.jsonl", same)
    table = {"A llama |has a neck.": -1.0, "A snake |has a neck.": -2.0}
    results = scored("comps", tmp_path, table)
    metrics = results[OVERALL].metrics
    assert metrics["accuracy"] == 3.5 / 4 and metrics["strict_accuracy"] == 3 / 4
    assert metrics["accuracy_macro"] == 0.75 and metrics["ties"] == 1
    assert results["comps_base"].n == 3
    suite = build_suite("comps")
    references = suite.references(suite.read(tmp_path), tmp_path)
    assert references["comps_wugs"]["accuracy"] == {"chance": 0.5}


def test_ewok_by_context_and_by_target(tmp_path: Path) -> None:
    item = {"Domain": "social", "Context1": "C.", "Context2": "D.", "Target1": "t", "Target2": "u"}
    write(tmp_path / "social.jsonl", item)
    # "u" is a frequent sentence: its context tells, comparing it with "t" does not.
    table = {"C.| t": -5.0, "D.| t": -6.0, "C.| u": -2.0, "D.| u": -1.0}
    metrics = scored("ewok", tmp_path, table)["social"].metrics
    assert metrics["context_accuracy"] == 1 and metrics["target_accuracy"] == 0
    half = scored("ewok", tmp_path, table | {"D.| u": -3.0, "C.| u": -5.0})[OVERALL].metrics
    assert half["context_accuracy"] == half["context_accuracy_macro"] == 1
    assert half["target_accuracy"] == 0.5 and half["strict_target_accuracy"] == 0
    assert (half["target_ties"], half["context_ties"]) == (1, 0)
    one = scored("ewok", tmp_path, table | {"D.| u": -3.0})[OVERALL].metrics
    assert one["context_accuracy"] == 0.5


def test_chance_of_means_of_ewok(tmp_path: Path) -> None:
    item = {"Context1": "C.", "Context2": "D.", "Target1": "t", "Target2": "u"}
    file = write(tmp_path / "all.jsonl", item | {"Domain": "a"}, item | {"Domain": "b"})
    suite = build_suite("ewok")
    references = suite.references(suite.read(file), file)
    kinds = [f"{kind}_accuracy" for kind in ("context", "target")]
    for name in kinds + [f"{kind}_macro" for kind in kinds] + [f"soft_{kind}" for kind in kinds]:
        assert references[OVERALL][name] == {"chance": 0.5}
    assert not {name for name in references["a"] if "strict" in name or "ties" in name}


def test_entity_tracking_by_operations(tmp_path: Path) -> None:
    prefix = "Box 0 holds the cup. Box 0 contains"
    item = {"input_prefix": prefix, "options": [" the cup.", " the pen.", " nothing."]}
    write(
        tmp_path / "regular.jsonl", item | {"numops": 0}, item | {"numops": 0}, item | {"numops": 1}
    )
    write(tmp_path / "ambiref.jsonl", item | {"numops": 1, "input_prefix": prefix + " now"})
    table = {f"{prefix}| the cup.": -1.0, f"{prefix}| the pen.": -2.0, f"{prefix}| nothing.": -3.0}
    now = {text.replace("contains|", "contains now|"): -1.0 for text in table}
    results = scored("entity_tracking", tmp_path, table | now)
    # All options of the last item are equal.
    assert results["ambiref/1_ops"].metrics["accuracy"] == pytest.approx(1 / 3)
    assert results["regular"].metrics["accuracy_macro"] == 1 and results["regular/0_ops"].n == 2
    assert results[OVERALL].metrics["accuracy_macro"] == pytest.approx((1 + 1 + 1 / 3) / 3)
    suite = build_suite("entity_tracking", ["first=1"])
    items = suite.read(tmp_path)
    references = suite.references(items, tmp_path)
    assert len(items) == 2
    for name in ("accuracy", "accuracy_macro"):
        assert references[OVERALL][name]["chance"] == pytest.approx(1 / 3)
        assert references["regular"][name]["chance"] == pytest.approx(1 / 3)
    with pytest.raises(UsageError, match="'ambiref' is empty"):
        scored("entity_tracking", tmp_path, table)


def test_a_tie_of_k_best_counts_one_kth() -> None:
    assert first_is_best(np.array([1.0, 0.0, 1.0]))["accuracy"] == 0.5
    assert first_is_best(np.array([0.0, 1.0, 1.0]))["accuracy"] == 0
    assert first_is_best(np.array([2.0, 1.0, 1.0])) == {
        "accuracy": 1,
        "strict_accuracy": 1,
        "soft_accuracy": pytest.approx(math.e / (math.e + 2)),
        "ties": 0,
    }


def test_soft_accuracies_are_shares_of_the_right_one() -> None:
    """Of two that is the sigmoid of the margin, as of a minimal pair; scores may be large."""
    for margin in (-3.0, 0.25, 900.0):
        soft = first_is_best(np.array([margin - 1e3, -1e3]))["soft_accuracy"]
        assert soft == pytest.approx(_pair_metrics(np.array([margin]))["soft_accuracy"])
    assert first_is_best(np.zeros(5))["soft_accuracy"] == pytest.approx(1 / 5)
    # Target 1 and 2 in context 1, then in context 2.
    metrics = _world_knowledge(np.array([math.log(3), 0.0, 0.0, 0.0]))
    assert metrics["soft_target_accuracy"] == pytest.approx(3 / 4)
    assert metrics["soft_context_accuracy"] == pytest.approx((3 / 4 + 1 / 2) / 2)


def test_ties_of_ewok_are_items() -> None:
    assert _world_knowledge(np.zeros(4))["context_ties"] == 1
    assert _world_knowledge(np.array([1.0, 0, 0, 0]))["context_ties"] == 1
    assert _world_knowledge(np.array([1.0, 0, 0, 1]))["context_ties"] == 0


def test_wug_is_a_rank_correlation(tmp_path: Path) -> None:
    rows = [("a\tb", 0.9), ("c\td", 0.1), ("e\tf", 0.5)]
    file = write(tmp_path / "wug.jsonl", *({"sentences": s, "ratio": str(r)} for s, r in rows))
    # The shares of the first are 3/4, 1/4 and 1/2.
    table = {"a": math.log(3), "b": 0.0, "c": 0.0, "d": math.log(3), "e": 1.0, "f": 1.0}
    results = scored("wug", file, table)
    assert results["wug"].metrics == {"spearman": pytest.approx(1)} and results[OVERALL].n == 3
    suite = build_suite("wug")
    guess = {"chance": 0.0}
    assert suite.references(suite.read(file), file) == {
        OVERALL: {"spearman": guess, "spearman_macro": guess},
        "wug": {"spearman": guess},
    }
    # Probabilities are compared within an item only.
    higher = table | {"c": 10.0, "d": 10 + math.log(3)}
    assert scored("wug", file, higher)[OVERALL].metrics["spearman"] == pytest.approx(1)
    swapped = table | {"a": 0.0, "b": math.log(4)}
    assert scored("wug", file, swapped)[OVERALL].metrics["spearman"] == pytest.approx(-0.5)


@pytest.mark.parametrize(
    "suite, row, part",
    [
        ("comps", {"prefix_acceptable": "a"}, "'property_phrase'"),
        ("ewok", {"Context1": "a", "Target1": "b"}, "'Target2'"),
        ("entity_tracking", {"options": ["a"], "input_prefix": "b"}, "two texts or more"),
        ("entity_tracking", {"options": ["a", "c"], "input_prefix": "b"}, "'numops'"),
        ("wug", {"sentences": "a b", "ratio": 0.5}, "no tab"),
        ("wug", {"sentences": "a\tb", "ratio": "half"}, "no number: 'half'"),
    ],
)
def test_mistakes_in_a_line(tmp_path: Path, suite: str, row: dict[str, Any], part: str) -> None:
    file = write(tmp_path / "items.jsonl", row)
    with pytest.raises(MetaseqError, match=f"items.jsonl:1: .*{part}"):
        build_suite(suite).read(file)
