"""Checks of a league's runs that need no training: are they what the plan says?

Whoever writes an archive can write any number into it, so these checks only find what does not fit
together. Runs that are trained again find the rest.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from metaseq_lm.core.files import is_number, to_json
from metaseq_lm.league.assembly import LeagueRuns, complete_rows
from metaseq_lm.league.expansion import BUDGET, FINAL, PHASES, SHUFFLED, TUNE, UNTRAINED, label_of
from metaseq_lm.league.gates import examine
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.referee.merge import name_in_league
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run
from metaseq_lm.runs.suite_results import HITS
from metaseq_lm.sweeps.definition import override_values
from metaseq_lm.training.suites import SuiteRequest, request_of

_GATE = "gate"  # prefix of checks that the standings make, too
# Gates that flag a row whose runs are not those of the plan. Other flags are about honest rows.
_INTEGRITY = ("missing", "controls", "identical runs")
_OFF = 0.1  # relative difference of the updates of a budget, whose prices vary with the rows
_EXACT = 1e-9  # relative difference of two numbers that were computed from the same ones


@dataclass(frozen=True)
class Complaint:
    """Something in a record that does not agree with its plan or with itself.

    Attributes:
        check: The check that found it.
        place: The run, or the row, such as "causal at 1e12".
        reason: One sentence with the numbers, without the full stop.
    """

    check: str
    place: str
    reason: str

    @property
    def is_of_gate(self) -> bool:
        """Whether a gate of the standings says it, which an honest row may deserve."""
        return self.check.startswith(_GATE)


def audit(league: LeagueRuns, data: Path | None = None) -> list[Complaint]:
    """Return all complaints about the runs of a league.

    Args:
        league: The plan and its runs.
        data: The data, made from the plan; None to leave out checks of test items.
    """
    plan = league.plan
    checks: list[Callable[[Run, Objective, str], Iterator[Complaint]]] = [
        partial(_check_options, plan),
        partial(_check_updates, league.contents.prices),
        _check_numbers,
    ]
    if data is not None:
        checks.append(partial(_check_items, _requests(plan, data)))
    complaints = [*_check_rows(league), *_check_known(league)]
    for objective in plan.objectives:
        for phase in PHASES:
            runs = league.of(objective, phase)
            complaints += _check_seeds(plan, objective, phase, runs)
            for run, check in product(runs, checks):
                complaints += check(run, objective, phase)
    return complaints


def describe_complaints(complaints: Sequence[Complaint]) -> str:
    """Return complaints as lines, equal ones about several runs as one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in complaints:
        groups.setdefault((item.check, item.reason), []).append(item.place)
    lines = []
    for (check, reason), places in groups.items():
        further = f" and {len(places) - 1} more" * (len(places) > 1)
        lines.append(f"{check}: {places[0]}{further}: {reason}")
    return "\n".join(lines)


def missing_in(league: LeagueRuns) -> list[Complaint]:
    """Return what a submission lacks, and what does not fit together in it.

    Its test items are checked by `verify`, which makes the data.
    """
    (added,) = league.contents.additions
    objective = league.plan.objective(added.name)
    return [*_missing_phases(league, objective), *audit(league)]


def _missing_phases(league: LeagueRuns, objective: Objective) -> Iterator[Complaint]:
    """Yield the phases of a row that have not all runs of the plan."""
    plan, whole = league.plan, complete_rows(league.runs, league.plan)
    budgets = sorted({row.budget for row in league.rows()})
    needed = [(FINAL, budget) for budget in budgets]
    needed += [(SHUFFLED, budget) for budget in budgets if budget in plan.controls.shuffled]
    needed += [(UNTRAINED, 0.0)] * (plan.controls.untrained and bool(budgets))
    needed += [
        (TUNE, b) for b in dict.fromkeys(map(plan.tuning.nearest, budgets)) if objective.grid
    ]
    if not budgets:
        yield Complaint("runs", objective.name, "no final run: the attempt is only registered")
    for phase, budget in needed:
        if (label_of(phase, objective.name), budget) not in whole:
            at = f" at {flops_text(budget)}" if budget else ""
            count = len(league.of(objective, phase, budget if budget else None))
            yield Complaint("runs", f"{label_of(phase, objective.name)}{at}", f"only {count} runs")


# ---------------------------------------------------------------- rows and seeds


def _check_rows(league: LeagueRuns) -> Iterator[Complaint]:
    """Yield what the gates say of rows that are not comparable or not complete."""
    for standing in examine(league.context()):
        place = f"{standing.row.objective} at {flops_text(standing.row.budget)}"
        for finding in standing.findings:
            is_severe = finding.action in (VOID, REFUSE) and finding.gate != "baseline"
            if is_severe or (finding.action == FLAG and finding.gate in _INTEGRITY):
                yield Complaint(f"{_GATE} {finding.gate}", place, finding.reason)


def _check_known(league: LeagueRuns) -> Iterator[Complaint]:
    names = [objective.name for objective in league.plan.objectives]
    known = {label_of(*pair) for pair in product(PHASES, names)}
    for run in league.runs:
        if run.values["label"] not in known:
            yield Complaint("plan", name_in_league(run), "no objective of the plan has this run")


