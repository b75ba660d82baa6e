"""The choice of settings: draws against all draws, its sd in closed form, its part of an error."""

import math
from dataclasses import replace
from itertools import product

import league_rows as make
import numpy as np
import pytest
from league_plans import plan_with
from league_rows import BRACKETS, BUDGET, TOPIC
from league_standings import action_of, only, standing

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league import score_errors
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.plan import Objective
from metaseq_lm.league.plan_files import parse_plan
from metaseq_lm.league.score_errors import choice_error, tuning_seeds_needed
from metaseq_lm.league.standings import FLAG, NOTE, VOID, Standing
from metaseq_lm.league.tuning import _collect_trials
from metaseq_lm.league.verdict import DecisionRule, contrast, decide_all
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.settings import Row, TuningRecord
from metaseq_lm.reporting.stats import Error
from metaseq_lm.sweeps.samplers import GridSampler
from metaseq_lm.sweeps.trials import (
    DRAWS,
    Trial,
    Trials,
    plausible_settings,
    sd_of_choice,
    seed_draws,
    shares_of_best,
)

LR = "optimizer.lr"
# By setting and seed: the first wins with seed 0 alone, by as much as the others lose.
SCORES = np.array([[9.0, 1.0, 3.0], [3.0, 4.0, 3.5], [2.0, 2.0, 4.0], [0.0, 0.0, 0.0]])


def all_draws(scores: np.ndarray, lower: bool) -> list[float]:
    """Return the share of all draws of the seeds, one after the other, that choose each setting."""
    seeds, counts = scores.shape[1], [0] * len(scores)
    for draw in product(range(seeds), repeat=seeds):
        sums = [sum(row[seed] for seed in draw) for row in scores]
        counts[sums.index(min(sums) if lower else max(sums))] += 1
    return [count / seeds**seeds for count in counts]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_draws_choose_as_all_draws_of_the_seeds_do(seeds: int, lower: bool) -> None:
    scores = np.hstack([SCORES, SCORES[:, ::-1] * 2])[:, :seeds]
    assert shares_of_best(scores, lower) == pytest.approx(all_draws(scores, lower))


def test_the_27_draws_of_three_seeds() -> None:
    assert shares_of_best(SCORES, False) * 27 == pytest.approx([19, 7, 1, 0])
    assert len(seed_draws(3)[0]) == 10 and seed_draws(9)[0].sum() == 9 * DRAWS


@pytest.mark.parametrize(
    "shares, least, settings",
    [
        ([0.3, 0.7, 0.0], 0.1, [1, 0]),
        ([0.1, 0.8, 0.099], 0.1, [1, 0]),
        ([0.25, 0.25, 0.25, 0.25], 0.1, [0, 1, 2]),
        ([0.4, 0.3, 0.3], 0.5, [0]),
    ],
)
def test_plausible_settings_are_the_most_frequent_and_three_at_most(
    shares: list[float], least: float, settings: list[int]
) -> None:
    assert plausible_settings(np.array(shares), least) == settings


def test_the_sd_of_choice_is_that_of_the_expected_score() -> None:
    """Of two settings that are d apart it is d sqrt(p (1 - p)), of one 0."""
    assert sd_of_choice([0.5, 0.9], [0.25, 0.75]) == pytest.approx(0.4 * math.sqrt(0.1875))
    assert sd_of_choice([0.5], [1.0]) == 0


# ---------------------------------------------------------------- trials and rows


def trials(scores: np.ndarray, rates: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)) -> Trials[Trial]:
    """Return trials with a loss for each rate and seed."""
    runs = []
    for rate, of_rate in zip(rates, scores):
        for seed, loss in enumerate(of_rate):
            run = make.make_run(seed, [5.0, float(loss)], optimizer__lr=rate)
            runs.append(run)
    return _collect_trials(Objective("masked", (), {LR: rates}), BUDGET, runs, "valid.loss")


def widened(of_rates: Trials[Trial], least: float) -> dict[str, tuple[float, ...]]:
    """Return the rates beyond ends that are plausible."""
    return GridSampler(2, lambda of: [values for values, _ in of.plausible(least)]).wider(of_rates)


