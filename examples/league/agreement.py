"""Do two leagues, or two budgets of one, order their objectives alike? Kendall's tau.

python examples/league/agreement.py laptop 1e12 examples/league/english.yaml 4e12
python examples/league/agreement.py L 1e12 OTHER 4e12    # leagues
python examples/league/agreement.py laptop               # each smaller budget and the largest one

For the primary metric of the first plan, and each kind of labels that it is a mean of, beside the
primary metric of the second: tau-b of the means of the objectives that both have. The 90 % interval
is over draws, with replacement, of the objectives and of the seeds of each. An order of one league
stands for that of the other where the interval lies above 0.3.

The budgets of one league have the same objectives: there the interval over seeds alone says whether
these are in the same order, and that over objectives, too, whether others would be. Decision
accuracy counts only pairs that differ at the largest budget.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import kendalltau

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.entries import Standings
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.league.rungs import decision_accuracies, ladder_of, objectives_of
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.settings import Row
from metaseq_lm.reporting.table import Cell, Table

DRAWS = 1000
FEWEST = 4  # objectives of an order
SHOWN = 0.3  # above which an order stands for another


def tau(scores: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return tau-b of the means of two lists of scores of the same objectives."""
    means = ([values.mean() for values in side] for side in (scores, others))
    return float(kendalltau(*means).statistic)


def interval(
    scores: Sequence[np.ndarray], others: Sequence[np.ndarray], of_seeds: bool = False
) -> np.ndarray:
    """Return the 90 % interval of tau over draws of the objectives and of their seeds.

    With `of_seeds` the objectives are those that they are.
    """
    rng, everything = np.random.default_rng(0), np.arange(len(scores))
    draws = []
    for _ in range(DRAWS):
        chosen = everything if of_seeds else rng.choice(everything, len(scores))
        # An objective that is drawn twice has the same seeds twice: a tie in both.
        drawn = ([rng.choice(values, len(values)) for values in side] for side in (scores, others))
        draws.append(tau(*([side[i] for i in chosen] for side in drawn)))
    # A draw of one objective alone has no order.
    limits: np.ndarray = np.nanquantile(draws, [0.05, 0.95])
    return limits


def line_of(
    metric: str, rows: Mapping[str, Row], others: Mapping[str, Row], other: str
) -> list[str]:
    """Return the cells of a metric: objectives of both, tau, its interval, and what it says."""
    names = [
        name
        for name in rows
        if name in others and rows[name].scores(metric) and others[name].scores(other)
    ]
    if len(names) < FEWEST:
        return [metric, str(len(names)), "-", "-", f"fewer than {FEWEST} objectives"]
    sides = (
        [np.array(rows[name].scores(metric)) for name in names],
        [np.array(others[name].scores(other)) for name in names],
    )
    low, high = interval(*sides)
    said = "stands for the other" if low > SHOWN else f"not shown above {SHOWN}"
    return [metric, str(len(names)), f"{tau(*sides):.2f}", f"{low:.2f} to {high:.2f}", said]


def budgets_table(standings: Standings) -> Table:
    """Return tau of each smaller budget and the largest one, over the tested rows of both."""
    *smaller, top = standings.budgets
    ladders = [ladder_of(standings, name) for name in objectives_of(standings)]
    accuracies, rows = decision_accuracies(standings), []
    for budget in smaller:
        both = [x.at([budget, top]).scores for x in ladders if {budget, top} <= {*x.budgets}]
        row = [flops_text(budget), str(len(both)), *"---"]
        if len(both) >= FEWEST:
            sides = [first for first, _ in both], [last for _, last in both]
            ends = (interval(*sides, of_seeds=True), interval(*sides))
            row[2:] = [f"{tau(*sides):.2f}", *(f"{low:.2f} to {high:.2f}" for low, high in ends)]
        same, count = accuracies.get(budget, (0, 0))
        rows.append([*map(Cell, row), Cell(f"{same} of {count}" if count else "-")])
    title = f"{standings.title}: the order of objectives by {standings.primary.name}, beside that "
    head = ["FLOPs", "objectives", "tau", "90 %, seeds", "90 %, objectives", "decision accuracy"]
    return Table(f"{title}at {flops_text(top)} FLOPs", head, rows, [])


def main() -> None:
    if len(sys.argv) == 2:
        show(to_text(budgets_table(read_league(named_plan(sys.argv[1])).standings())))
        return
    if len(sys.argv) != 5:
        raise UsageError(
            "give a league or plan, or two with FLOPs each: balanced 1e12 english.yaml 4e12"
        )
    league, other = (read_league(named_plan(word)) for word in sys.argv[1::2])
    rows, others = league.rows_at(sys.argv[2]), other.rows_at(sys.argv[4])
    comparison = league.plan.comparison
    metrics = dict.fromkeys([comparison.metric, *comparison.kinds])
    metric = other.plan.comparison.metric
    lines = [line_of(name, rows, others, metric) for name in metrics]
    title = f"{league.contents.title}, beside {metric} of {other.contents.title}"
    head = ["metric", "objectives", "tau", "90 % interval", "the order"]
    body = [[Cell(text, number=0 < i < 4) for i, text in enumerate(line)] for line in lines]
    show(to_text(Table(title, head, body, [])))


if __name__ == "__main__":
    run_script(main)
