"""One update of end-task-aware training, straight down (paper algorithm 1; the authors' code).

Every gradient is that of a global batch: what the authors accumulate over micro-steps, taking the
mean of their cosines, is one batch and one cosine here. First order: nothing is differentiated twice.
Shapes: T tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Logs
from metaseq_lm.engine import vectors
from metaseq_lm.engine.engine import Engine
from metaseq_lm.engine.vectors import Vector
from metaseq_lm.methods.tartan.criterion import Meta, MetaConfig, MultiTask, task_terms
from metaseq_lm.methods.tartan.data import StateBatch, TaskBatch
from metaseq_lm.methods.tartan.model import META, has_dropout, redraw, states_of
from metaseq_lm.models.vision.wide_resnet import frozen_statistics
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.tasks import Batches

BODY, HEAD = "body", "head"  # optimizers
ENDTASK, DEV, FIT = "endtask", "dev", "head"  # streams
AUXILIARY = "auxiliary."  # beginning of the names of the others


def label(stream: str) -> str:
    """Return the name of a task in the log."""
    return stream.removeprefix(AUXILIARY)


def build_own_optimizer(
    net: nn.Module,
    optimizer: Mapping[str, Any],
    schedule: Mapping[str, Any],
    lr: float,
    weight_decay: float,
) -> Optimizer:
    """Return an optimizer of the run's kind for one head, with its own rate and decay of everything."""
    options = {**optimizer, "lr": lr, "weight_decay": weight_decay}
    options |= {"decay_norms_and_biases": True, "layer_decay": 1.0}
    return build_optimizer(net.named_parameters(), options, schedule)


def weights_of(logits: Tensor) -> list[float]:
    """Return the weights of the tasks: softmax of their logits (T,)."""
    return logits.double().softmax(0).tolist()


def task_gradients(
    engine: Engine, model: nn.Module, batches: Batches, members: Sequence[str]
) -> tuple[dict[str, Vector], Logs]:
    """Return by task the gradient of its loss, over the body and for the end task its head behind.

    Their losses and accuracies are in the logs.
    """
    found: dict[str, Vector] = {}
    logs: Logs = {}
    for name in members:
        wrt = list(engine.parameters(BODY))
        if name == ENDTASK:
            wrt += engine.parameters(HEAD)
        loss = partial(task_terms, model)
        found[name], more = engine.gradients(loss, batches[name][0], wrt, rng_key=name)
        logs[f"loss_{label(name)}"] = more["loss"]
        logs[f"accuracy_{label(name)}"] = more["accuracy"]
    return found, logs


def encoder_part(engine: Engine, model: nn.Module) -> list[bool]:
    """Return which parameters of the body are the encoder's; the others are heads."""
    own = {id(p) for p in model.get_submodule("encoder").parameters()}
    return [id(p) in own for p in engine.parameters(BODY)]


def combined(
    gradients: Mapping[str, Vector],
    weights: Sequence[float],
    shared: Sequence[bool],
    scale_heads: bool,
) -> Vector:
    """Return the weighted sum of gradients of equal length; `shared` says what is the encoder's.

    Without `scale_heads` what is not counts with weight 1.
    """
    total: Vector = [None] * len(shared)
    for weight, gradient in zip(weights, gradients.values(), strict=True):
        part = [
            None if g is None else g * (weight if scale_heads or own else 1.0)
            for g, own in zip(gradient, shared, strict=True)
        ]
        total = vectors.add(total, part)
    return total


