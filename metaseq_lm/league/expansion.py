"""From a plan to sweeps: untrained models, trials, final and shuffled runs, and their budgets.

Each is an ordinary sweep of `metaseq-lm sweep`: `sweep status`, `resubmit` and `cancel` work on its
folder. A sweep may grow by further budgets and by values of a widened grid. Budgets that whole
updates of an objective cannot spend are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.files import is_number
from metaseq_lm.core.loading import format_value, quote
from metaseq_lm.league.parity_gates import PARITY
from metaseq_lm.league.plan import Objective, Plan, budget_text
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.sweeps.definition import Definition, normalise
from metaseq_lm.sweeps.expansion import PlannedRun, expand
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.trials import Values

UNTRAINED, TUNE, FINAL, SHUFFLED = PHASES = ("untrained", "tune", "final", "shuffled")
LABELS = {TUNE: "{}, tuning", FINAL: "{}", UNTRAINED: "{}, untrained", SHUFFLED: "{}, shuffled"}
BUDGET = "trainer.max_flops"


@dataclass(frozen=True)
class DataSource:
    """The data folder and the plug-in that the runs of a league use."""

    data: Path
    user_dir: str | None = None


@dataclass(frozen=True)
class LeagueSweep:
    """A sweep of a league: an objective in a phase.

    Attributes:
        phase: One of PHASES.
        objective: Its name.
        folder: PHASE/OBJECTIVE in the folder of the league.
        definition: The definition of the sweep.
        runs: Its runs.
    """

    phase: str
    objective: str
    folder: Path
    definition: Definition
    runs: list[PlannedRun]

    def at(self, budgets: Iterable[float]) -> list[PlannedRun]:
        """Return the runs at budgets; all runs if the phase has no budgets."""
        texts = {budget_text(budget) for budget in budgets}
        return [run for run in self.runs if run.values.get(BUDGET, None) in (None, *texts)]


def label_of(phase: str, objective: str) -> str:
    """Return the label of the runs of an objective in a phase."""
    return LABELS[phase].format(objective)


def budget_values(by_budget: Mapping[float, Sequence[Values]]) -> list[Values]:
    """Return the settings of runs: those of each budget, with the budget."""
    settings: list[Values] = []
    for budget, each in by_budget.items():
        settings += [{BUDGET: budget_text(budget), **values} for values in each]
    return settings


def build_sweep(
    plan: Plan,
    objective: Objective,
    phase: str,
    settings: Sequence[Values],
    source: DataSource,
    out: Path,
) -> LeagueSweep:
    """Return the sweep of an objective in a phase; `settings` are added to those it has.

    Raises UsageError for options that no sweep takes.
    """
    folder = out / phase / objective.name
    unique: dict[tuple[Any, ...], Values] = {}
    for values in (*stored_settings(folder), *settings):
        # 3 and 3.0 are the same value. The first of equal settings stays: its runs may exist.
        ordered = sorted(values.items())
        key = tuple((name, float(x) if is_number(x) else repr(x)) for name, x in ordered)
        unique.setdefault(key, values)
    seeds = {TUNE: plan.tuning.seeds, FINAL: plan.ladder.seeds}.get(phase, plan.controls.seeds)
    options = [*plan.options, *objective.options]
    options.append(f"label={quote(label_of(phase, objective.name))}")
    options.append(f"trainer.max_update={int(phase == UNTRAINED)}")
    of_phase = {UNTRAINED: ["optimizer.lr=0"], SHUFFLED: ["task.shuffle_tokens=true"]}
    options += of_phase.get(phase, [])
    suites = plan.tuning_suites(objective) if phase == TUNE else list(plan.comparison.suites)
    if suites:
        options.append(f"trainer.final_suites={format_value(suites)}")
    content: dict[str, Any] = {"data": str(source.data), "overrides": options, "seeds": list(seeds)}
    if source.user_dir:
        content["user_dir"] = source.user_dir
    if unique:
        content["list"] = [dict(values) for values in unique.values()]
    definition = normalise(content)
    return LeagueSweep(phase, objective.name, folder, definition, expand(definition, folder))


def stored_settings(folder: Path) -> list[Values]:
    """Return the settings of the sweep in a folder, none if there is no sweep."""
    if not (folder / "sweep.json").exists():
        return []
    return list(SweepFolder(folder).definition().alternatives)


Prices = Mapping[str, float]  # FLOPs of an update, by objective


def _why_excluded(plan: Plan, objective: Objective, price: float, budget: float) -> str:
    """Return why an objective with a `price` of an update cannot run at a budget, "" if it can."""
    if budget - math.floor(budget / price) * price > PARITY * budget:
        whole = f"whole ones leave more than {PARITY:.0%} of the budget"
        return f"whose updates are so large that {whole}"
    is_over = objective.grid and price > plan.tuning.nearest(budget)
    return "an update of which costs more than a trial may" if is_over else ""


def possible(
    plan: Plan, objective: Objective, prices: Prices, budgets: Iterable[float]
) -> list[float]:
    """Return the budgets at which an objective can run; all of them if its price is unknown."""
    price = prices.get(objective.name)
    return [b for b in budgets if price is None or not _why_excluded(plan, objective, price, b)]


def describe_excluded(
    plan: Plan, objectives: Iterable[Objective], prices: Prices, budgets: Iterable[float]
) -> list[str]:
    """Return a sentence for each reason and each budget at which objectives cannot run."""
    known = [objective for objective in objectives if objective.name in prices]
    sentences = []
    for budget in budgets:
        names: dict[str, list[str]] = {}
        for objective in known:
            if reason := _why_excluded(plan, objective, prices[objective.name], budget):
                names.setdefault(reason, []).append(objective.name)
        for reason, listed in names.items():
            sentences.append(f"Not at {flops_text(budget)} FLOPs: {', '.join(listed)}, {reason}.")
    return sentences
