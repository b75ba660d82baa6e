"""Roles of parameters in a network, from which optimizers choose rates and rules.

A module declares them in tables. Their keys are names of its children or parameters, or "" for the
whole module: `parameter_roles` (a Role), `parameter_pieces` (the number of equal matrices that are
stacked in a matrix) and `parameter_levels` (how many levels below the heads). Tables of inner
modules take precedence over tables of outer ones. `metaseq_lm.optim.roles` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Role", "role_of"]


class Role(Enum):
    """What a parameter does. Every parameter of fewer than two dimensions is a gain or a bias."""

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
        role: Its role; None for a matrix if its modules declare none.
        pieces: The number of equal matrices that are stacked in it.
        level: The number of levels below the heads, for rates that decay with depth.
    """

    role: Role | None
    pieces: int = 1
    level: int = 0


def role_of(name: str, parameter: Tensor) -> ParameterRole:
    """Return the role that a parameter was given; otherwise a role by its name and shape."""
    role: ParameterRole | None = getattr(parameter, "role", None)
    return role or ParameterRole(vector_role(name, parameter))


def vector_role(name: str, parameter: Tensor) -> Role | None:
    """Return the role of a gain or bias, None for a matrix."""
    if parameter.dim() > 1:
        return None
    return Role.BIAS if "bias" in name.rpartition(".")[2] else Role.GAIN
