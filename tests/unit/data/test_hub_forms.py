"""Benchmarks as the `datasets` library exports them give the sets that the official files give."""

import importlib.util
import json
import shutil

import pytest
from benchmark_files import ANSWERS, GLUE, PASSAGE, QUERY, SUPERGLUE, glue_files, lines, texts
from hub_files import TEXT_FORMS, table, write_rows
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.data.benchmarks import find_benchmark
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.squad.files import SquadReader

FORMS = [*TEXT_FORMS, *(["parquet"] if importlib.util.find_spec("pyarrow") else [])]
_NLI = ("entailment", "neutral", "contradiction")
_ENTAILMENT = ("entailment", "not_entailment")
# The classes in the order of the Hub, under their names there and in the official files.
HUB_CLASSES = {
    "glue/CoLA": (("unacceptable", "acceptable"), "01"),
    "glue/SST-2": (("negative", "positive"), "01"),
    "glue/MRPC": (("not_equivalent", "equivalent"), "01"),
    "glue/QQP": (("not_duplicate", "duplicate"), "01"),
    "glue/MNLI": (_NLI, _NLI),
    "glue/QNLI": (_ENTAILMENT, _ENTAILMENT),
    "glue/RTE": (_ENTAILMENT, _ENTAILMENT),
    "glue/WNLI": (("not_entailment", "entailment"), "01"),
    "superglue/BoolQ": (("False", "True"), (False, True)),
    "superglue/CB": ((_NLI[0], _NLI[2], _NLI[1]), (_NLI[0], _NLI[2], _NLI[1])),
    "superglue/COPA": (("choice1", "choice2"), (0, 1)),
    "superglue/RTE": (_ENTAILMENT, _ENTAILMENT),
    "superglue/WiC": (("False", "True"), (False, True)),
    "superglue/WSC": (("False", "True"), (False, True)),
    "superglue/AX-b": (_ENTAILMENT, _ENTAILMENT),
    "superglue/AX-g": (_ENTAILMENT, _ENTAILMENT),
}
HUB_TEXTS = {  # where they are not those of the official files
    "glue/MRPC": ("sentence1", "sentence2"),
    "glue/MNLI": ("premise", "hypothesis"),
}
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


def forms_of(task, tasks):
    """Return CSV and a third of the other forms; the nested tasks of SuperGLUE have all."""
    return FORMS if task in FLAT else ["csv", *FORMS[sorted(tasks).index(task) % 3 :: 3]]


def content(data, corpus):
    labels = None if data.labels is None else data.labels.tolist()
    spans = None if data.spans is None else data.spans.tolist()
    return texts(data, corpus), labels, spans, data.label_names, data.rows


@pytest.fixture
def read(corpus, tmp_path):
    """Return a function that preprocesses a folder of rows by split, written in a form."""

    def call(name, form, splits):
        source = tmp_path / "export"
        shutil.rmtree(source, ignore_errors=True)
        for stem, rows in splits.items():
            write_rows(source, stem, rows, form)
        target = tmp_path.name.replace("_", "-")
        command = ["preprocess", "--benchmark", name, "--source", str(source)]
        command += ["--destdir", str(corpus), "--labelled", target, "--overwrite"]
        assert main(command) == 0
        return corpus / target

    return call


@pytest.mark.parametrize("task", SUPERGLUE)
def test_superglue(run, read, corpus, task):
    name, record = f"superglue/{task}", SUPERGLUE[task]
    split = "test" if task.startswith("AX") else "train"
    file = f"{task}.jsonl" if task.startswith("AX") else "train.jsonl"
    code, output, folder = run(name, {file: lines(record)})
    assert code == 0, output
    expected = content(LabelledSet(folder, split), corpus)
    rows = FLAT.get(task)
    if rows is None:
        rows = [record | {"label": HUB_CLASSES[name][1].index(record["label"])}]
    for form in forms_of(task, SUPERGLUE):
        data = LabelledSet(read(name, form, {split: rows}), split)
        assert content(data, corpus) == expected, form


