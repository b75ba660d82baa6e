"""What the scripts of examples/league compute: simulated verdicts and ladders, predictions."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported import imported

from metaseq_lm.core.errors import UsageError
from metaseq_lm.reporting.stats import DEFAULT_TEST

LEAGUE = Path(__file__).resolve().parents[3] / "examples" / "league"
LINES = [json.loads(line) for line in (LEAGUE / "verdicts.jsonl").read_text().splitlines()]
SCATTER = "rows scatter 4 times as much"


@pytest.fixture(scope="module")
def verdicts() -> Any:
    """The module examples/league/verdicts.py."""
    return imported(LEAGUE / "verdicts.py")


def line_of(**values: Any) -> dict[str, Any]:
    """Return the line of the archive with some values."""
    return next(line for line in LINES if values.items() <= line.items())


@pytest.mark.parametrize(
    "values",
    [
        {"population": "normal", "seeds": 5, "comparisons": 1, "effect": 2.0},
        {"population": SCATTER, "seeds": 8, "comparisons": 1, "effect": 0.0},
    ],
)
def test_the_archive_is_what_the_simulation_makes(verdicts, values):
    line = line_of(**values)
    again = verdicts.simulate(*values.values(), line["leagues"])
    assert again["first"] == pytest.approx(line["first"], abs=2)
    assert again["wrong_leagues"] == pytest.approx(line["wrong_leagues"], abs=2)


def error(share: float, count: int) -> float:
    """Return three standard errors of a share of a number of leagues."""
    return 3 * math.sqrt(share * (1 - share) / count)


def test_leagues_without_an_effect_err_at_the_level():
    for line in LINES:
        if line.get("effect") == 0 and "comparisons" in line:
            share = line["wrong_leagues"] / line["leagues"]
            assert share <= 0.05 + error(0.05, line["leagues"]), line


def test_the_smallest_effect_is_seldom_called_equivalent():
    for line in LINES:
        if line.get("effect") == 2.0 and "comparisons" in line:
            share = line["first"].get("equivalent", 0) / line["leagues"]
            assert share <= 0.05 + error(0.05, line["leagues"]), line
            assert "better" not in line["first"]


def test_power_is_what_is_claimed(verdicts):
    checked = 0
    for line in LINES:
        if line.get("population") == "normal" and line.get("effect") and "comparisons" in line:
            seeds, comparisons = line["seeds"], line["comparisons"]
            claim = DEFAULT_TEST.power((seeds, seeds), line["effect"], comparisons=comparisons)
            share = line["first"].get("worse", 0) / line["leagues"]
            # The error of the claim itself, and Holm's gain beside the first step.
            assert abs(share - claim) <= 0.04 + error(max(claim, 0.05), line["leagues"]), line
            checked += 1
    assert checked >= 16


def test_a_permutation_test_alone_errs_where_spreads_differ():
    lines = [line for line in LINES if "tests" in line and line["population"] == SCATTER]
    counts = next(line["tests"] for line in lines if not line["effect"])
    assert counts["permutation"] > 80 and counts["both"] < 72  # of 1,000; 3 sd from 50


GAINS = [line for line in LINES if "gains" in line]


def test_the_archive_of_gains_is_what_the_simulation_makes(verdicts):
    line = line_of(population="nine of ten solve it", controls=4, effect=2.0)
    condition = line["population"], line["control_sd"]
    again = verdicts.simulate_gains(condition, (4, 4), 2.0, line["leagues"])
    for key in ("gains", "first"):
        assert again[key] == pytest.approx(line[key], abs=2)


def test_verdicts_on_gains_err_at_the_level():
    assert len(GAINS) == 30
    for line in GAINS:
        wrong = line["first"].get("equivalent", 0) if line["effect"] else line["gains"]["both"]
        assert wrong / line["leagues"] <= 0.05 + error(0.05, line["leagues"]), line
        assert not line["effect"] or "better" not in line["first"]


def test_a_permutation_of_scores_less_the_mean_of_untrained_ones_errs_alone():
    """So it only guards Welch's test, which alone decides on four seeds, where nothing can."""
    equal = [line for line in GAINS if not line["effect"]]
    assert max(line["gains"]["scores less mean"] / line["leagues"] for line in equal) > 0.5
    four = [line["gains"] for line in GAINS if line["seeds"] == 4]
    assert max(counts["Welch"] for counts in four) > 100
    assert {counts["both"] for counts in four} == {0}


