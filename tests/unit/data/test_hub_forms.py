"""Benchmarks as the `datasets` library exports them give the sets that the official files give."""

import json
from pathlib import Path

import pytest
from benchmark_files import ANSWERS, PASSAGE, QUERY, SUPERGLUE, glue_files, lines, texts

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks import GLUE, find_benchmark, hub_forms
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.squad.files import SquadReader
from metaseq_lm.data.storage.text_files import TextFile

SPAN_LISTS = {
    "text": ["Ann", "Bob", "Ann"],
    "start": [s["start"] for s in PASSAGE["entities"]],
    "end": [s["end"] + 1 for s in PASSAGE["entities"]],
}
FLAT = {
    "MultiRC": [
        {
            "paragraph": "p",
            "question": "q?",
            "answer": answer["text"],
            "idx": {"paragraph": 3, "question": 9, "answer": answer["idx"]},
            "label": answer["label"],
        }
        for answer in ANSWERS
    ],
    "ReCoRD": [
        {
            "passage": PASSAGE["text"],
            "query": QUERY["query"],
            "entities": ["Ann", "Bob"],
            "entity_spans": SPAN_LISTS,
            "answers": ["Ann"],
            "idx": {"passage": 3, "query": 7},
        }
    ],
    "WSC": [
        {
            **{k: v for k, v in SUPERGLUE["WSC"].items() if k != "target"},
            **SUPERGLUE["WSC"]["target"],
            "label": 1,
        }
    ],
}


def number(name, label):
    """Return the number that an export has for a label of the official file."""
    word = str(label).lower() if isinstance(label, bool) else str(label)
    return next(int(n) for n, label in hub_forms.label_words(name).items() if label == word)


def content(data, corpus):
    labels = None if data.labels is None else data.labels.tolist()
    spans = None if data.spans is None else data.spans.tolist()
    return texts(data, corpus), labels, spans, data.label_names


@pytest.mark.parametrize("task", SUPERGLUE)
def test_superglue(run, corpus, task):
    split = "test" if task.startswith("AX") else "train"
    file = f"{task}.jsonl" if task.startswith("AX") else "train.jsonl"
    record = SUPERGLUE[task]
    code, output, folder = run(f"superglue/{task}", {file: lines(record)})
    assert code == 0, output
    data = LabelledSet(folder, split)
    expected, rows = content(data, corpus), data.rows
    flat = FLAT.get(task) or [record | {"label": number(f"superglue/{task}", record["label"])}]
    code, output, folder = run(f"superglue/{task}", {file: lines(*flat)})
    assert code == 0, output
    data = LabelledSet(folder, split)
    assert content(data, corpus) == expected and data.rows == rows


@pytest.mark.parametrize("task", sorted(set(GLUE) - {"AX"}))
@pytest.mark.parametrize("named", [False, True])
def test_glue(run, corpus, task, named):
    """Of the split valid, which is not doubled; numbers and names of labels are the same."""
    name, benchmark = f"glue/{task}", find_benchmark(f"glue/{task}")
    official = glue_files(task)
    code, output, folder = run(name, official)
    assert code == 0, output
    expected = content(LabelledSet(folder, "valid"), corpus)
    rows = []
    head = () if task != "CoLA" else benchmark.header
    table = [line.split("\t") for line in official[benchmark.files["valid"]].splitlines()]
    head = head or table.pop(0)
    for i, fields in enumerate(table):
        row = dict(zip(head, fields))
        label = row[benchmark.label]
        value = float(label) if task == "STS-B" else number(name, label)
        if named and task != "STS-B":
            value = hub_forms.NAMES[name][value]
        columns = hub_forms.TEXTS.get(name, benchmark.texts)
        rows.append(
            {c: row[o] for c, o in zip(columns, benchmark.texts)} | {"label": value, "idx": i}
        )
    hidden = -1.0 if task == "STS-B" else -1
    source = Path(folder).parent.parent / f"export-{task}-{named}"
    source.mkdir()
    valid = "validation_matched" if task == "MNLI" else "validation"
    test = "test_matched" if task == "MNLI" else "test"
    (source / "train.jsonl").write_text(lines(*rows))
    (source / f"{valid}.jsonl").write_text(lines(*rows))
    (source / f"{test}.jsonl").write_text(lines(*({**row, "label": hidden} for row in rows)))
    call = ["preprocess", "--benchmark", name, "--source", str(source), "--destdir", str(corpus)]
    assert main([*call, "--labelled", folder.name, "--overwrite"]) == 0
    data = LabelledSet(folder, "valid")
    assert content(data, corpus) == expected and [row["idx"] for row in data.rows] == [0, 1, 2]
    assert LabelledSet(folder, "test").labels is None
    doubled = 2 if benchmark.doubled else 1
    assert len(LabelledSet(folder, "train")) == 3 * doubled


def test_squad(tmp_path):
    rows = [
        {
            "id": str(i),
            "title": "t",
            "context": context,
            "question": "q?",
            "answers": {"text": answers, "answer_start": [context.index(a) for a in answers]},
        }
        for i, (context, answers) in enumerate([("a b", ["b"]), ("a b", []), ("c", ["c", "c"])])
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = SquadReader(TextFile(path), "v2.0")
    assert [(q.answers, q.start, q.impossible) for q in first.questions] == [
        (("b",), 2, False),
        ((), -1, True),
    ]
    assert second.context == "c" and second.questions[0].answers == ("c", "c")