def _check_seeds(
    plan: Plan, objective: Objective, phase: str, runs: Sequence[Run]
) -> Iterator[Complaint]:
    """Yield settings that have other seeds than the plan says; the gates judge final runs."""
    if phase == FINAL:
        return
    planned = plan.tuning.seeds if phase == TUNE else plan.controls.seeds
    keys = [] if phase == UNTRAINED else [BUDGET, *objective.grid]
    settings: dict[str, Counter[Any]] = {}
    for run in runs:
        setting = ", ".join(f"{key}={run.values.get(key)}" for key in keys)
        settings.setdefault(setting, Counter())[run.seed] += 1
    for setting, seeds in settings.items():
        if seeds != Counter(planned[: seeds.total()]):
            has = ", ".join(map(str, sorted(seeds.elements(), key=str)))
            reason = f"the seeds are {has}, where the plan has {', '.join(map(str, planned))}"
            yield Complaint("seeds", f"{label_of(phase, objective.name)} {setting}".strip(), reason)


# ---------------------------------------------------------------- single runs


def _check_options(plan: Plan, run: Run, objective: Objective, phase: str) -> Iterator[Complaint]:
    stated = [*plan.options, *objective.options]
    stated += {UNTRAINED: ["optimizer.lr=0"], SHUFFLED: ["task.shuffle_tokens=true"]}.get(phase, [])
    expected = {}
    for text in stated:
        key = text.partition("=")[0]
        if key not in objective.grid or phase == UNTRAINED:
            name = f"{key}._name"
            expected[name if name in run.values else key] = _value_of(text)
    for key, value in expected.items():
        if isinstance(value, str) and ("${" in value or key.endswith("._name")):
            continue  # what Hydra resolves, and presets, whose classes have other names
        recorded = run.values.get(key, run.value(key))
        if recorded is not None and not _is_same(recorded, value):
            reason = f"{key} is {recorded}, where the plan has {value}"
            yield Complaint("options", name_in_league(run), reason)


@cache
def _value_of(text: str) -> Any:
    (value,) = override_values(text, "options")
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values of an option are the same: 3 and 3.0 are."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if is_number(one) and is_number(other):
        return math.isclose(one, other, rel_tol=_EXACT)
    return bool(one == other)


def _check_updates(
    prices: Mapping[str, float], run: Run, objective: Objective, phase: str
) -> Iterator[Complaint]:
    """Yield a finished run with another number of updates than its budget pays for."""
    price, results = prices.get(objective.name), run.recorded
    # The price of an update is known for the first values of a grid, which others may change.
    is_fixed = all(key.startswith(("optimizer.", "schedule.")) for key in objective.grid)
    if phase == UNTRAINED or price is None or not is_fixed or run.status != "finished":
        return
    budget, updates = float(run.values.get(BUDGET) or 0), results.get("updates", 0)
    if abs(updates * price / budget - 1) > _OFF + price / budget:
        reason = (
            f"{updates} updates, where {flops_text(budget)} FLOPs pay for {budget // price:.0f} of "
            f"{flops_text(price)}"
        )
        yield Complaint("updates", name_in_league(run), reason)


def _check_numbers(run: Run, objective: Objective, phase: str) -> Iterator[Complaint]:
    if run.status != "finished":
        return
    place = name_in_league(run)
    logged = _scored_validation(run)
    for name, value in run.final_metrics.items():
        split, _, metric = name.partition(".")
        if split == "valid" and metric in logged and not _is_same(logged[metric], value):
            yield Complaint("numbers", place, f"{name} is {value}, and {logged[metric]} in the log")
    for suite in run.suites:
        for group, content in suite.groups.items():
            accuracy, hits = content["metrics"].get("accuracy"), content.get(HITS)
            if hits and accuracy is not None:
                share = sum(hits) / content["n"]
                if not math.isclose(share, accuracy, rel_tol=_EXACT):
                    reason = f"accuracy {accuracy}, and {share} of its items are right"
                    yield Complaint("numbers", place, f"{suite.name}, {group}: {reason}")
    weights = {suite.weights for suite in run.suites}
    if len(weights) > 1:
        yield Complaint("numbers", place, "its suites were scored on different weights")


def _scored_validation(run: Run) -> Mapping[str, Any]:
    """Return the line in the log of the weights that are scored: the best ones, or the last."""
    valid = [line for line in run.log if line["kind"] == "valid"]
    # The log does not reach the end of the run.
    if not valid or valid[-1].get("update") != run.recorded.get("updates"):
        return {}
    metric = run.values.get("trainer.best_checkpoint_metric")
    if not metric:
        return valid[-1]
    best = max if run.values.get("trainer.maximize_best_checkpoint_metric") else min
    return best((line for line in valid if metric in line), key=lambda x: x[metric], default={})


def _requests(plan: Plan, data: Path) -> dict[str, tuple[SuiteRequest, str]]:
    requests = {}
    for entry in plan.comparison.suites:
        request = request_of(entry, data)
        requests[request.name] = request, request.suite.data_hash(request.folder)
    return requests


def _check_items(
    requests: Mapping[str, tuple[SuiteRequest, str]],
    run: Run,
    objective: Objective,
    phase: str,
) -> Iterator[Complaint]:
    """Yield suites that a finished run lacks, or that scored other items or with other options."""
    if run.status != "finished":
        return
    place, scored = name_in_league(run), {suite.name: suite for suite in run.suites}
    for name, (request, data_hash) in requests.items():
        suite = scored.get(name)
        if suite is None:
            if phase in (FINAL, UNTRAINED) and not request.is_optional:
                yield Complaint("items", place, f"there is no score of {name}")
            continue
        if suite.data != data_hash:
            yield Complaint("items", place, f"{name} was scored on other items than the plan's")
        options = json.loads(to_json(asdict(request.suite.config)))  # tuples become lists
        stated = {key: value for key, value in suite.options.items() if key in options}
        if others := [key for key, value in stated.items() if value != options[key]]:
            reason = f"{name} was scored with other {', '.join(others)}"
            yield Complaint("items", place, reason)
