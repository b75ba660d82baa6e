"""The cost of an update of an objective, and the budgets that whole updates cannot spend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from metaseq_lm.league.parity_gates import PARITY
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.reporting.numbers import flops_text

Prices = Mapping[str, float]  # FLOPs of an update, by objective
_TOO_LARGE = (
    f"whose updates are so large that whole ones leave more than {PARITY:.0%} of the budget"
)
_NO_TRIAL = "an update of which costs more than a trial may"


def _why_excluded(plan: Plan, objective: Objective, price: float, budget: float) -> str:
    """Return why an objective with a `price` of an update cannot run at a budget, "" if it can."""
    spent = math.floor(budget / price) * price
    if budget - spent > PARITY * budget:
        return _TOO_LARGE
    if objective.grid and price > plan.tuning.nearest(budget):
        return _NO_TRIAL
    return ""


def possible(
    plan: Plan, objective: Objective, prices: Prices, budgets: Iterable[float]
) -> list[float]:
    """Return the budgets at which an objective can run; all of them if its price is unknown."""
    if objective.name not in prices:
        return list(budgets)
    price = prices[objective.name]
    return [budget for budget in budgets if not _why_excluded(plan, objective, price, budget)]


def describe_excluded(
    plan: Plan, objectives: Iterable[Objective], prices: Prices, budgets: Iterable[float]
) -> list[str]:
    """Return a sentence for each reason and each budget at which objectives cannot run."""
    known = [objective for objective in objectives if objective.name in prices]
    names: dict[tuple[float, str], list[str]] = {}
    for budget in budgets:
        for objective in known:
            if reason := _why_excluded(plan, objective, prices[objective.name], budget):
                names.setdefault((budget, reason), []).append(objective.name)
    return [
        f"Not at {flops_text(budget)} FLOPs: {', '.join(listed)}, {reason}."
        for (budget, reason), listed in names.items()
    ]
