"""Check the machine and data folders before you spend compute on them.

Each line is ok, warning or error. The exit code is 1 if there is an error, 2 if a folder is not
there, else 0. With --runs it also says how many times runs see the words of train.
"""

import argparse
import contextlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from metaseq_lm import plugins
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.output import count_text, show

HELP = "check the machine, a corpus, its tokenizer, and sets of every kind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "data", nargs="*", type=Path, metavar="DATA", help="folder made by 'metaseq-lm preprocess'"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare every byte with the manifest's checksums"
    )
    parser.add_argument(
        "--environment",
        action="store_true",
        help="versions, cores, memory, GPUs, Slurm, disks and extras, and what each gives",
    )
    parser.add_argument(
        "--shifted-valid",
        action="store_true",
        help="other splits of a corpus come from another domain than train on purpose",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN",
        help=(
            "runs trained on DATA, folders of runs or archives: how many times each sees the "
            "words of train (an unfinished run by its limits)"
        ),
    )
    parser.add_argument("--user-dir", metavar="DIR", help="plug-in with checks or tokenizers")


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit code."""
    if args.environment == bool(args.data):
        raise UsageError("give DATA folders, or --environment alone")
    if args.environment:
        from metaseq_lm.data.doctor.environment import environment

        parts = list(environment())
        rows = [part._asdict() for part in parts]
        show_result("environment", {"parts": rows}, "\n".join(map(str, parts)))
        return 0
    # Imported late, so that --help does not load the tokenizer libraries.
    from metaseq_lm.data.doctor.findings import machine
    from metaseq_lm.reporting.epochs import epochs
    from metaseq_lm.reporting.folders import find_runs

    plugins.load_installed(args.user_dir)
    runs = find_runs(args.runs)
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
    counts = {level: levels.count(level) for level in ("error", "warning")}
    texts = (count_text(count, level) for level, count in counts.items())
    show_result("doctor", rows, ", ".join(texts))
    if not all(folder.is_dir() for folder in args.data):
        return UsageError.exit_code
    return MetaseqError.exit_code if counts["error"] else 0
