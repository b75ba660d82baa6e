"""Look over the machine and data folders before compute is spent on them.

Each line is ok, warning or error. The exit code is 1 if there is an error, 2 if a folder is not
there, else 0. With --runs it says how many times runs see the words of train, too.
"""

import argparse
import contextlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import to_json
from metaseq_lm.core.output import show

HELP = "check the machine, a corpus, its tokenizer, and sets of every kind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "data", nargs="+", type=Path, metavar="DATA", help="folder made by 'metaseq-lm preprocess'"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list of levels and texts"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte with the manifest's checksums"
    )
    parser.add_argument(
        "--shifted-valid",
        action="store_true",
        help="other splits of a corpus are meant to be of another domain than train",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN",
        help="runs on DATA, folders of runs or archives: how many times each sees the words of "
        "train, by its limits if it has not finished",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit code."""
    # Imported late, so that --help does not load the tokenizer libraries.
    from metaseq_lm.data.doctor.findings import machine
    from metaseq_lm.reporting.epochs import epochs
    from metaseq_lm.reporting.folders import read_runs

    runs = read_runs(args.runs)
    findings: Iterable[Any] = machine(args.data)
    # Some readers need torch; `machine` reports what to install.
    with contextlib.suppress(ImportError):
        from metaseq_lm.data.doctor.examine import examine

        findings = chain(
            findings, *(examine(folder, args.verify, args.shifted_valid) for folder in args.data)
        )
    rows = []
    for finding in chain(findings, epochs(args.data, runs)):
        rows.append({"level": finding.level, "text": finding.text})
        if not args.json:
            show(f"{finding.level:<8} {finding.text}")
    levels = [row["level"] for row in rows]
    errors, warnings = levels.count("error"), levels.count("warning")
    show(to_json(rows, 1) if args.json else f"{errors} errors, {warnings} warnings")
    if not all(folder.is_dir() for folder in args.data):
        return UsageError.exit_code
    return MetaseqError.exit_code if errors else 0
