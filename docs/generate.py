"""Print, as JSON {path: Markdown}, the pages that are made of the package itself.

The command reference comes from the parsers, the reference of options from the registries, and
"How the methods are built" from the READMEs of metaseq_lm/methods. A key that is a
comment stands for a table in a page that is written by hand. Pages of the API name modules only; mkdocstrings reads their docstrings.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "task": ("Tasks", "What is trained on: data, networks and the order of updates."),
    "criterion": ("Criterions", "What is minimised: a batch in, named sums out."),
    "model": ("Models", "The networks."),
    "optimizer": ("Optimizers", "How parameters follow gradients."),
    "schedule": ("Schedules", "How the learning rate changes over a run."),
}
API = {
    "engine": ("Engine", "Exact gradients, second derivatives, steps.", ("engine",)),
    "tasks": ("Tasks", "Data, networks and the order of updates.", ("tasks",)),
    "criterions": ("Criterions and batches", "What is minimised.", ("core.batch", "criterions")),
    "config": (
        "Configuration and registry",
        "Options, names, plug-ins, errors and random numbers.",
        (
            *("core.config", "core.registry", "core.plugins", "core.errors"),
            "core.random_streams",
        ),
    ),
    "data": ("Data", "Files, tokenizers, corpora, labelled sets, streams.", ("data",)),
    "models": ("Models", "Networks and their layers.", ("models",)),
    "optim": ("Optimizers and schedules", "Steps and learning rates.", ("optim",)),
    "evaluation": ("Evaluation", "Metrics and predictions.", ("evaluation",)),
    "runs": (
        "Runs and checkpoints",
        "Run folders, checkpoints, FLOPs, training, interchange with transformers.",
        ("runs", "training", "interop"),
    ),
}
LIMITS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def main() -> None:
    """Write all pages to standard output."""
    sys.path.insert(0, str(ROOT))
    from metaseq_lm.core import plugins

    plugins.load_all(None)
    pages = [*command_pages(), *option_pages(), *method_pages(), *api_pages(), *traces()]
    json.dump(dict(pages), sys.stdout)


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield a page per command with its help, and an index."""
    from metaseq_lm.cli import COMMANDS, build_parser

    parser = build_parser()
    choices = next(a.choices for a in parser._actions if a.dest == "command")
    helps = {
        action.dest: action.help
        for a in parser._actions
        if a.dest == "command"
        for action in a._choices_actions
    }
    assert isinstance(choices, dict)
    lines = [f"| [`metaseq-lm {name}`]({name}.md) | {helps[name]} |" for name in COMMANDS]
    yield (
        "reference/commands/index.md",
        "# Commands\n\nOne program, `metaseq-lm`, with a sub-command for each step. These pages are "
        "generated from the parsers: they show what `metaseq-lm COMMAND --help` prints.\n\n"
        "| command | does |\n|---|---|\n" + "\n".join(lines) + "\n",
    )
    for name in COMMANDS:
        more = (
            "\n`metaseq-lm train --task T --criterion C --help` prints the keys of that choice as "
            "well. All keys are in the [reference of options](../options/index.md).\n"
            if name == "train"
            else ""
        )
        text = choices[name].format_help().rstrip()
        yield (
            f"reference/commands/{name}.md",
            f"# metaseq-lm {name}\n{more}\n```text\n{text}\n```\n",
        )


def option_pages() -> Iterator[tuple[str, str]]:
    """Yield a page per registry with a table of options for each name, and one for every run's."""
    from metaseq_lm.core.config import EngineConfig, RunConfig, TrainerConfig
    from metaseq_lm.core.registry import ALL, tasks_for

    groups = ", ".join(f"[{title.lower()}]({kind}.md)" for kind, (title, _) in KINDS.items())
    page = [
        "# Options",
        "Every option is a key of the configuration and is set by `key=value` on the command line "
        "or in a YAML file. The first table holds the keys of every run. What else there is depends "
        f"on what is chosen: {groups}. These pages are generated from the registries.",
        "## run",
        table(RunConfig, "", skip=(*ALL, "trainer", "engine")),
        "## trainer",
        table(TrainerConfig, "trainer."),
        "## engine",
        table(EngineConfig, "engine."),
    ]
    yield "reference/options/index.md", "\n\n".join(page) + "\n"
    for kind, (title, about) in KINDS.items():
        registry = ALL[kind]
        page = [f"# {title}", f"{about} Chosen by `--{kind} NAME` or `{kind}=NAME`."]
        for name in registry.names():
            entry = registry.entries[name]
            page.append(f"## {name}")
            tasks = tasks_for(entry.value) if kind == "criterion" else []
            suited = f" For task {', '.join(f'`{t}`' for t in tasks)}." if tasks else ""
            summary = (entry.value.__doc__ or "").strip().split("\n\n")[0]
            page.append(f"{escape(summary)}{suited} Defined in `{entry.origin}`.")
            if entry.dataclass is not None and fields(entry.dataclass):
                page.append(table(entry.dataclass, f"{kind}."))
        yield f"reference/options/{kind}.md", "\n\n".join(page) + "\n"


