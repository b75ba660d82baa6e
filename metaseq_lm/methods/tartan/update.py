"""One update of end-task-aware training (paper algorithm 1, the authors' code), and its base task.

Every gradient is computed on a global batch. The authors accumulate micro-batches and average their
cosines; here there is one batch and one cosine. All gradients are first order. Shapes: T tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metaseq_lm.config.optimizers import OptimizerConfig
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Batch, Logs
from metaseq_lm.core.config import section
from metaseq_lm.data.streams import Order, Stream
from metaseq_lm.distributed import vectors
from metaseq_lm.distributed.vectors import Vector
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan.criterion import Meta, MultiTask, task_terms
from metaseq_lm.methods.tartan.data import Drawn, StateBatch, TartanRows
from metaseq_lm.methods.tartan.model import META, has_dropout, redraw, states_of
from metaseq_lm.methods.tartan.options import MetaConfig
from metaseq_lm.models.vision import frozen_statistics
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.tasks import Batches, Task

_BODY, HEAD = "body", "head"  # optimizers: encoder with the auxiliary heads; the end task's head
ENDTASK, DEV, _FIT = "endtask", "dev", "head"  # streams: end task, meta-objective, meta head
AUXILIARY = "auxiliary."  # prefix of the other streams


class EndTaskAware(Task):
    """Streams of labelled batches, optimizers and updates, shared by texts and images.

    Attributes:
        members: Streams of the trained tasks, in the order of their logits.
        endtask_head: Name of the end task's head.
    """

    fresh = ("heads.", "task_logits")
    members: list[str]
    endtask_head: ClassVar[str]

    @property
    def has_meta_head(self) -> bool:
        """Whether there is a separate head for the meta-objective."""
        return isinstance(self.criterion, Meta) and not self.criterion.config.same_head

    def labelled_rows(self, split: str) -> TartanRows:
        """Return the rows of a split of the end task's labelled set."""
        raise NotImplementedError

    def for_head(self, batch: Any, head: str) -> Batch:
        """Return a batch that names its head."""
        named: Batch = batch.replace(head=head)
        return named

    def stream(self, name: str, order: Order, rows: TartanRows, head: str) -> Stream:
        """Return a stream of batches for one head."""
        return Stream(
            name,
            order,
            lambda *args: self.for_head(rows.collate(*args), head),
            self.run_config.seed,
            rows.lengths,
            words=rows.words,
        )

    def drawn_batches(self) -> dict[str, tuple[str, int, str]]:
        """Return split, batch size and head of each stream of randomly drawn labelled batches."""
        options, criterion = self.config, self.criterion
        batches = {}
        if ENDTASK in self.members:
            batches[ENDTASK] = ("train", options.batch_size, self.endtask_head)
        if isinstance(criterion, Meta):
            head = META if self.has_meta_head else self.endtask_head
            batches[DEV] = ("valid", options.dev_batch_size or options.batch_size, head)
            if self.has_meta_head:
                split = "valid" if criterion.config.meta_head_split == "dev" else "train"
                batches[_FIT] = (split, options.meta_head_batch_size, META)
        return batches

    def drawn_streams(self) -> dict[str, Stream]:
        """Return the streams of `drawn_batches`."""
        streams = {}
        for name, (split, batch_size, head) in self.drawn_batches().items():
            rows = self.labelled_rows(split)
            order = Drawn(len(rows.lengths), batch_size, self.run_config.seed, name)
            streams[name] = self.stream(name, order, rows, head)
        return streams

    def build_optimizers(self, model: nn.Module) -> dict[str, Optimizer]:
        config, options = self.run_config, self.config
        separate = (f"heads.{self.endtask_head}.", f"heads.{META}.")
        body = [(n, p) for n, p in model.named_parameters() if not n.startswith(separate)]
        optimizers = {_BODY: build_optimizer(body, config.optimizer, config.schedule)}
        heads = dict(model.get_submodule("heads").named_children())
        if self.endtask_head in heads:
            lr = config.optimizer.lr if options.head_lr is None else options.head_lr
            optimizers[HEAD] = _build_head_optimizer(
                heads[self.endtask_head],
                config.optimizer,
                config.schedule,
                lr,
                options.head_weight_decay,
            )
        return optimizers

    def needs(self, number: int) -> dict[str, int]:
        return dict.fromkeys([*self.members, *self.drawn_batches()], 1)

    def update(self, engine: Engine, model: nn.Module, batches: Batches) -> Logs:
        optimizer = self.run_config.optimizer
        return update(engine, model, batches, self.members, self.criterion, optimizer)


def _build_head_optimizer(
    head: nn.Module,
    optimizer: OptimizerConfig,
    schedule: Any,
    lr: float,
    weight_decay: float,
) -> Optimizer:
    # Weight decay is for all of a head, its biases included.
    options = replace(
        optimizer,
        lr=lr,
        weight_decay=weight_decay,
        decay_norms_and_biases=True,
        layer_decay=1.0,
    )
    return build_optimizer(head.named_parameters(), options, schedule)


