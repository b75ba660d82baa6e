"""Rows of train that are not trained on but choose the best checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_runs import configure
from sentence_sets import learnable, sentences, write_corpus, write_set

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled.sets import LabelledSet, held_out_from
from metaseq_lm.data.streams import Shard
from metaseq_lm.training.parts import build_parts, prepare_config
from metaseq_lm.training.run import TrainingRun


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    write_corpus(folder)
    learnable(folder / "pair", "pair", rows=96)
    return folder


def test_held_out_rows_are_scored_and_not_trained_on(data: Path, tmp_path: Path) -> None:
    options = ["task.labelled=pair", "task.held_out=0.25", "task.train_size=64", "task.epochs=2"]
    options += ["task.batch_size=8", "task.validate_epochs=1", "trainer.valid_split=held_out"]
    config = configure(data, tmp_path, *options, "trainer.final_splits=[valid,train]")
    prepared = prepare_config(config)
    assert prepared.trainer.max_update == 12 and prepared.trainer.validate_interval_updates == 6
    task = build_parts(prepared, dry_run=True).task
    drawn = task.build_streams("train")["train"]
    trained = np.concatenate([drawn.order.batch(number) for number in range(12)])
    assert sorted(trained.tolist()) == sorted([*range(48)] * 2)
    held_out = task.build_streams("held_out")["held_out"]
    batches = [b for number in range(2) for b in held_out.micro_batches(number, Shard())]
    samples = np.concatenate([batch.samples for batch in batches])
    assert sorted(samples.tolist()) == [*range(48, 64)]
    gold = LabelledSet(data / "pair", "train").labels
    assert gold is not None
    for batch in batches:
        assert batch.targets.tolist() == gold[batch.samples].tolist()
    run = TrainingRun(config)
    run.train()
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    assert metrics.keys() == {"held_out", "valid", "train"}
    assert len((tmp_path / "predictions.train.jsonl").read_text().splitlines()) == 48


def test_neighbours_with_a_text_in_common_stay_together(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    texts = sentences(np.random.default_rng(1), 12)
    # Passages of 4, 4 and 2 rows, then a row and its copy with swapped texts.
    first = [texts[0]] * 4 + [texts[1]] * 4 + [texts[2]] * 2 + [texts[3], texts[4]]
    second = [*texts[2:12], texts[4], texts[3]]
    write_set(tmp_path / "set", {"train": ([first, second], [0, 1] * 6)}, ["no", "yes"])
    data = LabelledSet(tmp_path / "set", "train")
    expected = {1: 10, 2: 10, 3: 8, 4: 8, 5: 4, 8: 4}
    assert {size: held_out_from(data, 12, size) for size in expected} == expected
    assert held_out_from(data, 9, 1) == 8
    for size in (0, 9, 12):
        with pytest.raises(UsageError, match=f"{size} cannot be"):
            held_out_from(data, 12, size)


def test_nothing_is_held_out_unless_it_is_asked_for(data: Path, tmp_path: Path) -> None:
    config = configure(data, tmp_path, "task.labelled=pair", "trainer.valid_split=held_out")
    with pytest.raises(Exception, match="no split 'held_out'"):
        TrainingRun(config).train()
