"""One meta update: k inner steps, the gradient after them, and one step from the starting weights.

Pre-training as meta-learning (Lv et al. 2020, algorithm 1). From theta_0, k inner steps, each on
its own batch, lead to theta_k. The gradient of the test batch is taken at theta_k, and the
optimizer applies it at theta_0 (first order, equation 5). The exact meta-gradient is that gradient
times prod(I - inner_lr H_j), with H_j the Hessian at theta_j (equation 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from metaseq_lm.core.batch import Batch, Logs
from metaseq_lm.distributed import vectors
from metaseq_lm.engine.engine import Engine, InnerGradient
from metaseq_lm.forward.passes import LossFn
from metaseq_lm.methods.meta_pretrain.options import MetaOptions

_MAIN = "main"  # the optimizer


def meta_update(
    engine: Engine, loss: LossFn, batches: Sequence[Sequence[Batch]], config: MetaOptions
) -> Logs:
    """Make one meta update of the optimizer "main" on k inner batches and the test batch.

    Returns the logs of the test batch at theta_k, and "inner_loss_j", the loss of inner batch j at
    theta_j. If a loss or gradient is not finite, the parameters do not change and the engine
    reports it.
    """
    *inner_batches, test_batch = batches
    exact, inner_lr = config.second_order == "exact", config.inner_lr or 0.0
    parameters, optimizer = engine.parameters(_MAIN), engine.optimizers[_MAIN]
    inner_losses: Logs = {}
    inner_gradients: list[InnerGradient] = []
    # Without inner steps there is nothing to restore, so no copy of the parameters is made.
    restoring = engine.restoring(_MAIN) if inner_batches else contextlib.nullcontext()
    with restoring:
        for step, batch in enumerate(inner_batches):
            # Inner passes have their own keys, so the test pass has the random numbers of an
            # ordinary update.
            rng_key = f"inner {step}"
            if exact:
                inner = engine.inner(loss, batch, parameters, rng_key, replay=True)
                inner_gradients.append(inner)
                gradient, logs = inner.value, inner.logs
            else:
                gradient, logs = engine.gradients(loss, batch, parameters, rng_key)
            inner_losses[f"inner_loss_{step}"] = logs["loss"]
            if config.inner_optim == "sgd":
                # If the gradient is not finite, the next loss is not either, and the outer step
                # refuses it.
                engine.move(_MAIN, gradient, -inner_lr)
                continue
            updates = optimizer.updates
            if not engine.step(_MAIN, gradient):
                return inner_losses
            # All steps of a meta update have the same rate, so the schedule does not advance.
            optimizer.updates = updates
        gradient, logs = engine.gradients(loss, test_batch, parameters, full_precision=exact)
        # Back from theta_k to theta_0. Each inner loss is recomputed, to keep one graph in memory
        # at a time.
        for inner in reversed(inner_gradients):
            engine.move(_MAIN, inner.value, inner_lr)
            hvp = engine.hypergradients(inner, gradient, parameters)
            gradient = vectors.add(gradient, hvp, -inner_lr)
    engine.step(_MAIN, gradient)
    return {**logs, **inner_losses}