def test_trials_have_plausible_settings_and_are_widened_at_each() -> None:
    of_rates = trials(10 - SCORES)
    assert of_rates.plausible(0.0) == (({LR: 1.0}, 1.0),)
    (first, share), (second, other) = of_rates.plausible(0.1)
    assert (first, second) == ({LR: 1.0}, {LR: 2.0})
    assert (share, other) == pytest.approx((19 / 26, 7 / 26))
    assert widened(of_rates, 0.1) == {LR: (0.5, 1.0, 2.0, 4.0, 8.0)}
    flipped = trials(10 - SCORES[::-1])  # the best is the last rate, the other one is within
    assert widened(flipped, 0.1) == {LR: (1.0, 2.0, 4.0, 8.0, 16.0)}
    only_plausible = trials(10 - SCORES[[1, 0, 2, 3]])  # the end is best in 7 of 27 draws
    assert widened(only_plausible, 0.0) == {}
    assert widened(only_plausible, 0.1) == {LR: (0.5, 1.0, 2.0, 4.0, 8.0)}


def mixed_row(name: str, means: tuple[float, float], shares: tuple[float, float]) -> Row:
    """Return a row with runs at two rates, each plausible."""
    rates = 2e-3, 3e-3
    row = make.make_row(name, means[0])
    shift = means[1] - means[0]
    others = []
    for run in make.make_row(name, means[1]).runs:
        log = [{**line, "loss": line["loss"] + 0.01 * shift} for line in run.log]
        others.append(replace(run, values={**run.values, LR: rates[1]}, log=log))
    settings = tuple(({LR: rate}, share) for rate, share in zip(rates, shares))
    tuning = TuningRecord(
        {LR: (1e-3, *rates, 4e-3)}, settings[0][0], make.trials(), BUDGET, settings
    )
    return replace(row, runs=(*row.runs, *others), tuning=tuning)


def test_scores_of_a_row_are_expected_ones_over_its_settings() -> None:
    row = mixed_row("mine", (0.9, 0.7), (0.75, 0.25))
    single = make.make_row("mine", 0.9).scores(BRACKETS)
    assert row.scores(BRACKETS) == pytest.approx([score - 0.25 * 0.2 for score in single])
    assert row.sd_of_choice(BRACKETS) == pytest.approx(0.2 * math.sqrt(0.1875))
    assert row.sd_of_choice(TOPIC) == 0
    assert make.make_row("mine", 0.9).sd_of_choice(BRACKETS) is None
    # A seed without a score at one of the settings has no expected score.
    failed = make.change(row, make.with_results(status="failed"), [9])
    assert len(failed.scores(BRACKETS)) == 7


def test_gates_judge_each_plausible_setting(baseline: Row) -> None:
    row = mixed_row("mine", (0.9, 0.8), (0.75, 0.25))
    tuning = row.tuning
    assert tuning is not None
    options = {"causal": frozenset({LR}), "mine": frozenset({LR})}

    def judged(row: Row) -> Standing:
        return standing(baseline, row, options=options)

    assert not [f for f in judged(row).findings if f.action != NOTE]
    failed = make.change(row, make.with_results(status="failed"), [9])
    assert only(judged(failed).findings, "missing").action == FLAG
    assert action_of(judged(replace(row, runs=row.runs[:8])), BRACKETS) == VOID
    at_edge = replace(tuning, grid={LR: (2e-3, 3e-3)})
    found = judged(replace(row, tuning=at_edge)).findings
    assert [f.action for f in found if f.gate == "edge of the grid"] == [FLAG, NOTE]
    narrower = replace(tuning, shares=tuning.shares[:1])  # the other rate trained, too
    assert only(judged(replace(row, tuning=narrower)).findings, "tuning").action == FLAG


# ---------------------------------------------------------------- verdicts

RULE = DecisionRule(0.05)
SIDE = [0.80, 0.82, 0.81, 0.83, 0.79, 0.80, 0.81, 0.82]
OTHER = [x + 0.06 for x in SIDE]


def standings(*sds: float | None, seeds: int = 3) -> Standings:
    """Return decided standings of rows that are 0.06 above the baseline, with sd of choice."""
    entries = []
    for i, sd in enumerate(sds):
        scores = {"a.accuracy": OTHER if i else SIDE}
        of_choice = {} if sd is None else {"a.accuracy": sd}
        entries.append(StandingsEntry(f"row{i}", 1e10, scores, sds_of_choice=of_choice))
    metric = Metric.of("a.accuracy", [0.5])
    return Standings("t", [metric], "row0", RULE, entries, tuning_seeds=seeds).decided()


