"""Which validation of a run was the best so far, and how many came since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from metaseq_lm.core.errors import UsageError


class Best:
    """The best value of trainer.best_checkpoint_metric, its update, and the validations since."""

    def __init__(self, options: DictConfig) -> None:
        self.metric = options.best_checkpoint_metric
        self.maximize = bool(options.maximize_best_checkpoint_metric)
        self.ties = options.ties
        self.value: float | None = None
        self.update = self.waited = 0

    def takes(self, values: Mapping[str, float], update: int) -> bool:
        """Return whether the validation at `update` is the best so far, and remember it.

        Raises UsageError if it does not give the metric.
        """
        if not self.metric:
            return False
        if self.metric not in values:
            raise UsageError(
                f"trainer.best_checkpoint_metric is '{self.metric}' but validation gives "
                f"{', '.join(sorted(values))}"
            )
        value, before = values[self.metric], self.value
        sign = 1 if self.maximize else -1
        better = before is None or sign * value > sign * before
        if math.isfinite(value) and (better or value == before and self.ties == "latest"):
            self.value, self.update, self.waited = value, update, 0
            return True
        self.waited += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return value, update and waiting, and what they are of."""
        names = ("metric", "maximize", "value", "update", "waited")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take a saved state, unless it is of another metric: values of two cannot be compared.

        Returns whether it was taken.
        """
        own = (self.metric, self.maximize)
        same = (state.get("metric", own[0]), state.get("maximize", own[1])) == own
        if same:
            self.value, self.update, self.waited = (state[n] for n in ("value", "update", "waited"))
        return same
