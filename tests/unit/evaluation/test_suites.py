"""Suites: their options, and minimal pairs scored with probabilities that are set by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.options import value_of
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.minimal_pairs import MinimalPair, _pair_metrics, read_pairs
from metaseq_lm.evaluation.suites import (
    OVERALL,
    GroupMetrics,
    Results,
    SentenceScore,
    build_suite,
    mean_by_group,
)


class Probabilities:
    """Gives each sentence the log-probability in a table, None to others."""

    def __init__(self, table: dict[str, float]) -> None:
        self.table = table

    def score(self, sentences: Sequence[SourceSentence]) -> list[SentenceScore | None]:
        return [
            SentenceScore(np.array([0]), np.array([self.table[sentence.text]]))
            if sentence.text in self.table
            else None
            for sentence in sentences
        ]


def pair(good: str, bad: str, *groups: str) -> MinimalPair:
    return MinimalPair(SourceSentence(good, "here"), SourceSentence(bad, "here"), groups)


def scored(pairs: list[MinimalPair], table: dict[str, float]) -> Results:
    results: Results = build_suite("pairs").score(pairs, Probabilities(table))
    return results


def test_changed_tokens_alone_can_be_compared() -> None:
    class Whole(Probabilities):
        """Prefers "b" by the sums, and "a" where the sentences differ."""

        def score_changed(
            self, pairs: Sequence[tuple[SourceSentence, SourceSentence]]
        ) -> list[tuple[SentenceScore, SentenceScore] | None]:
            letters = [(good.text[0], bad.text[0]) for good, bad in pairs]
            return [
                None if "c" in (good, bad) else (self.letter(good), self.letter(bad))
                for good, bad in letters
            ]

        def letter(self, letter: str) -> SentenceScore:
            return SentenceScore(np.array([0]), np.array([float(letter == "a")]))

    pairs = [pair("ax", "bx", "letters"), pair("ax", "cx", "letters")]
    probabilities = Whole({"ax": -2.0, "bx": -1.0})
    by_sentence = build_suite("pairs").score(pairs, probabilities)
    by_change = build_suite("pairs", ["compare=changed"]).score(pairs, probabilities)
    assert by_sentence["overall"].metrics["accuracy"] == 0
    assert by_change["overall"].metrics["accuracy"] == 1 and by_change["overall"].n == 1


def test_accuracy_by_group() -> None:
    pairs = [
        pair("a", "b", "binding", "one"),
        pair("b", "a", "binding", "one"),
        pair("a", "a", "binding", "two"),
        pair("a", "b", "islands", "one"),
    ]
    results = scored(pairs, {"a": -1.0, "b": -2.0})
    counts = {name: group.n for name, group in results.items()}
    assert counts == {
        "overall": 4,
        "binding": 3,
        "binding/one": 2,
        "binding/two": 1,
        "islands": 1,
        "islands/one": 1,
    }
    accuracy = {name: group.metrics["accuracy"] for name, group in results.items()}
    # A tie counts 1/2.
    assert accuracy["binding/two"] == 0.5 and results["binding/two"].metrics["ties"] == 1
    assert accuracy["binding"] == 0.5 and accuracy[OVERALL] == 2.5 / 4
    # The mean over the narrowest groups, whatever their sizes.
    assert results[OVERALL].metrics["accuracy_macro"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert results["binding"].metrics["accuracy_macro"] == 0.5
    assert "accuracy_macro" not in results["binding/one"].metrics
    # The strict value counts it as wrong.
    assert results[OVERALL].metrics["strict_accuracy"] == 2 / 4
    assert next(iter(results)) == OVERALL


def test_the_macro_mean_weighs_paradigms_alike_whatever_their_sizes() -> None:
    pairs = [pair("a", "b", "A")] * 4 + [pair("b", "a", "B")]
    metrics = scored(pairs, {"a": -1.0, "b": -2.0})[OVERALL].metrics
    assert (metrics["accuracy"], metrics["accuracy_macro"]) == (0.8, 0.5)


def test_constant_probabilities_are_at_chance() -> None:
    pairs = [pair(str(n), str(n + 1), "all") for n in range(10)]
    table = {str(n): -3.0 for n in range(11)}
    metrics = scored(pairs, table)[OVERALL].metrics
    assert metrics["accuracy"] == metrics["soft_accuracy"] == 0.5 and metrics["ties"] == 10


def test_chance_of_an_accuracy_and_of_its_mean_over_groups() -> None:
    pairs = [pair("a", "b", "binding", "one"), pair("a", "b", "binding", "two")]
    references = build_suite("pairs", ["groups=[term,UID]"]).references(pairs, Path("none"))
    of_one = {name: {"chance": 0.5} for name in ("accuracy", "soft_accuracy")}
    of_several = {**of_one, "accuracy_macro": {"chance": 0.5}}
    assert references == {
        OVERALL: of_several,
        "binding": of_several,
        "binding/one": of_one,
        "binding/two": of_one,
    }


def test_soft_accuracy_is_the_mean_sigmoid_and_does_not_overflow() -> None:
    margins = np.array([0.5, -2.0, 3.0])
    expected = (1 / (1 + np.exp(-margins))).mean()
    assert _pair_metrics(margins)["soft_accuracy"] == pytest.approx(expected, rel=1e-12)
    assert _pair_metrics(np.array([-1e5, 1e5]))["soft_accuracy"] == 0.5


def test_pairs_that_are_too_long_are_left_out_and_an_empty_group_is_refused() -> None:
    pairs = [pair("a", "b", "short"), pair("a", "too long", "short")]
    assert scored(pairs, {"a": 0.0, "b": -1.0})[OVERALL].n == 1
    with pytest.raises(UsageError, match="'long'.*--too-long cut"):
        scored([*pairs, pair("a", "too long", "long")], {"a": 0.0, "b": -1.0})


def test_files_and_fields_of_pairs(tmp_path: Path) -> None:
    rows = [
        {"sentence_good": f"g{n}", "sentence_bad": f"b{n}", "linguistics_term": "t", "UID": f"u{n}"}
        for n in range(2)
    ]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "two.tsv").write_text("sentence_good\tsentence_bad\nx\ty\n")
    by_file = build_suite("pairs").read(tmp_path)
    assert [(p.good.text, p.bad.text, p.groups) for p in by_file] == [
        ("g0", "b0", ("one",)),
        ("g1", "b1", ("one",)),
        ("x", "y", ("two",)),
    ]
    assert by_file[1].good.location.endswith("one.jsonl:2")
    assert [p.groups for p in build_suite("blimp").read(tmp_path / "one.jsonl")] == [
        ("t", "u0"),
        ("t", "u1"),
    ]
    assert len(build_suite("blimp", ["first=1", "groups=[]"]).read(tmp_path)) == 2
    with pytest.raises(MetaseqError, match=r"two.tsv:2.*'linguistics_term'.*groups=\[\]"):
        build_suite("blimp").read(tmp_path)


def test_blimp_by_field_and_by_the_phenomena_of_the_paper(tmp_path: Path) -> None:
    terms = {
        "principle_A_case_2": ("syntax/semantics", "binding"),
        "principle_A_case_1": ("syntax_semantics", "binding"),
        "passive_1": ("syntax", "argument_structure"),
        "animate_subject_trans": ("syntax", "s-selection"),
    }
    for paradigm, (field, term) in terms.items():
        row = {"sentence_good": "a", "sentence_bad": "b", "field": field, "UID": paradigm}
        (tmp_path / f"{paradigm}.jsonl").write_text(json.dumps(row | {"linguistics_term": term}))

    def groups(*options: str) -> set[str]:
        suite = build_suite("blimp", options)
        results = suite.score(suite.read(tmp_path), Probabilities({"a": -1.0, "b": -2.0}))
        return {name for name in results if name != OVERALL and name.count("/") == 0}

    assert groups() == {"argument_structure", "binding", "s-selection"}
    assert groups("phenomena=paper") == {"argument_structure", "binding"}
    assert groups("groups=[field,linguistics_term,UID]") == {"syntax", "syntax_semantics"}


def test_the_supplement_has_sentences_only(tmp_path: Path) -> None:
    for name in ("hypernym", "turn_taking"):
        (tmp_path / f"{name}.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b"}\n')
    pairs = build_suite("blimp_supplement").read(tmp_path)
    assert [pair.groups for pair in pairs] == [("hypernym",), ("turn_taking",)]


def test_invalid_utf8(tmp_path: Path) -> None:
    good = b'{"sentence_good": "a", "sentence_bad": "b"}\n'
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(good + good.replace(b"a", b"\xff", 1))
    with pytest.raises(MetaseqError, match="pairs.jsonl:2.*0xff"):
        read_pairs(str(file))
    pairs, skipped = read_pairs(str(file), policy="skip")
    assert len(pairs) == 1 and skipped == 1


def test_means_by_group() -> None:
    items = [(["x"], {"accuracy": 1.0}), (["x", "y"], {"accuracy": 0.0}), ([], {"accuracy": 0.5})]
    results = mean_by_group(items)
    by_group = {name: (group.n, group.metrics["accuracy"]) for name, group in results.items()}
    assert by_group == {OVERALL: (3, 0.5), "x": (2, 0.5), "y": (1, 0.0)}
    assert mean_by_group([]) == {OVERALL: GroupMetrics(0, {})}


def test_options() -> None:
    suite = build_suite("pairs", ["groups=[kind,UID]", "first=3"])
    assert suite.config.groups == ("kind", "UID") and suite.config.first == 3
    assert suite.name == "pairs"
    for option, words in {
        "firsst=3": "Did you mean 'first'",
        "first=x": "first=x",
        "first=-1": "at least 0",
        "on_bad_utf8=drop": "replace, skip, fail",
    }.items():
        with pytest.raises(UsageError, match=words):
            build_suite("pairs", [option])
    with pytest.raises(UsageError, match="'blmp'.*'blimp'"):
        build_suite("blmp")


@pytest.mark.parametrize(
    "hint, text, value",
    [
        (int, "3", 3),
        (bool, "true", True),
        (float | None, "null", None),
        (float | None, "1e-3", 0.001),
        (tuple[str, ...], "a, b", ("a", "b")),
        (tuple[str, ...], "[]", ()),
        (tuple[int, ...], "[1,2]", (1, 2)),
    ],
)
def test_values_of_options(hint: object, text: str, value: object) -> None:
    assert value_of(hint, text) == value


def test_the_hash_of_the_data_is_that_of_the_files_that_are_read(tmp_path: Path) -> None:
    suite = build_suite("pairs")
    (tmp_path / "a.jsonl").write_text("one")
    before = suite.data_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not read")
    assert suite.data_hash(tmp_path) == before
    (tmp_path / "a.jsonl").write_text("two")
    assert suite.data_hash(tmp_path) != before
