"""What repeated documents change: the plan `epochs` beside the plan `objectives`, row by row.

python examples/league/repeated.py        # of the runs that ship
python examples/league/repeated.py R      # the folder of a league, beside the shipped `objectives`
python examples/league/repeated.py L R    # folders of both leagues: new documents, repeated

The differences of a metric are tested as a league tests rows, corrected for all objectives.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from metaseq_lm.core.errors import UsageError, run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.assembly import LeagueRuns, read_league
from metaseq_lm.league.plan_files import EPOCHS, OBJECTIVES, named_plan
from metaseq_lm.league.verdict import UNDECIDED, Decision, DecisionRule, decide_all
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.numbers import flops_text, p_text, summarise
from metaseq_lm.reporting.settings import Row, metric_of
from metaseq_lm.reporting.stats import DEFAULT_TEST
from metaseq_lm.reporting.table import Cell, Table

LOSS = "valid.loss"


@dataclass(frozen=True)
class Pair:
    """A row on new documents, and the same objective at the same budget on repeated ones."""

    new: Row
    repeated: Row

    def scores(self, metric: str) -> tuple[list[float], list[float]]:
        """Return the scores of a metric by seed: repeated, new."""
        return self.repeated.scores(metric), self.new.scores(metric)

    def of_seeds(self, metric: str) -> tuple[list[float], list[float]]:
        """Return the same of the seeds that both have, in their order."""
        repeated, new = by_seed(self.repeated, metric), by_seed(self.new, metric)
        seeds = sorted(repeated.keys() & new.keys())
        return [repeated[seed] for seed in seeds], [new[seed] for seed in seeds]


def by_seed(row: Row, metric: str) -> dict[int, float]:
    """Return the score of each seed of a row."""
    return {run.seed or 0: run.metrics[metric] for run in row.scored if metric in run.metrics}


def pairs_of(new: LeagueRuns, repeated: LeagueRuns) -> list[Pair]:
    """Return the rows that both leagues have scored."""
    before = {(row.objective, row.budget): row for row in new.rows()}
    metric = repeated.plan.comparison.metric
    return [
        Pair(before[row.objective, row.budget], row)
        for row in repeated.rows()
        if row.scores(metric) and (row.objective, row.budget) in before
    ]


def decisions_of(pairs: Sequence[Pair], metric: str, rule: DecisionRule) -> list[Decision]:
    """Return the verdict on the change of a metric for each pair that has it."""
    return decide_all([pair.scores(metric) for pair in pairs], rule)


def primary_table(pairs: Sequence[Pair], league: LeagueRuns, title: str) -> Table:
    """Return the primary metric on new and on repeated documents, tested."""
    comparison = league.plan.comparison
    metric = league.metric(comparison.metric)
    rule = DecisionRule(comparison.smallest_effect, comparison.level, metric.lower_is_better)
    decisions = decisions_of(pairs, metric.name, rule)
    cells = []
    for pair, decision in zip(pairs, decisions):
        again, once = map(summarise, pair.scores(metric.name))
        assert once is not None and again is not None
        low, high = decision.interval or (float("nan"), float("nan"))
        difference = metric.text(decision.difference, 1)
        ups = [a > b for a, b in zip(*pair.of_seeds(metric.name))]
        texts = [pair.new.objective, once.text(metric), again.text(metric)]
        texts += [f"{difference} ({metric.text(low, 1)} to {metric.text(high, 1)})"]
        texts += [f"{sum(ups)} of {len(ups)}", *map(p_text, (decision.p, decision.corrected))]
        cells.append([Cell(text, number=False) for text in (*texts, decision.text)])
    head = ["objective", "new", "repeated", "difference", "seeds up", "p", "p (Holm)", "verdict"]
    level = 100 - 200 * comparison.level
    notes = [f"In brackets the {level:g} % interval. Seeds up: of those that both leagues have."]
    correlations = [correlation(*pair.of_seeds(metric.name)) for pair in pairs]
    if known := [value for value in correlations if value is not None]:
        notes.append(
            "Correlation of the scores of the same seed in both leagues: "
            f"{statistics.mean(known):.2f} in the mean of the objectives."
        )
    sizes = min(min(map(len, pair.scores(metric.name))) for pair in pairs)
    sd = statistics.mean((d.sd or 0) ** 2 for d in decisions) ** 0.5
    effect = DEFAULT_TEST.detectable((sizes, sizes), sd, comparison.level, len(pairs))
    seen = f"a difference of {metric.text(effect, 1)}" if effect else "no difference"
    notes.append(
        f"With {sizes} seeds each, and an sd over seeds of {metric.text(sd, 1)}, {seen} is seen in "
        "4 of 5 cases."
    )
    return Table(f"{title}: {metric.title}", head, cells, notes)


def correlation(x: list[float], y: list[float]) -> float | None:
    """Return Pearson's correlation, None where a side is constant or has one value."""
    if len(x) < 2 or min(map(statistics.pstdev, (x, y))) == 0:
        return None
    return statistics.correlation(x, y)


def changes_table(pairs: Sequence[Pair], league: LeagueRuns) -> Table:
    """Return the change of each further metric and of the loss, those marked that are shown."""
    plan = league.plan
    names = [name for name in (*plan.comparison.secondary, LOSS) if name != plan.comparison.metric]
    texts: dict[str, list[str]] = {pair.new.objective: [] for pair in pairs}
    titles = []
    for name in names:
        scored = [pair for pair in pairs if all(pair.scores(name))]
        metric = metric_of(name, [run for pair in scored for run in pair.repeated.runs])
        titles.append(metric.title.replace(".accuracy", "").replace(".", " "))
        rule = DecisionRule(1e-9, plan.comparison.level, metric.lower_is_better)
        decisions = decisions_of(scored, name, rule) if scored else []
        shown = {
            pair.new.objective: f"{metric.text(d.difference, 1 if metric.percent else 3)}"
            f"{'*' if d.verdict != UNDECIDED else ''}"
            for pair, d in zip(scored, decisions)
        }
        for objective, row in texts.items():
            row.append(shown.get(objective, "-"))
    cells = [[Cell(text, number=False) for text in (name, *row)] for name, row in texts.items()]
    note = "*: p below the level after Holm's correction for the objectives, of each metric alone."
    return Table("Repeated less new", ["objective", *titles], cells, [note])


def epochs_of(league: LeagueRuns) -> str:
    """Return how often the runs of a league see their documents."""
    words = league.corpus.words if league.corpus else None
    counts = [run.costs["words"] for row in league.rows() for run in row.scored]
    times = [count / words for count in counts if count and words]
    return f"{min(times):.1f} to {max(times):.1f} times" if times else "an unknown number of times"


def main() -> None:
    if len(sys.argv) > 3:
        raise UsageError("give the folders: python examples/league/repeated.py [[L] R]")
    places = [named_plan(word) for word in sys.argv[1:]] or [EPOCHS]
    leagues = [read_league(place) for place in places]
    new, repeated = leagues if len(leagues) == 2 else (read_league(OBJECTIVES), *leagues)
    pairs = pairs_of(new, repeated)
    if not pairs:
        raise UsageError("the leagues have no row of the same objective and budget in common")
    budget = flops_text(repeated.contents.plan.ladder.budgets[0])
    title = f"{repeated.contents.title}: documents seen {epochs_of(repeated)}, at {budget} FLOPs"
    show(to_text(primary_table(pairs, repeated, title)))
    show("\n" + to_text(changes_table(pairs, repeated)))


if __name__ == "__main__":
    run_script(main)
