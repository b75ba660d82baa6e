"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, algorithm 3).

For a matrix W (A, B) with gradient G, at a step t, with betas b1, b2:

    L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G
    M <- b1 M + (1 - b1) G
    G' = Q_L^T G Q_R,   M' = Q_L^T M Q_R,   V <- b2 V + (1 - b2) G'^2
    W <- W (1 - lr decay) - lr Q_L (m / (sqrt(v) + eps)) Q_R^T, m and v corrected as in AdamW
    every `frequency` steps: Q <- QR(L Q)

Unlike in the paper, the first basis is one such iteration from the identity, and a share of the
mean eigenvalue is added to the diagonal in it: the eigenvectors are the same, but those that no
gradient has reached yet do not depend on rounding errors. A side longer than `largest` has the
identity as its basis; so do vectors, which AdamW steps.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metaseq_lm.config.groups import NamedParameters
from metaseq_lm.config.optimizers import AdamConfig
from metaseq_lm.core.options import option
from metaseq_lm.core.registry import register_optimizer
from metaseq_lm.optim.optimizers import pair_of
from metaseq_lm.optim.states import LIKE, NUMBER, WHOLE, Table

_DAMPING = 0.1


@dataclass
class SoapConfig(AdamConfig):
    """Adam's moments, and the eigenbasis they are of."""

    frequency: int = option(10, "steps after which the basis is brought up to date", at_least=1)
    largest: int = option(10_000, "longest side of a matrix that gets a basis", at_least=0)


class Soap(torch.optim.Optimizer):
    """Adam in a basis that turns slowly; the state of a matrix has a square one for each side."""

    state_form: ClassVar[Table] = {
        "step": NUMBER,
        "exp_avg": LIKE,
        "exp_avg_sq": LIKE,
        "sides": WHOLE,
        "bases": WHOLE,
    }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    lengths = [n if n <= group["largest"] else 0 for n in p.shape]
                    lengths = lengths if p.dim() == 2 else []
                    state["sides"] = [grad.new_zeros(n, n) for n in lengths]
                    state["bases"] = [torch.eye(n, dtype=p.dtype, device=p.device) for n in lengths]
                for side, matrix in zip(state["sides"], (grad, grad.transpose(0, -1))):
                    if len(side):
                        side.lerp_(matrix @ matrix.mT, 1 - beta2)
                if state["step"] % group["frequency"] == 0:
                    state["bases"] = list(map(turned, state["bases"], state["sides"]))
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                seen = into(grad, state["bases"])
                state["exp_avg_sq"].mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
                first = into(state["exp_avg"], state["bases"]) / (1 - beta1 ** state["step"])
                second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
                step = first / (second.sqrt() + group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(into(step, [basis.mT for basis in state["bases"]]), alpha=group["lr"])


def turned(basis: Tensor, side: Tensor) -> Tensor:
    """Return the basis (N, N) after an iteration towards the eigenvectors of a side (N, N)."""
    if not len(side):
        return basis
    shift = _DAMPING * side.diagonal().mean() + torch.finfo(side.dtype).tiny
    turned_basis: Tensor = torch.linalg.qr(side @ basis + shift * basis).Q
    return turned_basis


def into(matrix: Tensor, bases: list[Tensor]) -> Tensor:
    """Return Q_L^T X Q_R of a matrix X; an empty Q is the identity."""
    for basis in bases:  # each turns one side and transposes
        matrix = (basis.mT @ matrix if len(basis) else matrix).mT
    return matrix


@register_optimizer("soap", dataclass=SoapConfig)
def soap(config: SoapConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioners."""
    options = {name: getattr(config, name) for name in ("lr", "eps", "frequency", "largest")}
    options |= {"betas": pair_of(config.betas), "weight_decay": 0.0}
    return Soap(config.groups(parameters), options)
