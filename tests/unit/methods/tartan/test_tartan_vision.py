"""End-task-aware training on images: the split, the statistics, what is refused."""

from dataclasses import replace
from pathlib import Path

import image_data
import numpy as np
import pytest
import torch
from tartan_bench import logged, one_update, same, weights

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.methods.tartan.options import TartanVisionConfig
from metaseq_lm.methods.tartan.vision import _select_classes, _split_target
from metaseq_lm.training.run import TrainingRun

TINY = """
    task=tartan_vision task.target=[b,d] task.batch_size=8 model=wide_resnet model.depth=10
    model.width=1 schedule=constant optimizer.lr=0.003 trainer.log_interval=1 engine.device=cpu
    engine.threads=1 engine.tensorboard=false
""".split()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_data.write(tmp_path_factory.mktemp("images"))


def configure(data: Path, save: Path, criterion: str, *more: str) -> RunConfig:
    return load_config([*TINY, f"criterion={criterion}", f"data={data}", f"save_dir={save}", *more])


def options(**values: int) -> TartanVisionConfig:
    usual = TartanVisionConfig(dev_share=0.2, dev_limit=65, train_limit=200, split_seed=1)
    return replace(usual, **values)


def test_target_images_are_split_once():
    """A fifth for development, at most 65; of the others at most 200; no image in both (B7)."""
    images = _select_classes(image_data.make(400, 3), [1, 3])
    assert len(images) == 800 and set(images.labels) == {0, 1} and images.names == ("b", "d")
    train, dev = _split_target(images, options())
    assert (len(train), len(dev)) == (200, 65)
    every = np.concatenate([train.images, dev.images]).reshape(265, -1)
    assert len(np.unique(every, axis=0)) == 265
    whole = _split_target(images, options(dev_limit=0, train_limit=0))
    assert sum(map(len, whole)) == 800 and abs(len(whole[1]) - 160) < 50
    again, other = (
        _split_target(images, options())[0],
        _split_target(images, options(split_seed=2))[0],
    )
    assert (again.images == train.images).all() and not (other.images == train.images).all()


def test_tasks_have_their_own_classes(pictures, tmp_path):
    """Targets b and d; the others, a and c, are numbered anew."""
    task = TrainingRun(configure(pictures, tmp_path, "tartan_meta")).task
    assert task.classes == ([1, 3], [0, 2])
    assert len(task.parts["other"].labels) == 80 and set(task.parts["other"].labels) == {0, 1}
    assert task.parts["other"].label_names == ["a", "c"]
    assert len(task.labelled("test").labels) == 40
    some = TrainingRun(
        configure(pictures, tmp_path / "some", "tartan_meta", "task.test_limit=7")
    ).task
    assert some.labelled("test").labels.tolist() == task.labelled("test").labels[:7].tolist()


@pytest.mark.parametrize("criterion", ["tartan_mt", "tartan_meta"])
def test_stripes_are_learnt(criterion, pictures, tmp_path):
    more = ["trainer.max_update=40", "trainer.final_splits=[test]", "model.dropout=0"]
    run = TrainingRun(configure(pictures, tmp_path, criterion, *more))
    run.train()
    metrics, rows = run.parts.score("test")
    assert metrics["accuracy"] > 0.9 and len(rows) == 40
    assert {row["gold"] for row in rows} == {"b", "d"}
    assert ("cosine_other" in logged(tmp_path)[-1]) == (criterion == "tartan_meta")


def test_meta_passes_leave_the_statistics_alone(pictures, tmp_path):
    """With a rate of 0 running statistics and weights are those of MT, to the last bit."""
    found = []
    for criterion, more in (("tartan_mt", []), ("tartan_meta", ["criterion.weight_lr=0"])):
        run = TrainingRun(configure(pictures, tmp_path / criterion, criterion, *more))
        start = weights(run)
        for number in range(3):
            one_update(run, number)
        found.append(weights(run))
        name = "encoder.norm.running_mean"
        assert not torch.equal(found[-1][name], start[name])
    assert same(*found)


def test_pretraining_then_fine_tuning(pictures, tmp_path):
    """The task-agnostic baseline: the others first, then the target with a fresh head."""
    more = ["task.train_on=auxiliary", "trainer.valid_split=''", "trainer.max_update=3"]
    first = TrainingRun(configure(pictures, tmp_path / "first", "tartan_mt", *more))
    first.train()
    start = f"init_from={tmp_path / 'first'}"
    second = TrainingRun(
        configure(pictures, tmp_path / "second", "tartan_mt", "task.train_on=target", start)
    )
    taken = {n: w for n, w in weights(first).items() if n.startswith("encoder.")}
    assert same(taken, weights(second)) and taken.keys() < weights(second).keys()
    before = weights(second)
    one_update(second)
    after = weights(second)
    assert torch.equal(before["heads.other.weight"], after["heads.other.weight"])
    assert not torch.equal(before["heads.target.weight"], after["heads.target.weight"])


@pytest.mark.parametrize(
    "criterion, more, words",
    [
        ("tartan_mt", ["engine.micro_batch_size=4"], "batch normalisation takes its statistics"),
        ("tartan_mt", ["task.target=[b,bird]"], "no class 'bird'"),
        ("tartan_mt", ["task.target=[b]"], "two or more different classes"),
        ("tartan_mt", ["task.target=[a,b,c]"], "leave two or more"),
        ("tartan_mt", ["task.train_on=all"], "Choices: both, auxiliary, target"),
        ("tartan_mt", ["model=transformer"], "needs --model wide_resnet"),
        ("tartan_mt", ["model.channels=1"], "model.channels is for 1 channel"),
        ("tartan_mt", ["task.sd=[0.2,0.2]"], "task.sd is for 2 channel"),
        ("tartan_mt", ["task.sd=[0.2,0.2,0]"], "task.sd .*above 0"),
        ("tartan_meta", ["task.train_on=target"], "needs task.train_on=both"),
        ("tartan_mt", ["task.train_limit=-1"], "task.train_limit .*at least 0, got -1"),
        ("tartan_mt", ["task.dev_batch_size=0"], "task.dev_batch_size .*at least 1, got 0"),
        ("tartan_mt", ["task.head_lr=-0.1"], "task.head_lr .*at least 0, got -0.1"),
        ("tartan_mt", ["task.dev_share=2"], "task.dev_share .*at most 1, got 2"),
        ("masked_lm", [], "needs criterion=tartan_meta or tartan_mt"),
    ],
)
def test_mistakes_are_named(criterion, more, words, pictures, tmp_path):
    mine = [o for o in TINY if not o.startswith("model.") or "model=transformer" not in more]
    places = [f"criterion={criterion}", f"data={pictures}", f"save_dir={tmp_path}"]
    with pytest.raises(UsageError, match=words):
        TrainingRun(load_config([*mine, *places, *more]))
