"""Print the accuracy after each epoch of fine-tuning, mean and deviation over seeds (figure 2).

usage: python epochs.py RUN_OR_FOLDER ...

The runs are those of task sentence_prediction with task.validate_epochs. The picture of the same
numbers: metaseq-lm report ... --curve valid.accuracy --columns task.labelled --out DIR
"""

import sys
from collections.abc import Sequence

from metaseq_lm.core.errors import run_script
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.reporting.numbers import Metric, summarise
from metaseq_lm.reporting.runs import Run, natural

METRIC = "valid.accuracy"


def by_epoch(run: Run) -> dict[float, float]:
    """Return the accuracy of a run after each epoch that it was validated at."""
    updates = run.values["trainer.validate_interval_updates"] / run.values["task.validate_epochs"]
    return {update / updates: value for update, value in zip(*run.series(METRIC))}


def table(runs: Sequence[Run]) -> list[str]:
    """Return the lines of a table in Markdown, a row for each label, a column for each epoch."""
    curves: dict[str, list[dict[float, float]]] = {}
    for run in runs:
        curves.setdefault(run.values["label"], []).append(by_epoch(run))
    epochs = sorted({epoch for rows in curves.values() for row in rows for epoch in row})
    metric = Metric.of(
        METRIC, [v for rows in curves.values() for row in rows for v in row.values()]
    )
    lines = [
        "| | seeds | " + " | ".join(f"epoch {epoch:g}" for epoch in epochs) + " |",
        "|---" * (len(epochs) + 2) + "|",
    ]
    for label in sorted(curves, key=natural):
        cells = []
        for epoch in epochs:
            found = summarise([row[epoch] for row in curves[label] if epoch in row])
            cells.append(found.text(metric) if found else "-")
        lines.append(f"| {label} | {len(curves[label])} | " + " | ".join(cells) + " |")
    return lines


def main(paths: Sequence[str]) -> None:
    """Print one table for each labelled set, and name the runs that do not count."""
    runs = [r for r in find_runs(paths) if r.values.get("task._name") == "sentence_prediction"]
    counted = [r for r in runs if r.status == "finished" and r.values.get("task.validate_epochs")]
    for name in sorted({run.values["task.labelled"] for run in counted}):
        chosen = [run for run in counted if run.values["task.labelled"] == name]
        print(f"\n{name}, accuracy on the validation split (%)\n", *table(chosen), sep="\n")
    for run in runs:
        if run not in counted:
            print(f"\nleft out: {run.name}, {run.why_unended() or 'not validated by epochs'}")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
