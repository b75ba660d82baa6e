"""Tables of ladders: curves with intervals, FLOPs at equal score, crossovers, predictions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from metaseq_lm.league.columns import Value, verdict_text
from metaseq_lm.league.curves import bounds_of
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
from metaseq_lm.league.rungs import (
    has_learnt,
    has_number,
    is_compared,
    ladder_of,
    objectives_of,
)
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text
from metaseq_lm.reporting.stats import DEFAULT_TEST, holm
from metaseq_lm.reporting.table import Cell, Table

_NONE = "-"
_HELD_OUT_NOTE = (
    "Held out: the objectives whose last budget, predicted by the same form from those below, "
    "showed how far it errs; where there were too few the interval knows seeds alone (-)."
)


def ladder_tables(standings: Standings) -> list[Table]:
    """Return the tables of ladders, for two budgets or more, and of predictions, if any."""
    tables = []
    if len(standings.budgets) > 1:
        tables += [curves_table(standings), equal_score_table(standings)]
        tables += [crossover_table(standings), decision_table(standings)]
    if standings.predictions:
        tables.append(predictions_table(standings))
    return [table for table in tables if table.rows]


def interval_name(standings: Standings) -> str:
    """Return the title of bootstrap intervals: 95 % interval."""
    return f"{100 * (1 - standings.rule.level):g} % interval"


def _ends_text(ends: tuple[float, float] | None, metric: Metric) -> str:
    """Return the ends of an interval of scores, "-" without one."""
    if ends is None:
        return _NONE
    digits = metric.decimals(max(map(abs, ends)))
    return " to ".join(metric.text(end, digits) for end in ends)


# ---------------------------------------------------------------- curves


def curve_intervals(standings: Standings, objective: str) -> dict[float, tuple[float, float]]:
    """Return the interval of an objective's mean at each budget where it has two seeds."""
    ladder = ladder_of(standings, objective, has_number)
    bounds, intervals = bounds_of(standings.primary, ladder.scores), {}
    for budget, draws in zip(ladder.budgets, ladder.draws(np.random.default_rng(0)).T):
        if ends := interval(draws, standings.rule.level, bounds):
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
            text = metric.text(means[budget]) if budget in means else _NONE
            if budget in intervals:
                text += f" ({_ends_text(intervals[budget], metric)})"
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
    """Return how many times fewer FLOPs an objective needs for the score of another one.

    Other objectives have to reach the baseline's scores, and the baseline theirs.
    """
    metric, base = standings.primary, standings.baseline
    ladders, learnt = compared_ladders(standings), _learnt_rows(standings)
    rows, count = [], 0
    for budget in standings.budgets:
        for name, other in product(ladders, ladders):
            if (name == other) or base not in (name, other) or (name, budget) not in learnt:
                continue
            result = equal_score_of(standings, ladders[name].at([budget]), ladders[other])
            count += 1
            if math.isnan(result.ratio):
                continue
            score = metric.text(float(ladders[name].at([budget]).ladder.means[0]))
            row = [Cell(flops_text(budget)), Cell(name, number=False)]
            row += [Cell(score), Cell(other, number=False)]
            row += _ratio_cells(result, budget / ladders[other].ladder.budgets[0])
            rows.append(row)
    head = ["FLOPs", "objective", "its score", "reached by", "times fewer FLOPs"]
    notes = [
        "Below 1 it takes more FLOPs. At least: the first budget is enough, and less might be. "
        "Only scores of rows that have learnt something."
    ]
    if count > len(rows):
        notes.append(f"{count - len(rows)} further scores are not reached by the last budget.")
    title = f"FLOPs at equal score: {metric.title}"
    return Table(title, [*head, interval_name(standings)], rows, notes)


def _ratio_cells(result: EqualScore, largest: float) -> list[Cell]:
    """Return the cells of a ratio and its interval; `largest` is the ratio at the bound."""
    text = f"{'at least ' * result.is_bound}{result.ratio:.2f}"
    ratio = Cell(text, value=result.ratio)
    if result.interval is None:
        return [ratio, Cell(_NONE)]
    low, high = result.interval
    return [ratio, Cell(f"{low:.2f} to {high:.2f}{' or more' * math.isclose(high, largest)}")]