def update(
    engine: Engine,
    model: nn.Module,
    batches: Batches,
    members: Sequence[str],
    criterion: object,
    optimizer: OptimizerConfig,
) -> Logs:
    """Make one update of the tasks `members`, streams in the order of their logits.

    `optimizer` is the config that the meta head's optimizer follows.
    """
    logs: Logs = {}
    gradients: dict[str, Vector] = {}
    body = list(engine.parameters(_BODY))
    for name in members:
        wrt = [*body, *engine.parameters(HEAD)] if name == ENDTASK else body
        gradients[name], task_logs = engine.gradients(
            partial(task_terms, model), batches[name][0], wrt, rng_key=name
        )
        for key in ("loss", "accuracy"):
            logs[f"{key}_{label(name)}"] = task_logs[key]
    logits = model.get_buffer("task_logits")
    new_logits = logits
    encoder_ids = {id(p) for p in model.get_submodule("encoder").parameters()}
    in_encoder = [id(p) in encoder_ids for p in body]
    if isinstance(criterion, Meta):
        similarities, meta_logs = _meta_similarities(
            engine, model, batches, gradients, in_encoder, criterion, optimizer
        )
        logs |= meta_logs
        # A finite development loss may have a nonfinite gradient, which no step uses.
        engine.finite_check.require(similarities)
        # Descent on the meta-objective, whose derivative by a weight is -similarity (equation 7).
        new_logits = logits + criterion.config.weight_lr * similarities.to(logits)
    algorithm_1 = isinstance(criterion, MultiTask) and criterion.config.algorithm_1
    weights = (new_logits if algorithm_1 else logits).double().softmax(0).unbind()
    total: Vector = [None] * len(body)
    for weight, gradient in zip(weights, gradients.values(), strict=True):
        weighted: list[Tensor | None] = []
        # The end task's gradient continues into its head, which has a separate step.
        for g, encoder in zip(gradient, in_encoder):
            factor = weight if encoder or not algorithm_1 else 1.0
            weighted.append(None if g is None else g * factor)
        total = vectors.add(total, weighted)
    engine.step(_BODY, total)
    if ENDTASK in gradients:
        factor = 1.0 if algorithm_1 else weights[-1]
        engine.step(HEAD, vectors.scale(gradients[ENDTASK][len(body) :], factor))
    if not engine.finite_check.refused:
        logits.copy_(new_logits)
    logs |= {f"alpha_{label(name)}": weight for name, weight in zip(members, weights)}
    logs["loss"] = sum(w * logs[f"loss_{label(n)}"] for n, w in zip(members, weights))
    return logs


def label(stream: str) -> str:
    """Return the name of a task in the log."""
    return stream.removeprefix(AUXILIARY)


def _meta_similarities(
    engine: Engine,
    model: nn.Module,
    batches: Batches,
    gradients: Mapping[str, Vector],
    in_encoder: Sequence[bool],
    criterion: Meta,
    optimizer: OptimizerConfig,
) -> tuple[Tensor, Logs]:
    """Return the similarity (T,) of each task's gradient to the meta-objective's, and logs.

    The meta-objective is the end task's development loss through the meta head (equation 7) or,
    with same_head, through the end task's head (equation 6).
    """
    config = criterion.config
    logs: Logs = {}
    # These passes are not training, so batch normalisation must not update its statistics.
    with frozen_statistics(model):
        if not config.same_head:
            with _frozen_parameters(model.get_submodule("encoder")):
                logs |= _fit_meta_head(engine, model, batches[_FIT][0], config, optimizer)
        dev_gradient, dev_logs = engine.gradients(
            partial(task_terms, model), batches[DEV][0], engine.parameters(_BODY), rng_key=DEV
        )
    logs["loss_dev"] = dev_logs["loss"]

    def compared(gradient: Vector) -> Vector:
        over_body = config.similarity_over == "body"
        return [g for g, encoder in zip(gradient, in_encoder) if encoder or over_body]

    similarities = []
    for name, gradient in gradients.items():
        similarities.append(criterion.similarity(compared(dev_gradient), compared(gradient)))
        logs[f"{config.similarity}_{label(name)}"] = similarities[-1]
    return torch.stack(similarities), logs


@contextlib.contextmanager
def _frozen_parameters(net: nn.Module) -> Iterator[None]:
    """Disable gradients of the parameters of `net` inside the context, which saves memory."""
    trained = [p for p in net.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _fit_meta_head(
    engine: Engine,
    model: nn.Module,
    batches: list[Any],
    config: MetaConfig,
    optimizer: OptimizerConfig,
) -> Logs:
    """Train the meta head on one batch with a fixed encoder: estimate_meta_head of algorithm 1."""
    head = model.get_submodule(f"heads.{META}")
    if not config.algorithm_1:
        updates = engine.optimizers[_BODY].updates
        with engine.whole(write=True):
            redraw(head, random_streams.generator(engine.seed, "meta head", updates))
    options = replace(optimizer, clip_norm=0.0)
    constant = section("schedule", "constant", warmup_updates=0)
    # The optimizer's moments start at zero in every update.
    head_optimizer = _build_head_optimizer(
        head, options, constant, config.meta_head_lr, config.meta_head_weight_decay
    )
    parameters = head_optimizer.parameters
    # Without dropout the states of the fixed encoder are the same in every step.
    if config.meta_head_steps > 1 and not has_dropout(model.get_submodule("encoder")):
        states = engine.map(partial(states_of, model), batches, rng_key="fit")
        shared = ("targets", "head", "sizes", "rows", "samples", "stream")
        state_batches = []
        for batch, batch_states in zip(batches, states, strict=True):
            values = {field: getattr(batch, field) for field in shared}
            state_batches.append(StateBatch(states=batch_states, **values))
        batches = state_batches
    tolerance, previous = config.meta_head_tolerance, float("inf")
    logs: Logs = {}
    for step in range(config.meta_head_steps):
        gradient, step_logs = engine.gradients(
            partial(task_terms, model), batches, parameters, rng_key=f"fit {step}"
        )
        head_optimizer.load_gradient(gradient)
        head_optimizer.step()
        head_optimizer.forget_gradient()
        logs = {"meta_head_loss": step_logs["loss"], "meta_head_steps": float(step + 1)}
        if not tolerance:
            continue  # on a GPU the host does not wait for a loss without consequences
        loss = float(step_logs["loss"])
        if abs(loss - previous) < tolerance:
            break
        previous = loss
    return logs
