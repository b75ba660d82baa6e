"""Checks of the values of options that several tasks, criterions and models have alike."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from metaseq_lm.core.errors import UsageError


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise UsageError if a number in `options`, name to value, is not finite or has more than 64 bits."""
    for name, value in options.items():
        many = isinstance(value, Sequence) and not isinstance(value, str)
        for number in value if many else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UsageError(f"{name} is {value}; give finite numbers")
            if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
                raise UsageError(f"{name} is {value}; whole numbers have 64 bits")


def check_least(options: Mapping[str, float], least: float) -> None:
    """Raise UsageError that names the first of `options`, name to value, which is below `least`."""
    for name, value in options.items():
        if not value >= least:  # not a number, too
            raise UsageError(f"{name} must be at least {least}, got {value}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise UsageError unless the option `name` has one of the `allowed` values."""
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def check_classes(source: object, name: str, then: Sequence[str], now: Sequence[str]) -> None:
    """Raise UsageError if `source` was trained on other classes of a set, or in another order."""
    if list(then) != list(now):
        was, is_now = (", ".join(labels) or "real values" for labels in (then, now))
        raise UsageError(
            f"{source} was trained on {name} with the classes {was}, but DATA has {is_now}; their order is "
            "that of the outputs. Preprocess the set again with --labels-from the set of then, or with "
            "--labels in its order"
        )


def check_heads(
    source: object, then: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
) -> None:
    """Raise UsageError if the classes of a set of `now` are not those that its head was trained on.

    `then` are the classes of the sets that `source` was trained on; where that is one, its head is
    that of a set of another name, too.
    """
    for name, labels in now.items():
        only = next(iter(then.values())) if len(then) == 1 else labels
        check_classes(source, name, then.get(name, only), labels)


def check_share(name: str, value: float, whole: bool = True) -> None:
    """Raise UsageError unless `value` is from 0 to 1, without `whole` below 1."""
    if not 0 <= value <= 1 or (value == 1 and not whole):
        raise UsageError(f"{name} must be from 0 to {'1' if whole else 'below 1'}, got {value}")
