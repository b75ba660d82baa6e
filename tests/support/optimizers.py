"""Optimizers from options that tests have as mappings."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from metaseq_lm.core.config import section
from metaseq_lm.core.roles import ParameterRole, Role
from metaseq_lm.optim import Optimizer, build_optimizer
from metaseq_lm.optim.roles import assign_roles


def make_optimizer(
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
    optimizer: Mapping[str, Any],
    schedule: Mapping[str, Any],
) -> Optimizer:
    """Return the optimizer with its schedule; the mappings have the registered names as `_name`.

    A model's parameters get the roles that its modules declare.
    """
    if isinstance(parameters, nn.Module):
        assign_roles(parameters)
        parameters = parameters.named_parameters()
    return build_optimizer(
        parameters, section("optimizer", **optimizer), section("schedule", **schedule)
    )


def with_role(parameter: nn.Parameter, role: Role, **more: int) -> nn.Parameter:
    """Return a parameter without a module, given a role."""
    parameter.role = ParameterRole(role, **more)  # type: ignore[attr-defined]
    return parameter
