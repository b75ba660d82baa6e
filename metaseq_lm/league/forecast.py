"""Forecast before anything runs: the cost of a league and the effects that it can show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.output import seconds_text, show_progress
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.choice import MOST, tuning_seeds_needed
from metaseq_lm.league.expansion import PHASES
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import Objective
from metaseq_lm.league.prices import Prices
from metaseq_lm.league.runner import Runner
from metaseq_lm.league.standings import Row
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.stats import DEFAULT_TEST
from metaseq_lm.runs.conditions import count_conditions
from metaseq_lm.tasks import with_updates
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import (
    PRICED_SEED,
    PriceEstimate,
    conditions_before,
    estimate_price,
    seconds_of_update,
)


def forecast(runner: Runner, contents: Contents) -> tuple[dict[str, Any], str]:
    """Return runs, FLOPs and time of a request and the detectable effect, as values and lines."""
    lines, plan = [contents.title], runner.plan
    prices, rates, conditions = {}, {}, []
    for objective in runner.request.objectives:
        estimate = estimate_update(runner, objective)
        prices[objective.name] = estimate.flops
        rates[objective.name] = seconds_of_update(estimate) / estimate.flops
        most = max(runner.budgets(objective))
        config = with_updates(estimate.parts.config, max(1, int(most // estimate.flops)))
        trainer = replace(config.trainer, max_flops=most)
        conditions.append(conditions_before(replace(config, trainer=trainer), estimate))
    excluded = runner.excluded(prices)
    runner = runner.with_prices(prices)
    request = runner.request
    counts, flops, seconds = Counter[str](), dict.fromkeys(PHASES, 0.0), 0.0
    for objective in request.objectives:
        price = prices[objective.name]
        updates = [f"{int(b // price):,}" for b in ends(runner.budgets(objective))]
        lines.append(
            f"{objective.name}: an update costs {flops_text(price)} FLOPs, so a run has "
            f"{' to '.join(updates)} updates"
        )
        one = replace(request, objectives=(objective,))
        for (phase, budget), count in replace(runner, request=one).planned().items():
            counts[phase] += count
            flops[phase] += count * budget
            seconds += count * budget * rates[objective.name]
    lines += excluded
    if plan.tuning.plausible:
        lines.append(f"final counts one setting of each objective; up to {MOST} may be plausible")
    for phase in PHASES:
        if counts[phase]:
            lines.append(f"{phase:<10} {counts[phase]:>5} runs  {flops_text(flops[phase])} FLOPs")
    slots = runner.launch.max_parallel or 1
    parallel = f", {seconds_text(seconds / slots)} with --max-parallel {slots}" if slots > 1 else ""
    lines.append(
        f"all        {sum(counts.values()):>5} runs  {flops_text(sum(flops.values()))} FLOPs, "
        f"{seconds_text(seconds)} of training in one process like this one{parallel}; a run also "
        "has to start, be validated and scored, and a grid may be widened"
    )
    comparisons = plan.comparisons
    seeds, level = len(plan.ladder.seeds), plan.comparison.level
    lines.append(
        f"{plan.comparison.metric} is decided at level {level:g} among {comparisons} comparisons "
        f"with {plan.comparison.baseline}, with {seeds} seeds each:"
    )
    rows, effects = read_archived(contents).rows(), []
    for budget in request.budgets:
        sd = _sd_of(rows, budget, plan.comparison.metric)
        effect = DEFAULT_TEST.detectable(
            (seeds, seeds), 1.0 if sd is None else sd, level, comparisons
        )
        effects.append({"budget": budget, "effect": effect, "sd": sd})
        lines.append(f"{flops_text(budget)} FLOPs: {_effect_text(effect, sd)}")
    sentences = count_conditions(conditions, "objectives")
    lines += sentences
    lines.append(f"smallest effect that matters: {plan.comparison.smallest_effect:g}")
    content: dict[str, Any] = {"flops_per_update": prices, "excluded": excluded}
    content["phases"] = {p: {"runs": counts[p], "flops": flops[p]} for p in PHASES if counts[p]}
    content |= {"seconds": seconds, "max_parallel": slots, "conditions": sentences}
    content |= {"comparisons": comparisons, "seeds": seeds, "detectable": effects}
    return {"title": contents.title, **content, "comparison": asdict(plan.comparison)}, "\n".join(
        lines
    )


def check_tuning(contents: Contents, budgets: Sequence[float]) -> None:
    """Raise UsageError for a plan whose tuning is too thin for the smallest effect that matters.

    The check applies if the choice is part of the experiment, see `choice.tuning_seeds_needed`. The
    noise is taken from the plan, or else from the sd over seeds in its archive, or else is half of
    the smallest effect. A plan with archived rows is fixed, so it gets a warning and no error: its
    intervals include the choice of settings.
    """
    plan = contents.plan
    tuning, comparison = plan.tuning, plan.comparison
    if not tuning.plausible:
        return
    rows = read_archived(contents).rows()
    known = [sd for b in budgets if (sd := _sd_of(rows, b, comparison.metric)) is not None]
    noise, source = tuning.noise, "tuning.noise"
    if noise is None:
        noise, source = max(known, default=comparison.smallest_effect / 2), "the archive"
        source = source if known else "half of smallest_effect; give tuning.noise if you know it"
    needed = tuning_seeds_needed(
        noise, comparison.smallest_effect, comparison.level, plan.comparisons
    )
    if len(tuning.seeds) >= needed:
        return
    text = (
        f"tuning.seeds: {len(tuning.seeds)} are too few to show a difference of "
        f"{comparison.smallest_effect:g} among {plan.comparisons} comparisons where trials "
        f"have a sd of {noise:g} ({source}): which setting is chosen may alone make as much. "
        f"{needed} would be enough, or fewer comparisons, or a larger smallest_effect"
    )
    if not known:
        raise UsageError(text)
    say(f"{text}; the plan has rows, so it stays as it is, and small differences are undecided")


def _effect_text(effect: float | None, sd: float | None) -> str:
    """Return in words the difference that a comparison detects in four of five cases."""
    if effect is None:
        return "no difference can be established with so few seeds"
    if sd is None:
        return f"80 % power for a difference of {effect:.2g} standard deviations over seeds"
    return f"80 % power for a difference of {effect:.2g} (seeds have a sd of {sd:.2g})"


def _sd_of(rows: list[Row], budget: float, metric: str) -> float | None:
    """Return the sd over seeds at a budget, the root of the mean variance of rows; None if unknown.

    The rows are the archived ones of the plan.
    """
    at_budget = [row.scores(metric) for row in rows if row.budget == budget]
    variances = [np.var(scores, ddof=1) for scores in at_budget if len(scores) > 1]
    return float(np.sqrt(np.mean(variances))) if variances else None


def ends(budgets: Sequence[float]) -> list[float]:
    """Return the first and the last of ascending budgets, or one if they are equal."""
    return list(dict.fromkeys((budgets[0], budgets[-1])))


def estimate_update(runner: Runner, objective: Objective, device: str = "") -> PriceEstimate:
    """Make one update of an objective with the first values of its grid; return its cost.

    It runs on the device of the objective's options, or on `device` if given.
    """
    config = replace(prepare_config(runner.first_config(objective)), seed=PRICED_SEED)
    if device:
        config = replace(config, engine=replace(config.engine, device=device))
    return estimate_price(config)


def measure_prices(runner: Runner, known: Prices) -> dict[str, float]:
    """Return FLOPs of an update by objective: the known ones, and those of the request.

    Updates run on the CPU, so that a GPU stays free for the runs. Objectives that cannot make an
    update here have no price.
    """
    prices = dict(known)
    for objective in runner.request.objectives:
        if objective.name in prices:
            continue
        try:
            prices[objective.name] = estimate_update(runner, objective, "cpu").flops
        except MetaseqError as error:
            show_progress(f"{objective.name}: what an update costs is not known here: {error}")
    return prices
