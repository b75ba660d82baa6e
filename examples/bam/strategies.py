"""Print table 3.1: the score of each strategy on each set, median and range over seeds, and the average.

usage: python strategies.py RUN_OR_FOLDER_OR_ARCHIVE ...

Runs of one set and of several stand in one table: a run has a score for each of its sets. The average is over
the sets of a seed that all of the paper's strategies here have, of those seeds that have all of them.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from metaseq_lm.errors import MetaseqError
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.numbers import summarise
from metaseq_lm.reporting.runs import Run

SCORE = re.compile(r"valid\.(.+)_score")
# The table's order in the paper; what else there is follows.
ORDER = ["Single", "Multi", "Single->Single", "Multi->Multi", "Single->Multi"]
SETS = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]

# strategy -> set -> seed -> score
Scores = Mapping[str, Mapping[str, Mapping[int, float]]]


def collect(runs: Iterable[Run]) -> Scores:
    """Return the scores of the finished runs; raises MetaseqError for a score that there is twice."""
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


def text(values: Sequence[float]) -> str:
    """Return median [least, largest] (number of seeds) in per cent."""
    found = summarise([100 * value for value in values], "range")
    return f"{found.centre:.1f} [{found.low:.1f}, {found.high:.1f}] ({found.n})" if found else "-"


def table(scores: Scores) -> list[str]:
    """Return the lines of a table in Markdown."""
    found = {name for row in scores.values() for name in row}
    sets = [name for name in SETS if name in found] + sorted(found - set(SETS))
    known = [label for label in ORDER if label in scores]
    # Teachers of further sets, and students of few, stand in the table too.
    shared = [name for name in sets if all(name in scores[label] for label in known)]
    head = f"| | {' | '.join(sets)} | average of {', '.join(shared)} |"
    lines = [head, "|---" * (len(sets) + 2) + "|"]
    for label in [*known, *sorted(set(scores) - set(known))]:
        columns = [scores[label].get(name, {}) for name in sets]
        averaged = [scores[label].get(name, {}) for name in shared]
        whole = set.intersection(*(set(column) for column in averaged)) if shared else set()
        means = [sum(column[seed] for column in averaged) / len(shared) for seed in sorted(whole)]
        cells = [text(list(column.values())) for column in columns] + [text(means)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def main(paths: Sequence[str]) -> None:
    """Print the table, and name the runs that do not count."""
    runs = find_runs(paths)
    print("score (%) on the validation split: median [least, largest] (number of seeds)\n")
    print(*table(collect(runs)), sep="\n")
    for run in runs:
        if run.why_unended():
            print(f"\nleft out: {run.name}, {run.why_unended()}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MetaseqError as error:
        sys.exit(f"strategies.py: {error}")
