"""Print, as JSON {path: Markdown}, the pages that are made of the package itself.

The command reference comes from the parsers, the reference of options from the registries, and
"How the methods are built" from the READMEs of metaseq_lm/methods. A key that is a
comment stands for a table in a page that is written by hand; objective_tables.py has those of the
objectives. Pages of the API name modules only; mkdocstrings reads their docstrings.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from cells import code, escape, escape_lines, table

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "task": ("Tasks", "What is trained on: data, networks and the order of updates."),
    "criterion": ("Criterions", "What is minimised: a batch in, named sums out."),
    "model": ("Models", "The networks."),
    "attention": ("Attentions", "What a layer of a Transformer mixes the states of tokens with."),
    "optimizer": ("Optimizers", "How parameters follow gradients."),
    "schedule": ("Schedules", "How the learning rate changes over a run."),
    "suite": ("Suites", "What runs are scored with: items from files, metrics by group."),
    "world": ("Worlds", "Small languages with exact answers, which data are drawn from."),
}
# How those are chosen that are no part of a run's configuration; their options are name=value.
CHOICES = {
    "attention": "`model.attention=NAME model.part_options.A=1`",
    "suite": "`metaseq-lm score RUN --suite NAME --data FOLDER`",
    "world": "`metaseq-lm preprocess --world NAME --world-options A=1,B=2`",
}
# Pages of the Python API, and the modules whose `__all__` they show.
API = {
    "config": (
        "Registration, options, errors, random numbers",
        (
            *("core.registry", "core.options", "core.config", "config"),
            *("core.errors", "core.random_streams"),
        ),
    ),
    "tasks": ("Tasks and the engine", ("tasks", "engine", "forward")),
    "criterions": ("Criterions and batches", ("criterions", "core.batch", "core.metric_names")),
    "models": ("Networks and their parts", ("models", "core.roles")),
    "optim": ("Optimizers", ("optim",)),
    "data": ("Data", ("data",)),
    "results": ("Suites, gates and columns", ("evaluation", "league", "reporting")),
    "runs": ("Runs, opened by scripts", ("plugins", "training")),
}
# Titles of argparse's groups of its own.
TITLES = {"positional arguments": "Arguments"}
OF_KEYS = (
    "Flags of keys",
    "Each sets a key of the configuration and has its default, which may depend on the task, "
    "criterion and so on; here it is that of a run that chooses none. There are [more "
    "keys](../options/index.md), which are set by `key=value`.",
)
SAME = re.compile(r"the same as (\S+)=V")  # the help of a flag that stands for a key
DEFAULT = re.compile(r"^default: (.+)|\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)")
LIMITS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def main() -> None:
    """Write all pages to standard output."""
    sys.path.insert(0, str(ROOT))
    from objective_tables import objective_tables

    from metaseq_lm import plugins

    plugins.load_all(None)
    pages = dict([*command_pages(), *option_pages(), *method_pages(), *api_pages(), *traces()])
    pages["<!-- columns -->"] = column_list()
    plugins.load(str(ROOT / "user_dir"))  # the references are those of the package alone
    json.dump({**pages, **dict(objective_tables())}, sys.stdout)


def column_list() -> str:
    """Return the columns of standings with their titles."""
    from metaseq_lm.league.columns import COLUMNS, title_of

    rows = [
        (code(name), escape(title_of(name)), escape(COLUMNS.entry(name).summary))
        for name in COLUMNS.names()
    ]
    return table(("column", "title", "what"), rows)


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield a page per command with its options, and an index."""
    from metaseq_lm.cli import COMMANDS, build_parser

    (commands,) = (a for a in build_parser()._actions if a.dest == "command")
    assert isinstance(commands.choices, dict)
    helps = {action.dest: action.help for action in commands._get_subactions()}
    lines = [f"| [`metaseq-lm {name}`]({name}.md) | {helps[name]} |" for name in COMMANDS]
    yield (
        "reference/commands/index.md",
        "# Commands\n\nOne program, `metaseq-lm`, with a sub-command for each step. These pages "
        "are generated from the parsers, whose text `metaseq-lm COMMAND --help` prints and "
        "`metaseq-lm --help-json` as [JSON](../json.md#commands).\n\n"
        "| command | does |\n|---|---|\n" + "\n".join(lines) + "\n",
    )
    for name in COMMANDS:
        yield f"reference/commands/{name}.md", command_page(name, commands.choices[name])


