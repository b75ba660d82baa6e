"""Fine-tuning on the first labels of a set, and on sets in which some words have none."""

import json
from pathlib import Path

import numpy as np
import pytest
from battery import TINY

from metaseq_lm.cli import main
from metaseq_lm.core.loading import load_config
from metaseq_lm.training.parts import build_parts, prepare_config
from metaseq_lm.training.run import TrainingRun

SIZES = "--world-documents 30 --world-held-out 30 --world-labelled 24 --world-pairs 5"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels") / "quad"
    assert main(["preprocess", "--world", "quad", *SIZES.split(), "--destdir", str(folder)]) == 0
    return folder


def options(world: Path, task: str, labelled: str, *more: str) -> list[str]:
    words = [f"task={task}", f"criterion={task}", f"task.labelled={labelled}", "task.batch_size=4"]
    length = ["task.tokens_per_sample=40", "model.max_positions=40"]
    return [*TINY, *words, *length, f"data={world}", *more]


@pytest.mark.parametrize("size", [1, 10, 24, 99])
@pytest.mark.parametrize(
    "task, labelled", [("sentence_prediction", "topic"), ("token_classification", "depth")]
)
def test_only_the_first_rows_are_trained_on(world, tmp_path, task, labelled, size):
    more = [f"save_dir={tmp_path}", f"task.train_size={size}", "task.epochs=2"]
    config = prepare_config(load_config(options(world, task, labelled, *more)))
    expected = min(size, 24)
    assert config.trainer.max_update == 2 * -(-expected // 4)
    stream = build_parts(config, dry_run=True).task.build_streams("train")["train"]
    drawn = [stream.order.batch(number) for number in range(config.trainer.max_update)]
    assert sorted(np.concatenate(drawn).tolist()) == sorted([*range(expected)] * 2)


def test_the_rows_that_were_trained_on_are_scored(world, tmp_path):
    more = [f"save_dir={tmp_path}", "task.train_size=10", "trainer.max_update=1"]
    more += ["trainer.final_splits=[train]"]
    TrainingRun(load_config(options(world, "sentence_prediction", "topic", *more))).train()
    assert len((tmp_path / "predictions.train.jsonl").read_text().splitlines()) == 10


def test_words_without_a_label_do_not_count(world, tmp_path):
    more = [f"save_dir={tmp_path}", "trainer.max_update=2", "trainer.final_splits=[test]"]
    run = TrainingRun(load_config(options(world, "token_classification", "depth", *more)))
    run.train()
    head = run.model.get_parameter("heads.token.out.bias")
    assert len(head) == 4  # none for words without a label
    rows = [
        json.loads(line)
        for line in (tmp_path / "predictions.test.depth.jsonl").read_text().splitlines()
    ]
    pairs = [pair for row in rows for pair in zip(row["gold"], row["predicted"], strict=True)]
    labelled = [(gold, predicted) for gold, predicted in pairs if gold != "unlabelled"]
    assert 0 < len(labelled) < len(pairs) / 4
    assert all(predicted == "unlabelled" for gold, predicted in pairs if gold == "unlabelled")
    accuracy = np.mean([gold == predicted for gold, predicted in labelled])
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]["test"]
    assert metrics["accuracy"] == metrics["score"] == pytest.approx(accuracy)
    assert metrics["accuracy"] < 1
    batch = run.task.build_streams("test")["test"].one_epoch(run.parts.shard)
    counted = sum(b.sizes["words"] for micro in batch for b in micro)
    assert counted == len(labelled)
