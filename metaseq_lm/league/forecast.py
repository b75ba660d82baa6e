"""What a league will take, and what it can show, before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import seconds_text
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.expansion import FINAL, PHASES, budget_values
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.parity_gates import PARITY
from metaseq_lm.league.plan import Objective
from metaseq_lm.league.runner import Runner
from metaseq_lm.league.standings import Row
from metaseq_lm.league.verdict import detectable
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.sweeps.configs import composed
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import estimate_price, seconds_of_update


def forecast(runner: Runner, contents: Contents) -> str:
    """Return lines on runs, FLOPs and hours of a request, and the effect that it can show."""
    request, plan = runner.request, runner.plan
    lines, prices = [contents.title], []
    counts, flops, seconds = Counter[str](), dict.fromkeys(PHASES, 0.0), 0.0
    for objective in request.objectives:
        price, rate = price_and_rate(runner, objective)
        if price > request.budgets[0]:
            raise UsageError(
                f"objective {objective.name}: an update costs {flops_text(price)} FLOPs, more than "
                f"the budget of {flops_text(request.budgets[0])}"
            )
        prices.append(
            f"{objective.name}: an update costs {flops_text(price)} FLOPs, so a run has "
            f"{' to '.join(f'{int(b // price):,}' for b in ends(request.budgets))} updates"
        )
        if wrong := [b for b in request.budgets if b - int(b // price) * price > PARITY * b]:
            prices.append(
                f"{objective.name}: at {', '.join(map(flops_text, wrong))} FLOPs whole updates "
                f"leave more than {PARITY:.0%} of the budget, so the gate 'budget' refuses the row"
            )
        one = replace(request, objectives=(objective,))
        for (phase, budget), count in replace(runner, request=one).planned().items():
            counts[phase] += count
            flops[phase] += count * budget
            seconds += count * budget * rate
    lines += prices
    for phase in PHASES:
        if counts[phase]:
            lines.append(f"{phase:<10} {counts[phase]:>5} runs  {flops_text(flops[phase])} FLOPs")
    slots = runner.launch.max_parallel or 1
    lines.append(
        f"all        {sum(counts.values()):>5} runs  {flops_text(sum(flops.values()))} FLOPs, "
        f"{seconds_text(seconds)} of training in one process like this one, "
        f"{seconds_text(seconds / slots)} with --max-parallel {slots}; a run also has to start, be "
        "validated and scored, and a grid may be widened"
    )
    comparisons = plan.comparisons
    seeds, level = len(plan.ladder.seeds), plan.comparison.level
    lines.append(
        f"{plan.comparison.metric} is decided at level {level:g} among {comparisons} comparisons "
        f"with {plan.comparison.baseline}, with {seeds} seeds each:"
    )
    rows = read_archived(contents).rows()
    for budget in request.budgets:
        sd = sd_of(rows, budget, plan.comparison.metric)
        effect = detectable(seeds, 1.0 if sd is None else sd, level, comparisons)
        lines.append(f"{flops_text(budget)} FLOPs: {effect_text(effect, sd)}")
    lines.append(f"smallest effect that matters: {plan.comparison.smallest_effect:g}")
    return "\n".join(lines)


def effect_text(effect: float | None, sd: float | None) -> str:
    """Return in words what difference a comparison shows in four of five cases."""
    if effect is None:
        return "no difference can be established with so few seeds"
    if sd is None:
        return f"80 % power for a difference of {effect:.2g} standard deviations over seeds"
    return f"80 % power for a difference of {effect:.2g} (seeds have a sd of {sd:.2g})"


def sd_of(rows: list[Row], budget: float, metric: str) -> float | None:
    """Return the sd over seeds at a budget, the root of the mean variance of rows; None if unknown.

    Of the rows that are archived with the plan.
    """
    at_budget = [row.scores(metric) for row in rows if row.budget == budget]
    variances = [np.var(scores, ddof=1) for scores in at_budget if len(scores) > 1]
    return float(np.sqrt(np.mean(variances))) if variances else None


def ends(budgets: tuple[float, ...]) -> list[float]:
    """Return the first and the last of ascending budgets, one if they are the same."""
    return list(dict.fromkeys((budgets[0], budgets[-1])))


def price_and_rate(runner: Runner, objective: Objective) -> tuple[float, float]:
    """Return the FLOPs of an update of an objective, and its seconds a FLOP on this machine."""
    first = {key: values[0] for key, values in objective.grid.items()}
    budget = runner.request.budgets[0]
    sweep = runner.sweep(objective, FINAL, budget_values({budget: first}))
    (_, _, config), *_ = composed(sweep.at([budget])[:1], sweep.definition, runner.check)
    estimate = estimate_price(prepare_config(config))
    return estimate.flops, seconds_of_update(estimate) / estimate.flops
