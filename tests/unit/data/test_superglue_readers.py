"""Official files of SuperGLUE: what arrives, and what a wrong row is called."""

import json
import re

import numpy as np
import pytest
from benchmark_files import BENCHMARKS, SUPERGLUE, changed, lines, texts, without
from hypothesis import given
from hypothesis import strategies as st
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks.superglue import _find_words
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import verify
from metaseq_lm.data.tokenizers.base import token_span

EXPECTED = {
    "BoolQ": ([["a -- b", "is it"]], [1], [{"idx": 3}]),
    "CB": ([["a", "b"]], [2], [{"idx": 3}]),
    "COPA": ([["It fell. What happened as a result?", "a", "b"]], [1], [{"idx": 3}]),
    "MultiRC": (
        [["p", "q? yes"], ["p", "q? no"]],
        [1, 0],
        [{"idx": 4, "passage": 3, "question": 9}, {"idx": 5, "passage": 3, "question": 9}],
    ),
    "ReCoRD": (
        [["Ann and Bob met Ann.", "Ann met Bob"], ["Ann and Bob met Ann.", "Bob met Bob"]],
        [1, 0],
        [{"idx": 7, "passage": 3, "answers": ["Ann"], "entity": e} for e in ("Ann", "Bob")],
    ),
    "RTE": ([["a", "b"]], [1], [{"idx": 3}]),
    "WiC": ([["I ran.", "He runs it"]], [0], [{"idx": 3}]),
    "WSC": ([["Ann's dog barked; she fed it."]], [1], [{"idx": 3}]),
    "AX-b": ([["a", "b"]], [0], [{"idx": 3}]),
    "AX-g": ([["a", "b"]], [0], [{"idx": 3, "pair_id": 5}]),
}
FORMS = {"COPA": "choices", "WiC": "spans", "WSC": "spans"}


@pytest.mark.parametrize("task", EXPECTED)
def test_superglue(run, corpus, task):
    name = next(iter(BENCHMARKS[f"superglue/{task}"].files.values()))
    code, output, folder = run(f"superglue/{task}", {name: lines(SUPERGLUE[task])})
    assert code == 0, output
    data = LabelledSet(folder, "test" if task.startswith("AX") else "train")
    expected, labels, rows = EXPECTED[task]
    assert texts(data, corpus) == expected
    assert data.labels.tolist() == labels
    assert data.rows == rows
    assert data.form == FORMS.get(task, "pair")
    assert verify(folder) == []
    assert main(["doctor", str(folder)]) == 0


@pytest.mark.parametrize("task", ["BoolQ", "COPA", "MultiRC", "ReCoRD", "WSC"])
def test_superglue_test_split_without_labels(run, corpus, task):
    bare = json.loads(json.dumps(without(task, "label")))
    if task == "MultiRC":
        for answer in bare["passage"]["questions"][0]["answers"]:
            del answer["label"]
    if task == "ReCoRD":
        del bare["qas"][0]["answers"]
    code, output, folder = run(f"superglue/{task}", {"test.jsonl": lines(bare)})
    assert code == 0 and "no labels" in output
    data = LabelledSet(folder, "test")
    assert data.labels is None and texts(data, corpus) == EXPECTED[task][0]
    assert main(["doctor", str(folder)]) == 0
    expect(run(f"superglue/{task}", {"val.jsonl": lines(bare)}), 1, "val.jsonl:1:", "'label'")


def test_spans_are_tokens(run):
    """With one token per character, token spans are character spans."""
    _, _, folder = run("superglue/WiC", {"train.jsonl": lines(SUPERGLUE["WiC"])})
    data = LabelledSet(folder, "train")
    assert data.spans.dtype == np.int64
    assert data.spans.tolist() == [[[0, 2, 5], [1, 3, 7]]]
    _, _, folder = run("superglue/WSC", {"train.jsonl": lines(SUPERGLUE["WSC"])})
    assert LabelledSet(folder, "train").spans.tolist() == [[[0, 0, 3], [0, 18, 21]]]


@pytest.mark.parametrize(
    "wanted, index, found, remark",
    [
        ("the dog", 1, "The  dog", ""),
        ("dog", 2, "dog", ""),
        ("Ann", 5, "Ann", ""),
        ("bit", 4, "bit", "'and', not 'bit'; the nearest is word 3"),
        ("cat", 4, "and", "these are taken"),
        ("Ann twice today", 6, "twice.", "these are taken"),
        ("dog", 7, "", "7 words, the span 1"),
        ("", 0, "", "7 words, the span 0"),
        ("dog", -1, "", "7 words, the span 1"),
    ],
)
def test_find_words(wanted, index, found, remark):
    text = "So The  dog bit\tand Ann's twice."
    start, end, said = _find_words(text, wanted, index)
    assert text[start:end] == found
    assert said.endswith(remark) and bool(said) == bool(remark)


