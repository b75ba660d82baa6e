"""`metaseq-lm --help-json`: the commands with their options, read from the parsers."""

import argparse
from pathlib import Path
from typing import Any

from metaseq_lm import __version__
from metaseq_lm.cli.train import FLAGS
from metaseq_lm.core.documents import show_result

_TYPES: dict[Any, str] = {int: "integer", float: "number"}


def show_commands(parser: argparse.ArgumentParser) -> None:
    """Print the commands of a parser with their options."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    content = {}
    for name, sub in commands.choices.items():
        module = sub.get_default("module")
        usage = sub.format_usage().removeprefix("usage: ").strip()
        about = {"help": module.HELP, "description": module.__doc__, "usage": usage}
        options = []
        for group in sub._action_groups:
            for action in group._group_actions:
                if argparse.SUPPRESS not in (action.help, action.default):
                    options.append(_option(action, sub, str(group.title)))
        takes_keys = getattr(module, "OVERRIDES", False)
        content[name] = {**about, "takes_keys": takes_keys, "options": options}
    show_result("commands", {"version": __version__, "commands": content})


def _option(action: argparse.Action, parser: Any, group: str) -> dict[str, Any]:
    item, kind = getattr(action, "declared", (None, action.type))
    default = action.default if item is None else item.default
    is_key = item is None and getattr(parser.get_default("module"), "OVERRIDES", False)
    return {
        "name": action.dest,
        "flags": list(action.option_strings),
        "type": "boolean" if action.nargs == 0 else _TYPES.get(kind, "string"),
        "default": str(default) if isinstance(default, Path) else default,
        "choices": list(action.choices) if action.choices else None,
        "nargs": action.nargs,
        "repeated": isinstance(action, argparse._AppendAction),
        "required": action.required and action.nargs != "*",
        "metavar": action.metavar,
        "group": group,
        "key": FLAGS.get(action.dest.replace("_", "-")) if is_key else None,
        "help": parser._get_formatter()._expand_help(action),
    }