def table(config: type, prefix: str, skip: tuple[str, ...] = ()) -> str:
    """Return the options of a dataclass as a table."""
    from metaseq_lm.core.config import format_value

    lines = ["| key | default | range | help |", "|---|---|---|---|"]
    for item in fields(config):
        if item.name not in skip and not item.name.startswith("_"):
            default = f"`{format_value(default_of(item))}`"
            row = (f"`{prefix}{item.name}`", default, limits(item), item.metadata.get("help", ""))
            lines.append("| " + " | ".join(escape(cell) for cell in row) + " |")
    return "\n".join(lines)


def default_of(item: Field) -> Any:
    """Return the default of a field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def limits(item: Field) -> str:
    """Return the range of a field as its `option` declares it."""
    metadata = item.metadata
    ranges = [f"{LIMITS[key]} {metadata[key]}" for key in LIMITS if metadata.get(key) is not None]
    choices = metadata.get("choices")
    listed = [", ".join(f"`{choice}`" for choice in choices)] if choices else []
    return ", ".join(ranges + listed)


def escape(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield a page per room or group of modules, and an index."""
    package = ROOT / "metaseq_lm"
    rows = []
    for name, (title, about, rooms) in API.items():
        modules = []
        for room in rooms:
            base = package / room.replace(".", "/")
            for file in [base.with_suffix(".py"), *sorted(base.rglob("*.py"))]:
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                if file.is_file() and has_public_names(file):
                    modules.append(module.removesuffix(".__init__"))
        parts = [f"# {title}\n\n{about}", *(f"## {m}\n\n::: {m}" for m in modules)]
        yield f"reference/api/{name}.md", "\n\n".join(parts) + "\n"
        rows.append(
            f"| [{title}]({name}.md) | {', '.join(f'`{room}`' for room in rooms)} | {about} |"
        )
    yield (
        "reference/api/index.md",
        "# Python API\n\nMade of the docstrings. What a plug-in needs is in "
        "[Tasks](tasks.md), [Criterions and batches](criterions.md) and "
        "[Configuration and registry](config.md); [how to write plug-ins](../../how_to/plugins.md) "
        "says how they fit together.\n\n| page | modules of `metaseq_lm` | about |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n",
    )


FILES_OF_AN_UPDATE = {"masked_lm": 8, "soft": 12, "cvt": 14}  # at most; see docs/architecture.md


def traces() -> Iterator[tuple[str, str]]:
    """Yield, for a comment in the page on architecture, what scripts/trace_update prints."""
    for method, aim in FILES_OF_AN_UPDATE.items():
        command = [sys.executable, str(ROOT / "scripts" / "trace_update"), method]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)}: {result.stdout}{result.stderr}")
        total, *files = result.stdout.splitlines()
        if len(files) > aim:
            sys.exit(f"an update of {method} runs through {len(files)} files, more than {aim}")
        rows = ["| file | functions | what it does |", "|---|---|---|"]
        for line in files:
            file, _, count, _, _ = line.split()
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0].split("\n")[0]
            rows.append(f"| `{file.removeprefix('metaseq_lm/')}` | {count} | {escape(summary)} |")
        yield (
            f"<!-- trace: {method} -->",
            f"`scripts/trace_update {method}` prints **{total}**, and these files, in the order in "
            "which the update enters them:\n\n" + "\n".join(rows),
        )


def has_public_names(file: Path) -> bool:
    """Return whether a module defines a class or function without a leading underscore."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    definitions = (ast.ClassDef, ast.FunctionDef)
    return any(isinstance(node, definitions) and node.name[0] != "_" for node in nodes)


def method_pages() -> Iterator[tuple[str, str]]:
    """Yield the README of each method with its links turned into those of the site."""
    for readme in sorted((ROOT / "metaseq_lm" / "methods").glob("*/README.md")):
        text = readme.read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\.\./)+examples/(\w+)/README\.md\)", r"](../results/\1.md)", text)
        text = re.sub(r"\]\(\.\./(\w+)/README\.md\)", r"](\1.md)", text)
        yield f"methods/{readme.parent.name}.md", text


if __name__ == "__main__":
    main()
