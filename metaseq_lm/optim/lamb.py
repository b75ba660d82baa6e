"""LAMB: Adam's steps, scaled to the norms of the parameters (You et al. 2020, algorithm 2)."""

from __future__ import annotations

import torch

from metaseq_lm.config.groups import NamedParameters
from metaseq_lm.config.optimizers import LambConfig
from metaseq_lm.optim.optimizers import Eager, FusedAdamW, pair_of


class _Lamb(Eager):
    """Adam with layer-wise rates for the parameters that have a weight decay.

    u <- m / (sqrt(v) + eps) + decay p with corrected moments m and v, as in AdamW,
    p <- p - lr |p| / |u| u, where the ratio is 1 for a parameter or a step of norm 0.

    The ratio is also 1 for parameters without a weight decay, such as norms and biases with
    optimizer.decay_norms_and_biases=false, as in the code of GPT-BERT (Charpentier and Samuel
    2024).
    """

    state_form = FusedAdamW.state_form
    needs_whole_matrices = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    # On the host, which needs it for the bias corrections.
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1
                number = int(state["step"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                second = state["exp_avg_sq"] / (1 - beta2**number)
                update = state["exp_avg"] / (1 - beta1**number) / (second.sqrt() + group["eps"])
                if group["weight_decay"]:
                    update.add_(p, alpha=group["weight_decay"])
                    norms = p.norm(), update.norm()
                    ratio = norms[0] / norms[1]
                    update.mul_(ratio.where((norms[0] > 0) & (norms[1] > 0), 1.0))
                p.sub_(update, alpha=group["lr"])


def lamb(config: LambConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """LAMB (You et al. 2020): AdamW's steps with the norms of the parameters, for large batches."""
    betas = pair_of(config.betas)
    defaults = {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": 0.0}
    return _Lamb(config.groups(parameters), defaults)
