"""Forecast before anything runs: the cost of a league, its detectable effects, what fits a time."""

from __future__ import annotations

import io
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.output import count_text, seconds_text, show_progress
from metaseq_lm.core.registry import nearest
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.expansion import PHASES, TUNE, UNTRAINED, Prices
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.plan_files import BALANCED, TEXT_ARM, merge, read_plan
from metaseq_lm.league.runner import Runner
from metaseq_lm.league.score_errors import tuning_seeds_needed
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.stats import DEFAULT_TEST
from metaseq_lm.runs import suite_results
from metaseq_lm.runs.conditions import count_conditions
from metaseq_lm.sweeps.configs import compose_runs
from metaseq_lm.sweeps.definition import read_mapping
from metaseq_lm.sweeps.trials import MOST
from metaseq_lm.tasks import with_updates
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import (
    PRICED_SEED,
    PriceEstimate,
    conditions_before,
    estimate_price,
    seconds_of_update,
)
from metaseq_lm.training.run import TrainingRun


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
        estimate = _estimate_update(runner, objective)
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
    excluded, sentences = runner.excluded(prices), count_conditions(conditions, "objectives")
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
    phases = {p: {"runs": counts[p], "flops": flops[p]} for p in PHASES if counts[p]}
    totals = {"runs": counts.total(), "flops": sum(flops.values())}
    for name, total in {**phases, "all": totals}.items():
        lines.append(f"{name:<10} {total['runs']:>5} runs  {flops_text(total['flops'])} FLOPs")
    slots = runner.launch.max_parallel or 1
    parallel = f", {seconds_text(seconds / slots)} with --max-parallel {slots}" * (slots > 1)
    lines[-1] += (
        f", {seconds_text(seconds)} of training in one process like this one{parallel}; a run also "
        "has to start, be validated and scored, and a grid may be widened"
    )
    seeds, level, detectable = len(plan.ladder.seeds), plan.comparison.level, []
    sds = _known_sds(contents, runner.request.budgets)
    for budget in runner.request.budgets:
        sd = sds.get(budget)
        spread = 1.0 if sd is None else sd
        effect = DEFAULT_TEST.detectable((seeds, seeds), spread, level, plan.comparisons)
        detectable.append({"budget": budget, "effect": effect, "sd": sd})
    lines += [*_describe_effects(plan, detectable), *sentences]
    lines.append(f"smallest effect that matters: {plan.comparison.smallest_effect:g}")
    content: dict[str, Any] = {"flops_per_update": prices, "excluded": excluded, "phases": phases}
    content |= {"seconds": seconds, "max_parallel": slots, "conditions": sentences}
    content |= {"comparisons": plan.comparisons, "seeds": seeds, "detectable": detectable}
    content |= {"title": contents.title, "comparison": asdict(plan.comparison)}
    return content, "\n".join(lines)


