"""Parameter groups: options of an optimizer by rules over the roles and names of parameters.

Such rules set learning rates that decay with depth, exempt biases and norms from weight decay, and
select matrices that an optimizer treats specially.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.core.roles import Role, role_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["NamedParameters", "Rule"]

# Names of parameters, as in `model.named_parameters()`, and the parameters.
NamedParameters = Sequence[tuple[str, "nn.Parameter"]]


@dataclass(frozen=True)
class Rule:
    """Options of the parameters with certain names, numbers of dimensions, roles and levels.

    Attributes:
        pattern: The regular expression that their whole name matches.
        options: Options of their group, such as "lr" and "weight_decay".
        dims: Their numbers of dimensions; any if empty.
        roles: Their roles; any if empty.
        levels: Their numbers of levels below the heads; any if empty.
    """

    pattern: str
    options: Mapping[str, Any]
    dims: tuple[int, ...] = ()
    roles: tuple[Role, ...] = ()
    levels: tuple[int, ...] = ()

    def matches(self, name: str, parameter: Tensor) -> bool:
        """Return whether the rule applies to a parameter."""
        if self.dims and parameter.dim() not in self.dims:
            return False
        role = role_of(name, parameter)
        if self.roles and role.role not in self.roles:
            return False
        if self.levels and role.level not in self.levels:
            return False
        return re.fullmatch(self.pattern, name) is not None


def options_of(name: str, parameter: Tensor, rules: Sequence[Rule]) -> dict[str, Any]:
    """Return the options of one parameter; a later rule replaces the options of earlier ones."""
    options: dict[str, Any] = {}
    for rule in rules:
        if rule.matches(name, parameter):
            options |= rule.options
    return options


def parameter_groups(parameters: NamedParameters, rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Group the parameters with equal options, in the form that torch's optimizers take.

    Groups with a higher rate come first, and among equal rates those with weight decay. Checkpoints
    number the parameters in this order.

    Args:
        parameters: Names and parameters.
        rules: Rules with hashable options. Each parameter needs an "lr".

    Example:
        >>> net = nn.Linear(2, 1)
        >>> rules = [Rule(".*", {"lr": 0.1}), Rule("bias", {"lr": 0.2})]
        >>> [group["lr"] for group in parameter_groups(list(net.named_parameters()), rules)]
        [0.2, 0.1]
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for name, parameter in parameters:
        options = options_of(name, parameter, rules)
        group = groups.setdefault(tuple(sorted(options.items())), {"params": [], **options})
        group["params"].append(parameter)
    return sorted(groups.values(), key=lambda g: (-g["lr"], g.get("is_spared", False)))


def spared_from_decay() -> Rule:
    """Return the rule that gains and biases have no weight decay.

    They form a separate group even if the weight decay of all is 0.
    """
    options = {"weight_decay": 0.0, "is_spared": True}
    return Rule(".*", options, roles=(Role.GAIN, Role.BIAS))


def rates_by_level(parameters: NamedParameters, lr: float, decay: float) -> list[Rule]:
    """Return rules for rates of lr * decay^level, the level being that below the heads.

    As in the code of ELECTRA and BAM, heads have level 0, BERT's tanh pooler 1, the top layer 2 and
    the embeddings (and their projection) L + 2, so that the top layer gets decay^2.

    Args:
        parameters: Names and trained parameters.
        lr: The rate of the heads.
        decay: The factor from each level to the one below it.

    Raises:
        UsageError: The model has no layers with levels.
    """
    roles = [role_of(name, parameter) for name, parameter in parameters]
    if not any(role.level and role.role is Role.HIDDEN for role in roles):
        raise UsageError(
            f"optimizer.layer_decay is {decay}, but no trained parameter of the model is a matrix "
            "of a layer that declares its level (parameter_levels); it must be 1 for this task"
        )
    levels = sorted({role.level for role in roles})
    return [Rule(".*", {"lr": lr * decay**level}, levels=(level,)) for level in levels]


def check_roles(parameters: NamedParameters, reader: str) -> None:
    """Raise UsageError if a matrix has no role; `reader`, for the message, depends on roles."""
    unknown = [
        f"{name} {tuple(parameter.shape)}"
        for name, parameter in parameters
        if role_of(name, parameter).role is None
    ]
    if unknown:
        raise UsageError(
            f"{reader} needs the roles of matrices, and no module declares one for "
            f"{abbreviated(unknown)}; declare it in the module that has it, as in "
            f"parameter_roles = {{'weight': Role.HIDDEN}}, EMBEDDING or HEAD "
            "(docs/how_to/plugins.md#roles)"
        )
