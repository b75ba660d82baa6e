"""Conversion of dataclasses of options to flags of commands and back.

A field is declared by `option`: its help, range and choices are those of the flag, and a flag that
is not given has the field's default. Further metadata of a field:

    metavar     placeholder of the value in the help
    positional  the option has no flag; its place on the command line counts
    required    the command line must have it
    repeated    of a tuple: the flag is given once for each item
    nargs       as argparse's; "+" for items with blanks between them (a tuple has commas else)
    const       the value of a flag without one, with nargs "?"
    converter   makes a number of the text; raises ArgumentTypeError
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options, read_whole
from metaseq_lm.core.registry import nearest

TRUTH = {"true": True, "false": False}
PLACEHOLDERS = {int: "N", float: "X", Path: "F"}


def flag_of(name: str) -> str:
    """Return the flag of a field: --max-parallel of max_parallel."""
    return "--" + name.replace("_", "-")


def add_options(parser: Any, schema: type, without: Collection[str] = ()) -> None:
    """Declare the fields of a dataclass as arguments of a parser or group, except those `without`.

    Its own fields come before those that it inherits.
    """
    hints = get_type_hints(schema)
    for item in sorted(fields(schema), key=lambda item: item.name not in schema.__annotations__):
        if item.name not in without:
            add_option(parser, item, *value_type(hints[item.name]))


def add_option(parser: Any, item: Field[Any], kind: type, is_tuple: bool) -> None:
    """Declare a field whose value, or each item of it, is of a type."""
    allowed = item.metadata
    settings = {k: allowed[k] for k in ("metavar", "nargs", "const", "choices") if k in allowed}
    if kind is bool:
        settings["action"] = "store_true"
    elif "choices" not in settings:
        settings.setdefault("metavar", PLACEHOLDERS.get(kind))
    if kind in CONVERTERS and not is_tuple:
        settings["type"] = allowed.get("converter", CONVERTERS[kind])
    if allowed.get("repeated"):
        settings["action"] = "append"
    elif is_tuple and kind is Path:
        settings["nargs"] = "+"
    text = allowed["help"].replace("%", "%%")
    if item.default not in (None, "", (), False) and "default:" not in text:
        text += f" (default: {item.default})"
    if allowed.get("positional"):
        parser.add_argument(item.name, help=text, **settings)
        return
    required = allowed.get("required", False)
    parser.add_argument(flag_of(item.name), default=None, help=text, required=required, **settings)


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
        kind, is_tuple = value_type(hints[item.name])
        convert = read_whole if kind is int else kind
        try:
            if is_tuple:
                parts = value.split(",") if isinstance(value, str) else value
                read[item.name] = tuple(map(convert, parts))
            else:
                read[item.name] = convert(value)
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
        words: The words; items of a tuple have commas between them, and may stand in brackets.
        owner: What has these options, such as "suite blimp", for messages.

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
    """Return the value of a text by an annotation; ValueError or KeyError if it is none."""
    kind, is_tuple = value_type(hint)
    if text == "null" and type(None) in get_args(hint):
        return None
    convert = {bool: TRUTH.__getitem__, int: read_whole}.get(kind, kind)
    if not is_tuple:
        return convert(text)
    inside = text.removeprefix("[").removesuffix("]").strip()
    return tuple(convert(part.strip()) for part in inside.split(",")) if inside else ()


def value_type(hint: Any) -> tuple[type, bool]:
    """Return the type of the values of an annotation, and whether there may be several."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def whole_number(text: str) -> int:
    """Return a whole number, such as 1000 for "1e3"; raises ArgumentTypeError."""
    try:
        return read_whole(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Return a number; raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


CONVERTERS = {int: whole_number, float: number}