def test_one_plausible_setting_and_untuned_rows_have_the_verdict_of_the_seeds() -> None:
    expected = decide_all([(OTHER, SIDE)] * 2, RULE)
    for sds in ((None, None, None), (0.0, 0.0, 0.0)):
        assert [entry.decision for entry in standings(*sds).entries[1:]] == expected


def test_choices_are_pooled_over_the_rows_of_a_budget() -> None:
    """So a row whose three seeds agree by chance has the error that others show."""
    shown = standings(0.0, 0.0, 0.06)
    (first, second) = (entry.decision for entry in shown.entries[1:])
    assert first and second and first.interval == second.interval
    error = choice_error([0.0, 0.0, 0.06], 3, 2)
    assert (error.variance, error.freedom) == pytest.approx((2 * 0.06**2 / 3 * 3 / 2, 3))
    alone = contrast((OTHER, SIDE), RULE.level)
    assert first.interval and alone.interval and first.interval[0] < alone.interval[0] < 0.06
    assert first.p > alone.p and first.difference == alone.difference
    untuned = standings(0.06, None).entries[1].decision
    assert untuned and untuned.errors == (choice_error([0.06], 3, 1),)


def test_an_error_that_seeds_do_not_reduce_is_said() -> None:
    near = [x + 0.01 for x in SIDE]
    (decision,) = decide_all([(near, SIDE)], RULE, [[Error(0.04**2, 4)]])
    assert not decision.is_within_reach and "seeds" in decision.text
    (within,) = decide_all([(near, SIDE)], RULE, [[Error(0.01**2, 4)]])
    assert within.is_within_reach


# ---------------------------------------------------------------- plans


def test_the_tuning_seeds_that_are_enough() -> None:
    """The sd of the worst choice of two settings, simulated, leaves the effect with its power."""
    seeds = tuning_seeds_needed(1.0, 1.0, 0.05, 1)
    needed = 1.959964 + 0.841621
    assert 1 / math.sqrt(seeds - 1) * needed * score_errors.WORST * math.sqrt(2) <= 1
    assert 1 / math.sqrt(seeds - 2) * needed * score_errors.WORST * math.sqrt(2) > 1
    assert tuning_seeds_needed(1.0, 100.0, 0.05, 7) == score_errors.FEWEST
    rng, worst = np.random.default_rng(0), 0.0
    for distance in np.arange(0.5, 4, 0.25):
        means = rng.normal(size=(20_000, 2)) + np.array([0, distance])
        wrong = float((means[:, 0] > means[:, 1]).mean())
        worst = max(worst, distance * math.sqrt(wrong * (1 - wrong)))
    assert worst == pytest.approx(score_errors.WORST, abs=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning__plausible": 0.1},  # of one seed
        {"tuning__plausible": 0.7, "tuning__seeds": [101, 102, 103]},
        {"tuning__plausible": "x", "tuning__seeds": [101, 102, 103]},
        {"tuning__noise": 0.1},
        {"tuning__noise": -1, "tuning__plausible": 0.1, "tuning__seeds": [101, 102, 103]},
        {"tuning__once": ["task.batch_size"]},
        {"tuning__once": "task.batch_size"},
    ],
)
def test_keys_of_the_choice_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="tuning|once"):
        parse_plan(plan_with(**changes))


def test_an_option_that_is_tuned_once_is_no_part_of_other_grids() -> None:
    grid = {LR: [1e-3, 2e-3], "task.batch_size": [4, 8, 16]}
    plan = parse_plan(
        plan_with(
            budgets=[1e9, 2e9, 4e9],
            usual_budgets=None,
            tuning__grid=grid,
            tuning__budgets=None,
            tuning__once=["task.batch_size"],
            tuning__seeds=[101, 102],
            controls__shuffled=False,
        )
    )
    (objective, *_) = plan.objectives
    assert [plan.trials(objective, budget) for budget in plan.tuning.budgets] == [4, 12, 4]
