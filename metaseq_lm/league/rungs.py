"""The ladders of standings: which rows of an objective are rungs, and predictions from them."""

from __future__ import annotations

from collections.abc import Callable

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.curves import form_of, held_out_errors
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.gate import LEARNING, lacked_by
from metaseq_lm.league.ladders import Ladder
from metaseq_lm.league.predictions import Prediction, predict_from
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.reporting.numbers import flops_text

_Allows = Callable[[Entry, str], bool]  # whether a row and a metric count


def has_number(entry: Entry, metric: str) -> bool:
    """Return whether a row has scores and is neither void nor refused."""
    return bool(entry.scores.get(metric)) and not entry.about(metric, VOID, REFUSE)


def is_compared(entry: Entry, metric: str) -> bool:
    """Return whether a row is tested; a row that is flagged only for lack of gain still is."""
    return entry.is_tested(metric)


def has_learnt(entry: Entry, metric: str) -> bool:
    """Return whether a row is tested and above its untrained model."""
    lacks = {lacked_by(finding.gate) for finding in entry.about(metric, FLAG)}
    return entry.is_tested(metric) and LEARNING not in lacks


def objectives_of(standings: Standings) -> list[str]:
    """Return the names of the objectives with rows, in the order of the plan."""
    return list(dict.fromkeys(entry.objective for entry in standings.entries))


def ladder_of(standings: Standings, objective: str, allows: _Allows) -> Ladder:
    """Return the ladder of an objective's primary metric over the rows that `allows` accepts."""
    name = standings.primary.name
    rungs = {}
    for entry in standings.entries:
        if entry.objective == objective and allows(entry, name):
            rungs[entry.budget] = entry.scores[name]
    return Ladder.of(rungs)


def _ceiling_of(standings: Standings, objective: str) -> float | None:
    """Return the highest reachable score of the primary metric, as given by the last row."""
    name = standings.primary.name
    known = [
        e.ceilings[name]
        for e in standings.entries
        if e.objective == objective and name in e.ceilings
    ]
    return known[-1] if known else None


def predict(standings: Standings, objective: str, budget: float) -> Prediction:
    """Return the prediction of an objective at a budget from its rows at smaller ones.

    Rows that are untested, or not above their untrained model, are left out. Raises UsageError with
    the reason if nothing can be predicted.
    """
    metric = standings.primary
    usable = ladder_of(standings, objective, has_learnt).below(budget)
    tested = ladder_of(standings, objective, is_compared).below(budget)
    forms = {x: form_of(metric, _ceiling_of(standings, x)) for x in objectives_of(standings)}
    form = forms.pop(objective, None) or form_of(metric)
    if form is None:
        raise UsageError(f"no form of a curve is known for {metric.name}")
    others = [(ladder_of(standings, x, has_learnt), y) for x, y in forms.items() if y]
    about = objective, budget, metric.name
    try:
        return predict_from(usable, form, about, standings.rule.level, held_out_errors(others))
    except UsageError as error:
        out = [flops_text(other) for other in tested.budgets if other not in usable.budgets]
        note = f" (at {', '.join(out)} nothing was learnt yet)" if out else ""
        raise UsageError(f"{error}{note}") from None
