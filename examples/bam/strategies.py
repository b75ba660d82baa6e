"""Print table 3.1: scores of each strategy on each set, median and range over seeds, and averages.

usage: python strategies.py RUN_OR_FOLDER_OR_ARCHIVE ...

Runs of one set and of several stand in one table: a run has a score for each of its sets. A set
ranks strategies only if some median is above the most frequent class; the others are neither
averaged nor tested. The average is over the sets of a seed that all of the paper's strategies here
have, of those seeds that have all of them. p is of the paper's question, whether a strategy that
has teachers is better than Single and than Multi: the larger p of two bootstrap tests of means,
after Holm-Bonferroni for all cells that are tested. Below stand the differences that the paper's
claims are of, with those that a permutation test of these seeds could show.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from metaseq_lm.core.errors import MetaseqError, run_script
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.numbers import p_text, summarise
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.significance import DETECTABLE
from metaseq_lm.reporting.stats import FEWEST, Test, holm, pooled_sd

SCORE = re.compile(r"valid\.(.+)_score")
BASELINES = ["Single", "Multi"]
TAUGHT = ["Single->Single", "Multi->Multi", "Single->Multi"]
# The table's order in the paper; what else there is follows.
ORDER = [*BASELINES, *TAUGHT]
SETS = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]

# Scores of the class that is most frequent in training, as baseline.txt has them, on the rows that
# run.sh scores.
MOST_FREQUENT = {
    "CoLA": 0.0,
    "SST-2": 444 / 872,
    "MRPC": 279 / 408,
    "STS-B": 0.0,
    "QQP": 0.623,
    "MNLI": 0.347,
    "QNLI": 0.504,
    "RTE": 146 / 277,
}

# What the paper says is better than what: on average, and on RTE (table 3.5).
AVERAGE = [
    ("Multi", "Single"),
    ("Single->Single", "Single"),
    ("Multi->Multi", "Multi"),
    ("Single->Multi", "Single"),
    ("Single->Multi", "Multi"),
    ("Single->Multi", "without annealing (lambda 0)"),
    ("Single->Multi", "without annealing (lambda 0.5)"),
    ("Single->Multi", "without layer-wise rates"),
    ("Single->Multi", "without task sampling"),
]
RTE = [
    ("RTE with MNLI", "Single->Single"),
    ("RTE with QQP, CoLA, SST-2", "Single->Single"),
    ("RTE with all", "Single->Single"),
    ("Multi", "Single"),
]
# strategy -> set -> seed -> score
Scores = Mapping[str, Mapping[str, Mapping[int, float]]]
# strategy -> column of the table -> scores
Cells = Mapping[str, Mapping[str, Sequence[float]]]


def collect(runs: Iterable[Run]) -> Scores:
    """Return the scores of the finished runs; raises MetaseqError for a duplicate score."""
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for name, value in run.metrics.items():
            match = SCORE.fullmatch(name)
            if run.status != "finished" or not match or run.seed is None:
                continue
            seeds = scores.setdefault(run.values["label"], {}).setdefault(match[1], {})
            if run.seed in seeds:
                raise MetaseqError(
                    f"{run.values['label']} has {match[1]} twice for seed {run.seed} (again in "
                    f"{run.name}); name fewer folders"
                )
            seeds[run.seed] = value
    return scores


def sets_of(scores: Scores) -> list[str]:
    """Return the sets in the table's order."""
    names = {name for row in scores.values() for name in row}
    return [name for name in SETS if name in names] + sorted(names - set(SETS))


def unranked(scores: Scores) -> list[str]:
    """Return the sets on which no median is above the most frequent class."""
    return [
        name
        for name in sets_of(scores)
        if name in MOST_FREQUENT
        and all(
            np.median([*row[name].values()]) <= MOST_FREQUENT[name]
            for row in scores.values()
            if name in row
        )
    ]


