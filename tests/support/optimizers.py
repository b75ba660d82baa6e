"""Optimizers of options that stand in a test as mappings."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from metaseq_lm.core.config import section
from metaseq_lm.optim import Optimizer, build_optimizer


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer: Mapping[str, Any],
    schedule: Mapping[str, Any],
) -> Optimizer:
    """Return the optimizer with its schedule; the mappings have the registered names as `_name`."""
    return build_optimizer(
        parameters, section("optimizer", **optimizer), section("schedule", **schedule)
    )
