"""The declaration of options: fields of dataclasses with a default, a line of help and a range."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest

# What an option changes, besides its own value, see `option`.
LOSS, DATA, FUNCTION, WEIGHTS, SPEED, NOTHING = (
    *("loss", "data", "function"),
    *("weights", "speed", "nothing"),
)
EFFECTS = (LOSS, DATA, FUNCTION, WEIGHTS, SPEED, NOTHING)
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | None = None,
    affects: str | None = None,
    **metadata: Any,
) -> Any:
    """Declare an option: a dataclass field with its default, its line of help and its range.

    `check_options` checks the range. Only conditions on other options or on the data are checked
    elsewhere. Reports, tuning, resuming and the use of checkpoints ask what an option affects.

    Args:
        default: The default value; of a list, each config gets a copy.
        help: One line for `--help` and the reference.
        at_least: The smallest value allowed; in a list, for each number. None always passes.
        above: A bound that values must exceed.
        at_most: The largest value allowed.
        below: A bound that values must stay below.
        choices: The values allowed; of a list, for each of its entries.
        affects: LOSS if evaluated losses with other values are another function, so that the
            smaller one is not the better one; DATA if they are of other rows; FUNCTION if weights
            of the same shapes compute something else; WEIGHTS if only the training, or the shapes
            of weights, differ; SPEED or NOTHING if results are the same. None for the usual of its
            section: LOSS of tasks and criterions, FUNCTION of models, WEIGHTS of optimizers,
            schedules and the trainer, NOTHING of the engine.
        metadata: Further keys, which `options_with` finds. `follows` is the dotted name of another
            option, whose value a run's configuration has here unless it sets one. `reset` is the
            part of a run, as of `train --reset`, with which the option may change.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata |= {"help": help} | {k: v for k, v in bounds.items() if v is not None}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if affects is not None:
        if affects not in EFFECTS:
            raise UsageError(f"affects={affects!r}: give one of {', '.join(EFFECTS)}")
        metadata["affects"] = affects
    return _field(default, metadata)


def with_default(
    base: type, name: str, default: Any, help: str | None = None, **metadata: Any
) -> Any:
    """Declare an option of dataclass `base` again, with another default.

    Args:
        base: The dataclass that declares the option.
        name: The name of the option.
        default: The default value.
        help: Its line of help; None for that of the option.
        metadata: Bounds and choices that differ, as for `option`.
    """
    changes = metadata if help is None else {**metadata, "help": help}
    return _field(default, {**_declared(base, name).metadata, **changes})


def _declared(base: type, name: str) -> Any:
    (item,) = (item for item in fields(base) if item.name == name)
    return item


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def whole(value: Any) -> Any:
    """Return a float without a fraction as the integer that it is, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_whole(text: Any) -> int:
    """Return a whole number of a text, also 1000 for "1e3"; raises ValueError."""
    number = whole(float(text)) if isinstance(text, str) and "e" in text.lower() else text
    if isinstance(number, float):
        raise ValueError(text)
    return int(number)


def check_options(
    dataclass: type, values: Any, prefix: str = "", name_option: Callable[[str], str] | None = None
) -> None:
    """Raise UsageError for the first value outside the range that its `option` declares.

    Args:
        dataclass: The class whose fields are options.
        values: An instance of it, or a config node; missing keys are not checked.
        prefix: Prefix of an option's name in messages, such as "task.".
        name_option: Returns the name of a field's option in messages, instead of `prefix`.
    """
    for item in fields(dataclass):
        value = getattr(values, item.name, None)
        name = name_option(item.name) if name_option is not None else prefix + item.name
        entries = [] if value is None else [value]
        if isinstance(value, Sequence) and not isinstance(value, str):
            entries = list(value)
        for entry in entries:
            _check_entry(name, entry, value, item.metadata)


def _check_entry(name: str, entry: Any, value: Any, allowed: Mapping[str, Any]) -> None:
    choices = allowed.get("choices")
    if choices is not None and entry not in choices:
        names = [str(choice) for choice in choices]
        verb = "is" if entry is value else "has"
        raise UsageError(
            f"{name} {verb} '{entry}'.{nearest(str(entry), names)} Choices: {', '.join(names)}"
        )
    if not isinstance(entry, (int, float)) or isinstance(entry, bool):
        return
    if isinstance(entry, float) and not math.isfinite(entry):
        raise UsageError(f"{name} is {value}; give finite numbers")
    if isinstance(entry, int) and not -(1 << 63) <= entry < 1 << 63:
        raise UsageError(f"{name} is {value}; whole numbers have 64 bits")
    for bound, (words, holds) in BOUNDS.items():
        if bound in allowed and not holds(entry, allowed[bound]):
            raise UsageError(f"{name} must be {words} {allowed[bound]}, got {value}")
