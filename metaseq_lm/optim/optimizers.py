"""The registered optimizers: torch's fused ones, and Adam without bias correction.

An optimizer is registered as a function of its options and the named parameters; it makes its
parameter groups by `OptimizerConfig.groups`. An optimizer class declares `state_form` (see
`optim.states`), and `needs_whole_matrices = True` if a step of some rows needs all of a matrix.
"""

import inspect
from dataclasses import replace
from typing import ClassVar

import torch

from metaseq_lm.config.groups import NamedParameters
from metaseq_lm.config.optimizers import AdafactorConfig, AdamConfig, SGDConfig
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.optim.states import LIKE, NUMBER, ROWS, WHOLE, Table

__all__ = ["pair_of"]


def with_half_life(config: RunConfig) -> RunConfig:
    """Return `config` with the second of betas from optimizer.beta2_half_life.

    beta2 = 2^(-tokens of an update / half-life), so that it means the same at all batch sizes
    (Marek et al. 2025). Raises UsageError for a task without rows of tokens.
    """
    half_life = config.optimizer.beta2_half_life
    tokens = getattr(config.task, "batch_size", 0) * getattr(config.task, "tokens_per_sample", 0)
    if not tokens:
        raise UsageError(
            f"optimizer.beta2_half_life counts tokens, and task {config.task._name} has no rows of "
            "task.tokens_per_sample; give optimizer.betas instead"
        )
    beta1, _ = pair_of(config.optimizer.betas)
    betas = [beta1, 0.5 ** (tokens / half_life)]
    return replace(config, optimizer=replace(config.optimizer, betas=betas))


def with_width(config: RunConfig) -> RunConfig:
    """Return `config` with optimizer.width_ratio from model.base_width.

    Raises UsageError for a model, or an optimizer, that does not scale rates.
    """
    if config.model._name != "modern" or not isinstance(config.optimizer, AdamConfig):
        raise UsageError(
            "model.base_width is for --model modern and an optimizer of AdamW's kind (adamw, "
            f"adam_uncorrected, muon), this run has {config.model._name} and "
            f"{config.optimizer._name}; leave it out"
        )
    ratio = config.model.width_ratio
    return replace(config, optimizer=replace(config.optimizer, width_ratio=ratio))


def pair_of(betas: list[float]) -> tuple[float, float]:
    """Return the two betas; UsageError unless there are two."""
    if len(betas) != 2:
        raise UsageError(f"optimizer.betas must be two numbers, got {list(betas)}")
    return betas[0], betas[1]


class Eager(torch.optim.Optimizer):
    """A base before torch's class: its methods, without the wrappers that torch.compile needs.

    The wrappers import torch._dynamo, which would dominate the start of a run.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class FusedAdamW(Eager, torch.optim.AdamW):
    """torch's fused AdamW."""

    state_form: ClassVar[Table] = {"step": NUMBER, "exp_avg": LIKE, "exp_avg_sq": LIKE}
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def adamw(config: AdamConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), torch's fused kernel."""
    groups, betas = config.groups(parameters), pair_of(config.betas)
    return FusedAdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


class UncorrectedAdam(FusedAdamW):
    """Adam with decoupled decay and without bias correction, as BERT and ELECTRA were trained.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  p <- p - lr (m / (sqrt(v) + eps) + decay p).

    It is torch's fused kernel at a step so late that the correction, 1 - beta^step, is 1.
    """

    LATE = 2.0**26  # in float32, adding 1 does not change it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    step = torch.full((), self.LATE, dtype=torch.float32, device=p.device)
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": step, **moments}
        super().step()


def adam_uncorrected(config: AdamConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Adam without bias correction, decoupled decay (the BERT and ELECTRA optimizer)."""
    groups, betas = config.groups(parameters), pair_of(config.betas)
    return UncorrectedAdam(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


class FusedSGD(Eager, torch.optim.SGD):
    """torch's fused SGD, also for parameters that get their first gradient later than others.

    torch's fused kernel requires momentum buffers for all parameters of a group or for none.
    """

    state_form: ClassVar[Table] = {"momentum_buffer": LIKE}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if group["momentum"] and p.grad is not None and not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        inspect.unwrap(super().step)(self)


def sgd(config: SGDConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Stochastic gradient descent, v <- momentum v + g, p <- p - lr v, torch's fused kernel."""
    groups = config.groups(parameters)
    return FusedSGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


class Adafactor(Eager, torch.optim.Adafactor):
    """torch's Adafactor."""

    state_form: ClassVar[Table] = {
        "step": NUMBER,
        "row_var": ROWS,
        "col_var": WHOLE,
        "variance": LIKE,
    }
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adafactor.step))


def adafactor(config: AdafactorConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Adafactor (Shazeer and Stern 2018): AdamW without momentum, with factored second moments."""
    groups, epsilons = config.groups(parameters), (config.eps, config.least_scale)
    decay, d = config.beta2_decay, config.clip_threshold
    return Adafactor(groups, lr=config.lr, beta2_decay=decay, eps=epsilons, d=d)
