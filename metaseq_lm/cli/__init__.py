"""`metaseq-lm <command>`: one module per command.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int`. With
`OVERRIDES` it takes key=value arguments, with `WORDS` other words too, also between and after the
options. With `PROGRESS` it prints progress, which --quiet leaves out. Its results are shown by
`core.documents`, too, for --json. A command that is a word of Python, such as `import`, has a
module whose name ends in "_"; a hyphen becomes one.
"""

import argparse
import contextlib
import importlib
import io
import keyword
import os
import re
import sys
import traceback
from collections.abc import Sequence
from itertools import chain

from metaseq_lm import __version__
from metaseq_lm.core.documents import documents_only, show_failure
from metaseq_lm.core.errors import TRACEBACK, MetaseqError, UsageError, say
from metaseq_lm.core.memory import memory_error
from metaseq_lm.core.output import results_only
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.synonyms import suggest_option

COMMANDS = (
    *(
        "preprocess",
        "merge",
        "import-corpus",
        "train",
        "sweep",
        "league",
        "compare",
        "evaluate",
        "score",
        "rerank",
    ),
    *("report", "import", "export", "doctor", "list", "examples"),
)
JSON_HELP = "print one JSON document on standard output, everything else on standard error"
# Attributes that `main` and the parser add to the options of a command.
NOT_OPTIONS = ("command", "module", "parser", "overrides", "argv", "quiet", "json")
# Commands that write no files without --out.
_PRINTING = ("list", "doctor", "report", "evaluate", "score", "rerank", "examples")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError and suggests the option that may be meant."""

    def error(self, message: str) -> None:  # type: ignore[override]
        # Not list(...): the name is the module of a command once that is imported.
        options = [*chain.from_iterable(action.option_strings for action in self._actions)]
        words = [word.split("=")[0].rstrip(":,") for word in message.split()]
        wrong = next((w for w in words if re.match("-+[a-zA-Z]", w) and w not in options), None)
        hint = self._hint(wrong, options) if wrong else ""
        raise UsageError(f"{message}.{hint} See '{self.prog} --help'.")

    def _hint(self, word: str, options: list[str]) -> str:
        """Return a suggestion for an unknown option, "" without a similar one."""
        takes_keys = getattr(self.get_default("module"), "OVERRIDES", False)
        if takes_keys:
            from metaseq_lm.cli.train import FLAGS

            keys = {f"--{flag}": key for flag, key in FLAGS.items() if f"--{flag}" in options}
        return (
            suggest_option(word, options, keys if takes_keys else None)
            or self._option_with_value(word)
            or nearest(word, options)
        )

    def _option_with_value(self, word: str) -> str:
        """Return a hint for a value passed as an option, such as --html; "" for another word."""
        value = word.removeprefix("--")
        for action in self._actions:
            listed = action.help or "" if action.metavar == "LIST" else ""
            if action.option_strings and value in (
                *(action.choices or ()),
                *listed.replace(",", " ").split(),
            ):
                return f" Did you mean '{action.option_strings[-1]} {value}'?"
        return ""


def build_parser(only: str | None = None, argv: Sequence[str] = ()) -> _Parser:
    """Return the parser; `only` imports just that command, so that starting stays fast.

    A command with options from plug-ins has `load_plugins(argv)`.
    """
    parser = _Parser(
        prog="metaseq-lm",
        description="Pre-train, compare and evaluate language-model objectives.",
        epilog="exit codes: 0 ok, 1 error, 2 wrong usage (also a path that is not there), 3 "
        "diverged, 75 interrupted with a checkpoint saved (run again), 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"metaseq-lm {__version__}")
    parser.add_argument(
        "--help-json", action="store_true", help="print all commands and options as JSON"
    )
    commands = parser.add_subparsers(dest="command", metavar="<command>", parser_class=_Parser)
    for name in COMMANDS:
        if only is not None and name != only:
            continue
        suffix = "_" if keyword.iskeyword(name) else ""
        module = importlib.import_module(f"metaseq_lm.cli.{name.replace('-', '_')}{suffix}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            conflict_handler="resolve",
        )
        if hasattr(module, "load_plugins"):
            module.load_plugins(argv)
        module.add_arguments(sub)
        if getattr(module, "PROGRESS", False):
            sub.add_argument("--quiet", action="store_true", help="print results and errors only")
        sub.add_argument("--json", action="store_true", help=JSON_HELP)
        sub.set_defaults(module=module, parser=sub)
    return parser


def overrides(parser: _Parser, rest: list[str]) -> list[str]:
    """Return the key=value arguments (and words, where allowed) between and after the options.

    argparse takes only one group of positional arguments, so further ones come back as unknown; any
    other unknown argument is a UsageError.
    """
    module = parser.get_default("module")
    takes_words = getattr(module, "WORDS", False)
    wrong = [a for a in rest if a.startswith("-") or ("=" not in a and not takes_words)]
    if not getattr(module, "OVERRIDES", False):
        wrong = rest
    if wrong:
        parser.error(f"unknown argument {wrong[0]}")
    return rest


def _check_plug_in(argv: Sequence[str]) -> None:
    """Raise UsageError for two different values of --user-dir, since one would be dropped."""
    words = dict.fromkeys(
        argv[i + 1] if word == "--user-dir" else word.partition("=")[2]
        for i, word in enumerate(argv)
        if word.startswith("--user-dir=") or (word == "--user-dir" and i + 1 < len(argv))
    )
    if len({os.path.abspath(word) for word in words}) > 1:
        raise UsageError(
            f"--user-dir is given as {' and '.join(words)}, but one plug-in is loaded: name a "
            "folder whose __init__.py imports both (from . import A, B)"
        )


def _with_home(word: str) -> str:
    """Return a word with the home folder for ~, because shells do not expand it after "="."""
    option, equals, value = word.partition("=")
    if value.startswith("~/"):
        return option + equals + os.path.expanduser(value)
    return os.path.expanduser(word) if word.startswith("~/") else word


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        name = os.environ.get("PWD", "the current folder")
        raise MetaseqError(f"{name}: was deleted; change to a folder that exists") from error


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = [_with_home(word) for word in (sys.argv[1:] if argv is None else argv)]
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from metaseq_lm.cli.completion import complete_words

        complete_words(lambda name: build_parser(name if name in COMMANDS else None))
    # Replace characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_json = not {"--json", "--help-json"}.isdisjoint(argv)
    with documents_only() if is_json else contextlib.nullcontext():
        message, code = _outcome(argv)
        if message:
            say(f"metaseq-lm: {message}")
        if code:
            show_failure(message or "see standard error", code)
    return code


def _outcome(argv: list[str]) -> tuple[str, int]:
    """Run one command; return the message of the error that ended it, if any, and its exit code."""
    first = next((a for a in argv if not a.startswith("-")), None)
    try:
        return "", _run(first, argv)
    except MetaseqError as error:
        return "" if error.is_printed else str(error), error.exit_code
    except KeyboardInterrupt:
        return "interrupted", 130
    except BrokenPipeError:
        # The reader of our output (head, less) left, which is no error if only output was left to
        # do.
        only_prints = {"-h", "--help", "--print-config", "--dry-run", "status"}.intersection(argv)
        out = any(word.partition("=")[0] in ("--out", "--archive") for word in argv)
        is_over = only_prints or (first in (None, *_PRINTING) and not out)
        return "", 0 if is_over else MetaseqError.exit_code
    except OSError as error:
        if error.filename is None and error.errno is None:
            say(traceback.format_exc())
            return "", MetaseqError.exit_code
        where = f"{error.filename}: " if error.filename else ""
        is_typed = any(
            str(error.filename) == word.partition("=")[2] or str(error.filename) == word
            for word in argv
        )
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        code = UsageError.exit_code if is_typed and is_absent else MetaseqError.exit_code
        return f"{where}{error.strerror}", code


def _run(first: str | None, argv: list[str]) -> int:
    _check_current_folder()
    if first is not None and first not in COMMANDS:
        # Nor list(COMMANDS), as in `_Parser.error`.
        raise UsageError(
            f"unknown command '{first}'.{nearest(first, [*COMMANDS])} "
            f"Commands: {', '.join(COMMANDS)}."
        )
    _check_plug_in(argv)
    parser = build_parser(first, argv)
    args, rest = parser.parse_known_args(argv)
    if args.help_json:
        from metaseq_lm.cli.help_json import show_commands

        show_commands(parser)
        return 0
    if args.command is None:
        parser.print_help()
        return UsageError.exit_code
    args.overrides, args.argv = overrides(args.parser, rest), argv
    try:
        with results_only() if getattr(args, "quiet", False) else contextlib.nullcontext():
            return int(args.module.run(args))
    except Exception as error:
        if (known := memory_error(error)) is None:
            raise
        raise known from error


def program() -> None:
    """Run the command line and end the process.

    Python's own cleanup is skipped: after an error it would wait for hanging threads or replicas,
    and the threads of a process group can abort it.
    """
    try:
        code = main()
    except Exception as error:  # a defect in our code or in a plug-in
        plugins = sys.modules.get("metaseq_lm.plugins")  # if the command has loaded any
        failure = plugins.describe_failure(error) if plugins is not None else ""
        if failure and not os.environ.get(TRACEBACK):
            say(f"metaseq-lm: {failure}\n{TRACEBACK}=1 shows the whole traceback")
        else:
            say(traceback.format_exc())
        code = MetaseqError.exit_code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