def equal_score_of(standings: Standings, rung: "Drawn", other: "Drawn") -> EqualScore:
    """Return how many times fewer FLOPs a ladder needs for the score of one rung of another."""
    (budget,), (score,) = rung.ladder.budgets, rung.ladder.means
    base = budget, float(score), rung.draws[:, 0]
    rule = standings.rule
    return equal_score(base, other.ladder, other.draws, rule.lower_is_better, rule.level)


# ---------------------------------------------------------------- crossovers


@dataclass(frozen=True, eq=False)
class Drawn:
    """A ladder and its drawn means, (draws, budgets)."""

    ladder: Ladder
    draws: np.ndarray

    def at(self, budgets: Sequence[float]) -> "Drawn":
        """Return the ladder and the draws at some budgets."""
        columns = [self.ladder.budgets.index(budget) for budget in budgets]
        return Drawn(self.ladder.at(budgets), self.draws[:, columns])


@dataclass(frozen=True)
class Meeting:
    """The crossover of two objectives.

    Attributes:
        before: The objective ahead at the first budget that both have.
        after: The other one.
        budgets: The first and the last budget.
        crossover: Where they cross.
        corrected: p of the crossover after Holm's correction for all pairs.
        level: Level at which it is established.
        has_learnt: Whether the leading objective has learnt something, at both ends.
    """

    before: str
    after: str
    budgets: tuple[float, float]
    crossover: Crossover
    corrected: float
    level: float
    has_learnt: bool

    @property
    def is_established(self) -> bool:
        """Whether the order at both ends, and a crossing between them, is beyond chance."""
        is_sure = self.corrected < self.level and self.crossover.none <= self.level
        return is_sure and self.has_learnt


def compared_ladders(standings: Standings) -> dict[str, Drawn]:
    """Return the ladders of tested rows, with independent draws."""
    rng, ladders = np.random.default_rng(0), {}
    for name in objectives_of(standings):
        ladder = ladder_of(standings, name, is_compared)
        if ladder.least_seeds > 0:
            ladders[name] = Drawn(ladder, ladder.draws(rng))
    return ladders


def _learnt_rows(standings: Standings) -> set[tuple[str, float]]:
    """Return objective and budget of rows that have learnt something, see `has_learnt`."""
    name = standings.primary.name
    return {(e.objective, e.budget) for e in standings.entries if has_learnt(e, name)}


def meetings(standings: Standings) -> list[Meeting]:
    """Return the crossovers of all pairs of objectives.

    A pair is compared at the budgets, at least two, that both have and at which one of them has
    learnt something: at lower budgets a difference is one of untrained models.
    """
    learnt, level = _learnt_rows(standings), standings.rule.level
    pairs = []
    for names in combinations(ladders := compared_ladders(standings), 2):
        one, other = (ladders[name] for name in names)
        shared = [b for b in one.ladder.budgets if b in other.ladder.budgets]
        shared = [b for b in shared if not learnt.isdisjoint(product(names, [b]))]
        one, other = one.at(shared), other.at(shared)
        if len(shared) > 1 and min(one.ladder.least_seeds, other.ladder.least_seeds) > 1:
            result = crossover((one.ladder, other.ladder), (one.draws, other.draws), level)
            means = one.ladder.means[0], other.ladder.means[0]
            is_ahead = (means[0] >= means[1]) != standings.rule.lower_is_better
            ordered = names if is_ahead else names[::-1]
            pairs.append((ordered, (shared[0], shared[-1]), result))
    met = []
    corrected = holm([result.p for *_, result in pairs])
    for (names, ends, result), p in zip(pairs, corrected):
        have_learnt = set(zip(names, ends)) <= learnt
        met.append(Meeting(*names, ends, result, p, level, have_learnt))
    return met


