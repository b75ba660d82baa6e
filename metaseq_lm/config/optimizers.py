"""Options of the optimizers and schedules."""

from dataclasses import dataclass
from typing import Any

from metaseq_lm.config.groups import (
    NamedParameters,
    Rule,
    check_roles,
    parameter_groups,
    rates_by_level,
    spared_from_decay,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import OPTIMIZERS, SCHEDULES
from metaseq_lm.core.roles import Role

__all__ = ["AdamConfig", "OptimizerConfig"]

ORIGINAL, MATCH_RMS = "original", "match_rms_adamw"


@dataclass
class ConstantConfig:
    """A constant rate after an optional warm-up."""

    warmup_updates: int = option(0, "updates over which the rate rises to its peak", at_least=0)


@dataclass
class InverseSqrtConfig:
    """Linear warm-up, then decay like 1/sqrt(step) without end."""

    warmup_updates: int = option(100, "updates over which the rate rises to its peak", at_least=1)
    lr_is_peak: bool = option(
        True,
        "the peak rate is optimizer.lr; false: optimizer.lr / sqrt(warmup_updates) (Vaswani et al. "
        "2017)",
    )


@dataclass
class DampedInverseSqrtConfig:
    """Linear warm-up, times 1 / (1 + damping sqrt(step)) without end (Clark et al. 2018)."""

    warmup_updates: int = option(5000, "updates to warm up (only in the authors' code)", at_least=0)
    damping: float = option(0.005, "how fast the rate falls; with 0 it is constant", at_least=0)


@dataclass
class LinearConfig(ConstantConfig):
    """Linear warm-up to 1, then linear decay to 0 at the last update."""

    warmup_ratio: float = option(
        0.0,
        "length of the warm-up as a share of total_updates; the longer of the two warm-ups counts",
        at_least=0,
        at_most=1,
    )
    # 0 until the number of updates that trainer.max_flops pays for is known.
    total_updates: int = option(
        0, "updates until the rate reaches its end", at_least=0, follows="trainer.max_update"
    )


@dataclass
class PolynomialConfig(LinearConfig):
    """Polynomial decay to `end` over the whole run, times a linear warm-up (BERT, ELECTRA)."""

    power: float = option(1.0, "exponent of the decay; 1 is linear", at_least=0)
    end: float = option(0.0, "rate at the end, as a share of its peak", at_least=0)
    zero_based: bool = option(
        False, "count steps from 0 like the authors' code: the first rate is 0"
    )
    decay_in_warmup: bool = option(
        True, "apply the decay during the warm-up too; false: only after it (BERT's code)"
    )


@dataclass
class CosineConfig(LinearConfig):
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter 2017)."""

    end: float = option(0.1, "rate at the last update, as a share of its peak", at_least=0)
    cooldown_ratio: float = option(
        0.0,
        "last share of total_updates, over which the rate falls linearly from `end` to 0 instead",
        at_least=0,
        at_most=1,
    )


@dataclass
class WsdConfig(LinearConfig):
    """Linear warm-up, a constant rate, and a decay at the end (Hu et al. 2024)."""

    decay_ratio: float = option(
        0.2, "length of the decay as a share of total_updates", at_least=0, at_most=1
    )
    end: float = option(0.0, "rate at the last update, as a share of its peak", at_least=0)
    decay: str = option(
        "linear",
        "shape of the decay, x being the share of it that is over: linear, or sqrt: 1 - sqrt(x)",
        choices=("linear", "sqrt"),
    )


@dataclass
class OptimizerConfig:
    """Options of every optimizer: rates, weight decay and gradient clipping."""

    lr: float = option(
        5e-4, "learning rate at the peak of the schedule", at_least=0, reset="schedule"
    )
    weight_decay: float = option(0.01, "weight decay", at_least=0)
    decay_norms_and_biases: bool = option(True, "apply weight decay to biases and layer norms too")
    clip_norm: float = option(1.0, "global norm to clip gradients to (0 = never)", at_least=0)
    layer_decay: float = option(
        1.0,
        "the rate of each layer is this factor times that of the layer above it; the top layer has "
        "its square, as in ELECTRA's code",
        above=0,
        at_most=1,
    )

    def groups(self, parameters: NamedParameters, *rules: Rule) -> list[dict[str, Any]]:
        """Return the parameter groups of these options and of further rules, applied last.

        Raises UsageError if `layer_decay` is not 1 and the model has no layers with levels.
        """
        first = [Rule(".*", {"lr": self.lr, "weight_decay": self.weight_decay})]
        if self.layer_decay != 1.0:
            first += rates_by_level(parameters, self.lr, self.layer_decay)
        if not self.decay_norms_and_biases:
            first.append(spared_from_decay())
        return parameter_groups(parameters, [*first, *rules])


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
    beta2_half_life: float = option(
        0.0,
        "tokens after which a squared gradient counts half as much in its running average, which "
        "sets the second of betas (0 = unused); an update has batch_size rows of tokens_per_sample",
        at_least=0,
    )
    width_ratio: float = option(
        1.0,
        "divisor of the rate for the matrices of layers and the first matrix of each LM head; "
        "model.base_width sets it",
        above=0,
    )

    def groups(self, parameters: NamedParameters, *rules: Rule) -> list[dict[str, Any]]:
        """Return the parameter groups as `OptimizerConfig` does, with rates by width.

        Adam's steps do not shrink with the gradient, and more of them add up in a matrix with more
        inputs (Yang et al. 2021, table 8). Also raises UsageError for scaled rates with
        `layer_decay`, and for a matrix without a role.
        """
        if self.width_ratio == 1.0:
            return super().groups(parameters, *rules)
        if self.layer_decay != 1.0:
            raise UsageError(
                "model.base_width and optimizer.layer_decay each scale the rates of the layers; "
                "leave one of them out"
            )
        check_roles(parameters, "model.base_width")
        rate = {"lr": self.lr / self.width_ratio}
        wide = Rule(".*", rate, roles=(Role.HIDDEN, Role.HEAD_HIDDEN))
        return super().groups(parameters, wide, *rules)


@dataclass
class LambConfig(OptimizerConfig):
    """Adam's moments for steps as long as the parameters."""

    betas: list[float] = with_default(AdamConfig, "betas", [0.9, 0.98])
    eps: float = with_default(AdamConfig, "eps", 1e-6)


