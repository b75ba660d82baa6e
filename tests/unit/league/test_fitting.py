"""The budget that fits into a time, and the plan of a text at it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.expansion import DataSource
from metaseq_lm.league.forecast import Update, _Times, text_plan
from metaseq_lm.league.plan import Plan
from metaseq_lm.league.plan_files import plan_of
from metaseq_lm.league.runner import LeagueRequest, Runner
from metaseq_lm.sweeps.options import Launch

FILES = {"text": ["a.txt", "b.txt"], "probe": "labels.csv"}
NAMES = ("causal", "masked_40", "rtd")


def runner_at(budget: float, seeds: int = 0, parallel: int = 2) -> Runner:
    plan, _ = plan_of(text_plan(FILES, NAMES, seeds, budget), Path())
    request = LeagueRequest(plan.objectives, plan.ladder.budgets, DataSource(Path("data")))
    return Runner(plan, request, Path("out"), Launch(max_parallel=parallel), plan.hash)


def times_of(seconds: float = 0.1) -> _Times:
    estimate: Any = SimpleNamespace(flops=1e9)
    return _Times({name: Update(estimate, seconds) for name in NAMES}, start=2.0, scoring=3.0)


def test_a_plan_has_the_named_objectives_and_as_few_seeds_as_can_decide() -> None:
    plan: Plan = runner_at(1e11).plan
    assert [objective.name for objective in plan.objectives] == list(NAMES)
    assert (plan.comparison.baseline, plan.ladder.budgets) == ("causal", (1e11,))
    # Its control masked_15 is not among them; a loss is no guide to the rate of rtd.
    assert [o.control for o in plan.objectives] == [None, None, None]
    assert plan.tuning_suites(plan.objective("rtd")) == [plan.comparison.suites[0]]
    assert plan.comparison.kinds == ("frozen", "tuned")
    # Of 4 seeds against 4 the smallest p is 0.029, enough for one comparison; of 5, 0.008.
    assert len(plan.ladder.seeds) == 5 and len(text_plan(FILES, NAMES[:2], 0, 1.0)["seeds"]) == 4
    assert len(runner_at(1e11, 2).plan.ladder.seeds) == 2


@pytest.mark.parametrize("names, fault", [(("causal", "maskd_40"), "masked_40"), (("rtd",), "two")])
def test_unknown_and_lonely_objectives_are_refused(names: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        text_plan(FILES, names, 0, 1e11)


def test_the_chosen_budget_fills_the_time_and_too_little_time_says_how_much_is_needed() -> None:
    times, runner = times_of(), runner_at(1e12)
    budget = times.fit(runner, 60)
    assert 0.8 * 3600 < times.seconds(runner_at(budget), budget) <= 0.85 * 3600
    assert times.seconds(runner_at(budget, parallel=4), budget) < 0.6 * 3600
    with pytest.raises(UsageError, match=r"--minutes (\d+)") as refused:
        times.fit(runner, 3)
    needed = int(str(refused.value).split("give --minutes ")[1].split(",")[0])
    least = times.fit(runner, needed)
    assert least >= 100 * 1e9
    with pytest.raises(UsageError):
        times.fit(runner, needed - 1)