@contextlib.contextmanager
def fixed(net: nn.Module) -> Iterator[None]:
    """Keep autograd from following the parameters of `net` inside the block: no graph, less memory."""
    trained = [p for p in net.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def with_states(batch: TaskBatch, states: Tensor) -> StateBatch:
    """Return the states of a batch in its place."""
    about = {name: getattr(batch, name) for name in ("targets", "head", "sizes", "rows", "samples")}
    return StateBatch(states=states, stream=batch.stream, **about)


def fit_meta_head(
    engine: Engine,
    model: nn.Module,
    batches: list[Any],
    config: MetaConfig,
    optimizer: Mapping[str, Any],
) -> Logs:
    """Fit the meta head to a batch, the body fixed: estimate_meta_head of algorithm 1.

    The moments start anew each time, the weights too if they are reset: drawn from the seed and the
    number of steps made so far.
    """
    head = model.get_submodule(f"heads.{META}")
    if config.meta_head_reset:
        steps = engine.optimizers[BODY].updates
        redraw(head, random_streams.generator(engine.seed, "meta head", steps))
    options = {**optimizer, "clip_norm": 0.0}
    constant = {"_name": "constant", "warmup_updates": 0}
    fitting = build_own_optimizer(
        head, options, constant, config.meta_head_lr, config.meta_head_weight_decay
    )
    # The body is fixed: without dropout its states are the same in every step.
    if config.meta_head_steps > 1 and not has_dropout(model.get_submodule("encoder")):
        states = engine.map(partial(states_of, model), batches, rng_key="fit")
        batches = [with_states(b, s) for b, s in zip(batches, states, strict=True)]
    before, steps = float("inf"), 0
    loss = float("nan")
    for step in range(config.meta_head_steps):
        terms = partial(task_terms, model)
        grads, logs = engine.gradients(terms, batches, fitting.parameters, rng_key=f"fit {step}")
        loss, steps = float(logs["loss"]), step + 1
        for parameter, grad in zip(fitting.parameters, grads, strict=True):
            parameter.grad = grad
        fitting.step()
        for parameter in fitting.parameters:
            parameter.grad = None
        if abs(loss - before) < config.meta_head_tolerance:
            break
        before = loss
    return {"meta_head_loss": loss, "meta_head_steps": float(steps)} if steps else {}


def similarities(
    engine: Engine,
    model: nn.Module,
    batches: Batches,
    gradients: Mapping[str, Vector],
    criterion: Meta,
    optimizer: Mapping[str, Any],
) -> tuple[Tensor, Logs]:
    """Return how alike each task's gradient and that of the meta-objective are (T,), and the logs.

    The meta-objective is the end task's development loss through the meta head (equation 7), or
    through its own (equation 6).
    """
    config = criterion.config
    logs: Logs = {}
    body = engine.parameters(BODY)
    # These passes are not training: they leave no trace in the statistics of batch normalisation.
    with frozen_statistics(model):
        if not config.same_head:
            with fixed(model.get_submodule("encoder")):
                logs |= fit_meta_head(engine, model, batches[FIT][0], config, optimizer)
        loss = partial(task_terms, model)
        towards, more = engine.gradients(loss, batches[DEV][0], body, rng_key=DEV)
    logs["loss_dev"] = more["loss"]
    part = (
        encoder_part(engine, model) if config.similarity_over == "encoder" else [True] * len(body)
    )
    found = []
    for name, gradient in gradients.items():
        pair = [[g for g, kept in zip(v, part) if kept] for v in (towards, gradient)]
        found.append(criterion.similarity(*pair))
        logs[f"{config.similarity}_{label(name)}"] = found[-1]
    return torch.stack(found), logs


def update(
    engine: Engine,
    model: nn.Module,
    batches: Batches,
    members: Sequence[str],
    criterion: object,
    optimizer: Mapping[str, Any],
) -> Logs:
    """Make one update of the tasks `members`, streams in the order of their logits.

    `optimizer` is the config that the meta head's optimizer follows.
    """
    logits = model.get_buffer("task_logits")
    gradients, logs = task_gradients(engine, model, batches, members)
    moved = logits
    if isinstance(criterion, Meta):
        alike, more = similarities(engine, model, batches, gradients, criterion, optimizer)
        logs |= more
        # A development gradient may not be finite although its loss is; no step uses it.
        engine.require_finite(alike)
        # Descent on the meta-objective: its derivative by a weight is -similarity (equation 7).
        moved = logits + criterion.config.weight_lr * alike.to(logits)
    early = isinstance(criterion, Meta) and criterion.config.weight_update == "before"
    weights = weights_of(moved if early else logits)
    scale_heads = criterion.config.scale_heads if isinstance(criterion, MultiTask) else True
    shared = encoder_part(engine, model)
    bodies = {name: gradient[: len(shared)] for name, gradient in gradients.items()}
    engine.step(BODY, combined(bodies, weights, shared, scale_heads))
    if ENDTASK in gradients:
        own = gradients[ENDTASK][len(shared) :]
        engine.step(HEAD, vectors.scale(own, weights[-1] if scale_heads else 1.0))
    if not engine.nonfinite:
        logits.copy_(moved)
    for name, weight in zip(members, weights):
        logs[f"alpha_{label(name)}"] = weight
    logs["loss"] = sum(w * logs[f"loss_{label(n)}"] for n, w in zip(members, weights))
    return logs
