"""What training adds: scores of the laptop division over those of each untrained model.

python examples/league/gains.py [METRIC]      # the runs that ship with the package; default: probes

The untrained models of objectives differ, since what a token sees differs. So a score may be above
another before any training: the gains of two objectives are compared here, which the verdicts of
the league do not. Intervals are those of Welch, 95 %, over seeds, not corrected.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import LAPTOP, read_plan
from metaseq_lm.league.standings import Context, Row, seed_scores
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.table import Cell, Table

Samples = Sequence[tuple[float, Sequence[float]]]  # of each the factor, and the scores by seed


def combined(samples: Samples) -> tuple[float, float]:
    """Return a weighted sum of means and half its 95 % interval (Welch, Satterthwaite 1946)."""
    value = sum(factor * float(np.mean(scores)) for factor, scores in samples)
    parts = [factor**2 * float(np.var(x, ddof=1)) / len(x) for factor, x in samples]
    variance = math.fsum(parts)
    if not variance:
        return value, 0.0
    weights = [part**2 / (len(x) - 1) for part, (_, x) in zip(parts, samples)]
    freedom = variance**2 / math.fsum(weights)
    return value, float(stats.t.isf(0.025, freedom)) * math.sqrt(variance)


def interval_text(samples: Samples) -> str:
    """Return a difference in points with its interval, such as "+7.0 (+4.9 to +9.1)"."""
    value, half = combined(samples)
    ends = 100 * (value - half), 100 * (value + half)
    return f"{100 * value:+.1f} ({ends[0]:+.1f} to {ends[1]:+.1f})"


def gain_of(row: Row, metric: str) -> Samples:
    """Return the scores of a row and, with the factor -1, those of its untrained model."""
    return [(1.0, row.scores(metric)), (-1.0, seed_scores(row.untrained, metric))]


def table_rows(context: Context, metric: str) -> Iterator[list[str]]:
    """Yield a row for each row of the league, the budgets one after the other."""
    for row in sorted(context.rows, key=lambda row: row.budget):
        base, gain = context.baseline_of(row), gain_of(row, metric)
        if any(len(scores) < 2 for _, scores in gain):
            continue
        beside = ""
        if base is not None:
            others = [(-factor, scores) for factor, scores in gain_of(base, metric)]
            beside = interval_text([*gain, *others])
        updates = float(np.mean([run.results["updates"] for run in row.scored if run.results]))
        yield [
            flops_text(row.budget),
            row.objective,
            interval_text(gain),
            beside,
            f"{updates:.0f}",
            f"{row.budget / updates:.2e}".replace("e+0", "e"),
        ]


def main() -> None:
    metric = sys.argv[1] if len(sys.argv) > 1 else ""
    league = read_archived(Contents(*read_plan(LAPTOP)))
    context = league.context()
    metric = metric or context.primary
    if metric not in context.metrics:
        raise UsageError(f"no metric {metric} in the plan: {', '.join(context.metrics)}")
    head = ["FLOPs", "objective", f"gain of {metric} (points)"]
    head += [f"gain beside {context.baseline}", "updates", "FLOPs an update"]
    cells = [[Cell(text, number=False) for text in row] for row in table_rows(context, metric)]
    show(to_text(Table(f"{league.contents.title}: gains over untrained models", head, cells, [])))


if __name__ == "__main__":
    run_script(main)
