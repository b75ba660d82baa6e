"""Reads sections of plans and sweep files into dataclasses; OmegaConf checks the types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import check_options
from metaseq_lm.core.registry import nearest

S = TypeVar("S")
# OmegaConf must see neither interpolations, ${x}, nor missing values, ???.
_HIDDEN, _SHOWN = str.maketrans("$?", "\0\1"), str.maketrans("\0\1", "$?")
_NOUNS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
_NOUNS |= {dict: "a mapping", Any: "a value"}
_node_of = cache(OmegaConf.structured)  # to copy it is faster


def read_structured(schema: type[S], content: Any, place: str = "", **fixed: Any) -> S:
    """Return an instance of a dataclass with the values of a mapping, see `read_values`.

    If its `__post_init__` raises a UsageError that begins with a key, `place` is put before it.

    Args:
        schema: The dataclass.
        content: The mapping.
        place: The dotted key of the mapping in its file.
        fixed: Values of fields that are not keys of the mapping.
    """
    values = read_values(schema, content, place, fixed)
    try:
        return schema(**values, **fixed)
    except UsageError as error:
        raise UsageError(f"{place}{'.' * bool(place)}{error}") from error


def read_values(
    schema: type, content: Any, place: str = "", fixed: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a mapping by the fields of a dataclass, with the fields' types.

    The key of a field is its name, or `key` in its metadata. null stands for its default.

    Raises:
        UsageError: A key is unknown or missing, a value of a wrong type, outside the range that
            its `option` declares, or not printable. The message begins with the dotted key.
    """
    prefix = place and f"{place}."
    declared = {f.metadata.get("key", f.name): f for f in fields(schema) if f.name not in fixed}
    if not isinstance(content, dict):
        raise UsageError(f"{place}: {content!r} is not a mapping; keys: {', '.join(declared)}")
    hints = get_type_hints(schema)
    node = copy.deepcopy(_node_of(schema))
    OmegaConf.set_readonly(node, False)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in declared:
            hint = nearest(str(key), declared)
            raise UsageError(f"{prefix}{key}: unknown key.{hint} Keys: {', '.join(declared)}.")
        item = declared[key]
        name, kind = item.name, hints[item.name]
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        if value is None and has_default and not _accepts(kind, type(None)):
            continue  # the default
        if isinstance(value, bool | list) and not _accepts(kind, bool):
            value = _without_truth(value)
        _assign(node, name, value, kind, f"{prefix}{key}")
        read = node[name]
        if OmegaConf.is_config(read):
            read = OmegaConf.to_container(read)
        read = _change_texts(read, lambda text: text.translate(_SHOWN))
        values[name] = tuple(read) if get_origin(kind) is tuple else read
    for key, item in declared.items():
        if key not in content and item.default is item.default_factory is MISSING:
            raise UsageError(f"{prefix}{key}: the key is missing")
    check_options(schema, SimpleNamespace(**values), prefix)
    return values


def _accepts(kind: Any, scalar: type) -> bool:
    return kind in (scalar, Any) or any(_accepts(part, scalar) for part in get_args(kind))


def _without_truth(value: Any) -> Any:
    """Return texts for YAML's yes, on, no and off in a value that has no truth values."""
    if isinstance(value, list):
        return [_without_truth(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _assign(node: Any, name: str, value: Any, kind: Any, place: str) -> None:
    """Assign a value to a key of a node; UsageError names the place of a value of another type."""
    if get_origin(kind) is dict and isinstance(value, dict):
        node[name] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{place}: the key {key!r} is not a text; put it in quotes")
            _assign(node[name], key, item, get_args(kind)[1], f"{place}.{key}")
        return

    def hide_signs(text: str) -> str:
        if not text.isprintable():
            raise UsageError(f"{place}: {text!r} has characters that cannot be printed")
        return text.translate(_HIDDEN)

    try:
        node[name] = _change_texts(value, hide_signs)
    except OmegaConfBaseException as error:
        raise UsageError(f"{place}: {value!r}: give {_noun(kind)}") from error


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_change_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _noun(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _noun(args[0])
    if origin in (list, tuple):
        return "a list" if args[0] is Any else f"a list (each item {_noun(args[0])})"
    return _NOUNS[origin or kind]