TUNED = [json.loads(line) for line in (LEAGUE / "tuned.jsonl").read_text().splitlines()]


def test_the_archive_of_tuned_leagues_is_what_the_simulation_makes(verdicts):
    condition = (1, 1.0, 3, 3.0, False)
    keys = ("rows", "noise", "tuning_seeds", "effect", "flat_baseline")
    (line,) = [line for line in TUNED if tuple(line[key] for key in keys) == condition]
    again = verdicts.simulate_tuned(condition, line["leagues"])
    assert again["first"] == pytest.approx(line["first"], abs=2)


def test_tuned_objectives_with_the_same_curve_are_called_different_at_the_level():
    """Where one seed chooses, they are in a quarter of the leagues or more."""
    for line in TUNED:
        if line["effect"] or line["flat_baseline"]:
            continue
        share = line["wrong_leagues"] / line["leagues"]
        if line["tuning_seeds"] == 1:
            assert share > 0.2
        else:
            assert share <= 0.05, line


class Rows:
    """Scores of four metrics at the budgets that the expectations name."""

    def __init__(self, scores: dict[tuple[str, float, str], list[float]]) -> None:
        self.scores = scores
        self.objectives = ["causal"]

    def of(self, name: str, budget: float, metric: str) -> list[float]:
        return self.scores.get((name, budget, metric), [])

    def untrained(self, name: str, budget: float, metric: str) -> list[float]:
        return self.scores.get(("untrained", budget, metric), [])


def test_an_expectation_is_held_not_held_or_not_measured():
    module = imported(LEAGUE / "expectations.py")
    seeds = [0.01 * i for i in range(8)]
    rows = Rows(
        {
            ("causal", 6e10, module.BRACKETS): [0.9 + x for x in seeds],
            ("masked_40", 6e10, module.BRACKETS): [0.6 + x for x in seeds],
            ("untrained", 6e10, module.TOPIC): [0.5 + x for x in seeds],
            ("causal", 6e10, module.TOPIC): [0.51 + x for x in seeds],
            ("causal", 2.5e11, module.ATTRACTOR): [0.5, 0.95, 0.96, 1.0],
            ("masked_40", 1e12, module.COPY): [0.95, 0.96, 0.2],
            ("masked_40", 1e12, module.ATTRACTOR): [0.95, 0.96, 0.2],
        }
    )
    rows.sides = module.Scores.sides.__get__(rows)  # type: ignore[attr-defined]
    ordered = [line[-1] for line in module.ordered_rows(rows)]
    assert ordered == ["held", "not measured yet", "not held"]
    solved = [(line[1], line[-1]) for line in module.solved_rows(rows)]
    assert solved == [("3 of 4 seeds", "held"), ("2 of 3 seeds; 2 of 3 seeds", "not held")]


def test_a_metric_leaves_its_control_or_does_not(monkeypatch, capsys):
    module = imported(LEAGUE / "controls.py")
    monkeypatch.setattr(sys, "argv", ["controls.py", str(LEAGUE / "english.yaml")])
    module.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    signs = {(line[0], line[1]): [x for x in line if x in "+-"] for line in lines if "±" in line}
    assert signs["probes", "causal"] == ["+", "+", "+"]
    assert signs["probes", "rtd"] == ["-", "+", "+"]  # the first is below its untrained models
    assert signs["relation.accuracy", "masked_40"] == ["+", "+"]  # at 1e12 as good as untrained
    # Scores of 6 and 6 seeds that scatter by 2.6 and 0.4 points.
    row = ["probes", "masked_40", "1.0e12", "6", "-8.06", "3.46"]
    # Gains from 47.52 and 47.54: the untrained models are nearly the same.
    assert [*row, "-8.04", "0.0022"] in lines
    assert ["probes", "3.92", "13.87", "61.37"] in lines  # chance, majority, word
    scores = np.random.default_rng(0).normal(scale=0.01876, size=(600, 2, 6))
    seen = [DEFAULT_TEST.p(x + 0.0346, y) < 0.05 for x, y in scores]
    assert sum(seen) / len(seen) == pytest.approx(0.8, abs=0.05)


