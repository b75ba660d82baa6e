"""What repeated documents change: epochs.yaml beside the plan `objectives`, row by row.

python examples/league/repeated.py R      # the folder of epochs.yaml, beside the shipped runs
python examples/league/repeated.py L R    # folders of both leagues: new documents, repeated

The difference of each objective is tested as a league tests rows, corrected for all objectives.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import LeagueRuns, read_archived, read_league_runs
from metaseq_lm.league.folder import Contents, LeagueFolder
from metaseq_lm.league.plan import OBJECTIVES, read_plan
from metaseq_lm.league.standings import Row
from metaseq_lm.league.verdict import Rule, decide_all
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.table import Cell, Table

PARTS = ("depth.accuracy", "head_number.accuracy", "state.accuracy")
LOSS = "valid.loss"


def mean_of(row: Row, metric: str) -> str:
    """Return mean ± sd of a metric of a row."""
    values = row.scores(metric)
    summary = summarise(values)
    return summary.text(Metric.of(metric, values)) if summary else "-"


def rows_of(new: LeagueRuns, repeated: LeagueRuns) -> Iterator[list[str]]:
    """Yield a row of the table for each objective that both leagues have scored."""
    comparison = new.contents.plan.comparison
    metric = comparison.metric
    before = {(row.objective, row.budget): row for row in new.rows()}
    pairs = [
        (before[row.objective, row.budget], row)
        for row in repeated.rows()
        if row.scores(metric) and (row.objective, row.budget) in before
    ]
    rule = Rule(comparison.smallest_effect, comparison.level)
    sides = [(again.scores(metric), once.scores(metric)) for once, again in pairs]
    named = Metric.of(metric, [value for pair in sides for side in pair for value in side])
    for (once, again), decision in zip(pairs, decide_all(sides, rule)):
        low, high = decision.interval or (float("nan"), float("nan"))
        yield [
            once.objective,
            mean_of(once, metric),
            mean_of(again, metric),
            f"{named.text(decision.difference, 1)} ({named.text(low, 1)} to {named.text(high, 1)})",
            p_text(decision.corrected),
            decision.text,
            ", ".join(named.text(mean(again, part) - mean(once, part), 0) for part in PARTS),
            f"{mean(once, LOSS):.2f}, {mean(again, LOSS):.2f}",
        ]


def mean(row: Row, metric: str) -> float:
    """Return the mean of a metric over the seeds of a row."""
    values = row.scores(metric)
    return sum(values) / len(values) if values else float("nan")


def epochs_of(league: LeagueRuns) -> str:
    """Return how often the runs of a league see their documents."""
    words = league.corpus.words if league.corpus else None
    counts = [run.costs["words"] for row in league.rows() for run in row.scored]
    times = [count / words for count in counts if count and words]
    return f"{min(times):.1f} to {max(times):.1f} times" if times else "an unknown number of times"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise UsageError("give the folders: python examples/league/repeated.py [L] R")
    folders = [LeagueFolder(Path(argument)) for argument in sys.argv[1:]]
    leagues = [read_league_runs(folder, folder.read()) for folder in folders]
    if len(leagues) == 1:
        leagues.insert(0, read_archived(Contents(*read_plan(OBJECTIVES))))
    new, repeated = leagues
    cells = [[Cell(text, number=False) for text in row] for row in rows_of(new, repeated)]
    head = ["objective", "new", "repeated", "difference", "p (Holm)", "verdict"]
    head += ["of depth, head number, state", "loss: new, repeated"]
    budget = flops_text(repeated.contents.plan.ladder.budgets[0])
    title = f"{repeated.contents.title}: documents seen {epochs_of(repeated)}, at {budget} FLOPs"
    show(to_text(Table(title, head, cells, [])))


if __name__ == "__main__":
    run_script(main)
