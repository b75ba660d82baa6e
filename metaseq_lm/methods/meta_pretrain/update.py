"""One meta update: k inner steps, the gradient where they lead, one step from where they began.

Pre-training as meta-learning (Lv et al. 2020, algorithm 1): theta_0 goes to theta_k in k steps, each
on a batch of its own; theta_0 then takes the optimizer's step with the gradient that one more
batch, the test batch, has at theta_k (first order, equation 5), or with that gradient times
prod(I - inner_lr H_j) (equation 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from metaseq_lm.core.batch import Batch, Logs
from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.engine import vectors
from metaseq_lm.engine.engine import Engine, InnerGradient, LossFn
from metaseq_lm.engine.vectors import Vector

MAIN = "main"  # the optimizer


@dataclass
class MetaOptions:
    """The inner steps."""

    inner_steps: int = option(
        1, "k; an update takes k + 1 batches, and with 0 is an ordinary one", at_least=0
    )
    inner_optim: str = option(
        "adam",
        "adam: the optimizer's own steps (moments, rate and clip_norm of this update), undone "
        "afterwards; sgd: plain steps of inner_lr, never clipped",
        choices=("adam", "sgd"),
    )
    inner_lr: float | None = option(
        None, "rate of the inner steps of sgd; adam has the optimizer's", at_least=0
    )
    second_order: str = option(
        "none",
        "none: the gradient at theta_k is applied as it is; exact: through the steps of sgd",
        choices=("none", "exact"),
    )

    def check(self) -> None:
        """Raise UsageError for values that make no sense together."""
        if (self.inner_lr is None) != (self.inner_optim == "adam"):
            raise UsageError(
                "task.inner_lr is the rate of task.inner_optim=sgd, which needs one; inner steps of "
                "adam have the rate of the optimizer"
            )
        if self.inner_optim == "adam" and self.second_order == "exact":
            raise UsageError("task.second_order=exact needs task.inner_optim=sgd")


def meta_update(
    engine: Engine, loss: LossFn, batches: Sequence[Sequence[Batch]], config: MetaOptions
) -> Logs:
    """Do one meta update of the optimizer "main"; `batches` are k inner ones, then the test batch.

    Returns the logs of the test batch at theta_k, and "inner_loss_j", the loss of inner batch j at
    theta_j. If anything on the way is not finite, the parameters stay as they are, and the engine
    says so.
    """
    *inner, test = batches
    exact = config.second_order == "exact"
    parameters = engine.parameters(MAIN)
    losses: Logs = {}
    # Without inner steps there is nothing to undo, and nothing to copy.
    with engine.restoring(MAIN) if inner else contextlib.nullcontext():
        taken: list[InnerGradient] = []
        for number, batch in enumerate(inner):
            # The random numbers of the inner passes are named, so that the test pass has those
            # that an ordinary update has.
            draw = f"inner {number}"
            if exact:
                taken.append(engine.inner(loss, batch, parameters, draw, replay=True))
                gradient, logs = taken[-1].value, taken[-1].logs
            else:
                gradient, logs = engine.gradients(loss, batch, parameters, draw)
            losses[f"inner_loss_{number}"] = logs["loss"]
            if not inner_step(engine, gradient, config):
                return losses
        gradient, logs = engine.gradients(loss, test, parameters, full_precision=exact)
        gradient = through(engine, taken, gradient, config.inner_lr or 0.0)
    engine.step(MAIN, gradient)
    return {**logs, **losses}


def inner_step(engine: Engine, gradient: Vector, config: MetaOptions) -> bool:
    """Take one inner step, inside `restoring`; returns False if the optimizer refuses it.

    A step of sgd with a gradient that is not finite leads to a loss that is not, which the outer
    step refuses.
    """
    if config.inner_optim == "sgd":
        engine.move(MAIN, gradient, -(config.inner_lr or 0.0))
        return True
    optimizer = engine.optimizers[MAIN]
    updates = optimizer.updates
    stepped = engine.step(MAIN, gradient)
    # The schedule stands still: all steps of an update have its rate, though not its moments.
    optimizer.updates = updates
    return stepped


def through(
    engine: Engine, taken: Sequence[InnerGradient], gradient: Vector, inner_lr: float
) -> Vector:
    """Return the gradient with respect to theta_0 of a loss with `gradient` at theta_k.

    Goes back along the steps of sgd, of which `taken` has the gradients: from theta_{j+1} to
    theta_j, and the vector v to (I - inner_lr H_j) v, with H_j the Hessian at theta_j. Memory stays
    that of one graph, because each loss is computed again.
    """
    for inner in reversed(taken):
        engine.move(MAIN, inner.value, inner_lr)
        bent = engine.hypergradients(inner, gradient, engine.parameters(MAIN))
        gradient = vectors.add(gradient, bent, -inner_lr)
    return gradient
