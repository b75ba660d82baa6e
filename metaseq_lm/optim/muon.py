"""Muon: momentum with orthogonalised matrices (Jordan et al. 2024), and AdamW for the rest.

Shapes: A rows and B columns of a matrix, m the smaller and n the larger of them, P pieces.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import torch
from torch import Tensor

from metaseq_lm.config.groups import NamedParameters, Rule, check_roles
from metaseq_lm.config.optimizers import (
    MATCH_RMS,
    ORIGINAL,
    MuonConfig,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.core.roles import Role, role_of
from metaseq_lm.optim.optimizers import FusedAdamW, pair_of
from metaseq_lm.optim.states import LIKE, Table

# Steep at 0, so that few iterations suffice; in exchange, singular values do not converge to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_LEAST_NORM = 1e-7
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (P, A, B) with singular values near 1, by five Newton-Schulz iterations.

    Singular values s of X / ||X|| become phi^5(s), phi(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5,
    which lies in about [0.68, 1.20], except for tiny s. A zero matrix stays zero. It computes in
    the precision of `matrices`, with 5 (4 m^2 n + 2 m^3) FLOPs for each matrix.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return _orthogonalise(matrices.mT).mT
    a, b, c = COEFFICIENTS
    norms = matrices.flatten(1).norm(dim=1)
    x: Tensor = matrices / norms.clamp(min=_LEAST_NORM)[:, None, None]
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _scale_of(rows: int, columns: int, scale: str) -> float:
    """Return the factor of the update of a matrix, see MuonConfig.scale."""
    if scale == ORIGINAL:
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(FusedAdamW):
    """Muon for the groups that have `pieces`, torch's fused AdamW for the others.

    m <- mu m + (1 - mu) g,  u = mu m + (1 - mu) g with Nesterov momentum, else m,
    p <- p (1 - lr decay) - lr scale orthogonal(u), where each of the equal pieces stacked in u is
    orthogonalised and scaled separately (torch.optim.Muon with one piece).
    """

    state_form: ClassVar[Table] = {**FusedAdamW.state_form, "momentum_buffer": LIKE}
    needs_whole_matrices = True

    def rule_of(self, group: dict[str, Any]) -> str:
        """Return the name of the rule that updates a group."""
        return "Muon" if "pieces" in group else "AdamW"

    @property
    def step_flops(self) -> int:
        """The FLOPs of a step of all parameters; AdamW's do not count."""
        flops = 0
        for group in self.param_groups:
            if "pieces" not in group:
                continue
            for p in group["params"]:
                rows, columns = p.shape
                smaller, larger = sorted((rows // group["pieces"], columns))
                flops += group["pieces"] * _STEPS * (4 * smaller**2 * larger + 2 * smaller**3)
        return flops

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's method expects a step count in the state of every parameter.
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
            # Groups that AdamW updates.
            self.param_groups = [group for group in groups if "pieces" not in group]
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, mu, lr = self.state[p], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp(grad, 1 - mu)
        update = momentum
        if group["nesterov"]:
            update = grad.lerp(momentum, mu)
        pieces = update.unflatten(0, (group["pieces"], -1)).to(_precision_of(p, group["iteration"]))
        _, rows, columns = pieces.shape
        factor = lr * _scale_of(rows, columns, group["scale"])
        direction = _orthogonalise(pieces).flatten(0, 1)
        weight = p.mul(1 - lr * group["weight_decay"]).add_(direction, alpha=-factor)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:  # the device decides, see Optimizer.step
            momentum = torch.where(found_inf > 0, state["momentum_buffer"], momentum)
            weight = torch.where(found_inf > 0, p, weight)
        state["momentum_buffer"].copy_(momentum)
        p.copy_(weight)


def _precision_of(weight: Tensor, iteration: str) -> torch.dtype:
    """Return the precision in which the update of a weight is orthogonalised."""
    # A CPU without bf16 units takes 20 times as long in bf16.
    if iteration == "auto":
        return torch.bfloat16 if weight.is_cuda else weight.dtype
    return _PRECISIONS[iteration]


def _hidden_rules(config: MuonConfig, parameters: NamedParameters) -> list[Rule]:
    """Return the rules of the hidden matrices, which Muon updates, with their numbers of pieces.

    Raises UsageError if there are none, if a matrix has no role or cannot be cut into its pieces,
    or if optimizer.layer_decay would be lost.
    """
    check_roles(parameters, "optimizer muon")
    hidden = [
        (name, p, role_of(name, p).pieces)
        for name, p in parameters
        if role_of(name, p).role is Role.HIDDEN
    ]
    if not config.split:
        hidden = [(name, p, 1) for name, p, _ in hidden]
    if not hidden:
        raise UsageError(
            "optimizer muon is for matrices between hidden states, such as those of Transformer "
            "layers, of which no trained parameter is one; choose another --optimizer"
        )
    uncut = [f"{name} {tuple(p.shape)}" for name, p, n in hidden if p.dim() != 2 or len(p) % n]
    if uncut:
        raise UsageError(
            f"optimizer muon steps hidden matrices, and not {abbreviated(uncut)}: they need two "
            "dimensions, and rows for as many equal pieces as parameter_pieces says"
        )
    if config.hidden_lr and config.layer_decay != 1.0:
        raise UsageError(
            f"optimizer.layer_decay={config.layer_decay} scales one rate; leave "
            "optimizer.hidden_lr out, or layer_decay"
        )
    options: dict[str, Any] = {
        name: getattr(config, name) for name in ("momentum", "nesterov", "scale", "iteration")
    }
    if config.hidden_lr or config.width_ratio != 1.0:
        options["lr"] = config.hidden_lr or config.lr
        if config.scale == MATCH_RMS:
            # The singular values of an update grow with the square root of the width.
            options["lr"] *= config.width_ratio**-0.5
    cuts = [Rule(re.escape(name), {"pieces": n}) for name, _, n in hidden if n > 1]
    return [Rule(".*", {"pieces": 1, **options}, roles=(Role.HIDDEN,)), *cuts]


def muon(config: MuonConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other parameters."""
    groups, betas = config.groups(parameters, *_hidden_rules(config, parameters)), config.betas
    return Muon(groups, lr=config.lr, betas=pair_of(betas), eps=config.eps, fused=True)
