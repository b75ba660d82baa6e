"""Fine-tuning in float64 without dropout gives the losses of a plain loop of transformers and
torch.

The loop is that of examples/real_encoder/peer.py; the weights are random and small.
"""

import json
from pathlib import Path

import pytest

from metaseq_lm.cli import main

pytest.importorskip("transformers")
from hf_folders import make
from imported import imported

PEER = imported(Path(__file__).resolve().parents[3] / "examples" / "real_encoder" / "peer.py")
UPDATES = 12
TRAIN = ["--model", "inherit", "--max-update", str(UPDATES), "task.tokens_per_sample=20"]
TRAIN += ["engine.device=cpu", "engine.tensorboard=false", "engine.precision=fp64", "--lr", "1e-2"]
TRAIN += ["task.batch_size=4", "schedule=linear", "schedule.warmup_ratio=0.3", "task.epochs=0"]
TRAIN += ["optimizer.decay_norms_and_biases=false", "optimizer.weight_decay=0.1"]
TRAIN += ["criterion.batch_sum=false", "trainer.log_interval=1", "trainer.valid_split="]
TRAIN += ["trainer.best_checkpoint_metric="]
SENTENCE = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
SENTENCE += ["task.pooled=true", "task.head_dropout=0"]
SQUAD = ["--task", "squad", "--criterion", "squad", "task.joint=false", "task.answerability=false"]
SQUAD += ["task.doc_stride=4", "task.max_query_length=5"]
TEXTS = ["the quick fox", "it was the best", "a lazy dog jumps over 12", "times", "naive fox, best"]


def write_set(folder: Path, kind: str) -> tuple[list[str], list[str]]:
    """Write rows of one kind; return the options that preprocess them and train on them."""
    file = folder / "rows"
    if kind == "spans":
        answer = {"text": "fox", "answer_start": 10}
        contexts = [
            "the quick fox, it was the best",
            "the quick fox",
            "the quick fox jumps 12 times",
        ]
        paragraphs = [
            {"context": text, "qas": [{"id": f"q{i}", "question": "who", "answers": [answer]}]}
            for i, text in enumerate(contexts * 3)
        ]
        file.write_text(
            json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})
        )
        return ["--benchmark", "squad/v1.1"], SQUAD
    labels = ["yes", "no"] if kind == "classes" else ["0", "2.5", "5", "1.2"]
    pairs = [(a, b) for a in TEXTS for b in TEXTS[::2]]
    rows = [f"{a}\t{b}\t{labels[i % len(labels)]}" for i, (a, b) in enumerate(pairs)]
    file.write_text("\n".join(["text_a\ttext_b\tlabel", *rows]) + "\n")
    return ["--labelled", "mine", *["--regression"] * (kind == "values")], SENTENCE


@pytest.mark.parametrize("kind", ["classes", "values", "spans"])
def test_the_losses_of_a_plain_loop(tmp_path: Path, kind: str) -> None:
    """And those are the losses that `train` logs."""
    make(tmp_path / "hf", "BertModel")
    start, data, run = (str(tmp_path / name) for name in ("start", "data", "run"))
    assert main(["import", str(tmp_path / "hf"), "--out", start]) == 0
    reading, task = write_set(tmp_path, kind)
    files = ["--trainpref", str(tmp_path / "rows"), "--tokenizer-from", start, "--destdir", data]
    assert main(["preprocess", *reading, *files]) == 0
    (name,) = {path.name for path in Path(data).iterdir() if path.is_dir()}
    paths = ["--init-from", start, "--save-dir", run, f"task.labelled={name}"]
    assert main(["train", data, *task, *TRAIN, *paths]) == 0
    lines = map(json.loads, (Path(run) / "log.jsonl").read_text().splitlines())
    logged = [line["loss"] for line in lines if line["kind"] == "train"]

    parts = PEER.reopen(run)
    updates = list(PEER.train_both(parts, PEER.peer_of(parts, str(tmp_path / "hf")), UPDATES))
    assert [update.loss for update in updates] == logged
    assert [update.peer_loss for update in updates] == pytest.approx(logged, rel=1e-10)
    assert max(logged) - min(logged) > 1e-2
