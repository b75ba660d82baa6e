"""The options of preprocess --benchmark."""

import pytest
from benchmark_files import SUPERGLUE, lines
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.preprocess import pipeline
from metaseq_lm.data.tokenizers.loading import load_tokenizer


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
