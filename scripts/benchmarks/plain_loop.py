"""Meta Pseudo Labels as an autograd loop: one micro-step at a time, in the paper code's order.

A micro-step is a dict: "original" and "masked" (B, S), "labels" of the masked rows, and (tokens,
padding, labels) under "support" and "query"; labels are -1 without a target.
"""

from __future__ import annotations

from typing import Any

import torch
from plain_encoder import PAD, Student, Teacher
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

MicroStep = dict[str, Any]
MLM_TOKEN = 4  # [CLS1]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the positions with a label."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class Trained:
    """A net with AdamW, inverse square root schedule and clipping."""

    def __init__(self, net: nn.Module, lr: float, warmup: int, clip: float) -> None:
        self.net = net
        self.clip = clip
        self.parameters = list(net.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
        )
        self.schedule = LambdaLR(
            self.optimizer, lambda n: min(1, (n + 1) / warmup) * max(n + 1, warmup) ** -0.5
        )

    def step(self) -> None:
        """Clip, step, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


class PlainLoop:
    """Student and teacher; each method takes the micro-steps of one update and returns a loss."""

    def __init__(
        self, student: Student, teacher: Teacher, lr: float, warmup: int, clip: float = 5.0
    ) -> None:
        self.student = Trained(student.train(), lr, warmup, clip)
        self.teacher = Trained(teacher.train(), lr, warmup, clip)
        self.inner_lr = 0.1
        self.inner_clip = 5.0
        self.meta_weight = 100.0

    # ---------------------------------------------------------------- masked language model

    def update_mlm(self, update: list[MicroStep]) -> float:
        total = 0.0
        for micro in update:
            loss = cross_entropy(self.student.net(micro["masked"]), micro["labels"]) / len(update)
            loss.backward()
            total += loss.item()
        self.student.step()
        return total

    def auxiliary(self, micro: MicroStep, count: int) -> float:
        """Add the gradient of the teacher's own masked-LM losses."""
        given, masked = micro["original"].clone(), micro["masked"]
        given[:, 0] = MLM_TOKEN
        x, y = self.teacher.net(torch.cat([given, masked]))
        rows = len(given)
        hidden = cross_entropy(y[rows:], micro["labels"])
        pair_given = 0.5 * cross_entropy(x[:rows], masked) + 0.5 * cross_entropy(y[:rows], given)
        pair_masked = 0.5 * cross_entropy(x[rows:], masked) + 0.5 * hidden
        ((pair_given + pair_masked) / count).backward()
        return hidden.item() / count

    # ---------------------------------------------------------------- hard labels

    def update_hard(
        self, update: list[MicroStep], pairs: list[tuple[Tensor, Tensor]] | None = None
    ) -> float:
        """The teacher samples pairs, unless they are given."""
        loss = 0.0
        for number, micro in enumerate(update):
            scores = self.teacher.net(micro["original"])
            if pairs is None:
                x, y = (
                    torch.multinomial(s.softmax(-1).flatten(0, 1), 1).view(s.shape[:2])
                    for s in map(torch.Tensor.detach, scores)
                )
            else:
                x, y = pairs[number]
            likelihood = 0.5 * cross_entropy(scores[0], x) + 0.5 * cross_entropy(scores[1], y)
            direction = torch.autograd.grad(likelihood / len(update), self.teacher.parameters)
            reward = self.reward(micro, x, y)
            if abs(reward) <= 1:  # also false for NaN
                for parameter, grad in zip(self.teacher.parameters, direction):
                    added = reward * grad
                    parameter.grad = added if parameter.grad is None else parameter.grad + added
            loss += self.auxiliary(micro, len(update))
        self.teacher.step()
        return loss

    def reward(self, micro: MicroStep, x: Tensor, y: Tensor) -> float:
        """Let the student learn a pair; return the cosine of its step and the query gradient."""
        student, parameters = self.student, self.student.parameters
        start = [p.detach().clone() for p in parameters]
        padding = x == PAD
        cross_entropy(student.net(x, padding), y.masked_fill(padding, -1)).backward()
        student.step()
        learnt = [p.detach().clone() for p in parameters]
        step = torch.cat([(a - b).flatten() for a, b in zip(start, learnt)])
        for name in ("support", "query"):
            tokens, padding, labels = micro[name]
            loss = cross_entropy(student.net(tokens, padding), labels)
            grads = list(torch.autograd.grad(loss, parameters))
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
            factor = (self.inner_clip / (norm + 1e-6)).clamp(max=1.0)
            if name == "support":
                with torch.no_grad():
                    for p, g in zip(parameters, grads):
                        p.sub_(self.inner_lr * factor * g)
        with torch.no_grad():
            for p, value in zip(parameters, learnt):
                p.copy_(value)
        query = torch.cat([(factor * g).flatten() for g in grads])
        return float(F.cosine_similarity(step, query, dim=0))

    # ---------------------------------------------------------------- soft labels

    def update_soft(self, update: list[MicroStep]) -> float:
        loss = 0.0
        for micro in update:
            self.meta_gradient(micro, len(update))
            loss += self.auxiliary(micro, len(update))
        self.teacher.step()
        self.student.step()
        return loss

    def meta_gradient(self, micro: MicroStep, count: int) -> None:
        """Differentiate the query loss through two virtual student steps to the teacher."""
        student = self.student.net
        theta = {n: p.detach().requires_grad_() for n, p in student.named_parameters()}
        x, y = (scores.softmax(-1) for scores in self.teacher.net(micro["original"]))
        predicted = functional_call(student, theta, (x,)).log_softmax(-1)
        loss = -(y * predicted).sum(-1).mean() / count
        grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        for p, g in zip(self.student.parameters, grads):
            p.grad = g.detach() if p.grad is None else p.grad + g.detach()
        theta = self.adamw(theta, grads)

        tokens, padding, labels = micro["support"]
        loss = cross_entropy(functional_call(student, theta, (tokens, padding)), labels)
        grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        theta = {n: p - self.inner_lr * g for (n, p), g in zip(theta.items(), grads)}

        tokens, padding, labels = micro["query"]
        loss = cross_entropy(functional_call(student, theta, (tokens, padding)), labels)
        (self.meta_weight * loss / count).backward(inputs=self.teacher.parameters)

    def adamw(self, theta: dict[str, Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the parameters after the student's next AdamW step, differentiably."""
        optimizer = self.student.optimizer
        group = optimizer.param_groups[0]
        (beta1, beta2), lr = group["betas"], group["lr"]
        stepped = {}
        for (name, p), g, real in zip(theta.items(), grads, self.student.parameters):
            state = optimizer.state[real]
            n = int(state["step"]) + 1 if state else 1
            first = (1 - beta1) * g + (beta1 * state["exp_avg"] if state else 0)
            second = (1 - beta2) * g * g + (beta2 * state["exp_avg_sq"] if state else 0)
            # The root has no derivative at 0.
            root = second.clamp(min=1e-30).sqrt() / (1 - beta2**n) ** 0.5
            decayed = p * (1 - lr * group["weight_decay"])
            stepped[name] = decayed - lr / (1 - beta1**n) * first / (root + group["eps"])
        return stepped
