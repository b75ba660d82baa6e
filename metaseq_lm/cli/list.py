"""List registered names with the module that each comes from.

Criterions that fit only some tasks name them. Sizes are models with their options set, and are chosen
like a model (--model NAME).
"""

import argparse

from metaseq_lm.core.output import show

HELP = "list registered tasks, criterions, models, optimizers, schedules, tokenizers, kinds of datasets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("kind", nargs="?", help="only one kind, such as task or criterion")
    parser.add_argument("--user-dir", help="plug-in folder or file to load")


def run(args: argparse.Namespace) -> int:
    """Print the registries."""
    from metaseq_lm.core import plugins
    from metaseq_lm.core.config import FOLDER
    from metaseq_lm.core.errors import UsageError
    from metaseq_lm.core.registry import ALL, nearest
    from metaseq_lm.data.preprocess.pipeline import DATASET_KINDS
    from metaseq_lm.tasks import tasks_for

    plugins.load_all(args.user_dir)
    registries = {**ALL, "dataset-kind": DATASET_KINDS}
    requested = args.kind.rstrip("s") if args.kind else None
    if requested is not None and requested not in registries:
        hint = nearest(requested, list(registries))
        raise UsageError(f"unknown kind '{args.kind}'.{hint} Kinds: {', '.join(registries)}")
    for kind, registry in registries.items():
        if requested in (None, kind):
            show(f"{kind}:")
            for name in registry.names():
                entry = registry.entries[name]
                summary = (entry.value.__doc__ or "").strip().split("\n")[0]
                tasks = ", ".join(tasks_for(entry.value) if kind == "criterion" else [])
                summary += f" (task {tasks})" if tasks else ""
                show(f"  {name:<28}{summary}  [{entry.origin}]")
            if kind == "model":
                show("model, sizes:")
                for file in sorted((FOLDER / "model").glob("*.yaml")):
                    summary = file.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
                    show(f"  {file.stem:<28}{summary}")
    return 0
