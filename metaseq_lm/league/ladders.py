"""Ladders: the scores of an objective over budgets, with a bootstrap over seeds.

All functions are pure functions of scores. Between two budgets the mean is a line over log FLOPs.
Seeds are resampled separately at each budget. The plain bootstrap of few seeds is too narrow, since
it treats their spread as known (Hesterberg 2015, doi:10.1080/00031305.2015.1089789). We therefore
stretch each draw of a mean of n by the root of n over a chi-square of n - 1 degrees of freedom,
which gives normal scores nearly the interval of Student's t (docs/results/league.md has the
simulation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from metaseq_lm.league.verdict import checked
from metaseq_lm.reporting.stats import DEFAULT_TEST

DRAWS = 10_000
Ends = tuple[float, float]
UNBOUNDED: Ends = (-math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class ObjectiveLadder:
    """Scores of an objective at ascending budgets.

    Attributes:
        budgets: FLOPs of a run.
        scores: Scores at each budget, by seed.
        draws: Means drawn by the bootstrap, (draws, budgets); no draws before `drawn`.
    """

    budgets: tuple[float, ...]
    scores: tuple[np.ndarray, ...]
    draws: np.ndarray

    @classmethod
    def of(cls, scores: Mapping[float, Sequence[float]]) -> ObjectiveLadder:
        """Return the ladder of the scores at each budget.

        Raises ValueError for a budget without scores, or with a score that is not finite.
        """
        budgets = tuple(sorted(scores))
        values = tuple(checked(scores[budget]) for budget in budgets)
        return cls(budgets, values, np.empty((0, len(budgets))))

    def drawn(self, rng: np.random.Generator, count: int = DRAWS) -> ObjectiveLadder:
        """Return the ladder with draws; NaN at a budget of one seed, which has no spread."""
        columns = [draw_means(values, rng, count) for values in self.scores]
        return replace(self, draws=np.reshape(columns, (len(columns), count)).T)

    @cached_property
    def logs(self) -> np.ndarray:
        """The natural logarithms of the budgets."""
        return np.log(self.budgets)

    @cached_property
    def means(self) -> np.ndarray:
        """The mean at each budget."""
        return np.array([values.mean() for values in self.scores])

    @property
    def least_seeds(self) -> int:
        """The smallest number of seeds at any budget, 0 without a budget."""
        return min(map(len, self.scores), default=0)

    def at(self, budgets: Sequence[float]) -> ObjectiveLadder:
        """Return the ladder of some of its budgets."""
        columns = [self.budgets.index(budget) for budget in budgets]
        scores = tuple(self.scores[i] for i in columns)
        return ObjectiveLadder(tuple(budgets), scores, self.draws[:, columns])


def draw_means(scores: np.ndarray, rng: np.random.Generator, count: int = DRAWS) -> np.ndarray:
    """Return drawn means of the scores of seeds, (count,), stretched as few seeds require."""
    n, mean = len(scores), scores.mean()
    if n < 2:
        return np.full(count, np.nan)
    drawn = rng.choice(scores, (count, n)).mean(axis=1)
    stretched: np.ndarray = mean + (drawn - mean) * np.sqrt(n / rng.chisquare(n - 1, count))
    return stretched


def interval(draws: np.ndarray, level: float, bounds: Ends = UNBOUNDED) -> Ends | None:
    """Return the 1 - `level` interval of draws; None if more than `level` / 2 of them are NaN.

    It is clipped to `bounds`, which draws may exceed because they are stretched or added to a
    curve.
    """
    known = np.clip(draws[~np.isnan(draws)], *bounds)
    if not known.size or len(draws) - len(known) > level / 2 * len(draws):
        return None
    low, high = np.quantile(known, [level / 2, 1 - level / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Crossover:
    """Where the means of two objectives change their order for the last time.

    Attributes:
        budget: FLOPs; None if the means keep their order from the first to the last budget.
        interval: Interval over the draws that cross; None if none does.
        none: Probability that the means keep their order, as the share of draws that do.
        p: Two-sided p of a crossing: the first objective is ahead at one end of the ladder and the
            second at the other. It is the larger p of the two differences (`DEFAULT_TEST`),
            as both have to hold; 1 if the means do not cross.
    """

    budget: float | None
    interval: Ends | None
    none: float
    p: float


def crossover(one: ObjectiveLadder, other: ObjectiveLadder, level: float) -> Crossover:
    """Return where the means of two ladders cross, with the 1 - `level` interval.

    Both have the same budgets, two at least, and draws that are independent of each other.
    """
    differences = one.means - other.means
    (observed,) = _crossings(one.logs, differences[None])
    drawn = _crossings(one.logs, one.draws - other.draws)
    crossed = drawn[~np.isnan(drawn)]
    ends, p = interval(crossed, level), 1.0
    if differences[0] * differences[-1] < 0:
        p = max(DEFAULT_TEST.p(one.scores[i], other.scores[i]) for i in (0, -1))
    return Crossover(
        None if math.isnan(observed) else math.exp(observed),
        ends and (math.exp(ends[0]), math.exp(ends[1])),
        1 - len(crossed) / len(drawn),
        p,
    )


def _crossings(logs: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Return where differences, (n, budgets), change their sign for the last time, NaN if never.

    A difference of zero at a budget between two signs is a change there, but not at an end.
    """
    signs = np.sign(differences)
    for i in range(1, len(logs)):  # a zero has the sign before it
        signs[:, i] = np.where(signs[:, i] == 0, signs[:, i - 1], signs[:, i])
    changes = np.pad(signs[:, :-1] * signs[:, 1:] < 0, ((0, 0), (1, 0)))
    last = changes.shape[1] - 1 - changes[:, ::-1].argmax(axis=1)
    return np.where(changes.any(axis=1), _zeros(logs, differences, last), np.nan)


def _zeros(logs: np.ndarray, differences: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return where differences, linear in logs, are zero between columns `ends` - 1 and `ends`."""
    rows = np.arange(len(ends))
    before, after = differences[rows, ends - 1], differences[rows, ends]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Rows without a zero there get any value; callers leave them out.
        share = before / (before - after)
        zeros: np.ndarray = logs[ends - 1] + share * (logs[ends] - logs[ends - 1])
    return zeros


def equal_score(
    rung: ObjectiveLadder, other: ObjectiveLadder, lower_is_better: bool, level: float
) -> tuple[float, Ends | None]:
    """Return how many times fewer FLOPs a ladder needs for the score of a ladder of one budget.

    The ratio is NaN if the other ladder does not reach the score. It is a bound if its first budget
    is enough: fewer FLOPs might be. The 1 - `level` interval is None for a bound, or if too many
    draws do not reach the score. Both ladders have draws, independent of each other.
    """
    (budget,), sign = rung.budgets, -1.0 if lower_is_better else 1.0
    (reached,) = _first_reached(other.logs, sign * (other.means - rung.means)[None])
    if reached == other.logs[0]:
        return budget / other.budgets[0], None
    places = _first_reached(other.logs, sign * (other.draws - rung.draws))
    if math.isnan(reached):
        return math.nan, None
    return float(budget / np.exp(reached)), interval(budget / np.exp(places), level)


def _first_reached(logs: np.ndarray, leads: np.ndarray) -> np.ndarray:
    """Return where leads, (n, budgets), are zero or more for the first time, NaN if never."""
    reaches = leads >= 0
    first = reaches.argmax(axis=1)
    # A lead at the first budget is a bound: less might be enough.
    places = np.where(reaches[:, 0], logs[0], _zeros(logs, leads, first))
    return np.where(reaches.any(axis=1), places, np.nan)
