"""Cross-view training of images: splits, teacher and students, perturbations, what
each step moves.
"""

from pathlib import Path

import image_data
import numpy as np
import pytest
import torch
from cvt_bench import average_moves_before_the_step

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.random_streams import key
from metaseq_lm.data.images import shift_images
from metaseq_lm.data.streams import Shard, mean_over_first
from metaseq_lm.forward.passes import ForwardContext, Noise, use_context
from metaseq_lm.methods.cvt.model import draw_gaussian
from metaseq_lm.methods.cvt.vision import (
    POSITION_HEADS,
    UNLABELLED,
    PositionHeads,
    _balanced_permutation,
    _kl_divergence,
)
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

TINY = """
    task=cvt_vision task.labelled=40 task.valid_count=20 task.batch_size=8
    task.unlabelled_batch_size=8 model=conv_large model.width=0.06 schedule=constant
    optimizer.lr=0.003 trainer.log_interval=1 engine.device=cpu engine.threads=1
    engine.tensorboard=false engine.precision=fp64
""".split()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_data.write(tmp_path_factory.mktemp("images"), size=16)


def configure(data: Path, save: Path, *more: str, criterion: str = "cvt_vision") -> RunConfig:
    return load_config([*TINY, f"criterion={criterion}", f"data={data}", f"save_dir={save}", *more])


def build(data: Path, save: Path, *more: str, criterion: str = "cvt_vision") -> TrainingRun:
    run = TrainingRun(configure(data, save, *more, criterion=criterion))
    run.model.train()
    return run


def parts(run: TrainingRun, stream: str, **shard: int) -> list:
    made = run.task.build_streams("train")[stream].micro_batches(0, Shard(**shard))
    return run.engine.to_device(made)


def gradients(run: TrainingRun, batches: list) -> dict[str, torch.Tensor]:
    """Return the gradients that there are, by name."""
    engine = run.engine
    engine.begin(1)
    grads, _ = engine.gradients(
        lambda batch: run.task.criterion(run.model, batch), batches, engine.parameters("main")
    )
    names = [n for n, p in run.model.named_parameters() if p.requires_grad]
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def heads(names: object) -> set[str]:
    return {n.split(".")[2] for n in names if n.startswith("net.heads.")}  # type: ignore[attr-defined]


def test_beginnings_of_the_order_have_all_classes_alike():
    labels = np.random.default_rng(1).integers(0, 5, 300)
    order = _balanced_permutation(labels, 1)
    assert sorted(order) == list(range(300))
    for count in (5, 50, 150):
        counts = np.bincount(labels[order[:count]], minlength=5)
        assert counts.max() - counts.min() <= 1
    assert (order != _balanced_permutation(labels, 2)).any() and (
        order == _balanced_permutation(labels, 1)
    ).all()


def test_parts_do_not_overlap(pictures, tmp_path):
    found = build(pictures, tmp_path).task.parts
    assert {n: len(p) for n, p in found.items()} == {"valid": 20, "train": 40, UNLABELLED: 100}
    every = np.concatenate([p.images for p in found.values()]).reshape(160, -1)
    assert len(np.unique(every, axis=0)) == 160
    assert np.bincount(found["train"].labels).tolist() == [10] * 4
    share = build(pictures, tmp_path / "share", "task.labelled_share=0.5").task.parts
    assert len(share["train"]) == 70 and (share["valid"].images == found["valid"].images).all()
    (batch,) = parts(build(pictures, tmp_path / "u"), UNLABELLED)
    assert batch.targets is None and batch.sizes == {UNLABELLED: 8}


def test_images_are_moved():
    images = np.arange(2 * 4 * 4).reshape(2, 4, 4, 1).astype(np.uint8)
    same = shift_images(images, np.zeros((2, 2), int))
    assert (same == images).all()
    down, right = shift_images(images, np.array([[1, 0], [0, 2]]))
    assert (down[1:] == images[0, :-1]).all() and (down[0] == images[0, 1]).all()
    assert (right[:, 2:] == images[1, :, :2]).all()
    assert (right[:, :2] == images[1, :, 2:0:-1]).all()


