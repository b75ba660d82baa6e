"""Sets in which a row has any number of the classes: how they are read, learnt and scored."""

import json
import re

import numpy as np
import pytest
import sentence_sets
from sentence_runs import configure
from sklearn.metrics import f1_score

from metaseq_lm.cli import main
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.training.run import TrainingRun

LABELS = [["joy"], ["anger", "fear"], [], ["fear", "joy"]] * 3
TEXTS = [f"the dog {i}" for i in range(len(LABELS))]
PAIRS = list(zip(TEXTS, LABELS))
FORMS = {
    "lists.jsonl": "".join(json.dumps({"text": t, "label": c}) + "\n" for t, c in PAIRS),
    "joined.csv": "text,label\n" + "".join(f'{t},"{", ".join(c)}"\n' for t, c in PAIRS),
    "bars.tsv": "text\tlabel\n" + "".join(f"{t}\t{'|'.join([*c, *c])}\n" for t, c in PAIRS),
    "pandas.csv": "text,label\n" + "".join(f'{t},"{c}"\n' for t, c in PAIRS),
    "json.tsv": "text\tlabel\n" + "".join(f"{t}\t{json.dumps(c)}\n" for t, c in PAIRS),
    "numbers.jsonl": "".join(
        json.dumps({"text": t, "label": [["anger", "fear", "joy"].index(name) for name in c]})
        + "\n"
        for t, c in PAIRS
    ),
}
NAMES = ["anger", "fear", "joy"]
COLUMNS = [["text", *NAMES], *([t, *(str(int(n in c)) for n in NAMES)] for t, c in PAIRS)]
FORMS |= {
    "columns.csv": "".join(",".join(row) + "\n" for row in COLUMNS),
    "columns.tsv": "".join("\t".join(row) + "\n" for row in COLUMNS).replace("1", "1.0"),
    "columns.txt": "".join(";".join(row) + "\n" for row in COLUMNS)
    .replace(";1", ";True")
    .replace(";0", ";False"),
    "columns.jsonl": "".join(
        json.dumps({"text": t, **{name: name in c for name in NAMES}}) + "\n" for t, c in PAIRS
    ),
}
OPTIONS = {
    **{name: ["--label-columns", "anger,fear,joy"] for name in FORMS if name[:3] == "col"},
    "joined.csv": ["--label-separator", ","],
    "bars.tsv": ["--label-separator", "|"],
    "numbers.jsonl": ["--labels", "anger,fear,joy"],
}


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that preprocesses a file; it returns (exit code, output, folder)."""
    (tmp_path / "c.txt").write_text("the dog barks\n" * 9)
    text = ["--trainpref", str(tmp_path / "c.txt"), "--vocab-size", "300"]
    assert main(["preprocess", *text, "--destdir", str(tmp_path / "d")]) == 0

    def call(content, *options, name="rows.jsonl", folder="s"):
        (tmp_path / name).write_text(content)
        files = [str(option).replace("ROWS", str(tmp_path / name)) for option in options]
        arguments = ["--labelled", folder, "--destdir", str(tmp_path / "d")]
        arguments += ["--trainpref", str(tmp_path / name), *files]
        code = main(["preprocess", *arguments])
        return code, "".join(capsys.readouterr()), tmp_path / "d" / folder

    return call


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_set(run, name):
    code, output, folder = run(FORMS[name], *OPTIONS.get(name, []), name=name)
    assert code == 0, output
    assert re.search("3 rows.*anger 3.*fear.6.*joy.6", output)
    data = LabelledSet(folder, "train")
    assert data.multi_label and data.label_names == ["anger", "fear", "joy"]
    assert [[c in labels for c in data.label_names] for labels in LABELS] == data.labels.tolist()
    assert main(["doctor", str(folder)]) == 0


def test_label_columns_keep_their_order_and_rows_without_gold_are_left_out(run, tmp_path):
    rows = ["a,1,0", "b,0,0", "c,-1,-1", "d,,", "e,1,1"]
    (tmp_path / "test.csv").write_text("text\na\nb\n")
    options = ["--label-columns", "toxic,insult", "--testpref", tmp_path / "test.csv"]
    content = "\n".join(["text,toxic,insult", *rows]) + "\n"
    code, output, folder = run(content, *options, name="train.csv")
    assert code == 0 and "2 no_gold_label" in output, output
    data = LabelledSet(folder, "train")
    assert data.label_names == ["toxic", "insult"]
    assert data.labels.tolist() == [[True, False], [False, False], [True, True]]
    assert LabelledSet(folder, "test").labels is None


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ("x,1,0\ny,1,2\n", "a,b", "rows.csv:3: column 'b' of --label-columns is '2'"),
        ("x,1,0\ny,,1\n", "a,b", "rows.csv:3: column 'a' of --label-columns is empty"),
        ("x,1,0\ny,-1,1\n", "a,b", "rows.csv:3: column 'a' of --label-columns is '-1'"),
        ("x,0.7,0\n", "a,b", "rows.csv:2: column 'a' of --label-columns is '0.7'"),
        ("x,1,nan\n", "a,b", "rows.csv:2: column 'b' of --label-columns is 'nan'"),
        ("x,1,0\n", "a,c", "no column 'c'"),
        ("x,1,0\n", "a", "two or more columns"),
        ("x,1,0\n", "a,b,a", "each once"),
        ("x,0,0\n", "a,b --regression", "exclude each other"),
        ("x,0,0\n", "a,b --labels b,a", "exclude each other"),
    ],
)
def test_mistakes_in_label_columns(run, rows, columns, message):
    options = ["--label-columns", *columns.split()]
    code, output, folder = run(f"text,a,b\n{rows}", *options, name="rows.csv")
    assert code in (1, 2) and message in output, output
    assert not folder.exists()


def test_a_split_without_labels(run):
    blank = "text,label\n" + "".join(f"{text},\n" for text in TEXTS)
    code, output, folder = run(blank, name="t.csv")
    assert code == 1
    (folder.parent.parent / "t.csv").write_text(blank)
    path = folder.parent.parent / "t.csv"
    options = ["--label-separator", ",", "--testpref", path]
    code, output, folder = run(FORMS["joined.csv"], *options, name="joined.csv")
    assert code == 0 and LabelledSet(folder, "test").labels is None
    code, output, later = run(
        FORMS["lists.jsonl"], "--labels-from", folder, name="lists.jsonl", folder="later"
    )
    assert code == 0 and LabelledSet(later, "train").multi_label


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a", "label": ["x"]}\n{"text": "b", "label": "x"}\n', (), ":2: label 'x'"),
        ('{"text": "a", "label": "x"}\n{"text": "b", "label": ["x"]}\n', (), ":2: label ['x']"),
        ('{"text": "a", "label": [["x"]]}\n', (), "label ['x'] is not a single"),
        ('{"text": "a", "label": []}\n', (), "row of the train split has"),
        ('{"text": "a", "label": ["x"]}\n', ("--regression",), "--regression is for one number"),
        ('{"text": "a", "label": ["x"]}\n', ("--labels", "y"), "label 'x' is not one of y"),
    ],
)
def test_mistakes(run, content, options, message):
    code, output, folder = run(content, *options)
    assert code == 1 and message in output, output
    assert not folder.exists()


def test_joined_labels_are_named(run):
    code, output, _ = run("text,label\na,x\nb,y\nc,x; y\nd,x; z\n", name="joined.csv")
    assert code == 0 and "warning: 'x; y'" in output
    assert "--label-separator ';'" in output


@pytest.fixture
def topics(tmp_path):
    """A data folder with a set in which the words 4, 5 and 6 tell the three classes."""
    sentence_sets.write_corpus(tmp_path)
    rng = np.random.default_rng(0)
    splits, gold = {}, {}
    for split in ("train", "valid"):
        rows = sentence_sets.sentences(rng, 256)
        gold[split] = rng.random((256, 3)) < 0.4
        for row, present in zip(rows, gold[split]):
            row += (4 + np.flatnonzero(present)).tolist()
        splits[split] = ([rows], [np.flatnonzero(row).tolist() for row in gold[split]])
    sentence_sets.write_set(tmp_path / "topics", splits, "abc", form="multi_label")
    return tmp_path, gold


def test_an_easy_rule_is_learnt(topics, tmp_path):
    data, gold = topics
    more = ["task.epochs=15", "task.batch_size=16", "trainer.final_splits=[valid]"]
    TrainingRun(configure(data, tmp_path / "r", "task.labelled=topics", *more)).train()
    metrics = json.loads((tmp_path / "r/results.json").read_text())["metrics"]["valid"]
    rows = (tmp_path / "r/predictions.valid.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, rows), key=lambda row: row["index"])
    scores = np.array([row["scores"] for row in rows])
    for average in ("micro", "macro"):
        expected = f1_score(gold["valid"], scores > 0.5, average=average)
        assert metrics[f"f1_{average}"] == pytest.approx(expected) and expected > 0.95
    assert list(metrics)[:2] == ["score", "f1_micro"] and metrics["score"] == metrics["f1_micro"]
    assert metrics["exact_match"] == np.mean([row["gold"] == row["predicted"] for row in rows])
    losses = -np.log(np.where(gold["valid"], scores, 1 - scores)).mean()
    assert metrics["binary_cross_entropy"] == pytest.approx(losses, rel=1e-4)
    code = main(["evaluate", "--ensemble", str(tmp_path / "r"), "--split", "valid"])
    assert code == 0


@pytest.mark.parametrize("task", ["token_labels", "bam", "tartan"])
def test_other_tasks_refuse_it(run, tmp_path, capsys, task):
    folder = run(FORMS["lists.jsonl"], "--validpref", "ROWS")[2]
    criterion = {"bam": "bam_distill", "tartan": "tartan_mt"}.get(task, task)
    name = "[s]" if task == "bam" else "s"
    arguments = [
        "--task",
        task,
        "--criterion",
        criterion,
        f"task.labelled={name}",
        "--max-update",
        "1",
    ]
    code = main(["train", str(folder.parent), *arguments, "--save-dir", str(tmp_path / "r")])
    assert code in (1, 2) and "multi_label" in capsys.readouterr().err
