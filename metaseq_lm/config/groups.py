"""Parameter groups: options of an optimizer by rules over the names of parameters.

Learning rates that decay with depth, biases and norms without weight decay, and matrices that an
optimizer treats in a way of their own are all rules of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

NamedParameters = Sequence[tuple[str, "nn.Parameter"]]
LAYER = re.compile(r"encoder\.stack\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Rule:
    """Options of the parameters whose whole name matches a regular expression.

    Attributes:
        pattern: The regular expression.
        options: Options of their group, such as "lr" and "weight_decay".
        dims: The numbers of dimensions that they have; any if empty.
    """

    pattern: str
    options: Mapping[str, Any]
    dims: tuple[int, ...] = ()

    def matches(self, name: str, parameter: Tensor) -> bool:
        """Return whether the rule applies to a parameter."""
        if self.dims and parameter.dim() not in self.dims:
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
    """Group the parameters whose options are equal, as torch's optimizers take them.

    Groups with a higher rate come first, of these the ones with weight decay. Checkpoints number
    the parameters in this order.

    Args:
        parameters: Names and parameters.
        rules: Rules whose options are hashable. Each parameter needs an "lr".

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
    """Return the rule that norms and biases have no weight decay.

    These are the parameters of one dimension or none. They are a group of their own even where the
    weight decay of all is 0.
    """
    return Rule(".*", {"weight_decay": 0.0, "is_spared": True}, dims=(0, 1))


def rates_by_depth(names: Sequence[str], lr: float, decay: float) -> list[Rule]:
    """Return rules for rates of lr * decay^(depth of the heads - depth of the parameter).

    As in the code of ELECTRA and BAM: embeddings (and their projection) have depth 0, layer i
    depth i + 1, BERT's tanh pooler L + 1 and heads L + 2, so that the top layer gets decay^2.

    Args:
        names: The names of the trained parameters.
        lr: The rate of the heads.
        decay: The factor from each depth to the one below it.

    Raises:
        UsageError: The model has no such layers.
    """
    layers = sorted({int(match[1]) for match in map(LAYER.match, names) if match})
    if not layers:
        raise UsageError(
            f"optimizer.layer_decay is {decay}, but no trained parameter of the model is called "
            "encoder.stack.layers.N; it must be 1 for this task"
        )
    top = layers[-1] + 1  # the depth of the top layer
    rules = [
        Rule(".*", {"lr": lr}),
        Rule(r".*\.pooler\..*", {"lr": lr * decay}),
        Rule(r"encoder\..*", {"lr": lr * decay ** (top + 2)}),
        # The last norm of a pre-LN stack belongs to its top layer.
        Rule(r"encoder\.stack\.norm\..*", {"lr": lr * decay**2}),
    ]
    for layer in layers:
        rate = lr * decay ** (top + 1 - layer)
        rules.append(Rule(rf"encoder\.stack\.layers\.{layer}\..*", {"lr": rate}))
    return rules