@dataclass
class MuonConfig(AdamConfig):
    """Muon for the matrices of the layers; rate, decay and moments of AdamW for the rest."""

    weight_decay: float = with_default(OptimizerConfig, "weight_decay", 0.1)
    hidden_lr: float = option(
        0.0, "learning rate for the layers' matrices (0 = optimizer.lr)", at_least=0
    )
    momentum: float = option(0.95, "decay rate of their momentum", at_least=0, below=1)
    nesterov: bool = option(True, "Nesterov momentum")
    scale: str = option(
        MATCH_RMS,
        "scale of their update, for A rows and B columns: original, sqrt(max(1, A / B)), needs "
        "a hidden_lr of about 0.02; match_rms_adamw, 0.2 sqrt(max(A, B)), AdamW's rate",
        choices=(ORIGINAL, MATCH_RMS),
    )
    split: bool = option(
        True,
        "orthogonalise queries, keys and values, and the halves of a gated network, one by one",
    )
    iteration: str = option(
        "auto",
        "precision of the orthogonalisation: fp32, bf16, or auto (as the weights on a CPU, bf16 "
        "on a GPU)",
        choices=("auto", "fp32", "bf16"),
    )


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Second moments by row and column; steps are relative to the size of the parameter."""

    lr: float = with_default(
        OptimizerConfig, "lr", 1e-2, "rate relative to the size of a parameter, at most step^-1/2"
    )
    weight_decay: float = with_default(OptimizerConfig, "weight_decay", 0.0)
    beta2_decay: float = option(
        -0.8, "1 - step to this power is the decay rate of the second moment", below=0
    )
    eps: float = option(1e-15, "lower bound of the root of a second moment", above=0)
    least_scale: float = option(1e-3, "lower bound of a parameter's size in its steps", above=0)
    clip_threshold: float = option(1.0, "upper bound of the root mean square of an update", above=0)


@dataclass
class SGDConfig(OptimizerConfig):
    """Plain or heavy-ball gradient descent."""

    weight_decay: float = option(0.0, "weight decay", at_least=0)
    momentum: float = option(0.0, "momentum factor", at_least=0, below=1)


OPTIMIZERS.declare("adamw", AdamConfig, "metaseq_lm.optim.optimizers.adamw")
OPTIMIZERS.declare("adam_uncorrected", AdamConfig, "metaseq_lm.optim.optimizers.adam_uncorrected")
OPTIMIZERS.declare("lamb", LambConfig, "metaseq_lm.optim.lamb.lamb")
OPTIMIZERS.declare("adafactor", AdafactorConfig, "metaseq_lm.optim.optimizers.adafactor")
OPTIMIZERS.declare("sgd", SGDConfig, "metaseq_lm.optim.optimizers.sgd")
OPTIMIZERS.declare("muon", MuonConfig, "metaseq_lm.optim.muon.muon")
SCHEDULES.declare("constant", ConstantConfig, "metaseq_lm.optim.constant")
SCHEDULES.declare("inverse_sqrt", InverseSqrtConfig, "metaseq_lm.optim.inverse_sqrt")
SCHEDULES.declare(
    "damped_inverse_sqrt", DampedInverseSqrtConfig, "metaseq_lm.optim.damped_inverse_sqrt"
)
SCHEDULES.declare("polynomial", PolynomialConfig, "metaseq_lm.optim.polynomial")
SCHEDULES.declare("cosine", CosineConfig, "metaseq_lm.optim.cosine")
SCHEDULES.declare("wsd", WsdConfig, "metaseq_lm.optim.wsd")
SCHEDULES.declare("linear", LinearConfig, "metaseq_lm.optim.linear")