def cells_of(scores: Scores) -> Cells:
    """Return the scores of each cell, the columns in the table's order, the average last."""
    sets, left_out = sets_of(scores), unranked(scores)
    known = [label for label in ORDER if label in scores]
    # Teachers of further sets, and students of few, stand in the table too.
    shared = [
        name
        for name in sets
        if name not in left_out and all(name in scores[label] for label in known)
    ]
    cells = {}
    for label in [*known, *sorted(set(scores) - set(known))]:
        columns = {name: scores[label].get(name, {}) for name in sets}
        averaged = [columns[name] for name in shared]
        whole = set.intersection(*(set(column) for column in averaged)) if shared else set()
        cells[label] = {name: list(column.values()) for name, column in columns.items()}
        cells[label][f"average of {', '.join(shared)}"] = [
            float(np.mean([column[seed] for column in averaged])) for seed in sorted(whole)
        ]
    return cells


def tested(cells: Cells, left_out: Sequence[str] = ()) -> dict[tuple[str, str], float]:
    """Return p after Holm, by strategy and column, where it and both baselines have seeds."""
    found = {}
    for label in TAUGHT:
        for column, values in cells.get(label, {}).items():
            if column in left_out:
                continue
            others = [cells.get(baseline, {}).get(column, []) for baseline in BASELINES]
            if min(len(values), *map(len, others)) >= FEWEST:
                p = [Test("bootstrap", sides=1).p(*map(np.array, (values, o))) for o in others]
                found[label, column] = max(p)
    return dict(zip(found, holm(list(found.values()))))


def text(values: Sequence[float], p: float | None) -> str:
    """Return median [least, largest] (number of seeds) in per cent, and p."""
    found = summarise([100 * value for value in values], "range")
    if not found:
        return "-"
    shown = f"{found.centre:.1f} [{found.low:.1f}, {found.high:.1f}] ({found.n})"
    return shown if p is None else f"{shown} p {p_text(p)}"


def table(cells: Cells, left_out: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table, with notes on p and on what is `left_out`."""
    columns = list(next(iter(cells.values()), {}))
    p = tested(cells, left_out)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    least = [
        f"{100 * MOST_FREQUENT[name]:.1f}" if name in MOST_FREQUENT else "" for name in columns
    ]
    lines.append(f"| most frequent class | {' | '.join(least)} |")
    for label, row in cells.items():
        written = [text(values, p.get((label, column))) for column, values in row.items()]
        lines.append(f"| {label} | {' | '.join(written)} |")
    lines += [
        "",
        f"p: better than {' and '.join(BASELINES)}, bootstrap of means (lenient for few seeds),",
    ]
    lines.append(f"corrected by Holm-Bonferroni for the {len(p)} cells that were tested.")
    if left_out:
        lines.append(
            f"{', '.join(left_out)}: no median is above the most frequent class; "
            "not averaged, not tested."
        )
    return lines


def claims(cells: Cells, left_out: Sequence[str] = ()) -> list[str]:
    """Return a Markdown table of differences of means in points, and of detectable ones."""
    averages = {
        label: next(name for name in row if name.startswith("average"))
        for label, row in cells.items()
    }
    pairs = [(one, other, averages.get(one, "")) for one, other in AVERAGE]
    pairs += [(one, other, "RTE") for one, other in RTE if "RTE" not in left_out]
    lines = [f"| better | than | on | difference | {DETECTABLE} |", "|---" * 5 + "|"]
    for one, other, column in pairs:
        x, y = (np.array(cells.get(label, {}).get(column, [])) for label in (one, other))
        if min(len(x), len(y)) < FEWEST:
            continue
        least = Test("permutation", sides=1).detectable((len(x), len(y)), pooled_sd(x, y) or 0.0)
        reach = "never" if least is None else f"{100 * least:.1f}"
        difference = 100 * float(np.mean(x) - np.mean(y))
        lines.append(f"| {one} | {other} | {column.split()[0]} | {difference:+.1f} | {reach} |")
    return lines


def main(paths: Sequence[str]) -> None:
    """Print the tables, and name the runs that do not count."""
    runs = find_runs(paths)
    scores = collect(runs)
    cells, left_out = cells_of(scores), unranked(scores)
    print("score (%) on the validation split: median [least, largest] (number of seeds)\n")
    print(*table(cells, left_out), sep="\n")
    print(
        "\ndifferences of means, in points, and the true ones for which p of a permutation test "
        "would fall below 0.05 with a probability of 0.8\n"
    )
    print(*claims(cells, left_out), sep="\n")
    for run in runs:
        if run.why_unended():
            print(f"\nleft out: {run.name}, {run.why_unended()}")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
