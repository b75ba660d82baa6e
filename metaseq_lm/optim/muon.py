"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024), with AdamW for the rest.

Shapes: A rows and B columns of a matrix, m the smaller and n the larger of them, P pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.config.groups import NamedParameters, Rule
from metaseq_lm.config.optimizers import (
    MATCH_RMS,
    ORIGINAL,
    MuonConfig,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.optim.optimizers import FusedAdamW, pair_of

HIDDEN = (
    r"(.*\.)?layers\.\d+\.(?!.*(embed|position)).+\.weight"  # matrices of a Transformer's layers
)
# What AdamW steps, unless it is in a numbered block, where a head may be one of attention.
OTHERS = r"((?!\d+\.)\w+\.)*(\w*embed\w*|positions|\w*heads?|project)(\..*)?"
JOINT = {"in_proj.weight": 3, "kv_proj.weight": 2}  # (queries,) keys and values, each square
GATED, AFTER = "fc1.weight", "fc2.weight"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


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

    Raises UsageError if there are none, if names do not tell which they are or how they are cut, or
    if optimizer.layer_decay would be lost.
    """
    common = {
        name: getattr(config, name) for name in ("momentum", "nesterov", "scale", "iteration")
    }
    rules = [Rule(HIDDEN, {"pieces": 1, **common}, dims=(2,))]
    hidden = {name: p.shape for name, p in parameters if rules[0].matches(name, p)}
    if not hidden:
        raise UsageError(
            "optimizer muon is for the matrices of Transformer layers, of which no trained "
            "parameter is one; choose another --optimizer"
        )
    unknown = [
        f"{name} {tuple(p.shape)}"
        for name, p in parameters
        if p.dim() > 1 and name not in hidden and not re.fullmatch(OTHERS, name)
    ]
    if unknown:
        raise UsageError(
            f"optimizer muon cannot tell whether to step {abbreviated(unknown)}: it steps matrices "
            "called layers.N.NAME.weight, and leaves embeddings, positions, project and heads to "
            "AdamW; rename them in the model, or choose another --optimizer"
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
        pieces = pieces_of(hidden)
        rules += [Rule(re.escape(name), {"pieces": count}) for name, count in pieces.items()]
    return rules


def pieces_of(shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    """Return the number of pieces of the matrices that have more than one.

    The first matrix of a gated network has two rows for each inner unit. Raises UsageError for a
    joint projection whose parts are not square.
    """
    pieces = {}
    for name, (rows, columns) in shapes.items():
        if joint := next((joint for joint in JOINT if name.endswith(joint)), None):
            pieces[name] = JOINT[joint]
            if rows != JOINT[joint] * columns:
                raise UsageError(
                    f"optimizer.split=true would cut {name} {rows, columns} into {JOINT[joint]} "
                    "square matrices; use optimizer.split=false"
                )
        after = shapes.get(name.removesuffix(GATED) + AFTER) if name.endswith(GATED) else None
        if after is not None and rows == 2 * after[1]:
            pieces[name] = 2
    return pieces


def muon(config: MuonConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other parameters."""
    groups, betas = config.groups(parameters, *hidden_rules(config, parameters)), config.betas
    return Muon(groups, lr=config.lr, betas=pair_of(betas), eps=config.eps, fused=True)
