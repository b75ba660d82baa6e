"""Simulate the verdicts of leagues: how often they are wrong, and how often they see an effect.

python examples/league/verdicts.py examples/league/verdicts.jsonl              # print tables
python examples/league/verdicts.py --simulate --out examples/league/verdicts.jsonl
python examples/league/verdicts.py examples/league/tuned.jsonl                 # print tables
python examples/league/verdicts.py --tuned --out examples/league/tuned.jsonl   # simulate tuning

A league has groups of seven rows, a group for each budget, which share the scores of a baseline.
Its first row is worse than the baseline by an effect, all others are equal to it in the mean.
So are their gains over untrained models, where those are simulated. Where tuning is, all objectives
have the same curve over the values of their grid.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.verdict import (
    BETTER,
    EQUIVALENT,
    VERDICTS,
    WORSE,
    DecisionRule,
    Gain,
    decide_all,
)
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.stats import DEFAULT_TEST, LEVEL, Test, assignments, holm
from metaseq_lm.sweeps.trials import plausible_settings, sd_of_choice, shares_of_best

SEEDS = (4, 5, 8, 10)
GROUP = 7
SMALLEST_EFFECT = 2.0  # in standard deviations over seeds
LEAGUES = {4: 1000, 5: 1000, 8: 1000, 10: 400}
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Population:
    """What scores of seeds are drawn from: those of a row, of the baseline, and their pooled sd."""

    row: Draw
    baseline: Draw
    sd: float


PERMUTATION, WELCH = Test("permutation"), Test("welch")
TESTS = {"permutation": PERMUTATION.p, "Welch": WELCH.p, "both": DEFAULT_TEST.p}


def normal(sd: float) -> Draw:
    """Return normal scores."""
    return lambda rng, n: rng.normal(scale=sd, size=n)


def near_one(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return accuracies with a long tail below 1."""
    return rng.beta(30, 1, size=n)


def solved(share: float) -> Draw:
    """Return accuracies of a task that a share of the seeds solves, the others not at all."""

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.where(rng.random(n) < share, 0.97, 0.55) + rng.normal(scale=0.02, size=n)

    return draw


def sd_solved(share: float) -> float:
    """Return the standard deviation of `solved`."""
    return math.sqrt(0.42**2 * share * (1 - share) + 0.02**2)


POPULATIONS = {
    "normal": Population(normal(1.0), normal(1.0), 1.0),
    "near 1": Population(near_one, near_one, math.sqrt(30 / (31**2 * 32))),
    "half of the seeds solve it": Population(solved(0.5), solved(0.5), sd_solved(0.5)),
    "nine of ten solve it": Population(solved(0.9), solved(0.9), sd_solved(0.9)),
    "rows scatter 4 times as much": Population(normal(4.0), normal(1.0), math.sqrt(8.5)),
}


# Of gains: the population of trained scores, and the sd of untrained ones in pooled sd of those.
GAINS = (
    ("normal", 1.0),
    ("normal", 4.0),
    ("rows scatter 4 times as much", 1.0),
    ("half of the seeds solve it", 0.3),
    ("nine of ten solve it", 0.3),
)
SIZES = ((4, 4), (8, 3), (8, 8))  # seeds and untrained models
GAIN_LEAGUES = 500  # a gain takes the time of three scores
GAIN, HEAD_START = 10.0, 7.0  # in pooled sd: of all rows, and of the baseline before training


def conditions() -> Iterator[tuple[str, int, int, float]]:
    """Yield population, seeds, comparisons and the effect of the first row, in sd."""
    for name in POPULATIONS:
        for seeds in SEEDS:
            for comparisons in (1, GROUP, 4 * GROUP) if name == "normal" else (1, GROUP):
                effects = [0.0, SMALLEST_EFFECT]
                limit = DEFAULT_TEST.detectable((seeds, seeds), comparisons=comparisons)
                if name == "normal" and limit:
                    effects.append(limit)
                for effect in effects:
                    yield name, seeds, comparisons, effect


