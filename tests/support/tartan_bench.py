"""A topic task in JSONL, lines of its domain, and tiny end-task-aware runs on them."""

import json
import random
from pathlib import Path

import torch
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.training.run import TrainingRun

TOPICS = {"animal": ["cat", "dog", "bird", "cow"], "tool": ["saw", "axe", "drill", "file"]}
WORDS = ["the", "a", "big", "small", "is", "was", "here", "there"]
SIZES = [
    "task=tartan",
    "task.labelled=topic",
    "task.batch_size=8",
    "task.meta_head_batch_size=8",
    "task.tokens_per_sample=12",
    "model.encoder_layers=1",
    "model.encoder_embed_dim=16",
    "model.encoder_ffn_embed_dim=32",
    "model.encoder_attention_heads=2",
    "model.max_positions=12",
    "optimizer.lr=0.005",
    "schedule=constant",
    "trainer.log_interval=1",
    "trainer.max_update=4",
    "engine.device=cpu",
    "engine.tensorboard=false",
    "engine.threads=1",
]
EXACT = [
    "engine.precision=fp64",
    "model.dropout=0",
    "model.attention_dropout=0",
    "task.head_dropout=0",
]


def sentence(draw: random.Random, topic: str) -> str:
    words = draw.choices(WORDS, k=draw.randint(3, 7))
    words.insert(draw.randrange(len(words)), draw.choice(TOPICS[topic]))
    return " ".join(words)


def make_data(place: Path) -> Path:
    """Write texts and binarise them: set "topic" (48/24/24 rows), 300 lines "domain",
    7 long ones.
    """
    draw = random.Random(1)
    place.mkdir(parents=True, exist_ok=True)
    names = list(TOPICS)
    lines = [sentence(draw, draw.choice(names)) for _ in range(300)]
    (place / "domain.txt").write_text("\n".join(lines) + "\n")
    (place / "long.txt").write_text("\n".join(" ".join([w] * 30) for w in WORDS[:7]) + "\n")
    data = place / "data"
    files = ["--trainpref", f"{place}/domain.txt", "--split", f"long={place}/long.txt"]
    assert main(["preprocess", *files, "--tokenizer", "word", "--destdir", str(data)]) == 0
    prefs = []
    for split, count in (("train", 48), ("valid", 24), ("test", 24)):
        rows = [{"label": names[i % 2], "metadata": i} for i in range(count)]
        rows = [{"text": sentence(draw, row["label"]), **row} for row in rows]
        file = place / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prefs.append(f"--{split}pref={file}")
    assert main(["preprocess", "--labelled", "topic", *prefs, "--destdir", str(data)]) == 0
    return data


def configure(data: Path, save: Path, criterion: str, *more: str) -> RunConfig:
    return load_config(
        [*SIZES, f"criterion={criterion}", f"data={data}", f"save_dir={save}", *more]
    )


def build(data: Path, save: Path, criterion: str, *more: str) -> TrainingRun:
    return TrainingRun(configure(data, save, criterion, *more))


def batches_of(run: TrainingRun, number: int = 0) -> dict[str, list[list[dict]]]:
    """Return what update `number` gets, if every update takes one batch of each stream."""
    streams = run.task.build_streams("train")
    wanted = run.task.needs(number)
    found = {n: [streams[n].micro_batches(number, run.parts.shard)] for n in wanted}
    return {n: [run.engine.to_device(b) for b in parts] for n, parts in found.items()}


def one_update(run: TrainingRun, number: int = 0) -> dict[str, float]:
    """Make one update by hand and return its log."""
    run.model.train()
    run.engine.begin(number)
    logs = run.task.update(run.engine, run.model, batches_of(run, number))
    return {name: float(value) for name, value in logs.items()}


def weights(run: TrainingRun) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def logged(save: Path, kind: str = "train") -> list[dict]:
    rows = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())
