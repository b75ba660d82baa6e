"""Whole updates of TARTAN and Cross-View Training against loops of plain torch, in float64.

Written from the papers: the networks are the package's, while gradients, clipping, steps and
averages are torch's own. tests/README.md lists the tests of the other papers' updates.
"""

import copy
from pathlib import Path

import pytest
import torch
from cvt_bench import BOTH, batch_of, built
from tartan_bench import EXACT, batches_of, build, one_update, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import WordBatch
from metaseq_lm.methods.cvt.model import TAGGING
from metaseq_lm.methods.tartan.criterion import task_terms
from metaseq_lm.methods.tartan.model import redraw
from metaseq_lm.training.run import TrainingRun

UPDATES = 3
META_LR = 0.2
SGD = ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0.9", "optimizer.clip_norm=0.4"]
TARTAN = [
    *EXACT,
    *SGD,
    "task.auxiliary=[train,tapt]",
    "task.head_lr=0.3",
    "task.head_weight_decay=0",
]
META = [
    *(
        "criterion.weight_lr=0.7",
        "criterion.meta_head_steps=3",
        f"criterion.meta_head_lr={META_LR}",
    ),
    "criterion.meta_head_weight_decay=0",
]


def mean_loss(model: nn.Module, batch: list) -> Tensor:
    (rows,) = batch
    (term,) = (term for term in task_terms(model, rows).values() if term.weight)
    return term.sum / rows.sizes[term.per]


def fit_head(model: nn.Module, batch: list) -> None:
    """Train the meta head on one batch, the body being fixed; its momentum starts at 0."""
    parameters = list(model.heads["meta"].parameters())
    descent = torch.optim.SGD(parameters, META_LR, momentum=0.9)
    for _ in range(3):
        grads = torch.autograd.grad(mean_loss(model, batch), parameters)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        descent.step()


def tartan(run: TrainingRun, meta: bool, algorithm_1: bool) -> nn.Module:
    """Return a copy of the net after UPDATES of algorithm 1, or of the authors' order of it."""
    model, members = copy.deepcopy(run.model), run.task.members
    encoder = list(model.encoder.parameters())
    end = list(model.heads["sentence"].parameters())
    aside = {id(p) for p in model.heads["meta"].parameters()} if meta else set()
    aside |= {id(p) for p in [*encoder, *end]}
    others = [p for p in model.parameters() if id(p) not in aside]
    body = torch.optim.SGD([*encoder, *others], 0.5, momentum=0.9)
    head = torch.optim.SGD(end, 0.3, momentum=0.9)
    logits = torch.zeros(len(members), dtype=torch.float64)
    for update in range(UPDATES):
        batches = {name: stream[0] for name, stream in batches_of(run, update).items()}
        every = [*encoder, *others, *end]
        gradients = [
            torch.autograd.grad(mean_loss(model, batches[name]), every, materialize_grads=True)
            for name in members
        ]
        shares = logits.softmax(0)
        if meta:
            if not algorithm_1:
                generator = random_streams.generator(run.config.seed, "meta head", update)
                redraw(model.heads["meta"], generator)
            fit_head(model, batches["head"])
            loss = mean_loss(model, batches["dev"])
            towards = torch.autograd.grad(loss, encoder, materialize_grads=True)
            flat = torch.cat([g.flatten() for g in towards])
            for k, gradient in enumerate(gradients):
                mine = torch.cat([g.flatten() for g in gradient[: len(encoder)]])
                logits[k] += 0.7 * F.cosine_similarity(mine, flat, 0)
        if algorithm_1:
            shares = logits.softmax(0)
        for place, parameter in enumerate(every):
            of_body = place < len(encoder)
            scales = shares if of_body or not algorithm_1 else torch.ones_like(shares)
            parts = [scale * gradient[place] for scale, gradient in zip(scales, gradients)]
            parameter.grad = torch.stack(parts).sum(0)
        clip_grad_norm_([*encoder, *others], 0.4)
        clip_grad_norm_(end, 0.4)
        body.step()
        head.step()
        model.zero_grad()
    model.task_logits.copy_(logits)
    return model