def test_labels_teach_the_primary_head_and_it_teaches_the_places(pictures, tmp_path):
    run = build(pictures, tmp_path)
    labelled, unlabelled = (
        gradients(run, parts(run, "train")),
        gradients(run, parts(run, UNLABELLED)),
    )
    assert heads(labelled) == {"primary"} and heads(unlabelled) == {POSITION_HEADS}
    body = {n for n in labelled if not n.startswith("net.heads.")}
    assert body == {n for n in unlabelled if not n.startswith("net.heads.")} and body
    vat = build(pictures, tmp_path / "vat", criterion="vat_vision")
    assert heads(gradients(vat, parts(vat, UNLABELLED))) == {"primary"}
    assert list(vat.model.net.heads) == ["primary"]


def test_the_loss_is_the_divergence_of_each_place(pictures, tmp_path):
    """The mean over the places of KL(primary, place), the teacher without dropout."""
    run = build(pictures, tmp_path, "criterion.unlabelled_dropout=0")
    (batch,) = parts(run, UNLABELLED)
    term = run.task.criterion(run.model, batch)["consistency"]
    run.model.eval()
    net = run.model.net
    wanted = net(batch.images).softmax(-1)
    features = net.features(batch.images)
    assert features.shape[2:] == (2, 2)
    losses = []
    for place in range(4):
        layer = net.heads[POSITION_HEADS]
        x = features[:, :, place // 2, place % 2]
        given = (x @ layer.weight[place].T + layer.bias[place]).softmax(-1)
        losses.append((wanted * (wanted / given).log()).sum())
    torch.testing.assert_close(term.sum, sum(losses) / 4)
    assert term.per == UNLABELLED


def test_the_teacher_does_not_depend_on_dropout(pictures, tmp_path):
    """Two passes with other masks differ in the student only: the target's entropy is the same."""
    run = build(pictures, tmp_path)
    seen = []
    criterion = run.task.criterion
    plain = criterion.losses
    criterion.losses = lambda net, images, wanted: (
        seen.append(wanted),
        plain(net, images, wanted),
    )[1]
    one, two = (gradients(run, parts(run, UNLABELLED)) for _ in range(2))
    run.engine.begin(9)
    (batch,) = parts(run, UNLABELLED)
    criterion(run.model, batch)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert not seen[0].requires_grad and run.model.net.features[4].p == 0.5
    assert all(torch.equal(one[n], two[n]) for n in one)  # the same update draws the same masks


@pytest.mark.parametrize("name", ["cvt_vision", "vat_vision"])
def test_the_student_sees_changed_images(name, pictures, tmp_path, monkeypatch):
    """And before it the teacher the images as they are."""
    run = build(pictures, tmp_path, criterion=name)
    (batch,) = parts(run, UNLABELLED)
    change = torch.ones_like(batch.images)
    monkeypatch.setattr(run.task.criterion, "perturbation", lambda net, images, loss: change)
    seen = []
    run.model.net.features.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run.task.criterion(run.model, batch)
    assert len(seen) == 2
    assert torch.equal(seen[0], batch.images) and torch.equal(seen[1], batch.images + change)


@pytest.mark.parametrize("kind", ["random", "adversarial"])
def test_perturbations_have_their_norm_and_the_adversarial_one_hurts(kind, pictures, tmp_path):
    more = [f"criterion.perturbation={kind}", "criterion.radius=0.5", "model.dropout=0"]
    run = build(pictures, tmp_path, *more, criterion="vat_vision")
    criterion, net = run.task.criterion, run.model.net
    (batch,) = parts(run, UNLABELLED)
    wanted = net(batch.images).log_softmax(-1).detach()

    def loss(images: torch.Tensor) -> torch.Tensor:
        return _kl_divergence(wanted, net(images))

    change = criterion.perturbation(net, batch.images, loss)
    norms = change.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.5))
    if kind == "adversarial":
        chance = criterion.config.radius * torch.nn.functional.normalize(
            torch.randn(8, 768, dtype=torch.float64)
        ).view_as(change)
        assert (loss(batch.images + change) > 2 * loss(batch.images + chance)).all()
    assert all(p.grad is None for p in net.parameters())


