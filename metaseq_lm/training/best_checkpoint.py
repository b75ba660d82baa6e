"""Which validation of a run was the best so far, and how many came since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from metaseq_lm.core.errors import UsageError


class BestCheckpoint:
    """The best value of trainer.best_checkpoint_metric, its update, and the validations since."""

    def __init__(self, options: DictConfig) -> None:
        self.metric: str = options.best_checkpoint_metric
        self.maximize = bool(options.maximize_best_checkpoint_metric)
        self.ties: str = options.ties
        self.value: float | None = None
        self.update = self.waited = 0

    def improves(self, metrics: Mapping[str, float], update: int) -> bool:
        """Record the validation at `update`; return whether it is the best so far.

        Raises UsageError if it does not give the metric.
        """
        if not self.metric:
            return False
        if self.metric not in metrics:
            raise UsageError(
                f"trainer.best_checkpoint_metric is '{self.metric}' but validation gives "
                f"{', '.join(sorted(metrics))}"
            )
        value, best = metrics[self.metric], self.value
        sign = 1 if self.maximize else -1
        better = best is None or sign * value > sign * best
        if math.isfinite(value) and (better or (value == best and self.ties == "latest")):
            self.value, self.update, self.waited = value, update, 0
            return True
        self.waited += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return value, update and waiting, and the metric that they belong to."""
        names = ("metric", "maximize", "value", "update", "waited")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load a saved state; return False for one of another metric, which cannot be compared."""
        if (state["metric"], state["maximize"]) != (self.metric, self.maximize):
            return False
        self.value, self.update, self.waited = (state[n] for n in ("value", "update", "waited"))
        return True
