"""Encoders fine-tuned on tags, exported as ...ForTokenClassification, which tags the same."""

from pathlib import Path

import pytest
import torch

from metaseq_lm.cli import main

pytest.importorskip("transformers")
from hf_folders import make, transformers

TRAIN = ["--task", "token_classification", "--criterion", "token_classification", "--lr", "1e-2"]
TRAIN += ["--model", "inherit", "--max-update", "3", "task.tokens_per_sample=20"]
TRAIN += ["engine.device=cpu", "engine.tensorboard=false", "schedule=constant"]
SENTENCES = [
    [("the", "B-ORG"), ("quick", "I-ORG"), ("foxes", "O"), ("naive", "B-PER")],
    [("it", "O"), ("was", "O"), ("best", "B-PER"), ("times", "B-PER")],
]
NAMES = ["BertModel", "RobertaModel", "ElectraModel", "DistilBertModel", "MegatronBertModel"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tags(tmp_path: Path, name: str, capsys) -> None:
    make(tmp_path / "hf", name)
    assert main(["import", f"{tmp_path}/hf", "--out", f"{tmp_path}/imported"]) == 0
    text = "\n".join("".join(f"{w}\t{t}\n" for w, t in s) for s in SENTENCES)
    (tmp_path / "ner.conll").write_text(text)
    files = [f"--{split}pref={tmp_path}/ner.conll" for split in ("train", "valid")]
    place = ["--tokenizer-from", f"{tmp_path}/imported", "--destdir", f"{tmp_path}/data"]
    assert main(["preprocess", "--tagged", "ner", *files, *place]) == 0
    run, out = f"{tmp_path}/run", tmp_path / "out"
    paths = ["--init-from", f"{tmp_path}/imported", "--save-dir", run, "task.labelled=ner"]
    assert main(["train", f"{tmp_path}/data", *TRAIN, *paths]) == 0
    assert "cannot be exported" not in capsys.readouterr().err
    assert main(["export", run, "--out", str(out), "--check"]) == 0
    assert main(["evaluate", run, "--split", "valid", "--out", f"{tmp_path}/scores"]) == 0
    lines = (tmp_path / "scores" / "ner.valid.conll").read_text().split("\n")
    ours = [line.split("\t")[2] for line in lines if line]

    model = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs, words = [], [[word for word, _ in sentence] for sentence in SENTENCES]
    for sentence in words:
        inputs = tokenizer(" ".join(sentence), return_tensors="pt", return_offsets_mapping=True)
        starts, at = [], 0
        for word in sentence:
            starts.append(at)
            at += len(word) + 1
        offsets = inputs.pop("offset_mapping")[0].tolist()
        first = [next(i for i, (_, end) in enumerate(offsets) if end > start) for start in starts]
        with torch.no_grad():
            classes = model(**inputs).logits[0].argmax(-1)
        theirs += [model.config.id2label[int(classes[i])] for i in first]
    # Of a faulty sequence such as O I-PER the file of predictions holds the spans.
    assert [t.replace("I-", "B-") for t in theirs] == [t.replace("I-", "B-") for t in ours]
    assert list(model.config.id2label.values()) == ["O", "B-ORG", "I-ORG", "B-PER", "I-PER"]
    card = (out / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card
    assert main(["import", str(out), "--out", f"{tmp_path}/again", "--check"]) == 0