def test_the_adversarial_direction_is_found_without_dropout(pictures, tmp_path):
    """It is what it would be in a net that has none; the loss at the changed images is not."""
    changes, losses = [], []
    for rate in (0.5, 0.0):
        more = [f"model.dropout={rate}", "criterion.perturbation=adversarial"]
        run = build(pictures, tmp_path / str(rate), *more, criterion="vat_vision")
        (batch,) = parts(run, UNLABELLED)
        inputs: list[torch.Tensor] = []
        run.model.net.register_forward_pre_hook(
            lambda net, given, seen=inputs: seen.append(given[0])
        )
        rows = np.arange(len(batch.images), dtype=np.uint64)
        with use_context(ForwardContext(Noise(key("x"), rows))):
            losses.append(run.task.criterion(run.model, batch)["consistency"].sum.item())
        changes.append(inputs[-1] - batch.images)
    torch.testing.assert_close(changes[0], changes[1], rtol=0, atol=1e-9)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", ["train", UNLABELLED])
def test_the_average_moves_once_and_before_the_step(kind, pictures, tmp_path):
    run = build(pictures, tmp_path, "task.average_decay=0.9")
    average_moves_before_the_step(run, {kind: [parts(run, kind)]})


def test_normal_numbers_belong_to_rows():
    def drawn(rows: list[int]) -> torch.Tensor:
        with use_context(ForwardContext(Noise(key("x"), np.array(rows, np.uint64)))):
            return draw_gaussian(torch.zeros(len(rows), 1, 100, 100, dtype=torch.float64))

    whole = drawn([0, 1, 2])
    assert torch.equal(whole[1:2], drawn([1]))
    assert abs(whole.mean()) < 0.02 and abs(whole.std() - 1) < 0.02
    assert abs((whole**4).mean() - 3) < 0.15


def test_batch_normalisation_remembers_labelled_images_only(pictures, tmp_path):
    """Neither teacher nor student leaves a trace in the statistics (trap 24)."""
    more = ["model.norm=batch", "criterion.perturbation=adversarial"]
    run = build(pictures, tmp_path, *more)
    engine = run.engine
    names = [n for n in run.model.net.state_dict() if "running" in n]
    for number, stream in enumerate((UNLABELLED, "train")):
        before = {n: run.model.net.state_dict()[n].clone() for n in names}
        engine.begin(number)
        run.task.update(engine, run.model, {stream: [parts(run, stream)]})
        now = run.model.net.state_dict()
        assert all(torch.equal(before[n], now[n]) == (stream == UNLABELLED) for n in names)


def test_the_average_teaches_if_asked(pictures, tmp_path):
    more = ["criterion.mean_teacher=true", "criterion.perturbation=none"]
    run = build(pictures, tmp_path, *more, criterion="vat_vision")
    (batch,) = parts(run, UNLABELLED)
    seen = []
    run.task.criterion.losses = lambda net, images, wanted: (seen.append(wanted), wanted.sum(1))[1]
    run.task.criterion(run.model, batch)
    with torch.no_grad():
        run.model.net.heads["primary"].weight.mul_(3.0)
    run.task.criterion(run.model, batch)
    assert torch.equal(seen[0], seen[1])
    with torch.no_grad():
        run.model.average.net.heads["primary"].weight.mul_(3.0)
    run.task.criterion(run.model, batch)
    assert not torch.allclose(seen[0], seen[2])


def test_turns(pictures, tmp_path):
    task = build(pictures, tmp_path).task
    assert [list(task.needs(u)) for u in range(3)] == [["train"], [UNLABELLED], ["train"]]
    joint = build(pictures, tmp_path / "j", "task.joint=true").task
    assert joint.needs(5) == {"train": 1, UNLABELLED: 1}
    supervised = build(pictures, tmp_path / "s", criterion="image_classification").task
    assert supervised.needs(1) == {"train": 1} and list(supervised.build_streams("train")) == [
        "train"
    ]


def test_kinds(pictures, tmp_path):
    """Both kinds are priced where they take turns."""
    estimate = estimate_price(configure(pictures, tmp_path, "trainer.valid_split=''"))
    labelled, unlabelled = estimate.first_updates
    task = estimate.parts.task
    streams = task.build_streams("train")
    scales = [mean_over_first(streams, needs) for _, needs in task.kinds()]
    assert estimate.flops == pytest.approx((labelled * scales[0] + unlabelled * scales[1]) / 2)
    assert labelled != unlabelled
    joint = build_parts(configure(pictures, tmp_path, "task.joint=true"))
    assert joint.task.kinds() == [(1.0, {"train": 1, UNLABELLED: 1})]
    supervised = build_parts(
        configure(pictures, tmp_path, criterion="image_classification"), dry_run=True
    )
    assert supervised.task.kinds() == [(1.0, {"train": 1})]