def test_the_nearest_of_several_places_is_taken():
    text = "it saw us and he saw it run"
    assert _find_words(text, "it", 5)[:2] == (21, 23) and _find_words(text, "it", 2)[:2] == (0, 2)


def test_span_text_elsewhere_is_a_remark_with_its_place(run):
    target = {"span1_text": "dog", "span1_index": 2, "span2_text": "she", "span2_index": 3}
    record = changed("WSC", target=target)
    code, output, folder = run("superglue/WSC", {"train.jsonl": "\n" + lines(record)})
    assert code == 0 and "train.jsonl:2: target.span1_index 2" in output
    assert re.search("'barked;'.*'dog'", output) and "1 span_text_elsewhere" in output
    assert LabelledSet(folder, "train").spans[0, 0].tolist() == [0, 6, 9]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_token_span_holds_exactly_the_tokens_that_share_a_character(widths, data):
    ends = np.cumsum(widths)
    starts = ends - widths
    total = int(ends[-1])
    first = data.draw(st.integers(0, max(total - 1, 0)))
    end = data.draw(st.integers(first + 1, total + 1))
    wanted = set(range(first, end))
    touching = [i for i in range(len(widths)) if wanted & set(range(starts[i], ends[i]))]
    begin, stop = token_span(starts, ends, first, end)
    inside = [i for i in range(begin, stop) if widths[i]]
    assert inside == touching
    assert not touching or (widths[begin] and widths[stop - 1])


def broken(task, path, value):
    record = json.loads(json.dumps(SUPERGLUE[task]))
    at = record
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return lines(record)


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("BoolQ", "{\n", "train.jsonl:1: not valid JSON"),
        ("BoolQ", "[1]\n", "train.jsonl:1: no objects but values"),
        ("BoolQ", lines(SUPERGLUE["BoolQ"]) * 2, "train.jsonl:2: idx 3 occurs twice"),
        ("BoolQ", lines(without("BoolQ", "label")), "train.jsonl:1: no field 'label'"),
        ("BoolQ", lines(changed("BoolQ", label="maybe")), "train.jsonl:1: label 'maybe'"),
        ("BoolQ", lines(changed("BoolQ", label=[1])), "train.jsonl:1: label [1] is not a single"),
        ("BoolQ", lines(changed("BoolQ", passage=3)), ":1: field 'passage' is not a text"),
        ("BoolQ", lines(changed("BoolQ", idx="x")), ":1: field 'idx' is not a whole"),
        ("COPA", lines(changed("COPA", question="why")), ":1: question 'why' is not 'cause' or"),
        ("COPA", lines(changed("COPA", label=2)), "train.jsonl:1: label '2' is not one of 0, 1"),
        ("MultiRC", broken("MultiRC", ("passage", "text"), None), "no field 'passage.text'"),
        (
            "MultiRC",
            broken("MultiRC", ("passage", "questions", 0, "answers", 1, "text"), None),
            ":1: no field 'passage.questions[0].answers[1].text'",
        ),
        ("MultiRC", broken("MultiRC", ("passage", "questions"), [1]), "does not hold objects only"),
        (
            "MultiRC",
            broken("MultiRC", ("passage", "questions", 0, "answers", 1, "idx"), 4),
            ":1: passage 3, question 9, idx 4 occurs twice",
        ),
        (
            "ReCoRD",
            broken("ReCoRD", ("passage", "entities", 1, "end"), 99),
            "passage.entities[1] from 8",
        ),
        ("ReCoRD", broken("ReCoRD", ("qas", 0, "query"), "who"), "query has no @placeholder"),
        ("WiC", lines(changed("WiC", end1=99)), "from character 2 to 99 of sentence1"),
        ("WiC", lines(changed("WiC", start2=2, end2=3)), "2 to 3 of sentence2"),
        ("WSC", broken("WSC", ("target", "span2_index"), 40), ":1: target.span2_index 40:"),
        ("WSC", broken("WSC", ("target",), "x"), ":1: field 'target' is not an object"),
    ],
)
def test_wrong_superglue_files(run, task, content, message):
    code, output, folder = run(f"superglue/{task}", {"train.jsonl": content})
    assert message in output
    assert code == 1
    assert not folder.exists()


def test_span_without_a_token(run, corpus, tmp_path):
    """A word pattern can leave characters out; a span of nothing else is named."""
    (tmp_path / "train.txt").write_text("ran run\n")
    words = tmp_path / "words"
    arguments = ["preprocess", "--trainpref", f"{tmp_path}/train.txt", "--destdir", str(words)]
    assert main([*arguments, "--tokenizer", "word", "--word-pattern", "[a-z]+"]) == 0
    record = changed("WiC", sentence1="run !", start1=4, end1=5)
    options = ("--destdir", str(words))
    code, output, _ = run("superglue/WiC", {"train.jsonl": lines(record)}, *options)
    assert code == 1 and re.search(r"train\.jsonl:1:.*'!'.*4 to 5", output)
