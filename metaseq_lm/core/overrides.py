"""Options as text: key=value words of a command line, in the grammar of Hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from metaseq_lm.core.config import GROUPS, RunConfig, as_dict, flatten, sections
from metaseq_lm.core.errors import UsageError

KEY = re.compile(r"[+~]*[A-Za-z_][\w.@-]*")


@cache
def parser() -> OverridesParser:
    """Return Hydra's parser of overrides, which takes longer to make than to use."""
    return OverridesParser.create()


@lru_cache(4096)  # of a sweep; nothing changes what it returns
def parse_override(word: str) -> Override:
    """Parse key=value; UsageError if it is not in Hydra's grammar, or is no single value."""
    try:
        override = parser().parse_override(word)
    except HydraException as error:
        key, equals, value = word.partition("=")
        remedy = f'quote the value, "{key}={quote_path(value)}"' if equals else "write KEY=VALUE"
        raise UsageError(f"{word}: not in Hydra's grammar; {remedy}") from error
    if override.is_sweep_override():
        raise UsageError(f"{word}: several values; a run has one, and several runs are a 'sweep'")
    if override.is_add() or override.is_delete() or override.is_force_add():
        raise UsageError(f"'{word}': keys can be set (key=value), not added or removed")
    return override


def split_overrides(
    words: Sequence[str], keys: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split words into paths or names, and key=value overrides.

    A word with "=" is a path if what is before "=" is no key, as in runs/lr=0.001-seed=1, or if
    there is such a file, unless it begins with one of `keys`.
    """

    def is_override(word: str) -> bool:
        key, equals, _ = word.partition("=")
        if not equals or not KEY.fullmatch(key):
            return False
        return key.split(".")[0] in keys or not Path(word).exists()

    overrides = [word for word in words if is_override(word)]
    return [word for word in words if word not in overrides], overrides


def override_value(override: str) -> Any:
    """Return the value of a key=value; None if it is not in Hydra's grammar."""
    return parser().parse_override(override).value() if is_valid(override) else None


@lru_cache(4096)
def is_valid(override: str) -> bool:
    """Return whether key=value is in Hydra's grammar."""
    try:
        parser().parse_override(override)
    except HydraException:
        return False
    return True


def format_value(value: Any) -> str:
    """Return a string, number, boolean, None or a list of them as in a Hydra override."""
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    if value is None:
        return "null"
    return quote(value) if isinstance(value, str) else repr(value).lower()


def quote(text: str) -> str:
    """Return a string in quotes if Hydra's syntax needs them."""
    if re.fullmatch(r"[A-Za-z0-9._/+-]+", text):
        return text
    return quote_path(text)


def quote_path(text: str) -> str:
    """Return a string in quotes, so that Hydra takes no name of a path for a number or a list."""
    return QuotedString(text, Quote.single).with_quotes()


def describe(config: RunConfig) -> str:
    """Return a line for each key of a configuration: key=value, as it is typed, and its help."""
    helps = dict.fromkeys(GROUPS, "'metaseq-lm list' shows all")
    for prefix, schema in sections(config).items():
        for item in fields(schema):
            helps.setdefault(prefix + item.name, item.metadata.get("help", ""))
    values = flatten(as_dict(config))
    lines = []
    for key in sorted(values, key=lambda key: not key.endswith("._name")):  # choices first
        name = key.removesuffix("._name")
        setting = f"{name}={format_value(values[key])}"
        lines.append(f"  {setting:<48}{helps.get(name, '')}".rstrip())
    return "\n".join(lines)
