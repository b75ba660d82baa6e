"""`metaseq-lm --help-json`: the commands with their options, read from the parsers."""

import argparse
from pathlib import Path
from typing import Any

from metaseq_lm import __version__
from metaseq_lm.cli.train import FLAGS
from metaseq_lm.core.documents import show_result

_TYPES = {int: "integer", float: "number", bool: "boolean"}
_REPEATED = (argparse._AppendAction, argparse._ExtendAction)


def show_commands(parser: argparse.ArgumentParser) -> None:
    """Print the commands of a parser with their options."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in commands._get_subactions()}
    content = {name: _command(sub, helps[name]) for name, sub in commands.choices.items()}
    show_result("commands", {"version": __version__, "commands": content})


def _command(parser: argparse.ArgumentParser, help_line: str | None) -> dict[str, Any]:
    """Return what a command does, its usage and its options."""
    options = [
        _option(action, parser, str(group.title))
        for group in parser._action_groups
        for action in group._group_actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    usage = parser.format_usage().removeprefix("usage: ").strip()
    about = {"help": help_line, "description": (parser.description or "").strip(), "usage": usage}
    return {**about, "takes_keys": _takes_keys(parser), "options": options}


def _takes_keys(parser: argparse.ArgumentParser) -> bool:
    """Return whether a command takes key=value arguments."""
    return bool(getattr(parser.get_default("module"), "OVERRIDES", False))


def _option(action: argparse.Action, parser: Any, group: str) -> dict[str, Any]:
    """Return an option; its default is null where the configuration or the data have it."""
    item, kind = getattr(action, "declared", (None, None))
    if item is None:
        kind = bool if isinstance(action, argparse._StoreTrueAction) else action.type
    default = action.default if item is None else item.default
    flags, key = list(action.option_strings), None
    if flags and item is None and _takes_keys(parser):
        key = FLAGS.get(flags[0].removeprefix("--"))
    return {
        "name": action.dest,
        "flags": flags,
        "type": _TYPES.get(kind, "string"),
        "default": str(default) if isinstance(default, Path) else default,
        "choices": list(action.choices) if action.choices else None,
        "nargs": action.nargs,
        "repeated": isinstance(action, _REPEATED),
        "required": action.required and action.nargs != "*",
        "metavar": action.metavar,
        "group": group,
        "key": key,
        "help": parser._get_formatter()._expand_help(action),
    }