def command_page(name: str, parser: argparse.ArgumentParser) -> str:
    """Return what a command does, and its options: a section for each group of them."""
    keys = base_keys()
    sections: dict[str, str] = {}
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        named = TITLES.get(str(group.title), str(group.title).capitalize())
        header = ("argument" if named == "Arguments" else "option", "default", "what")
        for is_key, title, about in ((False, named, group.description), (True, *OF_KEYS)):
            chosen = [a for a in actions if bool(SAME.match(a.help or "")) == is_key]
            rows = [option_row(action, parser, keys) for action in chosen]
            if rows:
                text = f"{about}\n\n" if about else ""
                sections[title] = text + table(header, rows)
    first, _, rest = (parser.description or "").strip().partition("\n\n")
    page = [f"# metaseq-lm {name}", escape_lines(first), f"```text\n{synopsis(parser)}\n```"]
    page += [contents(list(sections)), prose(rest)]
    page += [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n\n".join(part for part in page if part) + "\n"


@cache
def base_keys() -> dict[str, tuple[str, str]]:
    """Return default and help of each key of the base configuration."""
    from metaseq_lm.core.config import as_dict, flatten, section_classes
    from metaseq_lm.core.loading import format_value, load_config

    config = load_config([])
    helps = {
        prefix + item.name: item.metadata.get("help", "")
        for prefix, schema in section_classes(config).items()
        for item in fields(schema)
    }
    values = {key: format_value(value) for key, value in flatten(as_dict(config)).items()}
    links = {f"{kind}._name": f"one of [these](../options/{kind}.md)" for kind in KINDS}
    return {
        key.removesuffix("._name"): (value, links.get(key) or escape(helps.get(key, "")))
        for key, value in values.items()
    }


def synopsis(parser: argparse.ArgumentParser) -> str:
    """Return the usage in short: what is required, and the words that are no options."""
    if parser.usage is not None:
        return textwrap.dedent(" " * 7 + parser.usage.replace("%(prog)s", parser.prog))
    flags = [a for a in parser._actions if a.option_strings and a.required]
    words = [a for a in parser._actions if not a.option_strings]
    required = [f"{a.option_strings[-1]} {value_name(a)}" for a in flags]
    return " ".join([parser.prog, *required, "[options]", *map(value_name, words)])


def value_name(action: argparse.Action) -> str:
    """Return how the value of an option, or a word, is written: V, [V], [V ...] or V [V ...]."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar or ("V" if action.choices else action.dest)
    name = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.metavar and action.option_strings:
        name = name.upper()
    forms = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    return forms.get(str(action.nargs), name)


def option_row(
    action: argparse.Action, parser: argparse.ArgumentParser, keys: dict[str, tuple[str, str]]
) -> tuple[str, str, str]:
    """Return option, default and meaning of an action of a parser, as cells."""
    value = value_name(action)
    link = action.option_strings[-1] if action.option_strings else action.dest
    names = [f"{flag} {value}".strip() for flag in action.option_strings] or [value]
    option = ", ".join(f"[`{name}`](#{link})" for name in names) + f"{{ #{link} }}"
    text = " ".join(parser._get_formatter()._expand_help(action).split())
    if same := SAME.match(text):
        default, about = keys[same[1]]
        return option, code(default), f"{code(same[1])}: {about}{text[same.end() :]}"
    if default := DEFAULT.search(text):
        text = f"{text[: default.start()].rstrip()}{text[default.end() :]}"
    is_required = action.required and action.nargs not in ("?", "*")
    shown = (default[1] or default[2]) if default else "required" * is_required
    unnamed = [
        f"`{c}`" for c in action.choices or () if not re.search(rf"\b{re.escape(str(c))}\b", text)
    ]
    return option, escape(shown), escape("; one of ".join(filter(None, (text, ", ".join(unnamed)))))


def prose(text: str) -> str:
    """Return the description of a parser as Markdown: lines that are indented are code."""
    parts = []
    for is_code, lines in groupby(text.splitlines(), key=lambda line: line[:1] == " "):
        block = "\n".join(lines).strip("\n")
        parts.append(f"```text\n{textwrap.dedent(block)}\n```" if is_code else escape_lines(block))
    return "\n\n".join(parts)


def contents(titles: list[str]) -> str:
    """Return links to the sections of a page, if there are several."""
    slugs = [re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles]
    links = [f"[{title}](#{slug})" for title, slug in zip(titles, slugs)]
    return " · ".join(links) if len(links) > 1 else ""


def option_pages() -> Iterator[tuple[str, str]]:
    """Yield a page per registry with a table of options for each name, and one for every run's."""
    from metaseq_lm.core.config import FOLDER, EngineConfig, RunConfig, TrainerConfig
    from metaseq_lm.core.registry import ALL, tasks_for

    titles = {kind: title.lower() for kind, (title, _) in KINDS.items() if kind not in CHOICES}
    groups = ", ".join(f"[{title}]({kind}.md)" for kind, title in titles.items())
    page = [
        "# Options",
        "Every option is a key of the configuration and is set by `key=value` on the command line "
        "or in a YAML file. The first table holds the keys of every run. What else there is "
        f"depends on what is chosen: {groups}. These pages are generated from the registries.",
        contents(["run", "trainer", "engine"]),
        "## run",
        key_table(RunConfig, "", skip=(*ALL, "trainer", "engine")),
        "## trainer",
        key_table(TrainerConfig, "trainer."),
        "## engine",
        key_table(EngineConfig, "engine."),
    ]
    yield "reference/options/index.md", "\n\n".join(page) + "\n"
    for kind, (title, about) in KINDS.items():
        registry = ALL[kind]
        prefix, choice = f"{kind}.", f"`--{kind} NAME` or `{kind}=NAME`"
        if kind in CHOICES:
            prefix, choice = "", CHOICES[kind]
        page = [f"# {title}", f"{about} Chosen by {choice}."]
        presets = sorted((FOLDER / kind).glob("*.yaml"))
        page.append(contents([*registry.names(), *["Sizes"] * bool(presets)]))
        for name in registry.names():
            entry = registry.entries[name]
            page.append(f"## {name}")
            tasks = tasks_for(entry.value) if kind == "criterion" else []
            suited = f" For task {', '.join(f'`{t}`' for t in tasks)}." if tasks else ""
            summary = (entry.value.__doc__ or "").strip().split("\n\n")[0]
            page.append(f"{escape(summary)}{suited} Defined in `{entry.origin}`.")
            if entry.dataclass is not None and fields(entry.dataclass):
                page.append(key_table(entry.dataclass, prefix, name))
        if presets:
            page.append(f"## Sizes\n\nNames of a {kind} with its options set.\n\n" + sizes(presets))
        yield f"reference/options/{kind}.md", "\n\n".join(page) + "\n"


def sizes(presets: list[Path]) -> str:
    """Return a table of the files that set the options of a registered name."""
    from omegaconf import OmegaConf

    from metaseq_lm.core.loading import format_value

    rows = []
    for file in presets:
        summary = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        changes = dict(OmegaConf.load(file))
        base = changes.pop("defaults")[0]
        changed = " ".join(f"`{key}={format_value(value)}`" for key, value in changes.items())
        rows.append(
            (
                f"[`{file.stem}`](#{file.stem}){{ #{file.stem} }}",
                f"`{base}`",
                f"{escape(summary)} {changed}",
            )
        )
    return table(("name", "as", "what"), rows)


def key_table(config: type, prefix: str, name: str = "", skip: tuple[str, ...] = ()) -> str:
    """Return the options of a dataclass as a table; `name` is what they are options of."""
    from metaseq_lm.core.loading import format_value

    rows = []
    for item in fields(config):
        if item.name not in skip and not item.name.startswith("_"):
            link = f"{name}.{item.name}" if name else prefix + item.name
            key = f"[`{prefix}{item.name}`](#{link}){{ #{link} }}"
            default = code(format_value(default_of(item)))
            rows.append((key, default, limits(item), escape(item.metadata.get("help", ""))))
    return table(("key", "default", "range", "what"), rows)


def default_of(item: Field) -> Any:
    """Return the default of a field; that of an option that follows another refers to it."""
    if "follows" in item.metadata:
        return f"${{{item.metadata['follows']}}}"
    return item.default if item.default_factory is MISSING else item.default_factory()


def limits(item: Field) -> str:
    """Return the range of a field as its `option` declares it."""
    metadata = item.metadata
    ranges = [f"{LIMITS[key]} {metadata[key]}" for key in LIMITS if metadata.get(key) is not None]
    choices = metadata.get("choices")
    listed = [", ".join(f"`{choice}`" for choice in choices)] if choices else []
    return ", ".join(ranges + listed)


def api_modules() -> dict[str, list[str]]:
    """Return, for each module with `__all__`, the names that plug-ins may use."""
    modules = {}
    for file in sorted((ROOT / "metaseq_lm").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                modules[module.removesuffix(".__init__")] = ast.literal_eval(node.value)
    return modules


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield a page with all names that plug-ins may use, and the pages that describe them."""
    unseen = api_modules()
    index = [
        "# Python API",
        "A plug-in, or a script, may use the names below: those in the `__all__` of their modules, "
        "with the arguments, attributes and methods that are described behind the links. They are "
        "stable: within a minor version (0.3.0, 0.3.1, ...) none is removed, renamed or needs "
        "another argument, and the next minor version lists each change with its new form in "
        "[Upgrade](../../how_to/upgrading.md). Everything else is internal and changes without "
        "notice. [Write plug-ins](../../how_to/plugins.md) says how the names fit together.",
        contents([title for title, _ in API.values()]),
    ]
    for page, (title, rooms) in API.items():
        pattern = re.compile(rf"metaseq_lm\.({'|'.join(map(re.escape, rooms))})(\.|$)")
        modules = {name: unseen.pop(name) for name in list(unseen) if pattern.match(name)}
        rows: list[tuple[str, str, str]] = []
        parts = [f"# {title}", "A part of the [Python API](index.md)."]
        for name, names in modules.items():
            rows += api_rows(name, names)
            parts.append(f"## {name}\n\n::: {name}\n    options:\n      members: {names}")
        index += [f"## {title}", table(("name", "module", "what"), rows)]
        yield f"reference/api/{page}.md", "\n\n".join(parts) + "\n"
    assert not unseen, f"no page has the names of {', '.join(unseen)}"
    yield "reference/api/index.md", "\n\n".join(index) + "\n"


def api_rows(module: str, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each name of a module; names that one statement assigns share a row."""
    base = ROOT / module.replace(".", "/")
    file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    source = file.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            summary = (ast.get_docstring(node) or "").split("\n\n")[0]
            link = f"[`{node.name}`][{module}.{node.name}]"
            yield link, code(module), escape(summary)
        elif isinstance(node, ast.ImportFrom):
            imported = sorted({alias.name for alias in node.names}.intersection(names))
            for name, _, summary in api_rows(str(node.module), imported) if imported else ():
                yield name, code(module), summary
    for block in re.split(r"\n(?:[ \t]*\n)+", source):  # assignments below one comment
        comment = " ".join(re.findall(r"^# (.*)", block, re.MULTILINE))
        assigned = re.findall(r"^(?:[A-Z]+ = )?(\w+(?:, \w+)*)(?:: \w+)? = ", block, re.MULTILINE)
        listed = ", ".join(assigned).split(", ")
        if shown := [code(name) for name in listed if name in names]:
            yield ", ".join(shown), code(module), escape(comment)


# At most; see docs/architecture.md.
MOST_FILES = {"masked_lm": 9, "soft": 12, "cvt": 14, "task": 14}


def traces() -> Iterator[tuple[str, str]]:
    """Yield, for a comment in the page on architecture, what scripts/trace_update prints."""
    for method, aim in MOST_FILES.items():
        command = [sys.executable, str(ROOT / "scripts" / "trace_update"), method]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)}: {result.stdout}{result.stderr}")
        total, *files = result.stdout.splitlines()
        if len(files) > aim:
            sys.exit(f"{method} runs through {len(files)} files, more than {aim}")
        rows = ["| file | functions | what it does |", "|---|---|---|"]
        for line in files:
            file, _, count, _, _ = line.split()
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0].split("\n")[0]
            rows.append(f"| `{file.removeprefix('metaseq_lm/')}` | {count} | {escape(summary)} |")
        yield (
            f"<!-- trace: {method} -->",
            f"`scripts/trace_update {method}` prints **{total}**, and these files, in the order in "
            "which they are entered:\n\n" + "\n".join(rows),
        )


def method_pages() -> Iterator[tuple[str, str]]:
    """Yield the README of each method with its links turned into those of the site."""
    for readme in sorted((ROOT / "metaseq_lm" / "methods").glob("*/README.md")):
        text = readme.read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\.\./)+examples/(\w+)/README\.md\)", r"](../results/\1.md)", text)
        text = re.sub(r"\]\(\.\./(\w+)/README\.md\)", r"](\1.md)", text)
        text = re.sub(r"\]\((?:\.\./)+docs/(\w+/\w+\.md)", r"](../\1", text)
        yield f"methods/{readme.parent.name}.md", text


if __name__ == "__main__":
    main()
