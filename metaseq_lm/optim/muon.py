"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024), with AdamW for the rest.

Shapes: A rows and B columns of a matrix, m the smaller and n the larger of them, P pieces.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import register_optimizer
from metaseq_lm.optim.groups import NamedParameters, Rule
from metaseq_lm.optim.optimizers import AdamConfig, FusedAdamW, OptimizerConfig, pair_of

HIDDEN = r"(.*\.)?stack\.layers\.\d+\..+\.weight"  # matrices of the layers of a Transformer
JOINT = r"(.*\.)?stack\.layers\.\d+\..*in_proj\.weight"  # queries, keys and values
GATED, AFTER = "fc1.weight", "fc2.weight"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7
ORIGINAL, MATCH_RMS = "original", "match_rms_adamw"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class MuonConfig(AdamConfig):
    """Muon for the matrices of the layers; rate, decay and moments of AdamW for the rest."""

    weight_decay: float = with_default(OptimizerConfig, "weight_decay", 0.1)
    hidden_lr: float = option(
        0.0, "learning rate of the matrices of the layers (0 = optimizer.lr)", at_least=0
    )
    momentum: float = option(0.95, "decay rate of their momentum", at_least=0, below=1)
    nesterov: bool = option(True, "Nesterov momentum")
    scale: str = option(
        MATCH_RMS,
        "scale of their update, for A rows and B columns: original, sqrt(max(1, A / B)), wants a "
        "hidden_lr of about 0.02; match_rms_adamw, 0.2 sqrt(max(A, B)), the rate of AdamW",
        choices=(ORIGINAL, MATCH_RMS),
    )
    split: bool = option(
        True,
        "orthogonalise queries, keys and values, and the halves of a gated network, one by one",
    )
    iteration: str = option(
        "auto",
        "precision of the orthogonalisation: fp32, bf16, or auto, that of the weights on a CPU and "
        "bf16 on a GPU",
        choices=("auto", *PRECISIONS),
    )


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (P, A, B) with singular values near 1, by five Newton-Schulz iterations.

    Singular values s of X / ||X|| become phi^5(s), phi(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5,
    which lies in about [0.68, 1.20], but for tiny s. A matrix of zeros remains zero. The precision
    is that of `matrices`. It takes 5 (4 m^2 n + 2 m^3) FLOPs for each matrix.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=LEAST_NORM)[:, None, None]
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def scale_of(rows: int, columns: int, scale: str) -> float:
    """Return the factor of the update of a matrix, see MuonConfig.scale."""
    if scale == ORIGINAL:
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(FusedAdamW):
    """Muon for the groups that have `pieces`, torch's fused AdamW for the others.

    m <- mu m + (1 - mu) g,  u = mu m + (1 - mu) g with Nesterov momentum, else m,
    p <- p (1 - lr decay) - lr scale orthogonal(u), where each of the equal pieces of u, one above
    the other, is orthogonalised and scaled by itself (torch.optim.Muon with one piece).
    """

    needs_whole_matrices = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's own method expects a count of steps in the state of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            if "pieces" in group:
                for p in group["params"]:
                    if p.grad is not None:
                        self._step_matrix(p, p.grad, group)
        try:
            # Those that AdamW steps.
            self.param_groups = [group for group in groups if "pieces" not in group]
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, mu, lr = self.state[p], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp(grad, 1 - mu)
        update = grad.lerp(momentum, mu) if group["nesterov"] else momentum
        pieces = update.unflatten(0, (group["pieces"], -1)).to(precision_of(p, group["iteration"]))
        _, rows, columns = pieces.shape
        factor = lr * scale_of(rows, columns, group["scale"])
        direction = orthogonalise(pieces).flatten(0, 1)
        weight = p.mul(1 - lr * group["weight_decay"]).add_(direction, alpha=-factor)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:  # the device decides, see Optimizer.step
            momentum = torch.where(found_inf > 0, state["momentum_buffer"], momentum)
            weight = torch.where(found_inf > 0, p, weight)
        state["momentum_buffer"].copy_(momentum)
        p.copy_(weight)


def precision_of(weight: Tensor, iteration: str) -> torch.dtype:
    """Return the precision in which the update of a weight is orthogonalised.

    Without units for bf16 a CPU takes 20 times as long in bf16.
    """
    if iteration == "auto":
        return torch.bfloat16 if weight.is_cuda else weight.dtype
    return PRECISIONS[iteration]


def hidden_rules(config: MuonConfig, parameters: NamedParameters) -> list[Rule]:
    """Return the rules of the matrices that Muon steps, with the number of their pieces.

    Raises UsageError if there are none, or optimizer.layer_decay would be lost.
    """
    common = {
        name: getattr(config, name) for name in ("momentum", "nesterov", "scale", "iteration")
    }
    rules = [Rule(HIDDEN, {"pieces": 1, **common}, dims=(2,))]
    if not any(rules[0].matches(name, p) for name, p in parameters):
        raise UsageError(
            "optimizer muon is for the matrices of Transformer layers, of which no trained "
            "parameter is one; choose another --optimizer"
        )
    if config.hidden_lr and config.layer_decay != 1.0:
        raise UsageError(
            f"optimizer.layer_decay={config.layer_decay} scales one rate; leave "
            "optimizer.hidden_lr out, or layer_decay"
        )
    if config.hidden_lr or config.width_ratio != 1.0:
        rate = config.hidden_lr or config.lr
        # An update has singular values near its scale, and with match_rms_adamw that grows with the
        # root of the width.
        rate *= config.width_ratio**-0.5 if config.scale == MATCH_RMS else 1.0
        rules.append(Rule(HIDDEN, {"lr": rate}, dims=(2,)))
    if config.split:
        rules.append(Rule(JOINT, {"pieces": 3}, dims=(2,)))
        rules += [Rule(re.escape(name), {"pieces": 2}) for name in gated_matrices(parameters)]
    return rules


def gated_matrices(parameters: NamedParameters) -> list[str]:
    """Return the first matrices of gated networks, which have two rows for each inner unit."""
    shapes = {name: p.shape for name, p in parameters}
    others = {name: name.removesuffix(GATED) + AFTER for name in shapes if name.endswith(GATED)}
    return [
        name
        for name, other in others.items()
        if other in shapes and shapes[name][0] == 2 * shapes[other][1]
    ]


@register_optimizer("muon", dataclass=MuonConfig)
def muon(config: MuonConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other parameters."""
    groups, betas = config.groups(parameters, *hidden_rules(config, parameters)), config.betas
    return Muon(groups, lr=config.lr, betas=pair_of(betas), eps=config.eps, fused=True)
