"""How the moving average of the weights goes along with the steps of a run (Clark et al. 2018)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from omegaconf import DictConfig
from torch import nn

from metaseq_lm.engine import Engine
from metaseq_lm.models.averaged import AveragedWeights

RAW = "raw_"  # before the names of scores of the weights themselves


@contextlib.contextmanager
def moving(
    average: AveragedWeights | None, net: nn.Module, engine: Engine, config: DictConfig
) -> Iterator[None]:
    """Take the weights of `net` into its average, if it has one, then run the block, which steps.

    With trainer.on_nonfinite=skip a refused step leaves the average as it was; that costs a copy of
    it. Under the other policies a refused step ends the run or brings a checkpoint back.
    """
    if average is None:
        yield
        return
    skip = config.trainer.on_nonfinite == "skip"
    before = {n: value.clone() for n, value in average.state_dict().items()} if skip else {}
    average.move(net)
    yield
    if skip and engine.nonfinite:
        average.load_state_dict(before)
