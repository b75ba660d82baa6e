"""Print the lines of measure.py and corpus.py as tables in Markdown.

python tables.py measured.jsonl memory.jsonl measured_corpus.jsonl
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def update_cells(line: Line, first: Line) -> list[str]:
    """Return the cells of an update, compared with `first`, which has fewest processes."""
    low, high = line["spread"]
    rate = line["tokens_per_second"]
    share = rate / first["tokens_per_second"] / line["processes"] * first["processes"]
    return [
        str(line["processes"]),
        line["parallel"],
        *(f"{line[key] / 1e6:.1f}" for key in ("held", "peak")),
        f"{line['cpu']:.3f}",
        f"{line['seconds']:.3f} ({low:.3f}-{high:.3f})",
        "-" if line["wait"] is None else f"{line['wait']:.3f}",
        f"{rate:,.0f}",
        f"{share:.0%}",
    ]


def link_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of a sum over the processes."""
    return [str(line["processes"]), f"{line['bytes']:,}", f"{1e3 * line['seconds']:.2f}"]


def numbers_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of a sum of a few numbers."""
    return [str(line["processes"]), *(f"{1e3 * line[way]:.2f}" for way in ("ring", "grid"))]


def host_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of what a processor takes for operations and collectives."""
    return [str(line["launches"]), *(f"{1e6 * line[key]:.1f}" for key in ("launch", "collective"))]


def preprocess_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of a binarised text."""
    text, tokens, peak = (line[key] / 1e6 for key in ("text_bytes", "tokens", "peak_bytes"))
    return [f"{text:.0f}", f"{tokens:.1f}", f"{line['seconds']:.0f}", f"{peak:.0f}"]


def kill_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of a run that was killed and resumed."""
    same = [
        "identical" if line[f"same_{part}"] else "not identical"
        for part in ("batches", "losses", "weights")
    ]
    numbers = [str(line[key]) for key in ("processes", "updates", "killed_at")]
    return [*numbers, *same, f"{line['loss_difference']:.1e}"]


def batch_cells(line: Line, _: Line) -> list[str]:
    """Return the cells of the first batch of one process."""
    seconds = [f"{line[key]:.3f}" for key in ("seconds", "cpu_seconds", "small_cpu_seconds")]
    sizes = [f"{line[f'further_{key}_bytes'] / 1e6:.1f}" for key in ("own", "peak")]
    where = f"{line['rank'] + 1} of {line['processes']}"
    return [line["break_mode"], where, *seconds, *sizes]


# Of each kind of line the titles and what makes the cells.
KINDS: dict[str, tuple[list[str], Callable[[Line, Line], list[str]]]] = {
    "update": (
        [
            "processes",
            "placement",
            "held MB",
            "peak MB",
            "CPU seconds",
            "seconds an update",
            "waiting",
            "tokens/s",
            "of as many single ones",
        ],
        update_cells,
    ),
    "link": (["processes", "bytes", "milliseconds"], link_cells),
    "numbers": (["processes", "ms around all", "ms along the axes"], numbers_cells),
    "host": (["operations", "µs each", "µs a collective"], host_cells),
    "preprocess": (["MB of text", "M tokens", "seconds", "peak MB"], preprocess_cells),
    "kill": (
        [
            "processes",
            "updates",
            "killed at",
            "batches",
            "losses",
            "weights",
            "losses beside the first",
        ],
        kill_cells,
    ),
    "first batch": (
        [
            "`task.sample_break_mode`",
            "process",
            "seconds",
            "CPU seconds",
            "of them for 0.1 M tokens",
            "own MB",
            "with pages of files, MB",
        ],
        batch_cells,
    ),
}


def main(paths: list[str]) -> None:
    """Print a table for each kind of line in each file."""
    for path in paths:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        for kind, (titles, cells) in KINDS.items():
            found = [line for line in lines if line["kind"] == kind]
            if found:
                print(f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", sep="\n")
                for line in found:
                    print(f"| {' | '.join(cells(line, found[0]))} |")
                print()


if __name__ == "__main__":
    main(sys.argv[1:])
