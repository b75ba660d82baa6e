"""The options of preprocess --benchmark."""

from pathlib import Path

import pytest
from benchmark_files import SUPERGLUE, lines
from outcomes import expect, expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.benchmarks import LabelledItems, format_submission, labelled_results


@pytest.mark.parametrize(
    "name, version, folder",
    [("v1.1", "v1.1", "SQuAD-1"), ("v2.0", "v2.0", "SQuAD-2"), ("mrqa", "mrqa", "MRQA")],
)
def test_question_answering_has_a_reader_of_its_own(corpus, monkeypatch, name, version, folder):
    seen = []
    monkeypatch.setattr(pipeline, "make_dataset", seen.append)
    call = ["preprocess", "--benchmark", f"squad/{name}", "--destdir", str(corpus)]
    assert main([*call, "--trainpref", "train.json"]) == 0
    (made,) = seen
    assert made.version == version and made.request.destdir == corpus / folder
    assert made.tokenizer.fingerprint == load_tokenizer(corpus).fingerprint
    assert main([*call, "--source", "x"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--source", "x"], "--source only applies to benchmarks"),
        (["--no-double"], "--no-double only applies to benchmarks"),
        (["--benchmark", "glue/CoLA"], "--benchmark needs --source DIR"),
        (["--benchmark", "glue/CoLA", "--labelled", "a/b", "--source", "x"], "name of a set 'a/b'"),
    ],
)
def test_wrong_options(corpus, capsys, options, message):
    expect_error(capsys, main(["preprocess", "--destdir", str(corpus), *options]), 2, message)


def test_the_folder_is_named_after_the_task(corpus, tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(SUPERGLUE["AX-g"]))
    call = ["preprocess", "--benchmark", "superglue/CB", "--trainpref", f"{tmp_path}/train.jsonl"]
    assert main([*call, "--destdir", str(corpus)]) == 0
    assert len(LabelledSet(corpus / "CB", "train")) == 1
    assert main([*call[:3], "--source", "/nowhere", "--destdir", str(corpus)]) == 2


SNLI = Path(__file__).resolve().parents[3] / "user_dir" / "snli" / "SNLI.yaml"


def test_a_benchmark_of_a_user(run):
    """The set holds what the file says, so that later commands do not need the file."""
    row = {"gold_label": "neutral", "sentence1": "a", "sentence2": "b", "pairID": "x#1"}
    files = {
        "snli_1.0_train.jsonl": lines(row, row | {"gold_label": "-"}),
        "dev.csv": "premise,hypothesis,label\na,b,0\n",  # as exported
        "snli_1.0_test.jsonl": lines({**row, "gold_label": "-"}, {**row, "gold_label": "-"}),
    }
    code, output, folder = run(str(SNLI), files)
    assert code == 0, output
    data = LabelledSet(folder, "valid")
    assert data.benchmark.name == "snli/SNLI" and data.benchmark.recipe.epochs == 3
    assert [data.label_names[label] for label in data.labels] == ["entailment"]
    assert len(LabelledSet(folder, "train")) == 1
    items = LabelledItems(data.benchmark, data.labels, data.rows, data.label_names)
    scores = [[0.0, 1.0, 0.0]]
    assert labelled_results(items, scores)["overall"].metrics == {"accuracy": 1.0}
    test = LabelledSet(folder, "test")
    name, text = format_submission(test.benchmark, "test", scores * 2, test.rows, test.label_names)
    assert (name, text) == ("SNLI.tsv", "index\tprediction\n0\tentailment\n1\tentailment\n")


@pytest.mark.parametrize(
    "content, facts",
    [
        ("labels: [a]\nmetrik: accuracy\n", [":2: metrik", "metric"]),
        ("labels: [a]\n\nmetric: acuracy\n", [":3: metric", "accuracy"]),
        ("metric: accuracy\n", ["labels", "missing"]),
        ("labels: 3\n", [":1: labels", "list"]),
        ("labels: [a]\nfine_tuning:\n  epochs: 0\n", [":3: fine_tuning.epochs"]),
        ("original: glue/COLA\n", [":1: original", "glue/COLA"]),
        ("[a]\n", ["mapping"]),
        ("labels: [a", ["line 2"]),
        ("labels: []\n", ["metric", "correlations"]),
        (None, ["No such file"]),
    ],
)
def test_a_wrong_file_of_a_user(run, tmp_path, content, facts):
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    expect(run(str(file), {}), 2, "mine.yaml", *facts)