def test_all_pairs_of_objectives(monkeypatch, capsys):
    module = imported(LEAGUE / "pairs.py")
    monkeypatch.setattr(sys, "argv", ["pairs.py", "laptop", "1e12", "rtd", "replaced", "electric"])
    module.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    # 8 against 8 seeds that do not overlap: 2 of 12,870 assignments; three pairs.
    assert ["replaced", "rtd", "14.2", "(12.1", "to", "16.4)", "0.0002", "0.0005"] in lines
    assert [line[:2] for line in lines[-3:]] == [
        ["replaced", "electric"],
        ["replaced", "rtd"],
        ["electric", "rtd"],
    ]
    for words, told in (
        (["laptop"], "give a plan"),
        (["laptop", "much"], "no number of FLOPs"),
        (["laptop", "1e12", "mine"], "no run at 1e12 FLOPs of mine"),
    ):
        monkeypatch.setattr(sys, "argv", ["pairs.py", *words])
        with pytest.raises(UsageError, match=told):
            module.main()


def test_orders_of_two_leagues_agree_or_do_not(monkeypatch, capsys):
    module = imported(LEAGUE / "agreement.py")
    rng = np.random.default_rng(3)
    scores = [rng.normal(i, 0.1, size=5) for i in range(12)]
    assert module.tau(scores, scores) == pytest.approx(1)
    assert module.tau(scores, scores[::-1]) == pytest.approx(-1)
    monkeypatch.setattr(module, "DRAWS", 100)
    low, high = module.interval(scores, [rng.normal(i, 0.1, size=6) for i in range(12)])
    assert module.SHOWN < 0.9 < low and high == pytest.approx(1)  # seeds do not change the order
    orders = [rng.normal(rng.permutation(12)[:, None], 0.1, size=(12, 5)) for _ in range(20)]
    limits = np.array([module.interval(scores, list(order)) for order in orders])
    # Of random orders the interval has 0 in about nine of ten, and is rarely above what is shown.
    assert ((limits[:, 0] <= 0) & (limits[:, 1] >= 0)).mean() > 0.8
    assert (limits[:, 0] > module.SHOWN).mean() <= 0.05
    same = [rng.permutation(scores[0] + 0.1 * i) for i in range(4)]
    low, high = module.interval(same, scores[:4], of_seeds=True)
    assert low <= module.tau(same, scores[:4]) <= high  # of four objectives, whose seeds overlap
    monkeypatch.setattr(sys, "argv", ["agreement.py", "laptop"])
    module.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "e1" in line]
    last = next(row for row in rows if row[0] == "2.5e11")
    assert last[:3] == ["2.5e11", "7", "0.71"] and last[-3:] == ["13", "of", "13"]
    words = ["agreement.py", "laptop", "1e12", str(LEAGUE / "english.yaml"), "4e12"]
    monkeypatch.setattr(sys, "argv", words)
    module.main()
    assert "shown above 0.3" in capsys.readouterr().out  # four objectives tell nothing
    for wrong, told in (("much", "no number of FLOPs"), ("1e13", "no runs at 1.0e13 FLOPs")):
        monkeypatch.setattr(sys, "argv", [*words[:2], wrong, *words[3:]])
        with pytest.raises(UsageError, match=told):
            module.main()


# ---------------------------------------------------------------- ladders

