"""Learning-rate schedules: pure functions from the number of the step (1, 2, ...) to a factor of the rate."""

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import II

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_schedule

Schedule = Callable[[int], float]


def warmup(step: int, warmup_updates: float) -> float:
    """Rise linearly from 1/W at step 1 to 1 at step W, then stay."""
    return min(1.0, step / warmup_updates) if warmup_updates else 1.0


def warmup_length(warmup_updates: int, warmup_ratio: float, total_updates: int) -> float:
    """Return the longer of `warmup_updates` and that share of all updates, not rounded."""
    return max(warmup_updates, warmup_ratio * total_updates)


@dataclass
class ConstantConfig:
    """A constant rate after an optional warm-up."""

    warmup_updates: int = option(0, "updates in which the rate rises to its peak", at_least=0)


@register_schedule("constant", dataclass=ConstantConfig)
def constant(config: ConstantConfig) -> Schedule:
    """Return a schedule that warms up and stays at 1."""
    return lambda step: warmup(step, config.warmup_updates)


@dataclass
class InverseSqrtConfig:
    """Linear warm-up, then a fall like 1/sqrt(step), for ever."""

    warmup_updates: int = option(100, "updates in which the rate rises to its peak", at_least=1)
    lr_is_peak: bool = option(
        True,
        "the peak is optimizer.lr; false: that divided by the root of warmup_updates (Vaswani et al. 2017)",
    )


@register_schedule("inverse_sqrt", dataclass=InverseSqrtConfig)
def inverse_sqrt(config: InverseSqrtConfig) -> Schedule:
    """Return step^-1/2 after the warm-up, times W^1/2 if the peak at step W is to be 1."""
    warmup_updates = config.warmup_updates
    scale = warmup_updates**0.5 if config.lr_is_peak else 1.0

    def factor(step: int) -> float:
        return scale * warmup(step, warmup_updates) * max(step, warmup_updates) ** -0.5

    return factor


@dataclass
class DampedInverseSqrtConfig:
    """Linear warm-up, times 1 / (1 + damping sqrt(step)), for ever (Clark et al. 2018)."""

    warmup_updates: int = option(5000, "updates to warm up (only in the authors' code)", at_least=0)
    damping: float = option(0.005, "how fast the rate falls; 0 keeps it", at_least=0)


@register_schedule("damped_inverse_sqrt", dataclass=DampedInverseSqrtConfig)
def damped_inverse_sqrt(config: DampedInverseSqrtConfig) -> Schedule:
    """Return min(1, step / W) / (1 + damping sqrt(step))."""
    return lambda step: warmup(step, config.warmup_updates) / (1.0 + config.damping * step**0.5)


@dataclass
class PolynomialConfig:
    """Polynomial decay to `end` over the whole run, multiplied by a linear warm-up (BERT, ELECTRA)."""

    warmup_updates: int = option(0, "updates in which the rate rises to its peak", at_least=0)
    warmup_ratio: float = option(
        0.0, "share of total_updates to warm up; the longer of the two", at_least=0, at_most=1
    )
    # 0 until the updates are known that trainer.max_flops pays for.
    total_updates: int = option(
        II("trainer.max_update"), "updates until the rate is at its end", at_least=0
    )
    power: float = option(1.0, "of the decay; 1 is linear", at_least=0)
    end: float = option(0.0, "share of the rate that is left at the end", at_least=0)
    zero_based: bool = option(False, "count steps from 0 as the authors' code: the first rate is 0")
    decay_in_warmup: bool = option(
        True, "the decay counts during the warm-up too; false: only after it (BERT's code)"
    )


@register_schedule("polynomial", dataclass=PolynomialConfig)
def polynomial(config: PolynomialConfig) -> Schedule:
    """Return warm-up(step) * (end + (1 - end) * (1 - step / total)^power), `end` after the last step.

    With `zero_based` the first step is number 0, the form of ELECTRA's code. Without
    `decay_in_warmup` the second factor is left out in the first W steps, so that after nearly 1 the
    rate falls to 1 - W / total at once: the form of BERT's and BAM's code, where W is a whole
    number, rounded down.
    """
    total, end = config.total_updates, config.end
    if total < 1:
        raise UsageError(f"schedule.total_updates must be at least 1, got {total}")
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)
    if not config.decay_in_warmup:
        rising = int(rising)

    def factor(step: int) -> float:
        step -= config.zero_based
        if step < rising and not config.decay_in_warmup:
            return warmup(step, rising)
        left = max(0.0, 1.0 - step / total)
        return warmup(step, rising) * (end + (1.0 - end) * left**config.power)

    return factor


@dataclass
class LinearConfig:
    """Linear warm-up to 1, then linear decay to 0 at the last update."""

    warmup_updates: int = option(0, "updates in which the rate rises to its peak", at_least=0)
    warmup_ratio: float = option(
        0.0, "share of total_updates to warm up; the longer of the two", at_least=0, at_most=1
    )
    total_updates: int = option(II("trainer.max_update"), "updates until the rate is at its end")


@register_schedule("linear", dataclass=LinearConfig)
def linear(config: LinearConfig) -> Schedule:
    """Return min(step / W, (total - step) / (total - W)), not below 0."""
    total = config.total_updates
    rising = warmup_length(config.warmup_updates, config.warmup_ratio, total)
    if total <= rising:
        raise UsageError(
            f"schedule.total_updates ({total}) must exceed warmup_updates ({rising:g})"
        )

    def factor(step: int) -> float:
        left = (total - step) / (total - rising)
        return max(0.0, min(warmup(step, rising), left))

    return factor
