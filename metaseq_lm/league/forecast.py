"""Forecast before anything runs: the cost of a league and the effects that it can show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.output import seconds_text, show_progress
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.choice import tuning_seeds_needed
from metaseq_lm.league.expansion import PHASES
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.prices import Prices
from metaseq_lm.league.runner import Runner
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.stats import DEFAULT_TEST
from metaseq_lm.runs.conditions import count_conditions
from metaseq_lm.sweeps.draws import MOST
from metaseq_lm.tasks import with_updates
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import (
    PRICED_SEED,
    PriceEstimate,
    conditions_before,
    estimate_price,
    seconds_of_update,
)


@dataclass(frozen=True)
class Update:
    """The measured cost of an update: of which parts, and its seconds, see `PriceEstimate`."""

    estimate: PriceEstimate
    seconds: float

    @property
    def rate(self) -> float:
        """Seconds a FLOP."""
        return self.seconds / self.estimate.flops


def measure_updates(runner: Runner, at_least: float = 0.0) -> dict[str, Update]:
    """Make updates of each objective of a request here; return what one costs, by objective.

    Those of an objective take `at_least` so many seconds, which evens out other work here.
    """
    measured = {}
    for objective in runner.request.objectives:
        estimate = estimate_update(runner, objective)
        began, seconds = time.monotonic(), [seconds_of_update(estimate)]
        while time.monotonic() - began < at_least:
            seconds.append(seconds_of_update(estimate))
        measured[objective.name] = Update(estimate, float(np.mean(seconds)))
    return measured


def forecast(
    runner: Runner, contents: Contents, measured: Mapping[str, Update]
) -> tuple[dict[str, Any], str]:
    """Return runs, FLOPs and time of a request and the detectable effect, as values and lines."""
    lines, plan = [contents.title], runner.plan
    prices = {name: update.estimate.flops for name, update in measured.items()}
    conditions = []
    for objective in runner.request.objectives:
        estimate = measured[objective.name].estimate
        most = max(runner.budgets(objective))
        config = with_updates(estimate.parts.config, max(1, int(most // estimate.flops)))
        trainer = replace(config.trainer, max_flops=most)
        conditions.append(conditions_before(replace(config, trainer=trainer), estimate))
    excluded = runner.excluded(prices)
    runner = runner.with_prices(prices)
    counts, flops, seconds = Counter[str](), dict.fromkeys(PHASES, 0.0), 0.0
    for objective in runner.request.objectives:
        price, budgets = prices[objective.name], runner.budgets(objective)
        updates = [f"{int(b // price):,}" for b in dict.fromkeys((budgets[0], budgets[-1]))]
        lines.append(
            f"{objective.name}: an update costs {flops_text(price)} FLOPs, so a run has "
            f"{' to '.join(updates)} updates"
        )
        for (phase, budget), count in runner.planned_of(objective).items():
            counts[phase] += count
            flops[phase] += count * budget
            seconds += count * budget * measured[objective.name].rate
    lines += excluded
    if plan.tuning.plausible:
        lines.append(f"final counts one setting of each objective; up to {MOST} may be plausible")
    totals = {phase: (counts[phase], flops[phase]) for phase in PHASES if counts[phase]}
    totals["all"] = sum(counts.values()), sum(flops.values())
    for phase, (count, spent) in totals.items():
        lines.append(f"{phase:<10} {count:>5} runs  {flops_text(spent)} FLOPs")
    slots = runner.launch.max_parallel or 1
    parallel = f", {seconds_text(seconds / slots)} with --max-parallel {slots}" if slots > 1 else ""
    lines[-1] += (
        f", {seconds_text(seconds)} of training in one process like this one{parallel}; a run also "
        "has to start, be validated and scored, and a grid may be widened"
    )
    budgets = list(runner.request.budgets)
    sds = _known_sds(contents, budgets)
    effects = {budget: _effect(plan, sds.get(budget, 1.0)) for budget in budgets}
    lines += _effect_lines(plan, effects, sds)
    sentences = count_conditions(conditions, "objectives")
    lines += sentences
    lines.append(f"smallest effect that matters: {plan.comparison.smallest_effect:g}")
    content: dict[str, Any] = {"flops_per_update": prices, "excluded": excluded}
    content["phases"] = {p: {"runs": counts[p], "flops": flops[p]} for p in PHASES if counts[p]}
    content |= {"seconds": seconds, "max_parallel": slots, "conditions": sentences}
    content |= {"comparisons": plan.comparisons, "seeds": len(plan.ladder.seeds)}
    content["detectable"] = [
        {"budget": budget, "effect": effect, "sd": sds.get(budget)}
        for budget, effect in effects.items()
    ]
    content |= {"title": contents.title, "comparison": asdict(plan.comparison)}
    return content, "\n".join(lines)


def _effect(plan: Plan, sd: float) -> float | None:
    """Return the difference that the plan's seeds show with 80 % power, None if none."""
    seeds = len(plan.ladder.seeds)
    return DEFAULT_TEST.detectable((seeds, seeds), sd, plan.comparison.level, plan.comparisons)


