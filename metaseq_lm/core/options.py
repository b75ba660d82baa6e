"""Options: fields of dataclasses with a default, a line of help and a range; and their flags.

`add_options` makes flags of a command from a dataclass, and `read_options` a dataclass from their
values. A flag that is not given has the field's default. Further metadata of a field, for its flag:

    metavar     placeholder of the value in the help
    positional  the option has no flag; its place on the command line counts
    required    the command line must have it
    repeated    for a tuple: the flag is given once for each item, or, with nargs, several times
    nargs       as argparse's; "+" for items separated by blanks (otherwise by commas)
    const       the value of a flag that is given without one, with nargs "?"
    converter   converts the text to a number; raises ArgumentTypeError
"""

from __future__ import annotations

import argparse
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import Registry, nearest

__all__ = ["DATA", "FUNCTION", "LOSS", "NOTHING", "SPEED", "WEIGHTS", "option", "with_default"]

# Effects of an option, see `option`.
LOSS, DATA, FUNCTION, WEIGHTS, SPEED, NOTHING = (
    *("loss", "data", "function"),
    *("weights", "speed", "nothing"),
)
_EFFECTS = (LOSS, DATA, FUNCTION, WEIGHTS, SPEED, NOTHING)
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
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
    choices: Iterable[Any] | None = None,
    affects: str | None = None,
    **metadata: Any,
) -> Any:
    """Declare an option: a dataclass field with its default, its line of help and its range.

    `check_options` checks the range. Only conditions on other options or on the data are checked
    elsewhere. Reports, tuning, resuming and the use of checkpoints depend on `affects`.

    Args:
        default: The default value; of a list or dict, each config gets a copy.
        help: One line for `--help` and the reference.
        at_least: The smallest value allowed; in a list, for each number. None always passes.
        above: A bound that values must exceed.
        at_most: The largest value allowed.
        below: A bound that values must stay below.
        choices: The values allowed, or the registry of their names; in a list, for each entry.
        affects: LOSS if other values make the evaluated loss another function, so that the smaller
            one is not the better one; DATA if they evaluate other rows; FUNCTION if weights of the
            same shapes compute something else; WEIGHTS if only the training, or the shapes of
            weights, differ; SPEED or NOTHING if results are the same. None for the section's
            default: LOSS for tasks and criterions, FUNCTION for models, WEIGHTS for optimizers,
            schedules and the trainer, NOTHING for the engine.
        metadata: Further keys, which `options_with` finds. `follows` is the dotted name of another
            option that provides the value in a run's configuration, unless one is set. `reset` is
            the part of a run (see `train --reset`) with which the option may change. `set_by` says
            why files of plans, searches or sweeps cannot set it (LEAGUE, SEARCH, SWEEP).
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata |= {"help": help} | {k: v for k, v in bounds.items() if v is not None}
    if choices is not None:
        # Plug-ins may register further names.
        metadata["choices"] = choices if isinstance(choices, Registry) else tuple(choices)
    if affects is not None:
        if affects not in _EFFECTS:
            raise UsageError(f"affects={affects!r}: give one of {', '.join(_EFFECTS)}")
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
        help: Its line of help; None to keep the option's.
        metadata: Bounds and choices that differ, as for `option`.
    """
    changes = metadata if help is None else {**metadata, "help": help}
    return _field(default, {**_declared(base, name).metadata, **changes})


def _declared(base: type, name: str) -> Any:
    (item,) = (item for item in fields(base) if item.name == name)
    return item


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def integer_if_whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_whole(text: Any) -> int:
    """Parse a whole number, such as 1000 for "1e3"; raises ValueError."""
    number = text
    if isinstance(text, str) and "e" in text.lower():
        number = integer_if_whole(float(text))
    if isinstance(number, float):
        raise ValueError(text)
    return int(number)


def check_options(
    dataclass: type, values: Any, prefix: str = "", name_option: Callable[[str], str] | None = None
) -> None:
    """Raise UsageError for the first value outside the range that its `option` declares.

    Args:
        dataclass: The class that declares the options.
        values: An instance of it, or a config node; missing keys are not checked.
        prefix: Prefix of an option's name in messages, such as "task.".
        name_option: Returns the name of a field's option in messages, instead of `prefix`.
    """
    for item in fields(dataclass):
        value = getattr(values, item.name, None)
        name = prefix + item.name
        if name_option is not None:
            name = name_option(item.name)
        if value is None:
            continue
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        for entry in value if is_list else [value]:
            _check_entry(name, entry, value, item.metadata)


def _check_entry(name: str, entry: Any, value: Any, allowed: Mapping[str, Any]) -> None:
    choices = allowed.get("choices")
    if choices is not None and entry not in choices:
        if isinstance(choices, Registry):
            raise UsageError(f"{name}: {choices.describe_unknown(str(entry))}")
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
    for bound, (words, holds) in _BOUNDS.items():
        if bound in allowed and not holds(entry, allowed[bound]):
            raise UsageError(f"{name} must be {words} {allowed[bound]}, got {value}")


