"""Messages for mistakes in configurations: one line with the location and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import ListConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from metaseq_lm.core.registry import ALL, abbreviated, nearest
from metaseq_lm.core.synonyms import suggest_option

# Exceptions while reading and composing configs.
MISTAKES = (HydraException, OmegaConfBaseException, YAMLError, RecursionError, ValueError, OSError)


def explain_composition(error: Exception, choices: Sequence[str], source: str) -> str:
    """Return the message for configs, described by `source`, that cannot be read or composed."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}:{error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return names_itself(source)
    if isinstance(error, (YAMLError, UnicodeError)) or type(error) is OSError:
        return f"{source} is no YAML of lines 'key: value': {' '.join(str(error).split())}"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").partition("/")
        if group in ALL and name:
            is_chosen = any(choice.startswith(f"{group}=") for choice in choices)
            unknown = ALL[group].describe_unknown(name, error.options or ())
            return unknown if is_chosen else f"{source}: {unknown}"
    return str(error.__cause__ or error).split("\n")[0]


def explain_value(error: Exception, known: Sequence[str]) -> str:
    """Return the message for an unknown option or a wrong value.

    `known` are the dotted names of all options.
    """
    key = getattr(error, "full_key", None) or ""
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_option(key, known)
    if key and isinstance(getattr(error, "child_node", None), ListConfig):
        return f"{key}: give a list, such as '{key}=[A,B]', or '[A]' for one"
    text = str(error).split("\n")[0]
    return f"{key}: {text}" if key else text


def names_itself(source: object) -> str:
    """Return the message for a config that refers to itself."""
    return f"{source} names itself, in its defaults, by an alias (*x) or by ${{key}}"


def no_section(key: str, value: Any) -> str:
    """Return the message for a value instead of a section."""
    return f"{key} is {value}; give keys of it (a task and the like are chosen in defaults)"


def without_base(file: Path) -> str:
    """Return the message for a primary config that lacks keys of a run."""
    return f"{file} lacks keys that every run has; begin it with 'defaults: [base, _self_]'"


def _unknown_option(key: str, known: Sequence[str]) -> str:
    if key.startswith("model.") and "model.changes" in known:
        change = f"{key.removeprefix('model.')}=VALUE"
        return f"unknown option '{key}': with model=inherit it is \"model.changes=['{change}']\""
    group, _, name = key.rpartition(".")
    elsewhere = [other for other in known if other.rpartition(".")[2].lower() == name.lower()]
    if elsewhere:
        hint = nearest(elsewhere[0], elsewhere)
    elif owners := _owners_of(name, group):
        hint = f" These {group}s have it: {abbreviated(owners)}."
    else:
        hint = suggest_option(key, flag_keys={})
    return f"unknown option '{key}'.{hint or nearest(key, known)} '--print-config' shows all."


def _owners_of(option: str, group: str) -> list[str]:
    owners = []
    for name in ALL.get(group, ()):
        if any(item.name == option for item in fields(ALL[group].entry(name).dataclass)):
            owners.append(name)
    return owners