def _effect_lines(
    plan: Plan, effects: dict[float, float | None], sds: dict[float, float]
) -> Iterator[str]:
    """Yield a line on the rule of decisions, and on the detectable difference at each budget."""
    comparison = plan.comparison
    yield (
        f"{comparison.metric} is decided at level {comparison.level:g} among {plan.comparisons} "
        f"comparisons with {comparison.baseline}, with {len(plan.ladder.seeds)} seeds each:"
    )
    for budget, effect in effects.items():
        text = f"80 % power for a difference of {effect or 0.0:.2g}"
        if effect is None:
            text = "no difference can be established with so few seeds"
        elif budget in sds:
            text += f" (seeds have a sd of {sds[budget]:.2g})"
        else:
            text += " standard deviations over seeds"
        yield f"{flops_text(budget)} FLOPs: {text}"


def _known_sds(contents: Contents, budgets: Sequence[float]) -> dict[float, float]:
    """Return the sd over seeds of the plan's archived rows by budget, where it is known.

    It is the root of the mean variance of the rows.
    """
    rows, sds = read_archived(contents).rows(), {}
    for budget in budgets:
        at_budget = [r.scores(contents.plan.comparison.metric) for r in rows if r.budget == budget]
        variances = [np.var(scores, ddof=1) for scores in at_budget if len(scores) > 1]
        if variances:
            sds[budget] = float(np.sqrt(np.mean(variances)))
    return sds


def check_tuning(contents: Contents, budgets: Sequence[float]) -> None:
    """Raise UsageError for a plan whose tuning is too thin for the smallest effect that matters.

    The check applies if the choice is part of the experiment, see `choice.tuning_seeds_needed`. The
    noise is taken from the plan, or else from the sd over seeds in its archive, or else is half of
    the smallest effect. A plan with archived rows is fixed, so it gets a warning and no error: its
    intervals include the choice of settings.
    """
    plan, tuning = contents.plan, contents.plan.tuning
    effect, level = plan.comparison.smallest_effect, plan.comparison.level
    if not tuning.plausible:
        return
    known = _known_sds(contents, budgets)
    noise, source = tuning.noise, "tuning.noise"
    if noise is None:
        noise = max(known.values(), default=effect / 2)
        source = "half of smallest_effect; give tuning.noise if you know it"
        source = "the archive" if known else source
    needed = tuning_seeds_needed(noise, effect, level, plan.comparisons)
    if len(tuning.seeds) >= needed:
        return
    text = (
        f"tuning.seeds: {len(tuning.seeds)} are too few to show a difference of {effect:g} among "
        f"{plan.comparisons} comparisons where trials have a sd of {noise:g} ({source}): the "
        f"choice of a setting alone may make as much. {needed} would be enough, or fewer "
        "comparisons, or a larger smallest_effect"
    )
    if not known:
        raise UsageError(text)
    say(f"{text}; the plan has rows, so it stays, and small differences remain undecided")


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
            show_progress(f"{objective.name}: the cost of an update is not known here: {error}")
    return prices
