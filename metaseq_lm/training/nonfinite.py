"""Handles updates with a loss or gradient that is not finite: stop, skip or roll back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from metaseq_lm.core.batch import Logs
from metaseq_lm.core.config import TrainerConfig
from metaseq_lm.core.errors import DivergedError, MetaseqError
from metaseq_lm.core.interfaces import place_of
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine, copy_nested
from metaseq_lm.tasks import Task


class NonfinitePolicy:
    """Counts refused updates and undoes their changes.

    The engine refuses a step if its gradient is not finite (`engine.finite_check.refused` then
    names its optimizer). By `trainer.on_nonfinite`, "stop" raises, "skip" undoes the update
    and continues, "rollback" returns to the last checkpoint. `trainer.max_nonfinite` limits the
    updates skipped in a row, or the rollbacks to one checkpoint.

    A GPU refuses the step itself (`finite_check.defers`), and the policy acts when the host next
    checks: before a line of the log, a validation, a checkpoint and the end. With "skip" and
    several optimizers the host checks at each step, because an earlier one may have stepped.
    """

    def __init__(self, options: TrainerConfig, model: nn.Module, engine: Engine) -> None:
        self.policy: str = options.on_nonfinite
        self.limit: int = options.max_nonfinite
        self.model, self.engine = model, engine
        self.refusals = 0
        optimizers = engine.optimizers.values()
        engine.finite_check.defers = (
            engine.device.type == "cuda"
            and (self.policy != "skip" or len(optimizers) == 1)
            and all(optimizer.takes_found_inf for optimizer in optimizers)
        )

    def snapshot(self) -> dict[str, Any] | None:
        """Return a copy of what the next update may change; None if the policy never undoes one."""
        if self.policy != "skip":
            return None
        snapshot: dict[str, Any] = copy_nested(self._changeable())
        return snapshot

    def _changeable(self) -> dict[str, Any]:
        """Return the state that a refused update may have changed."""
        optimizers = self.engine.optimizers
        # With several optimizers, an earlier one may have stepped. With one, its step was refused,
        # but tensors outside it may have changed: running statistics, averages.
        if len(optimizers) > 1:
            states = {name: o.local_state() for name, o in optimizers.items()}
            return {"weights": self.model.state_dict(), "optimizers": states}
        weights = self.model.state_dict(keep_vars=True)
        trained = {id(p) for o in optimizers.values() for p in o.parameters}
        return {
            "weights": {n: w.detach() for n, w in weights.items() if id(w) not in trained},
            "optimizers": {},
        }

    @torch.no_grad()
    def undo_skipped(self, snapshot: dict[str, Any] | None) -> None:
        """Restore a snapshot on the device if it has skipped the step of the only optimizer."""
        if snapshot is None:
            return
        skips, weights = self.engine.finite_check.skips(), self._changeable()["weights"]
        for name, value in snapshot["weights"].items():
            weights[name].copy_(torch.where(skips, value, weights[name]))

    def undo(self, snapshot: dict[str, Any] | None) -> None:
        """Restore a snapshot."""
        if snapshot is None:
            return
        self.model.load_state_dict(snapshot["weights"], strict=False)
        for name, state in snapshot["optimizers"].items():
            self.engine.optimizers[name].load_local_state(state)

    def accept(self) -> None:
        """Reset the count after a finite update; with "rollback" only a save does."""
        if self.policy != "rollback":
            self.refusals = 0

    def saved(self) -> None:
        """Reset the count after a save: a rollback now returns to a later checkpoint."""
        if not self.engine.finite_check.refused:
            self.refusals = 0

    def refuse(self, message: str) -> None:
        """Count a refused update; DivergedError with `message` if the run has to stop."""
        self.refusals += 1
        if self.policy == "stop" or self.refusals > self.limit:
            times = ""
            if self.refusals > 1:
                times = f" ({self.refusals} times in a row)"
            raise DivergedError(
                f"{message}{times}; nothing was changed by it. Lower optimizer.lr or "
                "optimizer.clip_norm and start anew, or resume "
                "with trainer.on_nonfinite=skip or rollback"
            )


def describe_refusal(update: int, engine: Engine, optimizers: list[str], logs: Logs) -> str:
    """Return a sentence on the update (counted from 1) that was refused.

    It names the terms of the loss in `logs` that are not finite; if all are finite, the first
    parameter with a gradient that is not; and the replicas with a part of the loss that is not,
    unless that is all replicas. A collective call.
    """
    names = ", ".join(dict.fromkeys(optimizers))
    text = f"update {update}: the loss or the gradient of {names} is not finite"
    terms = engine.record.loss_terms.keys() & logs.keys()
    bad = sorted(name for name in terms if not math.isfinite(float(logs[name])))
    gradients = process_group.gather_objects(engine.finite_check.gradient)
    if bad:
        text += f": the term {', '.join(bad)} is not"
    elif gradient := next(filter(None, gradients), ""):
        text += f": no term, but the gradient of {gradient} is the first that is not"
    replicas = engine.finite_check.nonfinite_replicas(update - 1)
    if 0 < len(replicas) < process_group.world_size():
        numbers = ", ".join(map(str, replicas))
        text += f" (the loss of replica{'s' * (len(replicas) > 1)} {numbers})"
    return text


def check_learns(update: int, task: Task, engine: Engine, values: Mapping[str, float]) -> None:
    """Raise MetaseqError if updates have values to log, but no optimizer has made a step."""
    optimizers = engine.optimizers.values()
    if values and optimizers and not any(optimizer.updates for optimizer in optimizers):
        raise MetaseqError(
            f"update {update}: no parameter has a gradient, so nothing was learnt: criterion "
            f"{task.run_config.criterion._name} ({place_of(type(task.criterion))}) gives no term "
            "with a weight that depends on what is trained"
        )


def check_finite(update: int, values: Mapping[str, float]) -> None:
    """Raise DivergedError if a logged value of training is not finite."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise DivergedError(
            f"update {update}: {', '.join(bad)} is not finite. Lower optimizer.lr, or resume from "
            "the last checkpoint with another setting"
        )
