"""How often is an idea without an effect called better, if an author tries many? By simulation.

python examples/league/attempts.py
python examples/league/attempts.py --seeds 6 --leagues 2000

In each league an author tries ideas that change nothing, each with as many seeds as the baseline.
"keep what is higher" calls the best of them better if its mean is; "test each" if it passes the
league's test without correction; "registered" is the league's rule, which corrects for all attempts
that are registered, whether or not they are shown.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from metaseq_lm.core.errors import run_script
from metaseq_lm.core.output import show
from metaseq_lm.league.verdict import BETTER, DecisionRule, decide_all
from metaseq_lm.reporting.formats import to_text
from metaseq_lm.reporting.table import Cell, Table

ATTEMPTS = (1, 10, 100)
LEVEL = 0.05


def called_better(rng: np.random.Generator, attempts: int, seeds: int) -> tuple[bool, bool, bool]:
    """Return whether each of the three rules calls any attempt better."""
    baseline, *others = rng.normal(size=(attempts + 1, seeds))
    pairs = [(scores, baseline) for scores in others]
    rule = DecisionRule(
        smallest_effect=1.0, level=LEVEL, lower_is_better=False, comparisons=attempts
    )
    decisions = decide_all(pairs, rule, [()] * attempts)
    is_higher = any(scores.mean() > baseline.mean() for scores in others)
    passes = any(d.p < LEVEL and x.mean() > baseline.mean() for d, x in zip(decisions, others))
    return is_higher, passes, any(decision.verdict == BETTER for decision in decisions)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the share of leagues in which each rule calls something better."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="of each attempt (default: 8)")
    parser.add_argument("--leagues", type=int, default=1000, help="to simulate (default: 1000)")
    arguments = parser.parse_args(argv)
    rng, rows = np.random.default_rng(0), []
    for attempts in ATTEMPTS:
        found = [called_better(rng, attempts, arguments.seeds) for _ in range(arguments.leagues)]
        shares = np.mean(found, axis=0)
        rows.append([Cell(str(attempts)), *(Cell(f"{100 * share:.1f} %") for share in shares)])
    head = ["attempts", "keep what is higher", "test each", "registered"]
    title = f"Called better though nothing is, {arguments.leagues} leagues, {arguments.seeds} seeds"
    show(to_text(Table(title, head, rows, [])))


if __name__ == "__main__":
    run_script(main)
