"""Simulate the verdicts of leagues: how often they are wrong, and how often they see an effect.

python examples/league/verdicts.py examples/league/verdicts.jsonl              # print tables
python examples/league/verdicts.py --simulate --out examples/league/verdicts.jsonl

A league has groups of seven rows, a group for each budget, which share the scores of a baseline.
Its first row is worse than the baseline by an effect, all others are equal to it in the mean.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.league.verdict import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    Rule,
    decide_all,
    detectable,
    power,
    seeds_to_decide,
)

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


def conditions() -> Iterator[tuple[str, int, int, float]]:
    """Yield population, seeds, comparisons and the effect of the first row, in sd."""
    for name in POPULATIONS:
        for seeds in SEEDS:
            for comparisons in (1, GROUP, 4 * GROUP) if name == "normal" else (1, GROUP):
                effects = [0.0, SMALLEST_EFFECT]
                limit = detectable(seeds, 1.0, comparisons=comparisons)
                if name == "normal" and limit:
                    effects.append(limit)
                for effect in effects:
                    yield name, seeds, comparisons, effect


def simulate(
    name: str, seeds: int, comparisons: int, effect: float, leagues: int
) -> dict[str, Any]:
    """Return the counts of verdicts on the first row and on the others."""
    population = POPULATIONS[name]
    rule = Rule(SMALLEST_EFFECT * population.sd, comparisons=comparisons)
    key = [seeds, comparisons, round(1000 * effect), list(POPULATIONS).index(name)]
    rng = np.random.default_rng(key)
    first, others, wrong_leagues = Counter(), Counter(), 0
    for _ in range(leagues):
        pairs = []
        for i in range(comparisons):
            if i % GROUP == 0:
                baseline = population.baseline(rng, seeds)
            pairs.append((population.row(rng, seeds), baseline))
        pairs[0] = pairs[0][0] - effect * population.sd, pairs[0][1]
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

    The smallest effect that matters is half of the true difference.
    """
    rng, counts = np.random.default_rng([seeds, 1]), Counter()
    rule = Rule(0.021)
    for _ in range(leagues):
        pair = solved(0.9)(rng, seeds), solved(1.0)(rng, seeds)
        counts[decide_all([pair], rule)[0].verdict] += 1
    return {"unseen": True, "seeds": seeds, "leagues": leagues, "first": dict(counts)}


# ---------------------------------------------------------------- tables


def per_cent(count: float, total: float) -> str:
    """Return a share in per cent."""
    return f"{100 * count / total:.1f}" if total else "-"


def null_cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of leagues without an effect."""
    counts = Counter(line["others"])
    total = counts.total()
    shares = [counts[BETTER] + counts[WORSE], counts[EQUIVALENT], counts[UNDECIDED]]
    return [
        *setting_cells(line),
        per_cent(line["wrong_leagues"], line["leagues"]),
        *[per_cent(share, total) for share in shares],
    ]


def effect_cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of leagues with an effect."""
    counts, total = Counter(line["first"]), line["leagues"]
    claimed = power(line["seeds"], line["effect"], 1.0, comparisons=line["comparisons"])
    shares = [counts[WORSE], counts[BETTER], counts[EQUIVALENT], counts[UNDECIDED]]
    texts = [per_cent(share, total) for share in shares]
    return [*setting_cells(line), f"{line['effect']:.2f}", f"{100 * claimed:.1f}", *texts]


def unseen_cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of leagues with failures that most samples of seeds do not have."""
    counts = Counter(line["first"])
    verdicts = (WORSE, BETTER, EQUIVALENT, UNDECIDED)
    return [str(line["seeds"]), *(per_cent(counts[v], line["leagues"]) for v in verdicts)]


def setting_cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of the population, the seeds and the comparisons."""
    return [line["population"], str(line["seeds"]), str(line["comparisons"])]


def plan_rows() -> list[list[str]]:
    """Return what can be detected, in sd, and the seeds that decide, by number of comparisons."""
    rows = []
    for comparisons in (1, 3, 7, 14, 28):
        reach = [detectable(n, 1.0, comparisons=comparisons) for n in SEEDS]
        seeds = [seeds_to_decide(1.0, Rule(e, comparisons=comparisons)) for e in (1, 1.5, 2, 3)]
        texts = ["never" if effect is None else f"{effect:.2f}" for effect in reach]
        rows.append([str(comparisons), *texts, *map(str, seeds)])
    return rows


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def print_tables(lines: Sequence[dict[str, Any]]) -> None:
    """Print all tables of an archive."""
    setting = ["scores", "seeds each", "comparisons"]
    leagues = [line for line in lines if "unseen" not in line]
    shares = ["worse", "better", "equivalent", "undecided"]
    print_table(
        "No effect: leagues with a wrong better or worse, and verdicts on rows (%)",
        [*setting, "leagues with an error", "better or worse", "equivalent", "undecided"],
        [null_cells(line) for line in leagues if not line["effect"]],
    )
    print_table(
        "One row worse by an effect (in sd): verdicts on it (%)",
        [*setting, "effect", "power by formula", *shares],
        [effect_cells(line) for line in leagues if line["effect"]],
    )
    print_table(
        "One seed in ten fails, which few samples show: verdicts (%)",
        ["seeds each", *shares],
        [unseen_cells(line) for line in lines if "unseen" in line],
    )
    heads = [f"{n} seeds detect" for n in SEEDS]
    heads += [f"seeds for {effect} sd" for effect in ("1", "1.5", "2", "3")]
    print_table(
        "By formula: the effect (in sd) with a power of 80 %, and the seeds that decide",
        ["comparisons", *heads],
        plan_rows(),
    )


def main(argv: Sequence[str]) -> None:
    """Simulate, or print the tables of an archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    if not arguments.simulate:
        text = arguments.archive.read_text(encoding="utf-8")
        print_tables([json.loads(line) for line in text.splitlines()])
        return
    with arguments.out.open("w", encoding="utf-8") as file:
        for name, seeds, comparisons, effect in conditions():
            line = simulate(name, seeds, comparisons, effect, LEAGUES[seeds])
            print(json.dumps(line), file=file, flush=True)
        for seeds in SEEDS:
            print(json.dumps(simulate_unseen(seeds, LEAGUES[seeds])), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
