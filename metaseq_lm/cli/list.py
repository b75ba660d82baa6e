"""List what is registered, with the module each name came from."""

import argparse

HELP = "registered tasks, criterions, models, optimizers, schedules, tokenizers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("kind", nargs="?", help="only one kind, such as task or criterion")
    parser.add_argument("--user-dir", help="plug-in folder or file to load")


def run(args: argparse.Namespace) -> int:
    """Print the registries."""
    from metaseq_lm import plugins
    from metaseq_lm.errors import UsageError
    from metaseq_lm.registry import ALL, nearest

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
                about = (entry.value.__doc__ or "").strip().split("\n")[0]
                print(f"  {name:<28}{about}  [{entry.origin}]")
    return 0
