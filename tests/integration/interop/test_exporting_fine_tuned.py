"""Fine-tuned runs, exported and opened by the transformers library, which predicts the same."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig, untyped_section
from metaseq_lm.interop.heads import to_library_form
from metaseq_lm.interop.model_card import model_card

pytest.importorskip("transformers")
from hf_folders import make, transformers

TRAIN = ["--model", "inherit", "--max-update", "3", "task.tokens_per_sample=20"]
TRAIN += ["engine.device=cpu", "engine.tensorboard=false", "trainer.best_checkpoint_metric=loss"]
TRAIN += ["schedule=constant", "trainer.maximize_best_checkpoint_metric=false", "--lr", "1e-2"]
SENTENCE = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
TEXTS = ["the quick fox", "it was the best", "a lazy dog", "times"]
ROWS = {
    "pair": "text_a\ttext_b\tlabel\n"
    + "".join(
        f"{a}\t{b}\t{('no', 'yes', 'perhaps')[i % 3]}\n"
        for i, (a, b) in enumerate((a, b) for a in TEXTS for b in TEXTS)
    ),
    "single": "text\tlabel\n" + "".join(f"{t}\t{'yn'[i % 2]}\n" for i, t in enumerate(TEXTS * 3)),
    "several": "text\tlabel\n"
    + "".join(f"{t}\t{('', 'a', 'a; b', 'b;c')[i % 4]}\n" for i, t in enumerate(TEXTS * 3)),
    "value": "text\tlabel\n" + "".join(f"{t}\t{i * 0.7 - 1}\n" for i, t in enumerate(TEXTS)),
}
CASES = {
    "BERT, no pooler": ("BertModel", "pair", [], "BertForSequenceClassification"),
    "BERT, pooler": ("BertModel", "pair", ["task.pooled=true"], "BertForSequenceClassification"),
    "BERT, several": ("BertModel", "several", [], "BertForSequenceClassification"),
    "BERT, values": ("BertForMaskedLM", "value", [], "BertForSequenceClassification"),
    "RoBERTa": ("RobertaForMaskedLM", "single", [], "RobertaForSequenceClassification"),
    "RoBERTa, pairs": ("RobertaModel", "pair", [], "RobertaForSequenceClassification"),
    "RoBERTa, pooler": (
        "RobertaModel",
        "single",
        ["task.pooled=true", "task.pooler_dropout=true"],
        "RobertaForSequenceClassification",
    ),
    "ELECTRA": ("ElectraForPreTraining", "pair", [], "ElectraForSequenceClassification"),
    "ELECTRA, values": ("ElectraModel", "value", [], "ElectraForSequenceClassification"),
    "ELECTRA, its head": (
        "ElectraModel",
        "pair",
        ["task.pooled=true", "task.pooler_dropout=true", "task.pooler_activation=gelu"],
        "ElectraForSequenceClassification",
    ),
    "DistilBERT": ("DistilBertModel", "single", [], "BertForSequenceClassification"),
    "DistilBERT, its head": (
        "DistilBertForMaskedLM",
        "pair",
        ["task.pooled=true", "task.pooler_activation=relu"],
        "DistilBertForSequenceClassification",
    ),
    "pre-LN": ("MegatronBertModel", "pair", [], "MegatronBertForSequenceClassification"),
}


def start(folder: Path, name: str, kind: str) -> tuple[str, str]:
    """Import a model of class `name` and preprocess a set of ROWS; return both folders."""
    make(folder / "hf", name)
    assert main(["import", str(folder / "hf"), "--out", str(folder / "imported")]) == 0
    (folder / "rows.tsv").write_text(ROWS[kind])
    files = [f"--{split}pref={folder / 'rows.tsv'}" for split in ("train", "valid")]
    files += ["--tokenizer-from", str(folder / "imported"), "--destdir", str(folder / "data")]
    files += ["--regression"] * (kind == "value")
    files += ["--label-separator", ";"] * (kind == "several")
    assert main(["preprocess", "--labelled", "mine", *files]) == 0
    return str(folder / "data"), str(folder / "imported")


@pytest.mark.parametrize("case", CASES)
def test_the_same_predictions(tmp_path: Path, case: str, capsys) -> None:
    name, kind, options, architecture = CASES[case]
    data, imported = start(tmp_path, name, kind)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    paths = ["--init-from", imported, "--save-dir", run, "task.labelled=mine", *options]
    assert main(["train", data, *SENTENCE, *TRAIN, *paths]) == 0
    assert "cannot be exported" not in capsys.readouterr().err
    assert main(["export", run, "--out", str(out), "--check"]) == 0
    assert main(["evaluate", run, "--split", "valid", "--out", str(tmp_path / "scores")]) == 0
    file = tmp_path / "scores" / "predictions.valid.jsonl"
    ours = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["index"])

    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert type(model).__name__ == architecture
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    rows = [line.split("\t")[:-1] for line in ROWS[kind].splitlines()[1:]]
    inputs = tokenizer(*map(list, zip(*rows)), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits.double()
    if kind == "value":
        scores, names = logits, {0: "value"}
    elif kind == "several":
        scores, names = logits.sigmoid(), dict(enumerate("abc"))
        predicted = [[names[i] for i in np.flatnonzero(row > 0.5)] for row in scores.numpy()]
        assert predicted == [row["predicted"] for row in ours]
        gold = torch.tensor([[float(c in row["gold"]) for c in "abc"] for row in ours])
        metrics = json.loads((tmp_path / "scores" / "metrics.valid.json").read_text())
        assert model.config.problem_type == "multi_label_classification"
        loss = model(**inputs, labels=gold).loss.item()
        assert metrics["binary_cross_entropy"] == pytest.approx(loss, abs=1e-5)
    else:
        scores, names = logits.softmax(-1), dict(enumerate(sorted({r["gold"] for r in ours})))
        assert [names[int(i)] for i in scores.argmax(1)] == [row["predicted"] for row in ours]
    assert model.config.id2label == names
    np.testing.assert_allclose(scores, [row["scores"] for row in ours], atol=2e-5)
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and architecture in card and "text-classification" in card


def test_a_card_shows_labels_as_they_are() -> None:
    model = {"architectures": ["BertForSequenceClassification"], "label2id": {"größer": 0}}
    config = RunConfig(
        label="x",
        task=untyped_section({"_name": "t", "tokens_per_sample": 8}),
        criterion=untyped_section({"_name": "c"}),
    )
    model["max_position_embeddings"] = 8
    names = {"<img src=x>": 0.5, "a|b\u202e\x1b[31m": 1.0, "valid_loss": 2.0}
    card = model_card(SimpleNamespace(manifest={"valid": names, "sha256": {}}), config, model)
    assert '* Labels: "größer"' in card and "| valid_loss | 2 |" in card
    assert "| &lt;img src=x&gt; | 0.5 |" in card and "| a\\|b  \\[31m | 1 |" in card


def test_spans_of_questions(tmp_path: Path, capsys) -> None:
    """BERT's head is exported; ELECTRA's is said to have no counterpart, before it is trained."""
    data, imported = start(tmp_path, "BertModel", "pair")
    answer = {"text": "fox", "answer_start": 10}
    question = {"id": "q", "question": "who was it", "answers": [answer]}
    paragraph = {"context": "the quick fox, it was the best", "qas": [question]}
    content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    (tmp_path / "squad.json").write_text(json.dumps(content))
    files = [f"--{split}pref={tmp_path / 'squad.json'}" for split in ("train", "valid")]
    assert main(["preprocess", "--benchmark", "squad/v1.1", *files, "--destdir", data]) == 0
    (name,) = {path.name for path in Path(data).iterdir() if path.is_dir()} - {"mine"}
    task = ["--task", "squad", "--criterion", "squad", *TRAIN, f"task.labelled={name}"]
    task += ["--init-from", imported, "task.doc_stride=4", "task.max_query_length=5"]
    assert main(["train", data, *task, "--dry-run"]) == 0
    line = next(x for x in capsys.readouterr().err.splitlines() if "cannot be exported" in x)
    assert "task.joint=false task.answerability=false" in line
    run = [*task, "task.joint=false", "task.answerability=false"]
    assert main(["train", data, *run, "--save-dir", str(tmp_path / "run")]) == 0
    assert "cannot be exported" not in capsys.readouterr().err
    out = str(tmp_path / "out")
    assert main(["export", str(tmp_path / "run"), "--out", out, "--check"]) == 0
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(out)
    assert type(model).__name__ == "BertForQuestionAnswering"


def test_choices(tmp_path: Path) -> None:
    """COPA: a premise and two candidates, one unit for each."""
    _, imported = start(tmp_path, "BertModel", "pair")
    row = {"premise": "the fox", "choice1": "best", "choice2": "lazy dog", "question": "cause"}
    lines = [json.dumps({**row, "label": i % 2, "idx": i}) for i in range(6)]
    (tmp_path / "copa.jsonl").write_text("\n".join(lines) + "\n")
    files = [f"--{split}pref={tmp_path / 'copa.jsonl'}" for split in ("train", "valid")]
    files += ["--tokenizer-from", imported, "--destdir", str(tmp_path / "sets")]
    assert main(["preprocess", "--benchmark", "superglue/COPA", *files]) == 0
    paths = ["--init-from", imported, "--save-dir", str(tmp_path / "run"), "task.labelled=COPA"]
    assert main(["train", str(tmp_path / "sets"), *SENTENCE, *TRAIN, *paths]) == 0
    export = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--check"]
    assert main(export) == 0
    model = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "BertForMultipleChoice"


def test_a_check_sees_a_wrong_head(tmp_path: Path, monkeypatch, capsys) -> None:
    """The logits are compared with those of the head as it was trained, not as it is exported."""
    data, imported = start(tmp_path, "BertModel", "single")
    paths = ["--init-from", imported, "--save-dir", str(tmp_path / "run"), "task.labelled=mine"]
    assert main(["train", data, *SENTENCE, *TRAIN, *paths]) == 0

    def wrong(weights: dict, *args: object) -> dict:
        form = to_library_form(weights, *args)
        return form | {"heads.sentence.out.bias": form["heads.sentence.out.bias"] + 0.01}

    (tmp_path / "data").rename(tmp_path / "moved")
    export = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--check"]
    expect_error(capsys, main(export), 2, "--data DIR")
    export += ["--data", str(tmp_path / "moved")]
    monkeypatch.setattr("metaseq_lm.interop.exporting.to_library_form", wrong)
    expect_error(capsys, main(export), 1, "logits differ")


CLASSIFIERS = {
    "BertForSequenceClassification": "tanh",
    "RobertaForSequenceClassification": "tanh",
    "ElectraForSequenceClassification": "gelu",
    "DistilBertForSequenceClassification": "relu",
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_trained_further_with_its_head(tmp_path: Path, name: str, capsys) -> None:
    data, imported = start(tmp_path, name, "single")
    activation = CLASSIFIERS[name]
    run = ["--init-from", imported, "task.labelled=mine", "task.keep_head=true"]
    train = ["train", data, *SENTENCE, *TRAIN, *run, "--save-dir", str(tmp_path / "run")]
    if activation != "tanh":
        assert main([*train, "task.pooled=true"]) == 2
        assert f"task.pooler_activation={activation}" in capsys.readouterr().err
    head = ["task.pooled=true", f"task.pooler_activation={activation}"]
    assert main([*train, *head]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--check"]) == 0
    first = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    last = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert type(last) is type(first) and last.config.id2label == {0: "n", 1: "y"}
    # A few updates away from where it started, not a head that was drawn anew.
    far = {n: (w - first.state_dict()[n]).abs().max() for n, w in last.state_dict().items()}
    assert 0 < max(float(far[n]) for n in far if "class" in n) < 0.05
    assert main(["import", str(out), "--out", str(tmp_path / "again"), "--check"]) == 0


def test_what_cannot_be_exported_is_said_first(tmp_path: Path, capsys) -> None:
    data, imported = start(tmp_path, "ElectraModel", "pair")
    run = ["--init-from", imported, "--save-dir", str(tmp_path / "run"), "task.labelled=mine"]
    assert main(["train", data, *SENTENCE, *TRAIN, *run, "task.pooled=true"]) == 0
    lines = capsys.readouterr().err.splitlines()
    at = next(i for i, line in enumerate(lines) if "cannot be exported to transformers" in line)
    assert "task.pooled=false" in lines[at] and any("train 3/3" in x for x in lines[at:])
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    assert "task.pooled=false" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_head_of_several(tmp_path: Path, capsys) -> None:
    """A model of one set, with its classes or range; without a name the heads are named."""
    data, imported = start(tmp_path, "BertModel", "pair")
    (tmp_path / "value.tsv").write_text(ROWS["value"])
    files = [f"--{split}pref={tmp_path / 'value.tsv'}" for split in ("train", "valid")]
    files += ["--regression", "--destdir", data]
    assert main(["preprocess", "--labelled", "values", *files]) == 0
    run = str(tmp_path / "run")
    options = ["--task", "bam", "--criterion", "bam_distill", "task.labelled=[mine,values]"]
    options += ["--init-from", imported, "task.batch_size=8", "--save-dir", run]
    assert main(["train", data, *options, *TRAIN]) == 0
    assert "cannot be exported" not in capsys.readouterr().err
    for head, message in {
        "": "with --head: mine, values",
        "mind": "no head for 'mind'. Did you mean 'mine'",
    }.items():
        assert main(["export", run, "--out", str(tmp_path / "no"), "--head", head]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert main(["evaluate", run, "--split", "valid", "--out", str(tmp_path / "scores")]) == 0
    for head, names in {"mine": ["no", "perhaps", "yes"], "values": ["value"]}.items():
        out = tmp_path / head
        assert main(["export", run, "--out", str(out), "--head", head, "--check"]) == 0
        model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
        assert type(model).__name__ == "BertForSequenceClassification"
        assert list(model.config.id2label.values()) == names
        assert f"Labelled set: {head}" in (out / "README.md").read_text()
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        rows = ROWS["pair" if head == "mine" else "value"].splitlines()[1:]
        texts = zip(*(row.split("\t")[:-1] for row in rows))
        inputs = tokenizer(*map(list, texts), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits.double()
        file = tmp_path / "scores" / f"predictions.valid.{head}.jsonl"
        ours = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["index"])
        scores = logits if head == "values" else logits.softmax(-1)
        np.testing.assert_allclose(scores, [row["scores"] for row in ours], atol=2e-5)
