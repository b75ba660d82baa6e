"""Tuning: the choice by validation and the step beyond the end of a grid."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from league_plans import LARGE, SMALL, plan_with
from outcomes import expect_facts

from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.league.tuning import _collect_trials, describe_other_choices, trials_of
from metaseq_lm.reporting.runs import Run
from metaseq_lm.runs.suite_results import SuiteResults
from metaseq_lm.sweeps.samplers import GridSampler
from metaseq_lm.sweeps.trials import Trial, Trials

LR = "optimizer.lr"
OBJECTIVE = Objective("masked", (), {LR: (1.0, 2.0, 4.0)})


def run(loss: float | None, budget: float = SMALL, **values: Any) -> Run:
    """Return a trial with a loss; None for one that diverged."""
    options = {
        "trainer.max_flops": budget,
        **{key.replace("_", "."): v for key, v in values.items()},
    }
    metrics = {"valid": {"loss": loss, "accuracy": loss}}
    status = (
        {"status": "finished", "metrics": metrics} if loss is not None else {"status": "diverged"}
    )
    return Run(Path("run"), options, [], status)


def probe(name: str, accuracy: float) -> SuiteResults:
    """Return the results of a suite with one score."""
    groups = {"overall": {"n": 5, "metrics": {"accuracy": accuracy}}}
    return SuiteResults(name, "probe", 9, "w", "d", {}, groups, {})


def trials(
    losses: Mapping[float, list[float | None]],
    objective: Objective = OBJECTIVE,
    metric: str = "valid.loss",
) -> Trials[Trial]:
    """Return trials with the losses of each rate, one for each seed."""
    runs = [run(loss, optimizer_lr=lr) for lr, of_seeds in losses.items() for loss in of_seeds]
    return _collect_trials(objective, SMALL, runs, metric)


def best_of(of: Trials[Trial]) -> Mapping[str, Any] | None:
    best = of.best()
    return best and best.values


def widened(of: Trials[Trial], most: int) -> Mapping[str, Any]:
    return GridSampler(most, lambda of: [best for best in [best_of(of)] if best]).wider(of)


def test_the_best_is_by_the_mean_over_seeds() -> None:
    of_rates = trials({1.0: [3, 3], 2.0: [1, 4], 4.0: [2.9, 3.2]})
    assert best_of(of_rates) == {LR: 2.0}
    assert best_of(trials({1.0: [3], 2.0: [3]})) == {LR: 1.0}
    assert best_of(trials({1.0: [3], 2.0: [5]}, metric="valid.accuracy")) == {LR: 2.0}


def test_the_best_by_a_term_of_the_loss_is_the_smallest() -> None:
    """Its name, valid.mlm, does not say so."""
    runs = []
    for rate, loss in ((1.0, 3.0), (2.0, 2.0)):
        results = {"status": "finished", "metrics": {"valid": {"mlm": loss}}, "losses": ["mlm"]}
        runs.append(Run(Path("run"), {LR: rate}, [], results))
    assert best_of(_collect_trials(OBJECTIVE, SMALL, runs, "valid.mlm")) == {LR: 2.0}


def test_a_value_with_a_run_that_did_not_finish_is_not_chosen() -> None:
    assert best_of(trials({1.0: [3, 3], 2.0: [1, None]})) == {LR: 1.0}
    assert best_of(trials({1.0: [None]})) is None
    assert widened(trials({1.0: [None]}), 2) == {}


def test_a_grid_is_widened_at_the_end_that_is_best_and_so_often_at_most() -> None:
    losses: dict[float, list[float | None]] = {1.0: [3], 2.0: [2], 4.0: [1]}
    assert widened(trials(losses), 2) == {LR: (1.0, 2.0, 4.0, 8.0)}
    assert widened(trials(losses), 0) == {}
    losses[8.0] = [0.5]
    assert widened(trials(losses), 2) == {LR: (1.0, 2.0, 4.0, 8.0, 16.0)}
    assert widened(trials(losses), 1) == {}
    losses[8.0] = [None]  # beyond the end it diverged, so the end stays
    assert widened(trials(losses), 2) == {}


def test_each_of_several_keys_is_widened_and_words_are_not() -> None:
    objective = Objective(
        "rtd", (), {LR: (1.0, 2.0), "model.size": (8, 16), "model.init": ("a", "b")}
    )
    runs = []
    for lr in (1.0, 2.0):
        for size in (8, 16):
            runs += [
                run(lr + size, optimizer_lr=lr, model_size=size, model_init=init) for init in "ab"
            ]
    of_pairs = _collect_trials(objective, SMALL, runs, "valid.loss")
    assert best_of(of_pairs) == {LR: 1.0, "model.size": 8, "model.init": "a"}
    assert widened(of_pairs, 1) == {LR: (0.5, 1.0, 2.0), "model.size": (4, 8, 16)}


def test_an_objective_is_tuned_by_its_own_metric_also_a_mean_of_suites() -> None:
    """The larger value is the better one of probes; of the plan's loss it is the worse one."""
    plan = parse_plan(
        plan_with(
            objectives={"rtd": {"metric": "probes"}, "masked": {}},
            comparison__means={"probes": ["depth.accuracy", "topic.accuracy"]},
        )
    )
    runs = []
    for rate, depth, topic in ((1.0, 0.6, 0.5), (2.0, 0.5, 0.8), (4.0, 0.9, 0.3)):
        suites = tuple(probe(name, x) for name, x in (("depth", depth), ("topic", topic)))
        runs.append(replace(run(rate, optimizer_lr=rate), suites=suites))
    best = {o.name: best_of(trials_of(plan, o, runs)[SMALL]) for o in plan.objectives}
    assert best == {"rtd": {LR: 2.0}, "masked": {LR: 1.0}}