@pytest.mark.parametrize("algorithm_1", [True, False], ids=["paper", "authors"])
@pytest.mark.parametrize("criterion", ["tartan_mt", "tartan_meta"])
def test_tartan(criterion: str, algorithm_1: bool, topics: Path, tmp_path: Path) -> None:
    meta = criterion == "tartan_meta"
    more = [*(META if meta else []), f"criterion.algorithm_1={algorithm_1}"]
    run = build(topics, tmp_path, criterion, *TARTAN, *more)
    with torch.no_grad():
        run.model.task_logits.zero_()
    run.model.train()
    expected = tartan(run, meta, algorithm_1)
    start = weights(run)
    for update in range(UPDATES):
        one_update(run, update)
    moved = 0
    for name, value in expected.state_dict().items():
        if value.is_floating_point():
            moved += not torch.equal(value, start[name])
            torch.testing.assert_close(weights(run)[name], value, rtol=0, atol=1e-12, msg=name)
    assert moved > 10
    assert not meta or weights(run)["task_logits"].std() > 1e-3


def cross_view_loss(model: nn.Module, batch: WordBatch) -> Tensor:
    """Return the loss of section 4.2 of the dissertation, without dropout, of tags and of trees."""
    views = model.views(batch)
    words, lengths = batch.scored, batch.lengths
    if batch.labels is not None:
        scores = model.scores(views, words, batch.set_name, "primary")
        targets = batch.labels
        if batch.heads is not None:  # a class for each pair of head and relation
            relations = scores.shape[-1] // (1 + scores.shape[1])
            heads = torch.where(batch.heads == 0, 0, 1 + batch.heads)
            targets = heads * relations + batch.labels
        smoothing = 0.1 if batch.heads is None else 0.0
        return F.cross_entropy(scores[words], targets[words], label_smoothing=smoothing)
    total = torch.zeros((), dtype=torch.float64)
    for name in BOTH:
        with torch.no_grad():
            teacher = model.scores(views, words, name, "primary").softmax(-1)
        for module in model.auxiliary_modules(name):
            logs = model.scores(views, words, name, module).log_softmax(-1)
            shift = TAGGING.get(module, {}).get("shift", 0) if name == "chunk" else 0
            losses = []
            for row, length in enumerate(lengths.tolist()):
                places = torch.arange(1, length + 1)
                places = places[(places + shift >= 1) & (places + shift <= length)]
                losses.append(-(teacher[row, places + shift] * logs[row, places]).sum(-1))
            total = total + torch.cat(losses).mean()
    return total


def test_cross_view_training(sentences: Path) -> None:
    """Updates by turns: SGD with momentum, norm 1, averages before each step."""
    dry = ("model.dropout=0", "criterion.unlabelled_dropout=0", "optimizer.clip_norm=1")
    rate = ("schedule=damped_inverse_sqrt", "schedule.warmup_updates=3", "task.average_decay=0.9")
    run = built(sentences, "criterion=cvt_aux", *dry, *rate)
    model, average = copy.deepcopy(run.model), copy.deepcopy(run.model.average.net)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    velocity: dict[str, Tensor] = {}
    for update, stream in enumerate(["chunk", "unlabelled", "dep", "unlabelled", "chunk"]):
        batch = batch_of(run, stream, update)
        run.engine.begin(update)
        run.task.update(run.engine, run.model, {stream: [[batch]]})
        with torch.no_grad():
            for name, mean in average.named_parameters():
                mean.mul_(0.9).add_(0.1 * trained[name])
        model.zero_grad()
        cross_view_loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        step = update + 1
        lr = 0.5 * min(1, step / 3) / (1 + 0.005 * step**0.5)
        for name, parameter in trained.items():
            if parameter.grad is not None:  # others stand still, whatever their momentum
                velocity[name] = 0.9 * velocity.get(name, 0.0) + parameter.grad
                parameter.data -= lr * velocity[name]
    means = dict(average.named_parameters())
    for name, found in trained.items():
        torch.testing.assert_close(run.model.get_parameter(name), found, rtol=0, atol=1e-12)
        mean = run.model.average.net.get_parameter(name)
        torch.testing.assert_close(mean, means[name], rtol=0, atol=1e-12)
        assert name in velocity
