"""Look over the machine and a data folder before compute is spent on them.

Each line is ok, warning or error. The exit code is 1 if there is an error, else 0.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELP = "check the machine, a corpus, its tokenizer, and sets of every kind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("data", metavar="DATA", help="folder made by 'metaseq-lm preprocess'")
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte with the manifest's checksums"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings and return 1 if one of them is an error."""
    levels = []
    for finding in findings(Path(args.data), args.verify):
        print(f"{finding.level:<8} {finding.text}", flush=True)
        levels.append(finding.level)
    errors, warnings = levels.count("error"), levels.count("warning")
    print(f"{errors} errors, {warnings} warnings")
    return 1 if errors else 0


def findings(folder: Path, full: bool) -> Iterator[Any]:
    """Yield the findings on the machine and on a data folder."""
    # Late, so that --help does not load the tokenizer libraries.
    from metaseq_lm.data.doctor.findings import machine

    yield from machine(folder)
    try:
        from metaseq_lm.data.doctor.examine import examine
    except ImportError:
        return  # some readers need torch; `machine` has said what to install
    yield from examine(folder, full)
