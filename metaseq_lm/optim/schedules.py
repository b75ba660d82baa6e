"""Schedules: the factor of the rate as a function of the step, counted from 1."""

import math
from collections.abc import Callable

from metaseq_lm.config.optimizers import (
    ConstantConfig,
    CosineConfig,
    DampedInverseSqrtConfig,
    InverseSqrtConfig,
    LinearConfig,
    PolynomialConfig,
    WsdConfig,
)
from metaseq_lm.core.errors import UsageError

Schedule = Callable[[int], float]


def warmup(step: int, warmup_updates: float) -> float:
    """Increase linearly from 1/W at step 1 to 1 at step W, then stay constant."""
    return min(1.0, step / warmup_updates) if warmup_updates else 1.0


def warmup_length(warmup_updates: int, warmup_ratio: float, total_updates: int) -> float:
    """Return the larger of `warmup_updates` and `warmup_ratio` of all updates, not rounded."""
    return max(warmup_updates, warmup_ratio * total_updates)


def constant(config: ConstantConfig) -> Schedule:
    """Return a schedule with warm-up to a constant 1."""
    return lambda step: warmup(step, config.warmup_updates)


def inverse_sqrt(config: InverseSqrtConfig) -> Schedule:
    """Return step^-1/2 after the warm-up, times W^1/2 if the peak at step W is to be 1."""
    warmup_updates = config.warmup_updates
    scale: float = warmup_updates**0.5 if config.lr_is_peak else 1.0

    def factor(step: int) -> float:
        decay: float = max(step, warmup_updates) ** -0.5
        return scale * warmup(step, warmup_updates) * decay

    return factor


def damped_inverse_sqrt(config: DampedInverseSqrtConfig) -> Schedule:
    """Return min(1, step / W) / (1 + damping sqrt(step))."""
    return lambda step: warmup(step, config.warmup_updates) / (1.0 + config.damping * step**0.5)


def polynomial(config: PolynomialConfig) -> Schedule:
    """Return warm-up(step) * (end + (1 - end) * (1 - step / total)^power).

    It is `end` after the last step. With `zero_based` the first step is number 0, the form of
    ELECTRA's code. Without `decay_in_warmup` the second factor is left out in the first W steps, so
    that after nearly 1 the rate falls to 1 - W / total at once: the form of BERT's and BAM's code,
    where W is a whole number, rounded down.
    """
    total, end = config.total_updates, config.end
    check_length(total)
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)
    if not config.decay_in_warmup:
        rising = int(rising)

    def factor(step: int) -> float:
        step -= config.zero_based
        if step < rising and not config.decay_in_warmup:
            return warmup(step, rising)
        decay: float = max(0.0, 1.0 - step / total) ** config.power
        return warmup(step, rising) * (end + (1.0 - end) * decay)

    return factor


def check_length(total: int) -> None:
    """Raise UsageError for a schedule without updates."""
    if total < 1:
        raise UsageError(f"schedule.total_updates must be at least 1, got {total}")


def cosine(config: CosineConfig) -> Schedule:
    """Return min(1, step / W) * (end + (1 - end) (1 + cos(pi p)) / 2).

    p is the share of the updates after the warm-up, (step - W) / (total - W), in it 0. The factor
    is `end` at the last step and after it, if the warm-up is over by then.
    """
    total, end = config.total_updates, config.end
    check_length(total)
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)
    falling = total - rising if total > rising else 1.0

    def factor(step: int) -> float:
        share = min(1.0, max(0.0, (step - rising) / falling))
        return warmup(step, rising) * (end + (1.0 - end) * (1.0 + math.cos(math.pi * share)) / 2)

    return factor


# The decay of a factor from 1 to 0, by the share of the decay that is left.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
}


def wsd(config: WsdConfig) -> Schedule:
    """Return warm-up(step) * (end + (1 - end) * d(x)), and warm-up(step) before the decay.

    x is the share of the decay that is over, 1 - (total - step) / (decay_ratio * total), d(x) is
    1 - x (Hu et al. 2024, section 4.1; Hägele et al. 2024, equation 1) or 1 - sqrt(x)
    (Hägele et al. 2024, equation 2). The factor is `end` at the last step and after it.
    """
    total, end, shape = config.total_updates, config.end, SHAPES[config.decay]
    check_length(total)
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)
    falling = config.decay_ratio * total

    def factor(step: int) -> float:
        left = max(0, total - step)
        if left >= falling:  # not a rounding error below 1: runs of other lengths have these rates
            return warmup(step, rising)
        return warmup(step, rising) * (end + (1.0 - end) * shape(left / falling))

    return factor


def linear(config: LinearConfig) -> Schedule:
    """Return min(step / W, (total - step) / (total - W)), not below 0; step / W if W >= total."""
    total = config.total_updates
    check_length(total)
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)

    def factor(step: int) -> float:
        rate = warmup(step, rising)
        return max(0.0, min(rate, (total - step) / (total - rising))) if total > rising else rate

    return factor
