"""Which objectives of a league separate from each other, on which task?

python examples/league/separate.py objectives 2.5e11    # of runs that ship: also laptop, epochs
python examples/league/separate.py L 2.5e11             # of a league

All pairs of rows of a budget are tested as a league tests a row beside its baseline, corrected for
all pairs of a metric. That is beyond any plan, which compares rows with the baseline only.
"""

import sys
from itertools import combinations

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import read_league
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.league.verdict import UNDECIDED, DecisionRule, decide_all
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text, summarise
from metaseq_lm.reporting.settings import Row, metric_of
from metaseq_lm.reporting.table import Cell, Table

SMALLEST = 1e-9  # every difference counts: a pair is better, worse, or undecided
METRICS = ("probes", "depth.accuracy", "head_number.accuracy", "state.accuracy")
METRICS += ("pairs.brackets.accuracy", "pairs.agreement_plain.accuracy", "pairs.copy.accuracy")


def table_of(rows: list[Row], metric: str) -> Table:
    """Return the rows, the best first, each with those that it is shown to be better than."""
    scores = {row.objective: row.scores(metric) for row in rows if row.scores(metric)}
    names = sorted(scores, key=lambda name: -sum(scores[name]) / len(scores[name]))
    pairs = list(combinations(names, 2))
    decisions = decide_all([(scores[a], scores[b]) for a, b in pairs], DecisionRule(SMALLEST))
    below: dict[str, list[str]] = {name: [] for name in names}
    for (first, second), decision in zip(pairs, decisions):
        if decision.verdict != UNDECIDED:
            below[first].append(second)
    named = metric_of(metric, [run for row in rows for run in row.runs])
    cells = []
    for i, name in enumerate(names):
        summary, later = summarise(scores[name]), names[i + 1 :]
        assert summary is not None
        missing = [other for other in later if other not in below[name]]
        text = "all below" if later and not missing else ", ".join(below[name])
        if missing and len(missing) < len(below[name]):
            text = f"all below but {', '.join(missing)}"
        cells.append([Cell(x, number=False) for x in (name, summary.text(named), text)])
    return Table(metric, ["objective", "mean ± sd", "better than"], cells, [])


def main() -> None:
    if len(sys.argv) != 3:
        raise UsageError("give a league and a budget: separate.py objectives 2.5e11")
    league = read_league(named_plan(sys.argv[1]))
    rows = [row for row in league.rows() if row.budget == float(sys.argv[2])]
    if not rows:
        raise UsageError(f"{league.contents.title} has no runs at {sys.argv[2]} FLOPs")
    show(f"{league.contents.title}, at {flops_text(rows[0].budget)} FLOPs\n")
    for metric in METRICS:
        if any(row.scores(metric) for row in rows):
            show(to_text(table_of(rows, metric)))


if __name__ == "__main__":
    run_script(main)