def test_a_refused_step_leaves_the_average_alone(pictures, tmp_path):
    run = build(pictures, tmp_path, "trainer.on_nonfinite=skip", "model.dropout=0")
    engine, (batch,) = run.engine, parts(run, "train")
    with torch.no_grad():
        for parameter in run.model.net.parameters():
            parameter.add_(0.1)
    before = {n: w.clone() for n, w in run.model.state_dict().items()}
    for images, refused in ((batch.images * float("nan"), True), (batch.images, False)):
        run.trainer._update(0, {"train": [[batch.replace(images=images)]]})
        moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, before[n])}
        assert bool(engine.finite_check.refused) == refused
        assert {name.split(".")[0] for name in moved} == (set() if refused else {"net", "average"})


def test_stripes_are_learnt(pictures, tmp_path):
    more = ["trainer.max_update=50", "task.average_decay=0.8", "task.score_raw=true"]
    more += ["task.joint=true", "task.batch_size=20", "model.dropout=0", "optimizer.lr=0.01"]
    more += ["model.width=0.13"]  # of 8 channels alone positional norm takes longer
    run = build(pictures, tmp_path, *more)
    run.train()
    metrics, rows = run.parts.score("test")
    assert metrics["accuracy"] > 0.8 and metrics["raw_accuracy"] > 0.8 and len(rows) == 80
    assert {row["gold"] for row in rows} == set("abcd")


def test_a_head_for_each_place():
    torch.manual_seed(1)
    layer = PositionHeads(36, 5, 3)
    features = torch.randn(2, 5, 6, 6)
    out = layer(features)
    wanted = features[1, :, 4, 2] @ layer.weight[26].T + layer.bias[26]
    torch.testing.assert_close(out[1, 26], wanted)


@pytest.mark.parametrize(
    "more, words",
    [
        (["criterion.perturbation=noise"], "Choices: none, random, adversarial"),
        (["task.labelled=150"], "160 training images are too few"),
        (["criterion.mean_teacher=true", "task.average_decay=0"], "needs averaged weights"),
        (["model.norm=batch", "engine.micro_batch_size=4"], "batch normalisation takes"),
        (["model.channels=1"], "and 3 channels"),
        (["criterion.unlabelled_dropout=1"], "criterion.unlabelled_dropout .*below 1"),
        (["task.mean=[0.5]"], r"task.mean .*1 channel\(s\), .*have 3"),
        (["task.sd=[0.2,0.2]"], r"task.sd .*2 channel\(s\), .*have 3"),
        (["task.sd=[0.2,0,0.2]"], "task.sd .*above 0"),
        (["task.mean=[0.2,nan,0.2]"], "task.mean is .*give finite numbers"),
        (["task.labelled_share=0.001"], "labelled_share=0.001 of 140 training images is none"),
        (["task.labelled_share=1.5"], "task.labelled_share .*at most 1"),
        (["task.translate=-1"], "task.translate .*at least 0"),
        (["task.translate=16"], "images have 16 pixels a side"),
        (["task.labelled=-1"], "task.labelled .*at least 0"),
        (["task.valid_count=-1"], "task.valid_count .*at least 0"),
        (["task.unlabelled_batch_size=0"], "task.unlabelled_batch_size .*at least 1"),
        (["model.width=-1"], "model.width .*above 0, got -1"),
        (["trainer.valid_split=train"], "would choose the best checkpoint"),
    ],
)
def test_cvt_vision_refuses_options_that_do_not_fit(more, words, pictures, tmp_path):
    with pytest.raises(UsageError, match=words):
        build(pictures, tmp_path, *more, "trainer.max_update=1").train()
    assert not (tmp_path / "log.jsonl").exists()


def test_small_images_are_refused(tmp_path):
    small = image_data.write(tmp_path / "small")
    with pytest.raises(UsageError, match="12 or more"):
        build(small, tmp_path / "run")
