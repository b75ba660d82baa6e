"""FLOPs that one recipe of a league needs for the losses of another, with intervals.

python examples/modern/efficiency.py PLAN.yaml       # of the runs archived beside the plan

The losses of the baseline at each budget are looked up on the ladder of every other objective,
between whose budgets the mean loss is a line over log FLOPs. Intervals, 95 %, are of a bootstrap
that draws the seeds of every budget anew.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import archive_beside, read_plan
from metaseq_lm.league.standings import Context
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.table import Cell, Table

DRAWS = 10_000
Scores = Mapping[float, np.ndarray]  # of each budget, by seed


def scores_of(context: Context, objective: str) -> Scores:
    """Return the primary metric of each budget of an objective, the least budget first."""
    rows = sorted(
        (row for row in context.rows if row.objective == objective), key=lambda row: row.budget
    )
    return {row.budget: np.array(row.scores(context.primary)) for row in rows if row.scored}


def means(scores: Scores, draw: np.random.Generator | None = None) -> np.ndarray:
    """Return the mean of each budget, of seeds drawn anew if there is a generator."""
    drawn = scores.values()
    if draw is not None:
        drawn = [draw.choice(values, len(values)) for values in drawn]
    return np.array([values.mean() for values in drawn])


def flops_for(loss: float, budgets: np.ndarray, losses: np.ndarray) -> float:
    """Return the FLOPs at which a ladder reaches a loss; nan where it never does.

    Of a loss that is reached at the first budget already, that budget: a bound.
    """
    reached = np.nonzero(losses <= loss)[0]
    if not len(reached):
        return float("nan")
    after = reached[0]
    if after == 0:
        return float(budgets[0])
    above, below = losses[after - 1], losses[after]
    share = (above - loss) / (above - below)
    low, high = np.log(budgets[after - 1 : after + 1])
    return float(np.exp(low + share * (high - low)))


def ratios(base: Scores, other: Scores, rung: int) -> tuple[float, float, float]:
    """Return FLOPs of the baseline over those of the other recipe at equal loss, and its interval.

    The interval is nan where more than 2.5 % of the draws are not on the ladder.
    """
    ladder, budget = np.array(list(other)), list(base)[rung]
    value = budget / flops_for(means(base)[rung], ladder, means(other))
    draw = np.random.default_rng(0)
    drawn = np.empty(DRAWS)
    for number in range(DRAWS):
        loss = means(base, draw)[rung]
        drawn[number] = budget / flops_for(loss, ladder, means(other, draw))
    if np.isnan(drawn).mean() > 0.025:
        return value, float("nan"), float("nan")
    return value, *np.nanquantile(drawn, [0.025, 0.975])


def table_rows(context: Context) -> Iterator[list[str]]:
    """Yield a row for each budget of the baseline and each other objective."""
    base = scores_of(context, context.baseline)
    names = dict.fromkeys(row.objective for row in context.rows)
    for rung, budget in enumerate(base):
        loss = base[budget]
        for name in names:
            if name == context.baseline:
                continue
            other = scores_of(context, name)
            value, low, high = ratios(base, other, rung)
            # The first budget is enough, and less might be.
            bound = "at least " if means(other)[0] <= loss.mean() else ""
            here = other.get(budget)
            yield [
                flops_text(budget),
                f"{loss.mean():.3f} ± {loss.std(ddof=1):.3f}",
                name,
                "-" if here is None else f"{here.mean():.3f}",
                "not on its ladder" if np.isnan(value) else f"{bound}{value:.2f}",
                "" if bound or np.isnan(low) else f"{low:.2f} to {high:.2f}",
            ]


def main() -> None:
    if len(sys.argv) != 2:
        raise UsageError("give a plan with an archive beside it: efficiency.py PLAN.yaml")
    plan = Path(sys.argv[1])
    contents, archive = Contents(*read_plan(plan)), archive_beside(plan)
    if archive is None:
        raise MetaseqError(f"{plan}: there is no archive of its runs beside it")
    context = read_archived(replace(contents, archive=str(archive))).context()
    head = ["FLOPs", f"{context.primary} of {context.baseline}", "recipe", "its loss there"]
    head += ["fewer FLOPs for that loss", "95 %"]
    cells = [[Cell(text, number=False) for text in row] for row in table_rows(context)]
    show(to_text(Table(f"{contents.title}: FLOPs at equal loss", head, cells, [])))


if __name__ == "__main__":
    run_script(main)
