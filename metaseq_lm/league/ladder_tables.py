"""Tables of ladders: curves with intervals, FLOPs at equal score, crossovers, predictions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from metaseq_lm.league.cells import signed
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.ladders import (
    Crossover,
    EqualScore,
    Ladder,
    crossover,
    equal_score,
    interval,
)
from metaseq_lm.league.predictions import Outcome, Prediction
from metaseq_lm.league.rungs import has_number, is_compared, ladder_of, objectives_of
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text
from metaseq_lm.reporting.significance import holm
from metaseq_lm.reporting.table import Cell, Table

NONE = "-"


def ladder_tables(standings: Standings) -> list[Table]:
    """Return the tables of standings with two budgets or more, and of predictions, if any."""
    tables = []
    if len(standings.budgets) > 1:
        tables += [curves_table(standings), equal_score_table(standings)]
        tables.append(crossover_table(standings))
    if standings.predictions:
        tables.append(predictions_table(standings))
    return [table for table in tables if table.rows]


def interval_name(standings: Standings) -> str:
    """Return the title of intervals of a bootstrap: 95 % interval."""
    return f"{100 * (1 - standings.rule.level):g} % interval"


def ends_text(ends: tuple[float, float] | None, metric: Metric) -> str:
    """Return the ends of an interval of scores, "-" without one."""
    if ends is None:
        return NONE
    digits = metric.decimals(max(map(abs, ends)))
    return " to ".join(metric.text(end, digits) for end in ends)


# ---------------------------------------------------------------- curves


def curve_intervals(standings: Standings, objective: str) -> dict[float, tuple[float, float]]:
    """Return the interval of the mean at each budget of an objective that has two seeds there."""
    ladder = ladder_of(standings, objective, has_number)
    intervals = {}
    for budget, draws in zip(ladder.budgets, ladder.draws(np.random.default_rng(0)).T):
        if ends := interval(draws, standings.rule.level):
            intervals[budget] = ends
    return intervals


def curves_table(standings: Standings) -> Table:
    """Return means with their intervals, objectives by budgets."""
    metric, rows = standings.primary, []
    for name in objectives_of(standings):
        ladder = ladder_of(standings, name, has_number)
        means = dict(zip(ladder.budgets, ladder.means))
        intervals = curve_intervals(standings, name)
        row = [Cell(name, number=False)]
        for budget in standings.budgets:
            text = metric.text(means[budget]) if budget in means else NONE
            if budget in intervals:
                text += f" ({ends_text(intervals[budget], metric)})"
            row.append(Cell(text))
        rows.append(row)
    title = f"Ladders: {metric.title}, mean with its {interval_name(standings)}"
    note = (
        "Intervals are of a bootstrap over seeds, stretched for their number, here and below. "
        "Between budgets the mean is a line over log FLOPs."
    )
    return Table(title, ["objective", *map(flops_text, standings.budgets)], rows, [note])


# ---------------------------------------------------------------- FLOPs at equal score


def equal_score_table(standings: Standings) -> Table:
    """Return how many times fewer FLOPs each objective needs for the scores of the baseline."""
    metric, rule = standings.primary, standings.rule
    ladders = compared_ladders(standings)
    base = ladders.pop(standings.baseline, None)
    rows = []
    for i, budget in enumerate(base.ladder.budgets if base else ()):
        assert base is not None
        score = float(base.ladder.means[i])
        for name, other in ladders.items():
            result = equal_score(
                (budget, score, base.draws[:, i]),
                other.ladder,
                other.draws,
                rule.lower_is_better,
                rule.level,
            )
            means = dict(zip(other.ladder.budgets, other.ladder.means))
            texts = [metric.text(means[budget]) if budget in means else NONE]
            texts += ratio_texts(result, other.ladder)
            row = [Cell(flops_text(budget)), Cell(metric.text(score)), Cell(name, number=False)]
            rows.append([*row, *(Cell(text, number=False) for text in texts)])
    head = ["FLOPs", f"score of {standings.baseline}", "objective", "score there"]
    head += ["times fewer FLOPs for that score", interval_name(standings)]
    note = "Below 1: it needs more FLOPs. At least: its first budget is enough, and less might be."
    return Table(f"FLOPs at equal score: {metric.title}", head, rows, [note])


def ratio_texts(result: EqualScore, ladder: Ladder) -> list[str]:
    """Return the cells of a ratio and of its interval."""
    if math.isnan(result.ratio):
        return [f"not by {flops_text(ladder.budgets[-1])}", ""]
    ends = result.interval
    text = f"{'at least ' * result.is_bound}{result.ratio:.2f}"
    return [text, f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "" if result.is_bound else NONE]


# ---------------------------------------------------------------- crossovers


@dataclass(frozen=True, eq=False)
class Drawn:
    """A ladder and its drawn means, (draws, budgets)."""

    ladder: Ladder
    draws: np.ndarray

    def at(self, budgets: Sequence[float]) -> "Drawn":
        """Return those of some budgets."""
        columns = [self.ladder.budgets.index(budget) for budget in budgets]
        return Drawn(self.ladder.at(budgets), self.draws[:, columns])


@dataclass(frozen=True)
class Meeting:
    """The crossover of two objectives.

    Attributes:
        before: The objective that is ahead at the first budget that both have.
        after: The other one.
        budgets: The first and the last budget.
        crossover: Where they cross.
        corrected: Its p after Holm's correction for all pairs.
        level: At which it is established.
    """

    before: str
    after: str
    budgets: tuple[float, float]
    crossover: Crossover
    corrected: float
    level: float

    @property
    def is_established(self) -> bool:
        """Whether the order at both ends, and that draws cross between them, is beyond chance."""
        return self.corrected < self.level and self.crossover.none <= self.level


def compared_ladders(standings: Standings) -> dict[str, Drawn]:
    """Return the ladders of the rows that are tested, with independent draws."""
    rng, ladders = np.random.default_rng(0), {}
    for name in objectives_of(standings):
        ladder = ladder_of(standings, name, is_compared)
        if ladder.least_seeds > 0:
            ladders[name] = Drawn(ladder, ladder.draws(rng))
    return ladders


def meetings(standings: Standings) -> list[Meeting]:
    """Return the crossovers of all pairs of objectives that have two budgets in common."""
    level, lower = standings.rule.level, standings.rule.lower_is_better
    pairs = []
    for (name, one), (other_name, other) in combinations(compared_ladders(standings).items(), 2):
        common = [b for b in one.ladder.budgets if b in other.ladder.budgets]
        one, other = one.at(common), other.at(common)
        if len(common) < 2 or min(one.ladder.least_seeds, other.ladder.least_seeds) < 2:
            continue
        result = crossover((one.ladder, other.ladder), (one.draws, other.draws), level)
        is_ahead = (one.ladder.means[0] >= other.ladder.means[0]) != lower
        names = (name, other_name) if is_ahead else (other_name, name)
        pairs.append((names, (common[0], common[-1]), result))
    corrected = holm([result.p for *_, result in pairs])
    return [Meeting(*names, ends, r, p, level) for (names, ends, r), p in zip(pairs, corrected)]


def crossover_table(standings: Standings) -> Table:
    """Return the crossovers of pairs with the baseline, and of others whose means cross."""
    pairs, rows = meetings(standings), []
    for pair in pairs:
        result = pair.crossover
        if result.budget is None and standings.baseline not in (pair.before, pair.after):
            continue
        ends = result.interval
        between = " to ".join(map(flops_text, pair.budgets))
        texts = [pair.before, pair.after, between]
        texts.append("none" if result.budget is None else flops_text(result.budget))
        texts.append(" to ".join(map(flops_text, ends)) if ends else NONE)
        texts += [f"{result.none:.2f}", p_text(pair.corrected)]
        texts.append("established" if pair.is_established else "not established")
        rows.append([Cell(text, number=False) for text in texts])
    head = ["ahead at first", "the other", "budgets", "crossover", interval_name(standings)]
    head += ["probability of none", "p (Holm)", "the order changes"]
    left = len(pairs) - len(rows)
    note = (
        "The means change their order, for the last time, at the crossover; its interval is of the "
        "draws that have one between the first and the last budget, the others are the probability "
        "of none. Established: the differences at the first and at the last budget have different "
        f"signs, both with p below {standings.rule.level:g} after Holm's correction for "
        f"{len(pairs)} pairs of objectives. No crossover was planned."
    )
    if left:
        note += f" {left} further pair{'s' * (left > 1)} without the baseline do not cross."
    title = f"Crossovers: {standings.primary.title}"
    return Table(title, head, rows, [note])


def describe_crossovers(standings: Standings) -> list[str]:
    """Return the established crossovers, a sentence each."""
    sentences = []
    for pair in meetings(standings):
        ends = pair.crossover.interval
        if pair.is_established and ends and pair.crossover.budget:
            low, high = map(flops_text, ends)
            sentences.append(
                f"{pair.after} passes {pair.before} at {flops_text(pair.crossover.budget)} FLOPs "
                f"({low} to {high})."
            )
    return sentences


# ---------------------------------------------------------------- predictions


def row_at(standings: Standings, objective: str, budget: float) -> Entry | None:
    """Return the row of an objective at a budget; None if there is none."""
    for entry in standings.entries:
        if (entry.objective, entry.budget) == (objective, budget):
            return entry
    return None


def observed(standings: Standings, outcome: Outcome) -> float | None:
    """Return the mean that a prediction is scored by.

    None if its runs are not over, if they began before it or do not say when, and if the row is
    not tested.
    """
    prediction = outcome.registered.prediction
    entry = row_at(standings, prediction.objective, prediction.budget)
    scores = entry.scores.get(prediction.metric) if entry else None
    if not (outcome.is_before and entry and scores and entry.is_tested(prediction.metric)):
        return None
    return float(np.mean(scores))


def why_unscored(standings: Standings, outcome: Outcome) -> str:
    """Return why a prediction has no observed mean."""
    prediction = outcome.registered.prediction
    entry = row_at(standings, prediction.objective, prediction.budget)
    if outcome.is_open:
        return "open"
    if outcome.is_before is None:
        return "its runs do not say when they began"
    if not outcome.is_before:
        return "made after its runs began"
    return standings.verdict_text(entry) if entry else "no scores"


def predictions_table(standings: Standings) -> Table:
    """Return the predictions of a league with what came out, and their errors."""
    metric, rows = standings.primary, []
    for outcome in standings.predictions:
        prediction, value = outcome.registered.prediction, observed(standings, outcome)
        low, high = prediction.interval
        row = [Cell(flops_text(prediction.budget)), Cell(prediction.objective, number=False)]
        row.append(Cell(outcome.registered.time, number=False))
        rungs = ", ".join(map(flops_text, prediction.rungs))
        row += [Cell(rungs, number=False), Cell(prediction.form, number=False)]
        row += [Cell(metric.text(prediction.value)), Cell(ends_text((low, high), metric))]
        if value is None:
            reason = why_unscored(standings, outcome)
            row += [Cell(reason, number=False), *([Cell("")] * 4)]
        else:
            row += [Cell(metric.text(value)), Cell("yes" if low <= value <= high else "no")]
            row += [Cell(signed(x - value, metric, None)) for x in expectations(prediction)]
        rows.append(row)
    head = ["FLOPs", "objective", "made", "from", "curve", "predicted", interval_name(standings)]
    head += ["mean", "inside", "error", "error of the last budget", "error of the line"]
    notes = list(describe_predictions(standings))
    return Table(f"Predictions: {metric.title}", head, rows, notes)


def expectations(prediction: Prediction) -> list[float]:
    """Return the mean that is expected by the curve, as the last one, and by the line."""
    return [prediction.value, prediction.naive["last"], prediction.naive["line"]]


def describe_predictions(standings: Standings) -> Iterator[str]:
    """Yield sentences on the predictions that were scored and on those that are open."""
    metric, errors, inside = standings.primary, [], 0
    for outcome in standings.predictions:
        prediction = outcome.registered.prediction
        if (value := observed(standings, outcome)) is not None:
            low, high = prediction.interval
            inside += low <= value <= high
            errors.append([abs(x - value) for x in expectations(prediction)])
    if errors:
        curve, last, line = (metric.text(x) for x in np.mean(errors, axis=0))
        count = len(errors)
        yield (
            f"Of {count} prediction{'s' * (count > 1)} that {'were' if count > 1 else 'was'} made "
            f"before the runs, {inside} "
            f"{'have' if inside != 1 else 'has'} the mean inside the interval. Mean size of the "
            f"error: {curve}; of the score of the last budget {last}, of the line over log FLOPs "
            f"through the last two {line}."
        )
    if open_count := sum(outcome.is_open for outcome in standings.predictions):
        yield f"{open_count} of the predictions have no runs yet."
