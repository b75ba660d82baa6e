"""From which budget on does a metric tell trained from untrained models, and objectives apart?

python examples/league/controls.py examples/league/text_ladder.yaml    # of an archive beside it
python examples/league/controls.py L                                   # of a league

For each metric of the plan and each objective: untrained models, the runs of each budget, and
whether these are above (+) or below (-) the untrained ones by the screen of the gates. Then the
difference from the baseline, and the true one that as many seeds would show in 80 % of cases if it
were the only comparison; and the difference of the gains over untrained models, with p, since
objectives may be apart before any training. Last what needs no model: chance, the most frequent
class, counts.
"""

import sys
from collections.abc import Iterator

import numpy as np

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import LeagueRuns, read_league
from metaseq_lm.league.control_gates import references
from metaseq_lm.league.differences import compare
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.league.verdict import Gain, contrast
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.settings import Row, metric_of, seed_scores
from metaseq_lm.reporting.stats import DEFAULT_TEST, LEVEL, difference_of, pooled_sd
from metaseq_lm.reporting.table import Cell, Table

SIGNS = {1: " +", 0: "", -1: " -"}
FEWEST = 3  # seeds of each side, for a difference


def table_of(title: str, head: list[str], rows: list[list[str]]) -> str:
    """Return a table as text."""
    return to_text(Table(title, head, [[Cell(x, number=False) for x in row] for row in rows], []))


def text_of(scores: list[float], metric: Metric) -> str:
    """Return mean and sd of scores, "-" without any."""
    summary = summarise(scores)
    return summary.text(metric) if summary else "-"


def beside_untrained(league: LeagueRuns, rows: list[Row], metric: Metric) -> Iterator[list[str]]:
    """Yield for each objective the scores of untrained models and those of each budget."""
    for objective in league.plan.objectives:
        of_budgets = {row.budget: row for row in rows if row.objective == objective.name}
        if not of_budgets:
            continue
        untrained = seed_scores(next(iter(of_budgets.values())).untrained, metric.name)
        texts = [metric.name, objective.name, text_of(untrained, metric)]
        for budget in sorted({row.budget for row in rows}):
            scores = of_budgets[budget].scores(metric.name) if budget in of_budgets else []
            difference = compare(scores, untrained, metric.lower_is_better)
            texts.append(text_of(scores, metric) + SIGNS[difference.sign if difference else 0])
        yield texts


def beside_baseline(rows: list[Row], baseline: str, metric: Metric) -> Iterator[list[str]]:
    """Yield the difference of each row from the baseline, and the one that would be seen."""
    bases = {row.budget: row for row in rows if row.objective == baseline}
    for row in rows:
        base = bases.get(row.budget)
        if base is None or row is base:
            continue
        samples = [np.array(other.scores(metric.name)) for other in (row, base)]
        count = min(map(len, samples))
        if count < FEWEST:
            continue
        sd = pooled_sd(*samples)
        assert sd is not None  # there are degrees of freedom
        reach = DEFAULT_TEST.detectable((count, count), sd)
        seen = "never" if reach is None else metric.text(reach, 2)
        difference = metric.text(difference_of(*samples), 2)
        row_of_table = [metric.name, row.objective, flops_text(row.budget), str(count)]
        yield [*row_of_table, difference, seen, *beside_gain(row, base, metric)]


def beside_gain(row: Row, base: Row, metric: Metric) -> tuple[str, str]:
    """Return the difference of the gains over untrained models, and its p, uncorrected."""
    gains = []
    for side in (row, base):
        untrained = seed_scores(side.untrained, metric.name)
        if not untrained:
            return "-", "-"
        gains.append(Gain(side.scores(metric.name), untrained))
    between = contrast(gains[0].over(gains[1]), LEVEL)
    return metric.text(between.difference, 2), p_text(between.p)


def without_models(rows: list[Row], metrics: list[Metric]) -> tuple[list[str], list[list[str]]]:
    """Return the names of all references, and for each metric its values of them."""
    runs = [run for row in rows for run in row.runs]
    levels = {metric: references(runs, metric.name) for metric in metrics}
    names = list(dict.fromkeys(name for values in levels.values() for name in values))
    lines = []
    for metric, values in levels.items():
        texts = [metric.text(values[name], 2) if name in values else "-" for name in names]
        lines.append([metric.name, *texts])
    return names, lines


def main() -> None:
    if len(sys.argv) != 2:
        raise UsageError("give a plan with an archive, or a league: controls.py PLAN.yaml")
    league = read_league(named_plan(sys.argv[1]))
    rows = league.rows()
    if not rows:
        raise UsageError(f"{league.contents.title} has no runs")
    runs = [run for row in rows for run in row.runs]
    metrics = [metric_of(name, runs) for name in league.plan.metrics]
    budgets = map(flops_text, sorted({row.budget for row in rows}))
    head = ["metric", "objective", "untrained", *budgets]
    lines = [line for metric in metrics for line in beside_untrained(league, rows, metric)]
    show(table_of(f"{league.contents.title}: beside untrained models", head, lines))
    baseline = league.plan.comparison.baseline
    head = ["metric", "objective", "FLOPs", "seeds", "difference", "to be seen", "of gains", "p"]
    lines = [line for metric in metrics for line in beside_baseline(rows, baseline, metric)]
    show(table_of(f"beside {baseline}", head, lines))
    names, lines = without_models(rows, metrics)
    show(table_of("without any model", ["metric", *names], lines))


if __name__ == "__main__":
    run_script(main)