def test_trials_are_of_the_budget_that_they_have() -> None:
    plan: Plan = parse_plan(plan_with())
    runs = [run(1, optimizer_lr=1.0), run(2, LARGE, optimizer_lr=2.0)]
    by_budget = trials_of(plan, OBJECTIVE, runs)
    assert {budget: best_of(of) for budget, of in by_budget.items()} == {
        SMALL: {LR: 1.0},
        LARGE: {LR: 2.0},
    }


def test_what_metrics_of_other_objectives_would_have_chosen_is_said() -> None:
    """Only of trials that were scored by them, with a score for each setting."""
    objectives = {
        "masked": {},
        "dense": {"metric": "topic.accuracy"},
        "agreed": {"metric": "topic.accuracy"},
        "untuned": {"grid": {}, "options": ["optimizer.lr=1"]},
    }
    plan = parse_plan(plan_with(objectives=objectives))

    def scored(loss: float, accuracy: float, rate: float) -> Run:
        return replace(run(loss, optimizer_lr=rate), suites=(probe("topic", accuracy),))

    unscored = [run(loss, optimizer_lr=rate) for loss, rate in ((2.0, 1e-4), (3.0, 1e-3))]
    differing = [scored(2.0, 0.6, 1e-4), scored(3.0, 0.9, 1e-3)]
    agreeing = [scored(2.0, 0.9, 1e-4), scored(3.0, 0.6, 1e-3)]
    trials: list[Trials[Trial]] = []
    for name, runs in (("masked", unscored), ("dense", differing), ("agreed", agreeing)):
        trials += trials_of(plan, plan.objective(name), runs).values()
    other, same, unknown = describe_other_choices(plan, trials)
    chosen = "dense at 3.0e7 by valid.loss optimizer.lr=0.0001, not optimizer.lr=0.001."
    expect_facts(other, "other values", chosen)
    expect_facts(same, "same values", "agreed at 3.0e7 by valid.loss.")
    expect_facts(unknown, "topic.accuracy", "not known of masked")
    # One of two trials with the score says nothing.
    partly = trials_of(plan, plan.objective("masked"), [unscored[0], differing[1]])
    expect_facts(" ".join(describe_other_choices(plan, partly.values())), "not known of masked")
    alike = parse_plan(plan_with())
    assert describe_other_choices(alike, trials[:1]) == []
