"""The ladders of standings: which rows of an objective are rungs, and what they decide together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.curves import (
    DRAWS,
    FEWEST_HELD_OUT,
    Fit,
    bounds_of,
    form_of,
    held_out_errors,
    naive_predictions,
    rejection,
    why_not_predictable,
)
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.gate import LEARNING, lacked_by
from metaseq_lm.league.ladders import Crossover, Ends, ObjectiveLadder, crossover, interval
from metaseq_lm.league.predictions import Prediction
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.stats import DEFAULT_TEST, holm

Allows = Callable[[StandingsEntry, str], bool]  # whether a row and a metric count


def has_number(entry: StandingsEntry, metric: str) -> bool:
    """Return whether a row has scores and is neither void nor refused."""
    return bool(entry.scores.get(metric)) and not entry.about(metric, VOID, REFUSE)


def has_learnt(entry: StandingsEntry, metric: str) -> bool:
    """Return whether a row is tested and above its untrained model."""
    lacks = {lacked_by(finding.gate) for finding in entry.about(metric, FLAG)}
    return entry.is_tested(metric) and LEARNING not in lacks


def objectives_of(standings: Standings) -> list[str]:
    """Return the names of the objectives with rows, in the order of the plan."""
    return list(dict.fromkeys(entry.objective for entry in standings.entries))


def ladder_of(
    standings: Standings, objective: str, allows: Allows = StandingsEntry.is_tested
) -> ObjectiveLadder:
    """Return the ladder of an objective's primary metric over the rows that `allows` accepts.

    Tested rows are flagged, if at all, only for lack of gain.
    """
    name, rungs = standings.primary.name, {}
    for entry in standings.entries:
        if entry.objective == objective and allows(entry, name):
            rungs[entry.budget] = entry.scores[name]
    return ObjectiveLadder.of(rungs)


def drawn_ladders(standings: Standings) -> dict[str, ObjectiveLadder]:
    """Return the ladders of tested rows, with independent draws."""
    rng = np.random.default_rng(0)
    ladders = {name: ladder_of(standings, name) for name in objectives_of(standings)}
    return {name: ladder.drawn(rng) for name, ladder in ladders.items() if ladder.budgets}


def curve_intervals(standings: Standings, objective: str) -> dict[float, Ends]:
    """Return the interval of an objective's mean at each budget where it has two seeds."""
    ladder = ladder_of(standings, objective, has_number).drawn(np.random.default_rng(0))
    bounds, intervals = bounds_of(standings.primary, ladder.scores), {}
    for budget, draws in zip(ladder.budgets, ladder.draws.T):
        if ends := interval(draws, standings.rule.level, bounds):
            intervals[budget] = ends
    return intervals


@dataclass(frozen=True)
class CurveMeeting:
    """The crossover of two objectives.

    Attributes:
        before: The objective ahead at the first budget that both have.
        after: The other one.
        budgets: The first and the last budget.
        crossover: Where they cross.
        corrected: p of the crossover after Holm's correction for all pairs.
        is_established: Whether the order at both ends, and a crossing between them, is beyond
            chance, and the leading objective has learnt something at both.
    """

    before: str
    after: str
    budgets: tuple[float, float]
    crossover: Crossover
    corrected: float
    is_established: bool


def meetings(standings: Standings) -> list[CurveMeeting]:
    """Return the crossovers of all pairs of objectives.

    A pair is compared at the budgets, at least two, that both have and at which one of them has
    learnt something: at lower budgets a difference is one of untrained models.
    """
    level, pairs, ladders = standings.rule.level, [], drawn_ladders(standings)
    learnt = {name: ladder_of(standings, name, has_learnt).budgets for name in ladders}
    for names in combinations(ladders, 2):
        one, other = (ladders[name] for name in names)
        first, second = (learnt[name] for name in names)
        shared = [b for b in one.budgets if b in other.budgets and b in first + second]
        one, other = one.at(shared), other.at(shared)
        if len(shared) > 1 and min(one.least_seeds, other.least_seeds) > 1:
            is_ahead = (one.means[0] >= other.means[0]) != standings.rule.lower_is_better
            ordered, ends = names if is_ahead else names[::-1], (shared[0], shared[-1])
            pairs.append((ordered, ends, crossover(one, other, level)))
    met = []
    for (names, ends, result), p in zip(pairs, holm([result.p for *_, result in pairs])):
        is_sure = p < level and result.none <= level
        is_sure &= all(budget in learnt[name] for name, budget in zip(names, ends))
        met.append(CurveMeeting(*names, ends, result, p, is_sure))
    return met


def decision_accuracies(standings: Standings) -> dict[float, tuple[int, int]]:
    """Return how many pairs each smaller budget orders like the largest one, and of how many.

    The pairs are those with a difference beyond chance at the largest budget, after Holm's
    correction for all pairs tested there with two seeds or more. Budgets without such a pair are
    left out (Magnusson et al. 2025).
    """
    if len(standings.budgets) < 2:
        return {}
    *smaller, top = standings.budgets
    ladders = [ladder_of(standings, name) for name in objectives_of(standings)]
    at_top = [x for x in ladders if top in x.budgets and len(x.scores[-1]) > 1]
    pairs = list(combinations(at_top, 2))
    corrected = holm([DEFAULT_TEST.p(one.scores[-1], other.scores[-1]) for one, other in pairs])
    accuracies = {}
    for budget in smaller:
        same = []
        for (one, other), p in zip(pairs, corrected):
            if p < standings.rule.level and budget in one.budgets and budget in other.budgets:
                leads = one.at([budget, top]).means - other.at([budget, top]).means
                same.append(bool(np.prod(leads) > 0))
        if same:
            accuracies[budget] = sum(same), len(same)
    return accuracies


def predict(standings: Standings, objective: str, budget: float) -> Prediction:
    """Return the prediction of an objective at a budget from its rows at smaller ones.

    Rows that are untested, or not above their untrained model, are left out. Raises UsageError with
    the reason if nothing can be predicted.
    """
    metric, level = standings.primary, standings.rule.level
    ladder = ladder_of(standings, objective, has_learnt)
    ladder = ladder.at([other for other in ladder.budgets if other < budget])
    name, ceilings = metric.name, dict.fromkeys(objectives_of(standings))
    for entry in standings.entries:  # the last row that knows it counts
        ceilings[entry.objective] = entry.ceilings.get(name, ceilings[entry.objective])
    forms = {x: form_of(metric, ceiling) for x, ceiling in ceilings.items()}
    form = forms.pop(objective, None) or form_of(metric)
    if form is None:
        raise UsageError(f"no form of a curve is known for {name}")
    rng = np.random.default_rng(0)
    if not (reason := why_not_predictable(ladder, form, budget)):
        fit = Fit(ladder.drawn(rng, DRAWS), form)
        reason = rejection(fit, level)
    if reason:
        tested = ladder_of(standings, objective).budgets
        if left_out := [b for b in tested if b < budget and b not in ladder.budgets]:
            reason += f" (at {', '.join(map(flops_text, left_out))} nothing was learnt yet)"
        raise UsageError(reason)
    others = ((ladder_of(standings, x, has_learnt), y) for x, y in forms.items() if y)
    errors = held_out_errors(others)
    ends = fit.interval(budget, level, rng, errors)
    assert ends is not None  # every budget has a spread
    return Prediction(
        objective=objective,
        budget=budget,
        metric=name,
        form=form.name,
        rungs=ladder.budgets,
        value=fit.value(budget),
        interval=ends,
        naive=naive_predictions(ladder, budget),
        held_out=len(errors) if len(errors) >= FEWEST_HELD_OUT else 0,
    )
