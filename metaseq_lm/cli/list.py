"""List registered names with the module that each comes from.

Criterions that fit only some tasks name them. Sizes are models with their options set, and are chosen
like a model (--model NAME).
"""

import argparse
from collections.abc import Iterator

HELP = "registered tasks, criterions, models, optimizers, schedules, tokenizers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("kind", nargs="?", help="only one kind, such as task or criterion")
    parser.add_argument("--user-dir", help="plug-in folder or file to load")


def run(args: argparse.Namespace) -> int:
    """Print the registries."""
    from metaseq_lm.core import plugins
    from metaseq_lm.core.errors import UsageError
    from metaseq_lm.core.registry import ALL, nearest
    from metaseq_lm.tasks import tasks_for

    plugins.load_all(args.user_dir)
    wanted = args.kind.rstrip("s") if args.kind else None
    if wanted is not None and wanted not in ALL:
        hint = nearest(wanted, list(ALL))
        raise UsageError(f"unknown kind '{args.kind}'.{hint} Kinds: {', '.join(ALL)}")
    for kind, registry in ALL.items():
        if wanted in (None, kind):
            print(f"{kind}:")
            for name in registry.names():
                entry = registry.entries[name]
                summary = (entry.value.__doc__ or "").strip().split("\n")[0]
                tasks = ", ".join(tasks_for(entry.value) if kind == "criterion" else [])
                print(
                    f"  {name:<28}{summary}{f' (task {tasks})' if tasks else ''}  [{entry.origin}]"
                )
            if kind == "model":
                print("model, sizes:")
                for name, summary in sizes():
                    print(f"  {name:<28}{summary}")
    return 0


def sizes() -> Iterator[tuple[str, str]]:
    """Yield the name of each size of a model and the first sentence of its file."""
    from metaseq_lm.core.config import FOLDER

    for file in sorted((FOLDER / "model").glob("*.yaml")):
        first = file.read_text(encoding="utf-8").split("\n")[0]
        yield file.stem, first.removeprefix("# ")
