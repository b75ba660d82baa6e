"""The seven sets of the BabyLM challenge, of the official files and of those of the challenge."""

import json
from typing import Any

import pytest
from benchmark_files import BENCHMARKS, SUPERGLUE, glue_files, lines
from outcomes import expect

from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.loading import load_tokenizer

WSC = {
    "idx": 3,
    "text": "Ann's dog barked; she fed it.",
    "label": True,
    "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3},
}
# A row of the files of the challenge, the texts that it gives, and its label.
CHALLENGE: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "BoolQ": ({"question": "is it", "passage": "a - b", "label": 1}, ["is it", "a - b"], "true"),
    "MultiRC": (
        {"question": "q?", "answer": "yes", "paragraph": "p", "label": 0},
        ["Question: q? Answer: yes", "p"],
        "0",
    ),
    "WSC": (
        {"span2_text": "she", "span1_text": "Ann", "text": "Ann. she", "label": 0},
        ['Does "she" refer to "Ann" in this passage?', "Ann. she"],
        "false",
    ),
    "RTE": ({"sentence1": "a", "sentence2": "b", "label": 1}, ["a", "b"], "not_entailment"),
    "MRPC": ({"sentence1": "a", "sentence2": "b", "label": 1}, ["a", "b"], "1"),
    "QQP": ({"question1": "a", "question2": "b", "label": 0}, ["a", "b"], "0"),
    "MNLI": ({"premise": "a", "hypothesis": "b", "label": 2}, ["a", "b"], "contradiction"),
}


def texts_of(data: LabelledSet, row: int) -> list[str]:
    tokenizer = load_tokenizer(data.folder.parent)
    return [tokenizer.decode(column[row]) for column in data.inputs]


@pytest.mark.parametrize("task", CHALLENGE)
def test_files_of_the_challenge(run, task):
    """They are those of all tasks in one folder, and their rows have no index."""
    fields, texts, label = CHALLENGE[task]
    files = {}
    for name, (other, _, _) in CHALLENGE.items():
        for split in ("train", "valid"):
            files[f"{name.lower()}.{split}.jsonl"] = lines(other, other)
    code, out, folder = run(f"babylm/{task}", files)
    assert code == 0, out
    for split in ("train", "valid"):
        data = LabelledSet(folder, split)
        assert len(data) == 2 and data.form == "pair" and data.benchmark.name == f"babylm/{task}"
        assert texts_of(data, 1) == texts
        assert data.labels is not None and data.label_names[data.labels[1]] == label


@pytest.mark.parametrize(
    "task, row, texts",
    [
        ("BoolQ", SUPERGLUE["BoolQ"], ["is it", "a -- b"]),
        ("MultiRC", SUPERGLUE["MultiRC"], ["Question: q? Answer: yes", "p"]),
        ("WSC", WSC, ['Does "she" refer to "Ann" in this passage?', WSC["text"]]),
    ],
)
def test_official_files_of_superglue(run, task, row, texts):
    other = json.loads(json.dumps(row).replace('"idx": 3', '"idx": 4'))
    code, out, folder = run(
        f"babylm/{task}", {"train.jsonl": lines(row, other), "val.jsonl": lines(row)}
    )
    assert code == 0, out
    data = LabelledSet(folder, "train")
    assert texts_of(data, 0) == texts and data.form == "pair"
    assert len(data) == (4 if task == "MultiRC" else 2)
    assert data.rows is not None and data.rows[0]["idx"] == (4 if task == "MultiRC" else 3)


@pytest.mark.parametrize("task", ["RTE", "MRPC", "QQP", "MNLI"])
def test_official_files_of_glue(run, task):
    """Nothing is doubled, and only train and valid are read."""
    code, out, folder = run(f"babylm/{task}", glue_files(task))
    assert code == 0, out
    data = LabelledSet(folder, "train")
    assert len(data) == 3 and texts_of(data, 2) == ['train "2a', 'train "2b']
    assert BENCHMARKS[f"babylm/{task}"].files.keys() == {"train", "valid"}
    assert "test" not in out.lower().replace("tests", "")


def test_a_folder_of_other_files(run):
    code, out, _ = run("babylm/RTE", {"boolq.train.jsonl": lines(CHALLENGE["BoolQ"][0])})
    assert code == 1 and "files of babylm/RTE" in out


def test_options_that_do_not_apply(run):
    files = {"mrpc.train.jsonl": lines(CHALLENGE["MRPC"][0])}
    expect(run("babylm/MRPC", files, "--no-double"), 2, "not doubled")
    expect(run("babylm/WSC", files, "--as-text"), 2, "babylm/WSC has no")