def _describe_effects(plan: Plan, detectable: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    comparison = plan.comparison
    yield (
        f"{comparison.metric} is decided at level {comparison.level:g} among "
        f"{count_text(plan.comparisons, 'comparison')} with {comparison.baseline}, "
        f"with {count_text(len(plan.ladder.seeds), 'seed')} each:"
    )
    for item in detectable:
        budget, effect, sd = item["budget"], item["effect"], item["sd"]
        text = f"80 % power for a difference of {effect or 0.0:.2g}"
        if effect is None:
            text = "no difference can be established with so few seeds"
        elif sd is not None:
            text += f" (seeds have a sd of {sd:.2g})"
        else:
            text += " standard deviations over seeds"
        yield f"{flops_text(budget)} FLOPs: {text}"


def _known_sds(contents: Contents, budgets: Sequence[float]) -> dict[float, float]:
    """Return the sd over seeds of archived rows by budget: the root of the mean variance."""
    rows, sds = read_archived(contents).rows(), {}
    for budget in budgets:
        at_budget = [r.scores(contents.plan.comparison.metric) for r in rows if r.budget == budget]
        variances = [np.var(scores, ddof=1) for scores in at_budget if len(scores) > 1]
        if variances:
            sds[budget] = float(np.sqrt(np.mean(variances)))
    return sds


def check_tuning(contents: Contents, budgets: Sequence[float]) -> None:
    """Raise UsageError for a plan whose tuning is too thin for the smallest effect that matters.

    The check applies if the choice is part of the experiment, see `tuning_seeds_needed`. The noise
    is taken from the plan, or else from the sd over seeds in its archive, or else is half of the
    smallest effect. A plan with archived rows is fixed, so it gets a warning and no error: its
    intervals include the choice of settings.
    """
    plan, tuning = contents.plan, contents.plan.tuning
    if not tuning.plausible:
        return
    effect, level = plan.comparison.smallest_effect, plan.comparison.level
    known = _known_sds(contents, budgets)
    noise, source = tuning.noise, "tuning.noise"
    if noise is None and known:
        noise, source = max(known.values()), "the archive"
    elif noise is None:
        noise, source = effect / 2, "half of smallest_effect; give tuning.noise if you know it"
    needed = tuning_seeds_needed(noise, effect, level, plan.comparisons)
    if len(tuning.seeds) >= needed:
        return
    text = (
        f"tuning.seeds: {len(tuning.seeds)} are too few to show a difference of {effect:g} among "
        f"{count_text(plan.comparisons, 'comparison')} where trials have a sd of "
        f"{noise:g} ({source}): the choice of a setting alone may make as much. "
        f"{needed} would be enough, or fewer comparisons, or a larger smallest_effect"
    )
    if not known:
        raise UsageError(text)
    say(f"{text}; the plan has rows, so it stays, and small differences remain undecided")


def _estimate_update(runner: Runner, objective: Objective, device: str = "") -> PriceEstimate:
    """Make one update with the first values of a grid on `device`, by default the objective's."""
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
            prices[objective.name] = _estimate_update(runner, objective, "cpu").flops
        except MetaseqError as error:
            show_progress(f"{objective.name}: the cost of an update is not known here: {error}")
    return prices


# ---------------------------------------------------------------- a plan that fits into a time

# A smaller model, and smaller batches, than those of the text arm, for runs of seconds.
_OPTIONS = [
    "model.encoder_embed_dim=64",
    "model.encoder_ffn_embed_dim=96",
    "task.batch_size=8",
]
_VOCABULARY = 2048
_RATES = [2e-3, 4e-3, 8e-3]
_SMALLEST_EFFECT = 0.02
_MOST_CONTROLS = 3  # untrained models of an objective
_LEAST_UPDATES = 100  # of a run; fewer say nothing on an objective
_SPENT = 0.85  # share of the time that is planned: the machine may have other work, too
_SLOWER = 1.15  # seconds of updates in a run, with validations, by those measured alone
_MEASURED = 3.0  # seconds of updates of each objective
_AROUND = 20.0  # seconds until the first run starts, and for the report


@dataclass(frozen=True)
class _Times:
    """What was measured: updates by objective, seconds of a run without them, and of its suites."""

    updates: Mapping[str, Update]
    start: float
    scoring: float

    def seconds(self, runner: Runner, budget: float) -> float:
        """Return how long a league of one budget takes, if all grids are widened."""
        plan, total = runner.plan, 0.0
        for objective in runner.request.objectives:
            for (phase, _), runs in runner.planned_of(objective).items():
                if phase == TUNE:
                    runs += plan.tuning.widen * len(plan.tuning.seeds)
                is_scored = phase != TUNE or plan.tuning_suites(objective)
                total += runs * (self.start + (self.scoring if is_scored else 0.0))
                if phase != UNTRAINED:
                    total += runs * budget * self.updates[objective.name].rate * _SLOWER
        return _AROUND + total / (runner.launch.max_parallel or 1)

    def fit(self, runner: Runner, minutes: float) -> float:
        """Return the FLOPs of a run, of two digits, with which a league takes some minutes.

        Raises UsageError, with the minutes that are needed, if runs would have too few updates.
        """
        least = _LEAST_UPDATES * max(update.estimate.flops for update in self.updates.values())
        fixed = self.seconds(runner, 0.0)
        slope = (self.seconds(runner, least) - fixed) / least
        budget = (60 * minutes * _SPENT - fixed) / slope
        if budget < least:
            needed = math.ceil((fixed + slope * least) / _SPENT / 60)
            raise UsageError(
                f"--minutes {minutes:g}: runs of {_LEAST_UPDATES} updates do not fit; give "
                f"--minutes {needed}, or fewer --objectives or --seeds"
            )
        digit = 10 ** (math.floor(math.log10(budget)) - 1)
        return float(int(budget) // digit * digit)


def measure_times(runner: Runner) -> _Times:
    """Make updates of each objective, and score an untrained model of the first one, here."""
    updates = measure_updates(runner, _MEASURED)
    sweep = runner.sweep(runner.request.objectives[0], UNTRAINED, [])
    (_, _, config), *_ = compose_runs(sweep.runs[:1], sweep.definition, runner.check)
    began = time.monotonic()
    with TemporaryDirectory(prefix="metaseq-lm-") as scratch:
        folder = Path(scratch) / "run"
        with redirect_stderr(io.StringIO()):
            TrainingRun(replace(config, save_dir=str(folder))).train()
        scoring = sum(result.facts["seconds"] for result in suite_results.read_all(folder)[0])
    return _Times(updates, time.monotonic() - began - scoring, scoring)


def text_plan(
    data: Mapping[str, Any], names: Sequence[str], seeds: int | None, budget: float
) -> dict[str, Any]:
    """Return the content of a plan of a text: the text arm with few objectives, at one budget.

    Args:
        data: The files of the text by the keys plan.FILES, and options of its labelled file.
        names: The objectives, the baseline first.
        seeds: The number of seeds; by default the least that can establish a difference.
        budget: FLOPs of a run.

    Raises:
        UsageError: An objective is unknown, or there are fewer than two.
    """
    content = read_mapping(TEXT_ARM)
    known = {**read_plan(BALANCED)[1]["objectives"], **content["objectives"]}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--objectives {unknown[0]}: not known.{nearest(unknown[0], known)} Known: "
            f"{', '.join(sorted(known))}. 'metaseq-lm league --out L --with' adds one of your own"
        )
    if len(set(names)) < 2:
        raise UsageError("--objectives: name two or more, the baseline first")
    level = 0.05 / (len(set(names)) - 1)
    seeds = seeds or next(n for n in itertools.count(2) if DEFAULT_TEST.smallest_p(n, n) < level)
    objectives: dict[str, Any] = dict.fromkeys(content["objectives"])
    for name in names:
        objective = known[name]
        chosen = {key: objective[key] for key in ("options", "note") if key in objective}
        if objective.get("control") in names:
            chosen["control"] = objective["control"]
        if "metric" in objective:
            chosen["metric"] = "frozen_valid"
        objectives[name] = chosen
    changes: dict[str, Any] = {
        "name": "own text",
        "data": {**content["data"], "vocab_size": _VOCABULARY, **data},
        "options": _OPTIONS,
        "objectives": objectives,
        "budgets": [budget],
        "usual_budgets": None,
        "seeds": list(range(31, 31 + seeds)),
        "tuning": {"grid": {"optimizer.lr": _RATES}, "budgets": [budget], "widen": 1},
        "controls": {"shuffled": None, "seeds": list(range(51, 51 + min(_MOST_CONTROLS, seeds)))},
        "comparison": {
            "baseline": names[0],
            "smallest_effect": _SMALLEST_EFFECT,
            "items": True,
        },
    }
    return merge(content, changes)