def crossover_table(standings: Standings) -> Table:
    """Return the crossovers of pairs with the baseline, and of other pairs if their means cross."""
    pairs, rows = meetings(standings), []
    for pair in pairs:
        result = pair.crossover
        if result.budget is None and standings.baseline not in (pair.before, pair.after):
            continue
        numbers = [" to ".join(map(flops_text, pair.budgets))]
        if result.budget and result.interval:
            numbers.append(flops_text(result.budget))
            numbers.append(" to ".join(map(flops_text, result.interval)))
        else:
            numbers += ["none", _NONE]
        numbers += [f"{result.none:.2f}", p_text(pair.corrected)]
        order = "established" if pair.is_established else "not established"
        row = [Cell(name, number=False) for name in (pair.before, pair.after)]
        rows.append([*row, *map(Cell, numbers), Cell(order, number=False)])
    head = ["ahead at first", "the other", "budgets", "crossover", interval_name(standings)]
    head += ["probability of none", "p (Holm)", "the order changes"]
    left = len(pairs) - len(rows)
    note = (
        "The means change their order, for the last time, at the crossover; its interval is of the "
        "draws that have one between the first and the last budget, the share of the others is the "
        "probability of none. Established: the differences at the first and at the last budget "
        f"have different signs, both with p below {standings.rule.level:g} after Holm's correction "
        f"for {len(pairs)} pairs of objectives, and the one that is ahead has learnt something. "
        "Budgets at which neither has are left out. No crossover was planned."
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


# ---------------------------------------------------------------- decision accuracy


@dataclass(frozen=True)
class DecisionAccuracy:
    """How many pairs of objectives have the same order at a budget as at the largest one.

    Attributes:
        budget: The smaller budget.
        same: The pairs in the same order.
        pairs: All pairs at both budgets that differ at the largest one.
    """

    budget: float
    same: int
    pairs: int

    @property
    def text(self) -> str:
        """The number of pairs in the same order, and of all pairs."""
        return f"{self.same} of {self.pairs}"


def decision_accuracies(standings: Standings) -> list[DecisionAccuracy]:
    """Return the decision accuracy of each smaller budget (Magnusson et al. 2025).

    The pairs are those with a difference beyond chance at the largest budget, after Holm's
    correction for all pairs tested there with two seeds or more. Budgets without such a pair are
    left out.
    """
    if len(standings.budgets) < 2:
        return []
    *smaller, top = standings.budgets
    ladders = [ladder_of(standings, name, is_compared) for name in objectives_of(standings)]
    at_top = [x for x in ladders if top in x.budgets and len(x.scores[-1]) > 1]
    pairs = list(combinations(at_top, 2))
    corrected = holm([DEFAULT_TEST.p(one.scores[-1], other.scores[-1]) for one, other in pairs])
    level = standings.rule.level
    decided = [pair for pair, p in zip(pairs, corrected) if p < level]
    accuracies = []
    for budget in smaller:
        # The difference of each pair at the budget and at the largest one.
        differences = [
            (one.at([budget, top]).means - other.at([budget, top]).means)
            for one, other in decided
            if budget in one.budgets and budget in other.budgets
        ]
        if differences:
            same = sum(first * last > 0 for first, last in differences)
            accuracies.append(DecisionAccuracy(budget, int(same), len(differences)))
    return accuracies


def decision_table(standings: Standings) -> Table:
    """Return how many pairs of objectives each smaller budget orders like the largest one."""
    rows = []
    for accuracy in decision_accuracies(standings):
        share = f"{100 * accuracy.same / accuracy.pairs:.0f}"
        rows.append([Cell(x) for x in (flops_text(accuracy.budget), accuracy.text, share)])
    top = flops_text(standings.budgets[-1])
    note = (
        f"Of the pairs of objectives that differ at {top} FLOPs, with p below "
        f"{standings.rule.level:g} after Holm's correction for all pairs there. Guessing has half "
        "of them. Pairs share objectives, so they are fewer than they seem."
    )
    title = f"Decision accuracy: {standings.primary.title}, pairs in the order of {top} FLOPs"
    return Table(title, ["FLOPs", "same order", "%"], rows, [note])


def describe_decisions(standings: Standings) -> list[str]:
    """Return a sentence on the decision accuracy of smaller budgets, [] without pairs."""
    texts = [f"{flops_text(x.budget)} has {x.text}" for x in decision_accuracies(standings)]
    if not texts:
        return []
    top = flops_text(standings.budgets[-1])
    return [
        f"Of the pairs of objectives that differ at {top} FLOPs, in the same order: "
        f"{', '.join(texts)}."
    ]


# ---------------------------------------------------------------- predictions


def _row_at(standings: Standings, objective: str, budget: float) -> Entry | None:
    """Return the row of an objective at a budget; None if there is none."""
    for entry in standings.entries:
        if (entry.objective, entry.budget) == (objective, budget):
            return entry
    return None


def _observed(standings: Standings, outcome: Outcome) -> float | None:
    """Return the mean that a prediction is scored against.

    Return None if its runs are not over, if they began before it or do not record when, or if the
    row is not tested.
    """
    prediction = outcome.registered.prediction
    entry = _row_at(standings, prediction.objective, prediction.budget)
    scores = entry.scores.get(prediction.metric) if entry else None
    if not (outcome.is_before and entry and scores and entry.is_tested(prediction.metric)):
        return None
    return float(np.mean(scores))


def _why_unscored(standings: Standings, outcome: Outcome) -> str:
    """Return why a prediction has no observed mean."""
    prediction = outcome.registered.prediction
    entry = _row_at(standings, prediction.objective, prediction.budget)
    if outcome.is_open:
        return "open"
    if outcome.is_before is None:
        return "its runs do not say when they began"
    if not outcome.is_before:
        return "made after its runs began"
    return verdict_text(standings, entry) if entry else "no scores"


def predictions_table(standings: Standings) -> Table:
    """Return the predictions of a league with outcomes and errors."""
    metric, rows, records = standings.primary, [], []
    for outcome in standings.predictions:
        prediction, value = outcome.registered.prediction, _observed(standings, outcome)
        records.append(_prediction_record(standings, outcome))
        low, high = prediction.interval
        row = [Cell(flops_text(prediction.budget)), Cell(prediction.objective, number=False)]
        row.append(Cell(outcome.registered.time, number=False))
        rungs = ", ".join(map(flops_text, prediction.rungs))
        row.append(Cell(rungs, number=False, value=max(prediction.rungs)))
        row.append(Cell(prediction.form, number=False))
        row += [Cell(metric.text(prediction.value)), Cell(_ends_text((low, high), metric))]
        row.append(Cell(str(prediction.held_out or _NONE), value=prediction.held_out))
        if value is None:
            row += [Cell(_why_unscored(standings, outcome)), Cell("", number=False)]
            row += [Cell("")] * 3
        else:
            is_inside = "yes" if low <= value <= high else "no"
            row += [Cell(metric.text(value)), Cell(is_inside, number=False)]
            errors = [x - value for x in expectations(prediction)]
            row += [Value({}, metric, x, is_signed=True).cell() for x in errors]
        rows.append(row)
    head = ["FLOPs", "objective", "made", "from", "curve", "predicted", interval_name(standings)]
    head += ["held out", "mean", "inside", "error", "error of the last budget"]
    head.append("error of the line")
    notes = [*describe_predictions(standings), _HELD_OUT_NOTE]
    return Table(f"Predictions: {metric.title}", head, rows, notes, records)


def _prediction_record(standings: Standings, outcome: Outcome) -> dict[str, Any]:
    """Return the unrounded numbers of a prediction and its outcome, for csv."""
    registered, value = outcome.registered, _observed(standings, outcome)
    prediction = registered.prediction
    low, high = prediction.interval
    return {
        "objective": prediction.objective,
        "flops": prediction.budget,
        "metric": prediction.metric,
        "made": registered.time,
        "plan": registered.plan,
        "code": registered.code,
        "rungs": " ".join(f"{rung:g}" for rung in prediction.rungs),
        "curve": prediction.form,
        "predicted": prediction.value,
        "low": low,
        "high": high,
        "held_out": prediction.held_out,
        **{f"predicted_{name}": naive for name, naive in prediction.naive.items()},
        "mean": value,
        "inside": None if value is None else low <= value <= high,
        "unscored": _why_unscored(standings, outcome) if value is None else None,
    }


def expectations(prediction: Prediction) -> list[float]:
    """Return the expected mean by the curve, by the last budget, and by the line."""
    return [prediction.value, prediction.naive["last"], prediction.naive["line"]]


def describe_predictions(standings: Standings) -> Iterator[str]:
    """Yield sentences on scored and on open predictions."""
    metric, errors, inside = standings.primary, [], 0
    for outcome in standings.predictions:
        prediction = outcome.registered.prediction
        if (value := _observed(standings, outcome)) is not None:
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