LADDERS = [json.loads(line) for line in (LEAGUE / "ladders.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ladders() -> Any:
    """The module examples/league/ladders.py."""
    return imported(LEAGUE / "ladders.py")


def ladder_lines(kind: str, **values: Any) -> list[dict[str, Any]]:
    """Return the simulations of a kind with some values."""
    values = {"kind": kind, **values}
    return [line for line in LADDERS if values.items() <= line.items()]


def test_the_archive_of_ladders_is_what_the_simulation_makes(ladders):
    (line,) = ladder_lines("crossovers", first=-1.0, last=1.0, seeds=5)
    assert ladders.simulate_crossovers(-1.0, 1.0, 5) == pytest.approx(line, abs=2)
    (line,) = ladder_lines("predictions", truth="change of phase", rungs=3, seeds=3)
    again = ladders.simulate_predictions("change of phase", 3, 3)
    for key in ("rejected", "covered"):
        assert again[key] == pytest.approx(line[key], abs=2)


def test_stretched_intervals_cover_normal_means_and_plain_ones_do_not():
    for line in ladder_lines("means", population="normal"):
        assert line["stretched"] / line["of"] == pytest.approx(0.95, abs=error(0.05, line["of"]))
        assert line["plain bootstrap"] / line["of"] < 0.95 - error(0.05, line["of"])


def test_crossovers_are_seldom_established_where_there_is_none():
    without = [line for line in ladder_lines("crossovers") if line["covered"] is None]
    assert len(without) == 4
    for line in without:
        assert line["established"] / line["of"] <= 0.05
    for line in ladder_lines("crossovers"):
        if line["covered"] is not None:
            assert line["covered"] / line["of"] >= 0.95 - error(0.05, line["of"])


def test_intervals_of_equal_scores_and_of_predictions_cover():
    for line in ladder_lines("equal score"):
        shown = line["of"] - line["without"]
        assert line["covered"] / shown >= 0.95 - error(0.05, shown)
    for truth in ("logit line", "power law"):
        for line in ladder_lines("predictions", truth=truth):
            shown = line["of"] - line["rejected"]
            assert line["rejected"] / line["of"] <= 0.05 + error(0.05, line["of"])
            assert line["covered"] / shown >= 0.95 - error(0.05, shown)


def test_a_prediction_in_hindsight_uses_smaller_budgets_only(ladders):
    """Logits of -1, 0 and 1 of the share of 0.8, at budgets of equal ratio, then something else.

    The losses fall by a power law; the line from losses to logits is known, and meets its mean.
    """
    noise = 1e-3 * np.linspace(-1, 1, 8)
    budgets = [4.0**i for i in range(4)]
    means = [0.8 / (1 + math.exp(-x)) for x in (-1, 0, 1)]
    ladder_of = ladders.ObjectiveLadder.of
    scores = ladder_of({b: mean + noise for b, mean in zip(budgets, [*means, 0.5])})
    losses = ladder_of({b: 1 + 2 * b**-0.5 + 0 * noise for b in budgets})
    case = ladders.Case("a", scores, losses, 0.8, 0.1)
    metric = ladders.Metric("accuracy", True, False)
    result = ladders.look_back(case, metric)
    assert result.error("curve") == pytest.approx(0.8 / (1 + math.exp(-2)) - 0.5, abs=1e-3)
    assert not ladders.covers(result.ends, case.value) and result.wide is None
    assert [result.error(rule) for rule in ladders.RULES] == pytest.approx([0.085, 0.269], abs=1e-3)
    slope = np.polyfit([3, 2, 1.5], [-1, 0, 1], 1)
    through = 0.8 / (1 + math.exp(-np.polyval(slope, 1.25)))
    assert result.expected["through the loss"] == pytest.approx(through, abs=2e-3)
    wide = ladders.widened([result] * 1 + [ladders.look_back(case, metric) for _ in range(3)])
    assert all(ladders.covers(each.wide, case.value) for each in wide)
    short = replace(case, ladder=scores.at(budgets[1:]))
    assert ladders.look_back(short, metric).fit is None