# ------------------------------------------------------------------------ flags

_TRUTH = {"true": True, "false": False}
_PLACEHOLDERS = {int: "N", float: "X", Path: "F"}


def flag_of(name: str) -> str:
    """Return the flag of a field: --max-parallel of max_parallel."""
    return "--" + name.replace("_", "-")


def add_options(parser: Any, schema: type, without: Collection[str] = ()) -> None:
    """Declare the fields of a dataclass as arguments of a parser or group, leaving out `without`.

    Its own fields come before inherited ones.
    """
    hints = get_type_hints(schema)
    for item in sorted(fields(schema), key=lambda item: item.name not in schema.__annotations__):
        if item.name not in without:
            _add_option(parser, item, *_value_type(hints[item.name]))


def _add_option(parser: Any, item: Field[Any], kind: type, is_tuple: bool) -> None:
    allowed = item.metadata
    settings = {k: allowed[k] for k in ("metavar", "nargs", "const", "choices") if k in allowed}
    if is_tuple and "nargs" not in settings:
        settings.pop("choices", None)  # `read_options` checks each of the items
    if kind is bool:
        settings["action"] = "store_true"
    elif "choices" not in settings:
        settings.setdefault("metavar", _PLACEHOLDERS.get(kind))
    if kind in _CONVERTERS and not is_tuple:
        settings["type"] = allowed.get("converter", _CONVERTERS[kind])
    if allowed.get("repeated"):
        settings["action"] = "extend" if "nargs" in settings else "append"
    elif is_tuple and kind is Path:
        settings["nargs"] = "+"
    text = allowed["help"].replace("%", "%%")
    if item.default not in (None, "", (), False) and "default:" not in text:
        text += f" (default: {item.default})"
    if allowed.get("positional"):
        action = parser.add_argument(item.name, help=text, **settings)
    else:
        settings |= {"default": None, "required": allowed.get("required", False)}
        action = parser.add_argument(flag_of(item.name), help=text, **settings)
    action.declared = item, kind  # for --help-json


def read_options(schema: type, values: Mapping[str, Any]) -> Any:
    """Return the dataclass with the values of a command line that are not None.

    Further names in `values` are ignored. Raises UsageError for a value of another type, or
    outside an option's range.
    """
    hints = get_type_hints(schema)
    read: dict[str, Any] = {}
    for item in fields(schema):
        value = values.get(item.name)
        if value is None:
            continue
        kind, is_tuple = _value_type(hints[item.name])
        convert = _read_whole if kind is int else kind
        try:
            if not is_tuple:
                read[item.name] = convert(value)
            elif isinstance(value, str):
                read[item.name] = tuple(convert(part.strip()) for part in value.split(","))
            else:
                read[item.name] = tuple(map(convert, value))
        except (TypeError, ValueError):
            noun = {int: "a whole number", float: "a number"}.get(kind, "such a value")
            raise UsageError(f"{flag_of(item.name)}: {value!r} is not {noun}") from None
    options = schema(**read)
    check_options(schema, options, name_option=flag_of)
    return options


def read_words(schema: type, words: Sequence[str], owner: str) -> Any:
    """Return the dataclass with the values of words `name=value`.

    Args:
        schema: The dataclass.
        words: The words; items of a tuple are separated by commas, and may stand in brackets.
        owner: The owner of these options for messages, such as "suite blimp".

    Raises:
        UsageError: An option is unknown, or its value of a wrong type or out of its range.
    """
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in hints:
            known = f"Options: {', '.join(hints)}" if hints else "It has none"
            raise UsageError(f"{owner} has no option '{name}'.{nearest(name, hints)} {known}")
        try:
            values[name] = value_of(hints[name], text)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{word}: {owner} takes another kind of value there") from error
    options = schema(**values)
    check_options(schema, options)
    return options


def value_of(hint: Any, text: str) -> Any:
    """Parse a text as a value of an annotated type; ValueError or KeyError if it is none."""
    kind, is_tuple = _value_type(hint)
    if text == "null" and type(None) in get_args(hint):
        return None
    convert = {bool: _TRUTH.__getitem__, int: _read_whole}.get(kind, kind)
    if not is_tuple:
        return convert(text)
    inside = text.removeprefix("[").removesuffix("]").strip()
    if not inside:
        return ()
    return tuple(convert(part.strip()) for part in inside.split(","))


def _value_type(hint: Any) -> tuple[type, bool]:
    """Return the type of the values of an annotation, and whether there may be several."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False


def _whole_number(text: str) -> int:
    """Parse a whole number, such as 1000 for "1e3"; raises ArgumentTypeError."""
    try:
        return _read_whole(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Parse a number; raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_CONVERTERS = {int: _whole_number, float: number}
