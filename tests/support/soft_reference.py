"""A reference soft-label update: one graph through every step, micro-step after micro-step.

Shapes of a micro-step: B batch, S length, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from meta_pseudo_bench import Bench
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from metaseq_lm.core.batch import CopiesBatch, Layout
from metaseq_lm.tasks import Batches

Weights = dict[str, Tensor]


@dataclass
class Moments:
    """Adam's state by parameter name; `fresh` is where the second moment is a constant zero."""

    first: Weights
    second: Weights
    step: int


@dataclass
class Wanted:
    """Expected gradients for the optimizers in an update, and its losses."""

    student: list[Tensor]
    meta: list[Tensor | None]
    auxiliary: list[Tensor | None]
    pseudo: float
    query: float
    after_pseudo: list[Weights]


def rate(bench: Bench, number: int) -> float:
    """Return the rate of step `number` (from 1): base n^-1/2 after a linear rise to base W^-1/2."""
    base, warm = bench.config.optimizer.lr, bench.config.schedule.warmup_updates
    return base * number**-0.5 if number >= warm else base * warm**-0.5 * number / warm


def present_moments(bench: Bench) -> Moments:
    """Return the student's actual Adam state, zeros before its first step."""
    inner = bench.engine.optimizers["student"].inner
    first, second, step = {}, {}, 0
    for name, p in bench.model["student"].named_parameters():
        state = inner.state.get(p, {})
        first[name] = state["exp_avg"].clone() if state else torch.zeros_like(p)
        second[name] = state["exp_avg_sq"].clone() if state else torch.zeros_like(p)
        step = int(state["step"]) if state else 0
    return Moments(first, second, step)


def adamw(
    bench: Bench, theta: Weights, grad: Weights, state: Moments, lr: float
) -> tuple[Weights, Moments]:
    """Return weights and moments after one AdamW step, keeping the graph."""
    b1, b2 = bench.config.optimizer.betas
    eps, decay = bench.config.optimizer.eps, bench.config.optimizer.weight_decay
    step = state.step + 1
    first, second, after = {}, {}, {}
    for name, g in grad.items():
        m = b1 * state.first[name] + (1 - b1) * g
        v = b2 * state.second[name] + (1 - b2) * g * g
        # sqrt((1 - b2) g^2) is |g| sqrt(1 - b2), which has a finite derivative at g = 0.
        only = state.second[name].detach() == 0
        some = torch.where(only, torch.ones_like(v), v).sqrt()
        root = torch.where(only, (1 - b2) ** 0.5 * g.abs(), some)
        corrected = m / (1 - b1**step)
        move = corrected / (root / (1 - b2**step) ** 0.5 + eps)
        after[name] = theta[name] - lr * decay * theta[name] - lr * move
        first[name], second[name] = m, v
    return after, Moments(first, second, step)


def slope(loss: Tensor, at: Weights) -> Weights:
    """Return the gradient of a loss by parameter name, itself differentiable."""
    grads = torch.autograd.grad(loss, list(at.values()), create_graph=True)
    return dict(zip(at, grads))


def labelled_loss(student: Any, weights: Weights, batch: CopiesBatch, c: int) -> Tensor:
    """Return the mean CE over the targets of micro-step c of a support or query batch."""
    pads = None if batch.padding is None else batch.padding[c]
    logits = functional_call(student, weights, (batch.tokens[c], Layout(pads)))
    losses = []
    for row, (at, targets) in enumerate(zip(batch.positions[c], batch.targets[c])):
        for position, target in zip(at.tolist(), targets.tolist()):
            if target >= 0:
                losses.append(-logits[row, position].log_softmax(-1)[target])
    return torch.stack(losses).mean()


def pseudo_loss(bench: Bench, theta0: Weights, batch: CopiesBatch, c: int) -> Tensor:
    """Return the student's mean soft CE on the teacher's soft pair."""
    teacher, student = bench.model["teacher"], bench.model["student"]
    text = batch.original[c]
    pads = torch.zeros_like(text, dtype=torch.bool)
    if batch.padding is not None:
        pads = batch.padding[c]
    hidden = teacher.encoder(text, Layout(pads))
    soft_x = teacher.predict(hidden, head="x").softmax(-1)
    soft_y = teacher.predict(hidden, head="y").softmax(-1)
    if bench.config.criterion.fixed_y:
        soft_y = F.one_hot(text, soft_y.shape[-1]).to(soft_y)
    soft_y = taught(bench, soft_y, pads)
    logits = functional_call(student, theta0, (soft_x, Layout(pads)))
    losses = -(soft_y * logits.log_softmax(-1)).sum(-1)
    return losses[~pads].sum() / (soft_y.sum(-1)[~pads]).sum()