def draw_league(
    rng: np.random.Generator, population: Population, seeds: int, comparisons: int, effect: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the scores of each row and of its baseline; the first row is worse by the effect."""
    pairs = []
    for i in range(comparisons):
        if i % GROUP == 0:
            baseline = population.baseline(rng, seeds)
        pairs.append((population.row(rng, seeds), baseline))
    pairs[0] = pairs[0][0] - effect * population.sd, pairs[0][1]
    return pairs


def simulate(
    name: str, seeds: int, comparisons: int, effect: float, leagues: int
) -> dict[str, Any]:
    """Return the counts of verdicts on the first row and on the others."""
    population = POPULATIONS[name]
    rule = DecisionRule(SMALLEST_EFFECT * population.sd, comparisons=comparisons)
    key = [seeds, comparisons, round(1000 * effect), list(POPULATIONS).index(name)]
    rng = np.random.default_rng(key)
    first, others, wrong_leagues = Counter(), Counter(), 0
    for _ in range(leagues):
        pairs = draw_league(rng, population, seeds, comparisons, effect)
        verdicts = [decision.verdict for decision in decide_all(pairs, rule)]
        equal = verdicts[1:] if effect else verdicts
        first[verdicts[0]] += 1
        others.update(equal)
        wrong_leagues += not {BETTER, WORSE}.isdisjoint(equal)
    line: dict[str, Any] = {"population": name, "seeds": seeds, "comparisons": comparisons}
    line |= {"effect": effect, "leagues": leagues, "wrong_leagues": wrong_leagues}
    return line | {"first": dict(sorted(first.items())), "others": dict(sorted(others.items()))}


def simulate_unseen(seeds: int, leagues: int) -> dict[str, Any]:
    """Return verdicts on a row of which one seed in ten fails, beside a baseline that never does.

    The true difference of 0.042 is larger than the smallest effect that matters, 0.03.
    """
    rng, counts = np.random.default_rng([seeds, 1]), Counter()
    rule = DecisionRule(0.03)
    for _ in range(leagues):
        pair = solved(0.9)(rng, seeds), solved(1.0)(rng, seeds)
        counts[decide_all([pair], rule)[0].verdict] += 1
    return {"unseen": True, "seeds": seeds, "leagues": leagues, "first": dict(counts)}


def simulate_tests(
    name: str, seeds: int, comparisons: int, effect: float, leagues: int
) -> dict[str, Any]:
    """Return in how many leagues a test calls a row different.

    Without an effect that is any row, with one it is the first, which has it.
    """
    population = POPULATIONS[name]
    key = [seeds, comparisons, round(1000 * effect), list(POPULATIONS).index(name), 2]
    rng, counts = np.random.default_rng(key), Counter()
    for _ in range(leagues):
        pairs = draw_league(rng, population, seeds, comparisons, effect)
        for test, p_of in TESTS.items():
            corrected = holm([p_of(row, baseline) for row, baseline in pairs])
            counts[test] += (corrected[0] if effect else min(corrected)) < LEVEL
    line: dict[str, Any] = {"tests": dict(counts), "population": name, "seeds": seeds}
    return line | {"rows": comparisons, "effect": effect, "leagues": leagues}


# ---------------------------------------------------------------- gains


def trained_or_not_p(
    scores: np.ndarray, base: np.ndarray, untrained: np.ndarray, base_untrained: np.ndarray
) -> float:
    """Return the exact p of a difference of gains over all labels "trained" within each side."""
    gains = []
    for trained, control in ((scores, untrained), (base, base_untrained)):
        ways = assignments(len(trained), len(control))
        sums, total = ways @ np.concatenate([trained, control]), trained.sum() + control.sum()
        gains.append(sums / len(trained) - (total - sums) / len(control))
    observed = scores.mean() - untrained.mean() - base.mean() + base_untrained.mean()
    others = np.sort(gains[1])
    # So many differences are at least, and at most, as large as the observed one.
    at_least = np.searchsorted(others, gains[0] - observed + 1e-12, "right").sum()
    at_most = (len(others) - np.searchsorted(others, gains[0] - observed - 1e-12, "left")).sum()
    return min(1.0, 2 * float(min(at_least, at_most)) / (len(gains[0]) * len(others)))


def pairs_p(
    scores: np.ndarray, base: np.ndarray, untrained: np.ndarray, base_untrained: np.ndarray
) -> float:
    """Return p of the permutation of gains of single seeds, each with an untrained model."""
    return PERMUTATION.p(scores - untrained, base - base_untrained)


GAIN_TESTS = {
    "trained or not": trained_or_not_p,
    "pairs": pairs_p,
    "scores less mean": PERMUTATION.p,
    "Welch": WELCH.p,
}
BOTH = "both"  # the last two, what `decide_all` has


def draw_gains(
    rng: np.random.Generator, condition: tuple[str, float], sizes: tuple[int, int], effect: float
) -> list[tuple[Gain, Gain]]:
    """Return the gain of each row and of its baseline; the first row gains less by the effect."""
    population, control_sd = POPULATIONS[condition[0]], condition[1]
    seeds, controls = sizes
    unit = population.sd

    def untrained(level: float) -> np.ndarray:
        return (level - GAIN) * unit + rng.normal(scale=control_sd * unit, size=controls)

    base = Gain(population.baseline(rng, seeds) + HEAD_START * unit, untrained(HEAD_START))
    pairs = []
    for i in range(GROUP):
        loss = effect * unit * math.sqrt(1 + control_sd**2) if i == 0 else 0.0
        pairs.append((Gain(population.row(rng, seeds) - loss, untrained(0.0)), base))
    return pairs


def simulate_gains(
    condition: tuple[str, float], sizes: tuple[int, int], effect: float, leagues: int
) -> dict[str, Any]:
    """Return in how many leagues a test calls a gain different, and the verdicts on the first.

    Without an effect that is any gain, with one it is the first, which has it, in sd of a gain.
    """
    rng = np.random.default_rng([*sizes, round(1000 * effect), GAINS.index(condition), 3])
    unit = POPULATIONS[condition[0]].sd * math.sqrt(1 + condition[1] ** 2)
    rule = DecisionRule(SMALLEST_EFFECT * unit, comparisons=GROUP)
    tests = dict(GAIN_TESTS)
    if condition != GAINS[0] or sizes != SIZES[0]:  # elsewhere it says the same, and takes long
        del tests["trained or not"]
    if sizes[0] != sizes[1]:
        del tests["pairs"]
    counts, first = Counter(dict.fromkeys((*tests, BOTH), 0)), Counter()
    for _ in range(leagues):
        pairs = draw_gains(rng, condition, sizes, effect)
        decisions = decide_all([gain.over(base) for gain, base in pairs], rule)
        corrected = {BOTH: [decision.corrected for decision in decisions]}
        for test, p_of in tests.items():
            values = []
            for gain, base in pairs:
                (scores, untrained), (base_scores, base_untrained) = gain.samples, base.samples
                values.append(p_of(scores, base_scores, untrained, base_untrained))
            corrected[test] = holm(values)
        for test, values in corrected.items():
            counts[test] += (values[0] if effect else min(values)) < LEVEL
        first[decisions[0].verdict] += 1
    line: dict[str, Any] = {"gains": dict(counts), "population": condition[0]}
    line |= {"control_sd": condition[1], "seeds": sizes[0], "controls": sizes[1]}
    return line | {"effect": effect, "leagues": leagues, "first": dict(sorted(first.items()))}


# ---------------------------------------------------------------- tuning

# The expected score at each rate, in sd over seeds: -8, -3, 0 and -6 points where the sd is 2.
CURVE = np.array([-4.0, -1.5, 0.0, -3.0])
FLAT = np.zeros(4)  # of a baseline whose rate does not matter
TUNED_LEAGUES, TUNED_SEEDS, PLAUSIBLE = 1000, 8, 0.1
FIXED = 0  # tuning seeds where all objectives have the best rate
SCORE = Metric.of("score", [0.0], "higher")
Tuned = tuple[int, float, int, float, bool]  # rows, noise, tuning seeds, effect, flat baseline


def tuned_conditions() -> Iterator[Tuned]:
    """Yield conditions; noise is the sd of a trial in sd over seeds."""
    for rows, effect in product((1, GROUP), (0.0, 2.0, 3.0)):
        yield rows, 0.0, FIXED, effect, False
        for noise, seeds in product((1.0, 2.0), (1, 3, 5)):
            yield rows, noise, seeds, effect, False
    for rows, noise, seeds in product((1, GROUP), (1.0, 2.0), (3, 5)):
        yield rows, noise, seeds, 0.0, True


def draw_tuned(
    rng: np.random.Generator, name: str, curve: np.ndarray, noise: float, seeds: int
) -> StandingsEntry:
    """Return a row after tuning: the scores of its plausible settings, and the sd of choice."""
    finals = curve[:, None] + rng.normal(size=(len(curve), TUNED_SEEDS))
    if seeds == FIXED:
        return StandingsEntry(name, 1.0, {"score": finals[CURVE.argmax()].tolist()})
    trials = curve[:, None] + rng.normal(scale=noise, size=(len(curve), seeds))
    if seeds == 1:
        return StandingsEntry(name, 1.0, {"score": finals[trials[:, 0].argmax()].tolist()})
    shares = shares_of_best(trials, lower_is_better=False)
    chosen = plausible_settings(shares, PLAUSIBLE)
    weights = shares[chosen] / shares[chosen].sum()
    sd = sd_of_choice(finals[chosen].mean(axis=1).tolist(), weights.tolist())
    return StandingsEntry(
        name, 1.0, {"score": (weights @ finals[chosen]).tolist()}, sds_of_choice={"score": sd}
    )


def simulate_tuned(condition: Tuned, leagues: int) -> dict[str, Any]:
    """Return verdicts on objectives that were tuned: the first row is worse by the effect, in sd.

    A flat baseline has the expected score of the rows, which tuning lowers.
    """
    rows, noise, seeds, effect, is_flat = condition
    rng = np.random.default_rng([rows, round(noise), seeds, round(effect), is_flat, 4])
    base = CURVE
    if is_flat:
        drawn = [draw_tuned(rng, "row", CURVE, noise, seeds) for _ in range(4 * leagues)]
        base = FLAT + np.mean([entry.scores["score"] for entry in drawn])
    first, wrong_leagues = Counter[str](), 0
    for _ in range(leagues):
        entries = [draw_tuned(rng, "baseline", base, noise, seeds)]
        entries.append(draw_tuned(rng, "row", CURVE - effect, noise, seeds))
        entries += [draw_tuned(rng, f"row {i}", CURVE, noise, seeds) for i in range(1, rows)]
        rule = DecisionRule(SMALLEST_EFFECT, comparisons=rows)
        standings = Standings("", [SCORE], "baseline", rule, entries, tuning_seeds=seeds)
        decided = standings.decided().entries[1:]
        verdicts = [entry.decision.verdict for entry in decided if entry.decision]
        first[verdicts[0]] += 1
        wrong_leagues += not {BETTER, WORSE}.isdisjoint(verdicts[effect > 0 :])
    line: dict[str, Any] = {"tuning_seeds": seeds, "noise": noise, "rows": rows}
    line |= {"effect": effect, "flat_baseline": is_flat, "leagues": leagues}
    return line | {"wrong_leagues": wrong_leagues, "first": dict(sorted(first.items()))}


def print_tuned(lines: Sequence[dict[str, Any]]) -> None:
    """Print the tables of leagues with tuning."""
    heads = {(FIXED, 0.0): "rates fixed"}
    for noise, seeds in product((1.0, 2.0), (1, 3, 5)):
        heads[seeds, noise] = f"{seeds} tuning seed{'s' * (seeds > 1)}, noise {noise:g} sd"
    rows: dict[tuple[str, str], dict[tuple[int, float], str]] = {}
    for line in lines:
        is_equal = line["effect"] == 0
        text = wrong_leagues(line) if is_equal else first_row(WORSE)(line)
        what = "wrong" if is_equal else f"sees {line['effect']:g} sd"
        what += ", baseline without a curve" * line["flat_baseline"]
        rows.setdefault((what, str(line["rows"])), {})[line["tuning_seeds"], line["noise"]] = text
    print_table(
        "Leagues of tuned objectives with the same curve in which a row is wrongly called better "
        "or worse, and in which one that is worse is called so (%)",
        ["leagues", "comparisons", *heads.values()],
        [[*key, *(texts.get(head, "-") for head in heads)] for key, texts in rows.items()],
    )


# ---------------------------------------------------------------- tables


def per_cent(count: float, total: float) -> str:
    """Return a share in per cent."""
    return f"{100 * count / total:.1f}"


def wrong_leagues(line: dict[str, Any]) -> str:
    """Return the share of leagues in which a row that is equal is called better or worse."""
    return per_cent(line["wrong_leagues"], line["leagues"])


def equal_rows(line: dict[str, Any]) -> str:
    """Return the share of equal rows that are called equivalent."""
    return per_cent(line["others"].get(EQUIVALENT, 0), sum(line["others"].values()))


def first_row(verdict: str) -> Callable[[dict[str, Any]], str]:
    """Return a function for the share of leagues with a verdict on the first row."""
    return lambda line: per_cent(line["first"].get(verdict, 0), line["leagues"])


def pivot(
    lines: Sequence[dict[str, Any]], text: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    """Return a row for each population and number of comparisons, a column for each of SEEDS."""
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for line in lines:
        texts = rows.setdefault((line["population"], line["comparisons"]), {})
        texts[line["seeds"]] = text(line)
    return [
        [name, str(count), *(texts.get(n, "-") for n in SEEDS)]
        for (name, count), texts in rows.items()
    ]


def claims() -> list[list[str]]:
    """Return the power that is claimed for the smallest effect, as rows of a pivot."""
    rows = []
    for count in (1, GROUP, 4 * GROUP):
        texts = [
            per_cent(DEFAULT_TEST.power((n, n), SMALLEST_EFFECT, comparisons=count), 1)
            for n in SEEDS
        ]
        rows.append(["claimed", str(count), *texts])
    return rows


def plan_rows() -> list[list[str]]:
    """Return what can be detected, in sd, and the seeds that decide, by number of comparisons."""
    rows = []
    for comparisons in (1, 3, 7, 14, 28):
        reach = [DEFAULT_TEST.detectable((n, n), comparisons=comparisons) for n in SEEDS]
        seeds = [
            DEFAULT_TEST.seeds_that_decide(effect, 1.0, LEVEL, comparisons)
            for effect in (1, 1.5, 2, 3)
        ]
        texts = ["never" if effect is None else f"{effect:.2f}" for effect in reach]
        rows.append([str(comparisons), *texts, *map(str, seeds)])
    return rows


def gain_rows(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return what tests of gains say, a row for each condition, and how often equivalent."""
    rows = []
    for line in lines:
        row = [line["population"], f"{line['control_sd']:g}"]
        row += [str(line["seeds"]), str(line["controls"])]
        for test in (*GAIN_TESTS, BOTH):
            is_known = test in line["gains"]
            row.append(per_cent(line["gains"][test], line["leagues"]) if is_known else "-")
        rows.append([*row, first_row(EQUIVALENT)(line)])
    return rows


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def print_tables(lines: Sequence[dict[str, Any]]) -> None:
    """Print all tables of an archive."""
    if "tuning_seeds" in lines[0]:
        print_tuned(lines)
        return
    setting = ["scores", "comparisons", *(f"{n} seeds" for n in SEEDS)]
    leagues = [line for line in lines if "comparisons" in line]
    equal = [line for line in leagues if not line["effect"]]
    smallest = [line for line in leagues if line["effect"] == SMALLEST_EFFECT]
    limits = [line for line in leagues if line["effect"] not in (0.0, SMALLEST_EFFECT)]
    print_table(
        "All rows equal: leagues in which one is called better or worse (%)",
        setting,
        pivot(equal, wrong_leagues),
    )
    print_table("All rows equal: rows called equivalent (%)", setting, pivot(equal, equal_rows))
    print_table(
        f"One row worse by {SMALLEST_EFFECT:g} sd: leagues in which it is called worse (%)",
        setting,
        [*claims(), *pivot(smallest, first_row(WORSE))],
    )
    print_table(
        "One row worse by what should be seen in 80 %: leagues in which it is called worse (%)",
        setting,
        pivot(limits, first_row(WORSE)),
    )
    print_table(
        f"One row worse by {SMALLEST_EFFECT:g} sd: leagues in which it is called equivalent (%)",
        setting,
        pivot(smallest, first_row(EQUIVALENT)),
    )
    for effect, title in (
        (0.0, "All rows equal: leagues in which a test calls one different (%)"),
        (SMALLEST_EFFECT, "One row worse by 2 sd: leagues in which a test sees it (%)"),
    ):
        rows = []
        for line in (line for line in lines if "tests" in line and line["effect"] == effect):
            texts = [per_cent(line["tests"][test], line["leagues"]) for test in TESTS]
            rows.append([line["population"], str(line["rows"]), str(line["seeds"]), *texts])
        print_table(title, ["scores", "comparisons", "seeds", *TESTS], rows)
    for effect, title in (
        (0.0, "All gains equal: leagues in which a test calls one different (%)"),
        (SMALLEST_EFFECT, "One gain less by 2 sd: leagues in which a test sees it (%)"),
    ):
        head = ["scores", "sd of untrained", "seeds", "untrained", *GAIN_TESTS, BOTH]
        lines_of = [line for line in lines if "gains" in line and line["effect"] == effect]
        print_table(title, [*head, "called equivalent"], gain_rows(lines_of))
    unseen = {line["seeds"]: line for line in lines if "unseen" in line}
    print_table(
        "One seed in ten fails, a difference of 4.2 points where 3 matter: verdicts (%)",
        ["verdict", *setting[2:]],
        [
            [verdict, *(first_row(verdict)(unseen[n]) for n in SEEDS if n in unseen)]
            for verdict in VERDICTS
        ],
    )
    heads = [f"{n} seeds detect" for n in SEEDS]
    heads += [f"seeds for {effect} sd" for effect in ("1", "1.5", "2", "3")]
    print_table(
        "The effect (in sd) with a power of 80 %, and the seeds that decide",
        ["comparisons", *heads],
        plan_rows(),
    )


def main(argv: Sequence[str]) -> None:
    """Simulate, or print the tables of an archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--tuned", action="store_true", help="simulate leagues with tuning")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    if not (arguments.simulate or arguments.tuned):
        text = arguments.archive.read_text(encoding="utf-8")
        print_tables([json.loads(line) for line in text.splitlines()])
        return
    with arguments.out.open("w", encoding="utf-8") as file:
        for condition in tuned_conditions() if arguments.tuned else ():
            leagues = TUNED_LEAGUES * (1 if condition[3] else 3)  # without an effect more
            line = simulate_tuned(condition, leagues)
            print(json.dumps(line), file=file, flush=True)
        if arguments.tuned:
            return
        for name, seeds, comparisons, effect in conditions():
            line = simulate(name, seeds, comparisons, effect, LEAGUES[seeds])
            print(json.dumps(line), file=file, flush=True)
        for seeds in SEEDS:
            print(json.dumps(simulate_unseen(seeds, LEAGUES[seeds])), file=file, flush=True)
        for name, effect in product(POPULATIONS, (0.0, SMALLEST_EFFECT)):
            line = simulate_tests(name, 8, GROUP, effect, LEAGUES[8])
            print(json.dumps(line), file=file, flush=True)
        line = simulate_tests("half of the seeds solve it", 4, 4 * GROUP, 0.0, LEAGUES[4])
        print(json.dumps(line), file=file, flush=True)
        for condition, sizes, effect in product(GAINS, SIZES, (0.0, SMALLEST_EFFECT)):
            line = simulate_gains(condition, sizes, effect, GAIN_LEAGUES)
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
