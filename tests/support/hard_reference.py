"""A reference hard-label update with torch's own AdamW on a copy of the student."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from meta_pseudo_bench import Bench, flat
from soft_reference import auxiliary_loss, labelled_loss, rate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from metaseq_lm.core.batch import Layout
from metaseq_lm.tasks import Batches


@dataclass
class Taken:
    """Results of an update: the sampled pairs (C, B, S) and the rewards, in order."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)


def watch(bench: Bench) -> Taken:
    """Record samples and rewards of the following updates."""
    taken = Taken()
    sample: Callable = bench.task.criterion.sample
    reward: Callable = bench.task.reward

    def sampled(*arguments: Any) -> tuple[Tensor, Tensor]:
        taken.pairs.append(sample(*arguments))
        return taken.pairs[-1]

    def earned(*arguments: Any) -> dict:
        logs = reward(*arguments)
        taken.rewards.append(float(logs["reward"]))
        taken.products.append(float(logs["unscaled_reward"]))
        return logs

    bench.task.criterion.sample = sampled
    bench.task.reward = earned
    return taken


@dataclass
class Wanted:
    """Expected rewards, dot products, student weights and teacher's gradient of an update."""

    rewards: list[float]
    products: list[float]
    student: Tensor
    reinforce: list[Tensor | None]
    auxiliary: list[Tensor | None]


def gradient(net: nn.Module, loss: Tensor) -> list[Tensor]:
    """Return a loss's gradient, clipped to norm 5 by torch's own function."""
    net.zero_grad()
    loss.backward()
    clip_grad_norm_(net.parameters(), 5.0)
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def pseudo_loss(student: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean CE of a sampled pair (B, S); a sampled [PAD], id 0, is padding."""
    pads = x == 0
    logits = student(x, Layout(pads))
    return F.cross_entropy(logits[~pads], y[~pads])


def reward_of_step(
    bench: Bench, student: nn.Module, batches: Batches, c: int, update: int, draws: list[Any]
) -> tuple[list[Tensor], Tensor]:
    """Return the clipped query gradient and the query loss after a virtual support step."""
    tuned = copy.deepcopy(student)
    (support,), (query,) = (batches[n][0] for n in ("support", "query"))
    if bench.config.criterion.inner_steps:
        with bench.replay(support.rows[c], update, draws[0]):
            loss = labelled_loss(tuned, weights_of(tuned), support, c)
        grads = gradient(tuned, loss)
        with torch.no_grad():
            for p, g in zip(tuned.parameters(), grads):
                p -= 0.1 * g
    with bench.replay(query.rows[c], update, draws[-1]):
        loss = labelled_loss(tuned, weights_of(tuned), query, c)
    return gradient(tuned, loss), loss.detach()


def written_out(
    bench: Bench, batches: Batches, update: int, draws: list[Any], pairs: tuple[Tensor, Tensor]
) -> Wanted:
    """Return the expected result of update `update` with sampled `pairs`, from the current state.

    `draws` belong to the student's passes, in order: pseudo, support if there is one, query.
    """
    criterion, copies = bench.config.criterion, bench.copies
    (text,) = batches["unlabelled"][0]
    student, teacher = copy.deepcopy(bench.model["student"]), bench.model["teacher"]
    decay = bench.config.optimizer.weight_decay
    adamw = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=decay)
    state = bench.engine.optimizers["student"].inner.state_dict()["state"]
    groups = adamw.state_dict()["param_groups"]
    adamw.load_state_dict(copy.deepcopy({"state": state, "param_groups": groups}))
    made = bench.engine.optimizers["student"].updates
    paper = criterion.fidelity == "paper"
    wanted = Wanted([], [], torch.zeros(()), [], [])
    per_step = len(draws) // copies
    reinforce, auxiliary = torch.zeros(()), torch.zeros(())
    start = copy.deepcopy((student.state_dict(), adamw.state_dict()))
    pseudo = [torch.zeros_like(p) for p in student.parameters()]

    for c in range(copies):
        mine = draws[c * per_step : (c + 1) * per_step]
        x, y = pairs[0][c], pairs[1][c]
        if paper:  # each starts from the beginning of the update
            student.load_state_dict(start[0])
            adamw.load_state_dict(copy.deepcopy(start[1]))
        before = flat(student.parameters())
        with bench.replay(text.rows[c], update, mine[0]):
            loss = pseudo_loss(student, x, y)
        student.zero_grad()
        loss.backward()
        pseudo = [total + p.grad / copies for total, p in zip(pseudo, student.parameters())]
        clip_grad_norm_(student.parameters(), 5.0)
        lr = rate(bench, made + 1 + (0 if paper else c))
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        step = before - flat(student.parameters())
        if paper:
            step = step - lr * decay * before
        grads, query = reward_of_step(bench, student, batches, c, update, mine[1:])
        towards = flat(grads)
        product = (step * towards).sum()
        kinds = {
            "cosine": product / (step.norm() * towards.norm()),
            "dot": product,
            "neg_loss": -query,
        }
        wanted.rewards.append(kinds[criterion.reward].item())
        wanted.products.append(product.item())

        pads = torch.zeros_like(x, dtype=torch.bool)
        if text.padding is not None:
            pads = text.padding[c]
        with bench.replay(text.rows[c], update, "teacher"):
            hidden = teacher.encoder(text.original[c], Layout(pads))
            scores = [teacher.predict(hidden, head=name)[~pads] for name in ("x", "y")]
            ce = 0.5 * F.cross_entropy(scores[0], x[~pads])
            ce = ce + 0.5 * F.cross_entropy(scores[1], y[~pads])
            auxiliary = auxiliary + auxiliary_loss(bench, text, c) / copies
        reinforce = reinforce + criterion.meta_weight * wanted.rewards[-1] * ce / copies
    if paper:
        student.load_state_dict(start[0])
        adamw.load_state_dict(copy.deepcopy(start[1]))
        for p, total in zip(student.parameters(), pseudo):
            p.grad = total
        clip_grad_norm_(student.parameters(), 5.0)
        adamw.param_groups[0]["lr"] = rate(bench, made + 1)
        adamw.step()
    parameters = list(teacher.parameters())
    wanted.student = flat(student.parameters())
    wanted.reinforce = list(torch.autograd.grad(reinforce, parameters, allow_unused=True))
    wanted.auxiliary = list(torch.autograd.grad(auxiliary, parameters, allow_unused=True))
    return wanted
