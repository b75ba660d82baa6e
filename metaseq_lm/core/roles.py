"""Roles of parameters in a network, which optimizers go by.

A module declares them in tables, whose keys are names of its children or parameters, "" for all of
the module: `parameter_roles` (a Role), `parameter_pieces` (of how many equal matrices, one above
the other, a matrix consists) and `parameter_levels` (how many levels below the heads). The tables
of inner modules count before those of outer ones. `metaseq_lm.optim.roles` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Role(Enum):
    """What a parameter does. Gains and biases are all parameters of less than two dimensions."""

    HIDDEN = "maps hidden states to hidden states"
    EMBEDDING = "embeds tokens or positions, or maps embeddings to hidden states"
    HEAD = "maps hidden states to outputs"
    HEAD_HIDDEN = "first matrix of a head, whose rate follows the width"
    KERNEL = "matrix of a recurrent layer, or filters of a convolution"
    GAIN = "multiplies states"
    BIAS = "is added to states"


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter.

    Attributes:
        role: Its role; None for a matrix whose modules declare none.
        pieces: The number of equal matrices, one above the other, that it consists of.
        level: The number of levels that it is below the heads, for rates that decay with depth.
    """

    role: Role | None
    pieces: int = 1
    level: int = 0


def role_of(name: str, parameter: Tensor) -> ParameterRole:
    """Return the role that a parameter was given, else what its name and shape tell."""
    role: ParameterRole | None = getattr(parameter, "role", None)
    return role or ParameterRole(vector_role(name, parameter))


def vector_role(name: str, parameter: Tensor) -> Role | None:
    """Return the role of a gain or bias, None for a matrix."""
    if parameter.dim() > 1:
        return None
    return Role.BIAS if "bias" in name.rpartition(".")[2] else Role.GAIN
