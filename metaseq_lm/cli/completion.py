"""Completion of commands, options and registered names in a shell, by argcomplete.

A shell asks at each press of the tab key, so nothing here imports torch.
"""

import argparse
import contextlib
import os
from collections.abc import Callable
from itertools import chain
from typing import Any

from metaseq_lm import plugins
from metaseq_lm.core.config import FOLDER
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import ALL


def _registered_names(kind: str, user_dir: str | None = None) -> list[str]:
    """Return the registered names of a kind, from package and plug-ins, and presets of models."""
    with contextlib.suppress(UsageError):  # raised by a plug-in
        plugins.load_all(user_dir)
    presets = {file.stem for file in (FOLDER / kind).glob("*.yaml")}
    return sorted({*ALL[kind].names(), *presets})


def complete_words(build_parser: Callable[[str], argparse.ArgumentParser]) -> None:
    """Print completions of the line in COMP_LINE, and end the process.

    `build_parser` returns the parser of a command.
    """
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    parser = build_parser(words[1] if len(words) > 1 else "")
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for sub in chain.from_iterable(group.choices.values() for group in groups):
        for action in sub._actions:
            kinds = [kind for kind in ALL if f"--{kind}" in action.option_strings]
            if kinds:
                _set_completer(action, _names_of(kinds[0]))
            elif not action.option_strings and getattr(
                sub.get_default("module"), "OVERRIDES", False
            ):
                _set_completer(action, _complete_key)
    argcomplete.autocomplete(parser)


def _set_completer(action: argparse.Action, completer: Callable[..., list[str]]) -> None:
    """Let argcomplete ask `completer` for the values of an option."""
    action.completer = completer  # type: ignore[attr-defined]


def _names_of(kind: str) -> Callable[..., list[str]]:
    def names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        return _registered_names(kind, getattr(parsed_args, "user_dir", None))

    return names


def _complete_key(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return keys of all runs that begin with `prefix`, and names after task= and similar keys."""
    from metaseq_lm.cli.train import FLAGS
    from metaseq_lm.core.config import GROUPS, as_dict, flatten
    from metaseq_lm.core.loading import common_config

    group, equals, _value = prefix.partition("=")
    if equals and group in GROUPS:
        user_dir = getattr(parsed_args, "user_dir", None)
        return [f"{group}={name}" for name in _registered_names(group, user_dir)]
    common = flatten(as_dict(common_config()))
    keys = {key.removesuffix("._name") for key in common} | set(FLAGS.values())
    # Nothing for an empty prefix, so that the shell completes files.
    return [f"{key}=" for key in sorted(keys)] if prefix else []