@pytest.mark.parametrize("task", sorted(set(GLUE) - {"AX"}))
def test_glue(run, read, corpus, task):
    """Of the split valid, which is not doubled; numbers and names of labels are the same."""
    name, benchmark = f"glue/{task}", find_benchmark(f"glue/{task}")
    official = glue_files(task)
    code, output, folder = run(name, official)
    assert code == 0, output
    *expected, _ = content(LabelledSet(folder, "valid"), corpus)
    table = [line.split("\t") for line in official[benchmark.files["valid"]].splitlines()]
    head = benchmark.header or table.pop(0)
    columns = HUB_TEXTS.get(name, benchmark.texts)
    rows = [dict(zip(head, fields)) for fields in table]
    for number, form in enumerate(forms_of(task, GLUE)):
        exported = []
        for i, row in enumerate(rows):
            label = row[benchmark.label]
            if task == "STS-B":
                label = float(label)
            else:
                names, words = HUB_CLASSES[name]
                place = list(words).index(label)
                label = (place, names[place], float(place))[number % 3]
            pair = {c: row[o] for c, o in zip(columns, benchmark.texts)}
            exported.append({**pair, "label": label, "idx": i})
        hidden = [{**row, "label": -1.0 if task == "STS-B" else -1} for row in exported]
        matched = "_matched" if task == "MNLI" else ""
        stem = ("validation", "valid", "dev", "val")[number % 4]
        splits = {f"{stem}{matched}": exported, f"test{matched}": hidden, "train": exported}
        folder = read(name, form, splits)
        *actual, facts = content(LabelledSet(folder, "valid"), corpus)
        assert actual == expected, form
        assert [row["idx"] for row in facts] == [0, 1, 2]
        assert LabelledSet(folder, "test").labels is None
        assert len(LabelledSet(folder, "train")) == (6 if benchmark.expand == "swapped" else 3)


def test_an_export_under_the_names_of_official_files(run, corpus):
    """The names of the columns decide; marks in the text are those of the table."""
    rows = [{"sentence": 'she said "no", twice', "label": 0, "idx": 0}]
    rows += [{"sentence": "fine", "label": 1, "idx": 1}]
    for name in ("CoLA", "SST-2"):
        code, output, folder = run(f"glue/{name}", {"train.tsv": table(rows, "\t")})
        assert code == 0, output
        data = LabelledSet(folder, "train")
        assert texts(data, corpus) == [['she said "no", twice'], ["fine"]]
        assert data.labels.tolist() == [0, 1]


def test_which_files_are_a_split(run, tmp_path):
    """Of several, or with a part missing, none is chosen; folders and numbered parts are read."""
    rows = [{"sentence": "a", "label": 1, "idx": 0}]
    files = {"cola_train.csv": table(rows), "data/train-00000-of-00002.csv": table(rows)}
    (tmp_path / "source" / "data").mkdir(parents=True)
    expect(run("glue/CoLA", files), 1, "train split")
    (tmp_path / "source" / "cola_train.csv").unlink()
    expect(run("glue/CoLA", {}), 1, "of 2 parts")
    rows[0]["idx"] = 1
    code, output, folder = run("glue/CoLA", {"data/train-00001-of-00002.csv": table(rows)})
    assert code == 0 and len(LabelledSet(folder, "train")) == 2
    shutil.rmtree(tmp_path / "source" / "data")
    (tmp_path / "source" / "cola" / "validation").mkdir(parents=True)
    code, output, folder = run("glue/CoLA", {"cola/validation/0000.csv": table(rows)})
    assert code == 1 and "source/cola:" in output and "--source" in output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [int, str])
def test_squad(tmp_path, form, number):
    rows = [
        {
            "id": number(i),
            "title": "t",
            "context": context,
            "question": "q?",
            "answers": {"text": answers, "answer_start": [context.index(a) for a in answers]},
        }
        for i, (context, answers) in enumerate([("a b", ["b", "a"]), ("a b", ["a"]), ("c", ["c"])])
    ]
    write_rows(tmp_path, "train", rows, form)
    (path,) = tmp_path.iterdir()
    file = TextFile(path)
    first, second = SquadReader(file, "v2.0")
    assert [(q.id, q.answers, q.start, q.impossible) for q in first.questions] == [
        ("0", ("b", "a"), 2, False),
        ("1", ("a",), 0, False),
    ]
    assert second.context == "c" and second.questions[0].answers == ("c",)


def test_squad_without_answers_and_articles(tmp_path):
    path = tmp_path / "train.jsonl"
    row = {"id": "x", "context": "a", "question": "q?"}
    path.write_text(lines({**row, "answers": {"text": [], "answer_start": []}}))
    (paragraph,) = SquadReader(TextFile(path), "v2.0")
    assert paragraph.questions[0].impossible
    question = {"id": 7, "question": "q?", "answers": [{"text": "a", "answer_start": 0}]}
    path.write_text(lines({"title": "t", "paragraphs": [{"context": "a", "qas": [question]}]}))
    (paragraph,) = SquadReader(TextFile(path), "v1.1")
    assert paragraph.questions[0].id == "7"
    spans = {"text": ["b"], "char_spans": [{"start": [2], "end": [2]}]}
    exported = {"qid": "m", "context": "a b", "question": "q?", "answers": ["b"]}
    path.write_text(json.dumps(exported | {"detected_answers": spans}))
    (paragraph,) = SquadReader(TextFile(path), "mrqa")
    assert paragraph.questions[0].answers == ("b",) and paragraph.questions[0].start == 2
