"""Which objectives of a league differ, of all pairs alike? In the primary metric, at one budget.

python examples/league/pairs.py laptop 1e12    # a plan that ships, or PLAN.yaml beside its archive
python examples/league/pairs.py L 1e12 causal masked_15 rtd    # a league, of these objectives

Differences of means over seeds with the 90 % interval of Welch, and p: the larger of a permutation
test and Welch's t test, both two-sided, alone and after Holm's correction for all pairs. Rows that
gates do not rank are among them, so that a difference may be one of failures.
"""

import sys
from itertools import combinations

import numpy as np

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.league.verdict import contrast
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text, p_text
from metaseq_lm.reporting.settings import metric_of
from metaseq_lm.reporting.stats import LEVEL, holm
from metaseq_lm.reporting.table import Cell, Table

FEWEST = 3  # seeds of each side


def main() -> None:
    if len(sys.argv) < 3:
        raise UsageError("give a plan with an archive, or a league, and FLOPs: laptop 1e12")
    league = read_league(named_plan(sys.argv[1]))
    by_objective, named = league.rows_at(sys.argv[2]), sys.argv[3:]
    if unknown := set(named) - by_objective.keys():
        raise UsageError(f"no run at {sys.argv[2]} FLOPs of {', '.join(sorted(unknown))}")
    rows = list(by_objective.values())
    budget = flops_text(rows[0].budget)
    metric = metric_of(league.plan.comparison.metric, [run for row in rows for run in row.runs])
    rows = [row for row in rows if not named or row.objective in named]
    scores = {row.objective: np.array(row.scores(metric.name)) for row in rows}
    scores = {name: values for name, values in scores.items() if len(values) >= FEWEST}
    sign = -1 if metric.lower_is_better else 1
    names = sorted(scores, key=lambda name: -sign * scores[name].mean())
    if len(names) < 2:
        raise UsageError(f"no two objectives have {FEWEST} scored seeds at {budget} FLOPs")
    pairs = list(combinations(names, 2))
    contrasts = [contrast((scores[a], scores[b]), LEVEL) for a, b in pairs]
    lines = []
    for (ahead, behind), item, corrected in zip(
        pairs, contrasts, holm([item.p for item in contrasts])
    ):
        assert item.interval is not None  # there are FEWEST seeds
        texts = [metric.text(value, 1) for value in (item.difference, *item.interval)]
        difference = f"{texts[0]} ({texts[1]} to {texts[2]})"
        lines.append([ahead, behind, difference, p_text(item.p), p_text(corrected)])
    head = ["objective", "ahead of", "by", "p", "p (Holm)"]
    title = f"{league.contents.title}: {metric.title} at {budget} FLOPs"
    body = [[Cell(text, number=i > 1) for i, text in enumerate(line)] for line in lines]
    show(to_text(Table(title, head, body, [])))


if __name__ == "__main__":
    run_script(main)
