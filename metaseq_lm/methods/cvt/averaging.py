"""A net with the moving average of its weights beside it, for the tasks of translation and vision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from metaseq_lm.core.errors import UsageError
from metaseq_lm.engine.engine import Engine
from metaseq_lm.models.layers import RAW, AveragedWeights
from metaseq_lm.tasks import Passes, Scored


def check_teacher(mean_teacher: bool, decay: float) -> None:
    """Raise UsageError if averaged weights are to teach and there are none."""
    if mean_teacher and not decay:
        raise UsageError("criterion.mean_teacher needs averaged weights; task.average_decay is 0")


class AveragedNet(nn.Module):
    """`net`, which is trained and called, and with a `decay` above 0 its average."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__()
        self.net = net
        self.average = AveragedWeights(net, decay) if decay else None

    @property
    def averaged(self) -> nn.Module:
        """The net of averaged weights, or the trained one if there is no average."""
        return self.net if self.average is None else self.average.net

    def forward(self, *inputs: Any) -> Any:
        """Call the trained net."""
        return self.net(*inputs)


def scores(
    evaluate: Callable[[Engine, nn.Module, Passes], Scored],
    engine: Engine,
    model: AveragedNet,
    passes: Passes,
    both: bool,
) -> Scored:
    """Return what `evaluate` finds with the averaged weights, and with `both` with the trained ones.

    The names of the latter's metrics begin with "raw_", rows are of the former. The batches of a
    split are then held in memory.
    """
    if not both or model.average is None:
        return evaluate(engine, model.averaged, passes)
    held: Passes = {name: list(batches) for name, batches in passes.items()}
    metrics, rows = evaluate(engine, model.averaged, held)
    raw = evaluate(engine, model.net, held).metrics
    return Scored(metrics | {RAW + name: value for name, value in raw.items()}, rows)
