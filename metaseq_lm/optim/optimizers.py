"""The registered optimizers: torch's own where they exist, one class of ours."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_optimizer


@dataclass
class OptimizerConfig:
    """What every optimizer has: rates, weight decay, and the norm its gradient is clipped to."""

    lr: float = option(5e-4, "learning rate at the peak of the schedule", at_least=0)
    weight_decay: float = option(0.01, "weight decay", at_least=0)
    decay_norms_and_biases: bool = option(True, "apply weight decay to biases and layer norms too")
    clip_norm: float = option(1.0, "global norm gradients are clipped to (0 = never)", at_least=0)
    layer_decay: float = option(
        1.0,
        "the rate of each layer is this factor times that of the layer above it; the top layer has its "
        "square, as in ELECTRA's code",
        above=0,
        at_most=1,
    )


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam's moments."""

    betas: list[float] = option(
        [0.9, 0.98],
        "decay rates of the running averages of the gradient and of its square",
        at_least=0,
        below=1,
    )
    eps: float = option(1e-6, "added to the root of the second moment", at_least=0)


@dataclass
class SGDConfig(OptimizerConfig):
    """Plain or heavy-ball gradient descent."""

    weight_decay: float = option(0.0, "weight decay", at_least=0)
    momentum: float = option(0.0, "momentum factor", at_least=0, below=1)


def both(betas: list[float]) -> tuple[float, float]:
    """Return the two betas; UsageError unless there are two."""
    if len(betas) != 2:
        raise UsageError(f"optimizer.betas must be two numbers, got {list(betas)}")
    return betas[0], betas[1]


@register_optimizer("adamw", dataclass=AdamConfig)
def adamw(config: AdamConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), torch's fused kernel."""
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=both(config.betas), eps=config.eps, fused=True
    )


class UncorrectedAdam(torch.optim.Optimizer):
    """Adam with decoupled decay and without bias correction, as BERT and ELECTRA were trained.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  p <- p - lr (m / (sqrt(v) + eps) + decay p).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, group)

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        grads = [p.grad for p in params if p.grad is not None]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(params, first, denominators, -group["lr"])


@register_optimizer("adam_uncorrected", dataclass=AdamConfig)
def adam_uncorrected(config: AdamConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam without bias correction, decoupled decay (the BERT and ELECTRA optimizer)."""
    defaults = {"lr": config.lr, "betas": both(config.betas), "eps": config.eps}
    return UncorrectedAdam(groups, defaults)


class FusedSGD(torch.optim.SGD):
    """torch's fused SGD, which also takes parameters that get their first gradient later than others.

    torch's fused kernel wants momentum buffers for all parameters of a group or for none.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"] if group["momentum"] else ():
                if p.grad is not None and not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        super().step()


@register_optimizer("sgd", dataclass=SGDConfig)
def sgd(config: SGDConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Stochastic gradient descent, v <- momentum v + g, p <- p - lr v, torch's fused kernel."""
    return FusedSGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
