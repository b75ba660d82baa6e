"""Look over the machine and a data folder before compute is spent on them.

Each line is ok, warning or error. The exit code is 1 if there is an error, else 0.
"""

import argparse
import itertools
from pathlib import Path

HELP = "check the machine, a corpus, its tokenizer, and sets of every kind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("data", metavar="DATA", help="folder made by 'metaseq-lm preprocess'")
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte with the manifest's checksums"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings and return 1 if one of them is an error."""
    # Late, so that --help does not load the tokenizer libraries.
    from metaseq_lm.data.doctor.corpus import ERROR, WARNING, machine
    from metaseq_lm.data.doctor.sets import examine

    folder = Path(args.data)
    levels = []
    for finding in itertools.chain(machine(folder), examine(folder, args.verify)):
        print(f"{finding.level:<8} {finding.text}", flush=True)
        levels.append(finding.level)
    errors, warnings = levels.count(ERROR), levels.count(WARNING)
    print(f"{errors} errors, {warnings} warnings")
    return 1 if errors else 0