def taught(bench: Bench, soft_y: Tensor, pads: Tensor) -> Tensor:
    """Return the teacher's probabilities (B, S, V) after criterion.targets, row by row."""
    kind, size = bench.config.criterion.targets, soft_y.shape[-1]
    if kind == "uniform":
        return torch.full_like(soft_y, 1 / size)
    if kind == "unigram":
        counts = soft_y.new_tensor(bench.task.vocabulary.counts)
        special = [s for s in bench.task.vocabulary.specials if s != bench.task.vocabulary.unk]
        counts[special] = 0
        return (counts / counts.sum()).expand_as(soft_y)
    rows = []
    for row, padding in zip(soft_y, pads):
        length = int((~padding).sum())
        if kind == "shifted":
            row, half = row.detach(), length // 2
            row = torch.cat([row[half:length], row[:half], row[length:]])
        if kind == "flat":
            row = torch.stack([flat_row(p, bench.config.criterion.support) for p in row.detach()])
        rows.append(row)
    return torch.stack(rows)


def flat_row(probabilities: Tensor, support: float) -> Tensor:
    """Return equal probabilities for the smallest set of likeliest tokens that holds `support`."""
    likeliest = sorted(range(len(probabilities)), key=lambda t: -probabilities[t].item())
    count = 0
    while probabilities[likeliest[:count]].sum() < support:
        count += 1
    chosen = likeliest[:count]
    flat = torch.zeros_like(probabilities)
    flat[chosen] = 1 / len(chosen)
    return flat


def auxiliary_loss(bench: Bench, batch: CopiesBatch, c: int) -> Tensor:
    """Return the teacher's two masked-LM pairs, each half x and half y, of micro-step c."""
    teacher = bench.model["teacher"]
    text, masked = batch.original[c].clone(), batch.tokens[c]
    text[:, 0] = bench.task.vocabulary.index("[CLS1]")
    pads = torch.zeros_like(text, dtype=torch.bool)
    if batch.padding is not None:
        pads = batch.padding[c]
    hidden = teacher.encoder(torch.stack([text, masked], 1), Layout(torch.stack([pads, pads], 1)))
    x = teacher.predict(hidden, head="x")
    y = teacher.predict(hidden, head="y")
    losses = [
        F.cross_entropy(x[:, 0][~pads], masked[~pads]),
        F.cross_entropy(y[:, 0][~pads], text[~pads]),
        F.cross_entropy(x[:, 1][~pads], masked[~pads]),
    ]
    hidden_ones = []
    for row, (at, targets) in enumerate(zip(batch.positions[c], batch.targets[c])):
        chosen = {p: t for p, t in zip(at.tolist(), targets.tolist()) if t >= 0}
        hidden_ones += [-y[row, 1, p].log_softmax(-1)[t] for p, t in chosen.items()]
    return 0.5 * (sum(losses) + torch.stack(hidden_ones).mean())


def unrolled(bench: Bench, batches: Batches, update: int, draws: list[Any]) -> Wanted:
    """Return the expected result of update `update` from the current weights and moments.

    `draws` belong to the engine's passes: pseudo, support if there is one, query, auxiliary.
    """
    criterion, copies = bench.config.criterion, bench.copies
    student, teacher = bench.model["student"], list(bench.model["teacher"].parameters())
    (text,), (support,), (query,) = (batches[n][0] for n in ("unlabelled", "support", "query"))
    start = {n: p.detach().clone() for n, p in student.named_parameters()}
    moments = present_moments(bench)
    lr = rate(bench, moments.step + 1)
    total: dict[str, Tensor] = {}
    wanted = Wanted([torch.zeros_like(p) for p in start.values()], [], [], 0.0, 0.0, [])

    for c in range(copies):
        theta0 = {n: p.clone().requires_grad_() for n, p in start.items()}
        with bench.replay(text.rows[c], update, draws[0]):
            pseudo = pseudo_loss(bench, theta0, text, c)
        grad0 = slope(pseudo / copies, theta0)
        after = moments
        times = copies if criterion.fidelity == "paper" else 1
        moving = {n: times * g for n, g in grad0.items()}
        if criterion.pretrain_step == "adamw":
            theta1, after = adamw(bench, start, moving, moments, lr)
        else:
            theta1 = {n: start[n] - criterion.inner_lr * g for n, g in moving.items()}
        theta2 = theta1
        if criterion.inner_steps:
            with bench.replay(support.rows[c], update, draws[1]):
                grad1 = slope(labelled_loss(student, theta1, support, c), theta1)
            if criterion.finetune_step == "adamw":
                theta2, _ = adamw(bench, theta1, grad1, after, lr)
            else:
                theta2 = {n: theta1[n] - criterion.inner_lr * g for n, g in grad1.items()}
        with bench.replay(query.rows[c], update, draws[-2]):
            loss = labelled_loss(student, theta2, query, c)
        with bench.replay(text.rows[c], update, draws[-1]):
            own = auxiliary_loss(bench, text, c)
        for name, value in (("meta", criterion.meta_weight * loss), ("auxiliary", own)):
            total[name] = total.get(name, torch.zeros(())) + value / copies
        wanted.student = [s + g.detach() for s, g in zip(wanted.student, grad0.values())]
        wanted.pseudo += pseudo.item() / copies
        wanted.query += loss.item() / copies
        wanted.after_pseudo.append({n: p.detach() for n, p in theta1.items()})
    wanted.meta = list(torch.autograd.grad(total["meta"], teacher, allow_unused=True))
    wanted.auxiliary = list(torch.autograd.grad(total["auxiliary"], teacher, allow_unused=True))
    return wanted
