"""Do two leagues order their objectives alike? Kendall's tau of what both have, with its interval.

python examples/league/agreement.py objectives 2.5e11 examples/league/english.yaml 4e12
python examples/league/agreement.py L 1e12 OTHER 4e12    # leagues

For the primary metric of the first plan, and each kind of labels that it is a mean of, beside the
primary metric of the second: tau-b of the means of the objectives that both have. The 90 % interval
is over draws, with replacement, of the objectives and of the seeds of each. An order of one league
stands for that of the other where the interval lies above 0.3.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import kendalltau

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.league.standings import Row
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.table import Cell, Table

DRAWS = 1000
FEWEST = 4  # objectives of an order
SHOWN = 0.3  # above which an order stands for another


def tau(scores: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return tau-b of the means of two lists of scores of the same objectives."""
    means = ([values.mean() for values in side] for side in (scores, others))
    return float(kendalltau(*means).statistic)


def interval(scores: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the 90 % interval of tau over draws of the objectives and of their seeds."""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        chosen = rng.integers(len(scores), size=len(scores))
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


def main() -> None:
    if len(sys.argv) != 5:
        raise UsageError(
            "give two leagues or plans, each with FLOPs: balanced 1e12 english.yaml 4e12"
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
