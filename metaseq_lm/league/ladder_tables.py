"""Tables of ladders: curves with intervals, FLOPs at equal score, crossovers, predictions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from metaseq_lm.core.output import count_text
from metaseq_lm.league.columns import Value, verdict_text
from metaseq_lm.league.entries import Standings
from metaseq_lm.league.ladders import Ends, equal_score
from metaseq_lm.league.predictions import OPEN, Outcome
from metaseq_lm.league.rungs import (
    curve_intervals,
    decision_accuracies,
    drawn_ladders,
    has_learnt,
    has_number,
    ladder_of,
    meetings,
    objectives_of,
)
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text
from metaseq_lm.reporting.table import Cell, Table

_NONE = "-"
_WORDS = {  # columns without numbers
    *("objective", "reached by", "ahead at first", "the other", "the order changes"),
    *("made", "from", "curve", "inside"),
}
_Row = Sequence[str | Cell]
_EXPECTED = ("predicted", "predicted_last", "predicted_line")  # numbers of a record
_HELD_OUT_NOTE = (
    "Held out: the objectives whose last budget, predicted by the same form from those below, "
    "showed how far it errs; with too few of them the interval covers seeds alone (-)."
)


def ladder_tables(standings: Standings) -> list[Table]:
    """Return the tables of ladders, for two budgets or more, and of predictions, if any."""
    tables = []
    if len(standings.budgets) > 1:
        tables += [_curves_table(standings), equal_score_table(standings)]
        tables += [_crossover_table(standings), _decision_table(standings)]
    if standings.predictions:
        tables.append(predictions_table(standings))
    return [table for table in tables if table.rows]


def interval_name(standings: Standings) -> str:
    """Return the title of bootstrap intervals: 95 % interval."""
    return f"{100 * (1 - standings.rule.level):g} % interval"


def _table(title: str, head: list[str], rows: Sequence[_Row], notes: list[str]) -> Table:
    is_number = [name not in _WORDS for name in head]
    body = []
    for row in rows:
        cells = zip(row, is_number)
        body.append([x if isinstance(x, Cell) else Cell(x, number=y) for x, y in cells])
    return Table(title, head, body, notes)


def _ends_text(ends: Ends, metric: Metric) -> str:
    digits = metric.decimals(max(map(abs, ends)))
    return " to ".join(metric.text(end, digits) for end in ends)


def _curves_table(standings: Standings) -> Table:
    metric, rows = standings.primary, []
    for name in objectives_of(standings):
        ladder = ladder_of(standings, name, has_number)
        texts = dict.fromkeys(standings.budgets, _NONE)
        texts.update(zip(ladder.budgets, map(metric.text, ladder.means)))
        for budget, ends in curve_intervals(standings, name).items():
            texts[budget] += f" ({_ends_text(ends, metric)})"
        rows.append([name, *texts.values()])
    title = f"Ladders: {metric.title}, mean with its {interval_name(standings)}"
    note = (
        "Intervals here and below come from a bootstrap over seeds, widened for their number. "
        "Between budgets the mean is a line over log FLOPs."
    )
    return _table(title, ["objective", *map(flops_text, standings.budgets)], rows, [note])


def equal_score_table(standings: Standings) -> Table:
    """Return how many times fewer FLOPs an objective needs for the score of another one.

    Other objectives have to reach the baseline's scores, and the baseline theirs.
    """
    metric, rule = standings.primary, standings.rule
    ladders = drawn_ladders(standings)
    learnt = {name: ladder_of(standings, name, has_learnt).budgets for name in ladders}
    rows: list[_Row] = []
    missing = 0
    for budget, name, other in product(standings.budgets, ladders, ladders):
        is_pair = name != other and standings.baseline in (name, other)
        if not is_pair or budget not in learnt[name]:
            continue
        rung, ladder = ladders[name].at([budget]), ladders[other]
        ratio, ends = equal_score(rung, ladder, rule.lower_is_better, rule.level)
        if math.isnan(ratio):
            missing += 1
            continue
        bound, text = budget / ladder.budgets[0], _NONE
        if ends:
            or_more = " or more" * math.isclose(ends[1], bound)
            text = f"{ends[0]:.2f} to {ends[1]:.2f}{or_more}"
        times = Cell(f"{'at least ' * (ratio == bound)}{ratio:.2f}", value=ratio)
        rows.append([flops_text(budget), name, metric.text(rung.means[0]), other, times, text])
    head = ["FLOPs", "objective", "its score", "reached by", "times fewer FLOPs"]
    notes = [
        "Below 1 it takes more FLOPs. At least: the first budget is enough, and less might be. "
        "Only scores of rows that have learnt something."
    ]
    if missing:
        notes.append(f"{missing} further scores are not reached by the last budget.")
    title = f"FLOPs at equal score: {metric.title}"
    return _table(title, [*head, interval_name(standings)], rows, notes)


def _crossover_table(standings: Standings) -> Table:
    """Return the crossovers of pairs with the baseline, and of other pairs if their means cross."""
    pairs, rows = meetings(standings), []
    for pair in pairs:
        result = pair.crossover
        if result.budget is None and standings.baseline not in (pair.before, pair.after):
            continue
        places = ["none", _NONE]
        if result.budget and result.interval:
            places = [flops_text(result.budget), " to ".join(map(flops_text, result.interval))]
        ends = " to ".join(map(flops_text, pair.budgets))
        order = "not " * (not pair.is_established) + "established"
        row = [pair.before, pair.after, ends, *places, f"{result.none:.2f}"]
        rows.append([*row, p_text(pair.corrected), order])
    head = ["ahead at first", "the other", "budgets", "crossover", interval_name(standings)]
    head += ["probability of none", "p (Holm)", "the order changes"]
    left = len(pairs) - len(rows)
    note = (
        "The means change their order, for the last time, at the crossover; its interval comes "
        "from the draws that have one between the first and the last budget; the share of the "
        "other draws is the probability of none. Established: the differences at the first and "
        f"at the last budget have different signs, both with p below {standings.rule.level:g} "
        f"after Holm's correction for {len(pairs)} pairs of objectives, and the one that is "
        "ahead has learnt something. Budgets at which neither has are left out. No crossover "
        "was planned."
    )
    if left:
        note += f" {count_text(left, 'further pair')} without the baseline do not cross."
    return _table(f"Crossovers: {standings.primary.title}", head, rows, [note])


def describe_crossovers(standings: Standings) -> Iterator[str]:
    """Yield the established crossovers, a sentence each."""
    for pair in meetings(standings):
        at, ends = pair.crossover.budget, pair.crossover.interval
        if pair.is_established and at and ends:
            low, high = map(flops_text, ends)
            yield f"{pair.after} passes {pair.before} at {flops_text(at)} FLOPs ({low} to {high})."


def _decision_table(standings: Standings) -> Table:
    rows = []
    for budget, (same, count) in decision_accuracies(standings).items():
        rows.append([flops_text(budget), f"{same} of {count}", f"{100 * same / count:.0f}"])
    top = flops_text(standings.budgets[-1])
    note = (
        f"Of the pairs of objectives that differ at {top} FLOPs, with p below "
        f"{standings.rule.level:g} after Holm's correction for all pairs there. Guessing gets "
        "half of them right. Pairs share objectives, so fewer are independent than it seems."
    )
    title = f"Decision accuracy: {standings.primary.title}, pairs in the order of {top} FLOPs"
    return _table(title, ["FLOPs", "same order", "%"], rows, [note])


def describe_decisions(standings: Standings) -> Iterator[str]:
    """Yield a sentence on the decision accuracy of smaller budgets, none without pairs."""
    texts = [f"{row[0].text} has {row[1].text}" for row in _decision_table(standings).rows]
    if texts:
        yield (
            f"Of the pairs of objectives that differ at {flops_text(standings.budgets[-1])} FLOPs, "
            f"in the same order: {', '.join(texts)}."
        )


def predictions_table(standings: Standings) -> Table:
    """Return the predictions of a league with outcomes and errors."""
    metric, rows, records = standings.primary, [], []
    for outcome in standings.predictions:
        item, record = outcome.prediction, _prediction_record(standings, outcome)
        records.append(record)
        rungs = Cell(", ".join(map(flops_text, item.rungs)), number=False, value=max(item.rungs))
        row: list[str | Cell] = [flops_text(item.budget), item.objective, item.time]
        row += [rungs, item.form]
        row += [metric.text(item.value), _ends_text(item.interval, metric)]
        row.append(Cell(str(item.held_out or _NONE), value=item.held_out))
        if (mean := record["mean"]) is None:
            row += [record["unscored"], "", "", "", ""]
        else:
            row += [metric.text(mean), "yes" if record["inside"] else "no"]
            errors = [record[key] - mean for key in _EXPECTED]
            row += [Value({}, metric, error, is_signed=True).wide for error in errors]
        rows.append(row)
    head = ["FLOPs", "objective", "made", "from", "curve", "predicted", interval_name(standings)]
    head += ["held out", "mean", "inside", "error", "error of the last budget"]
    head.append("error of the line")
    notes = [*describe_predictions(standings), _HELD_OUT_NOTE]
    return replace(_table(f"Predictions: {metric.title}", head, rows, notes), records=records)


def _prediction_record(standings: Standings, outcome: Outcome) -> dict[str, Any]:
    """Return a prediction with the mean that it is scored against, or else why there is none."""
    item, mean, why = outcome.prediction, None, outcome.unscored or "no scores"
    rows = {(entry.objective, entry.budget): entry for entry in standings.entries}
    row = rows.get((item.objective, item.budget))
    if row and not outcome.unscored:
        why = verdict_text(standings, row)
        if row.is_tested(item.metric):
            mean = float(np.mean(row.scores[item.metric]))
    low, high = item.interval
    return {
        "objective": item.objective,
        "flops": item.budget,
        "metric": item.metric,
        "made": item.time,
        "plan": item.plan,
        "code": item.code,
        "rungs": " ".join(f"{rung:g}" for rung in item.rungs),
        "curve": item.form,
        "predicted": item.value,
        "low": low,
        "high": high,
        "held_out": item.held_out,
        **{f"predicted_{name}": naive for name, naive in item.naive.items()},
        "mean": mean,
        "inside": None if mean is None else low <= mean <= high,
        "unscored": why if mean is None else None,
    }


def describe_predictions(standings: Standings) -> Iterator[str]:
    """Yield sentences on scored and on open predictions."""
    records = [_prediction_record(standings, outcome) for outcome in standings.predictions]
    if scored := [record for record in records if record["mean"] is not None]:
        errors = []
        for key in _EXPECTED:
            errors.append(np.mean([abs(record[key] - record["mean"]) for record in scored]))
        curve, last, line = map(standings.primary.text, errors)
        count, inside = len(scored), sum(record["inside"] for record in scored)
        noun = "predictions that were" if count > 1 else "prediction that was"
        yield (
            f"Of {count} {noun} made before the runs, {inside} {'have' if inside != 1 else 'has'} "
            f"the mean inside the interval. Mean size of the error: {curve}; of the score of the "
            f"last budget {last}, of the line over log FLOPs through the last two {line}."
        )
    if open_count := sum(outcome.unscored == OPEN for outcome in standings.predictions):
        yield f"{open_count} of the predictions have no runs yet."
