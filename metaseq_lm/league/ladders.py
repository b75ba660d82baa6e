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
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from metaseq_lm.league.verdict import checked
from metaseq_lm.reporting.stats import DEFAULT_TEST

DRAWS = 10_000
Ends = tuple[float, float]
UNBOUNDED: Ends = (-math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class Ladder:
    """Scores of an objective at ascending budgets.

    Attributes:
        budgets: FLOPs of a run.
        scores: Scores at each budget, by seed.
    """

    budgets: tuple[float, ...]
    scores: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, scores: Mapping[float, Sequence[float]]) -> Ladder:
        """Return the ladder of the scores at each budget.

        Raises ValueError for a budget without scores, or with a score that is not finite.
        """
        budgets = tuple(sorted(scores))
        return cls(budgets, tuple(checked(scores[budget]) for budget in budgets))

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

    def at(self, budgets: Sequence[float]) -> Ladder:
        """Return the ladder of some of its budgets."""
        scores = dict(zip(self.budgets, self.scores))
        return Ladder(tuple(budgets), tuple(scores[budget] for budget in budgets))

    def below(self, budget: float) -> Ladder:
        """Return the ladder of the budgets below one."""
        return self.at([other for other in self.budgets if other < budget])

    def draws(self, rng: np.random.Generator, count: int = DRAWS) -> np.ndarray:
        """Return drawn means, (count, budgets); NaN at a budget of one seed, without spread."""
        columns = [draw_means(values, rng, count) for values in self.scores]
        return np.stack(columns, axis=1) if columns else np.empty((count, 0))


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
    if len(draws) - len(known) > level / 2 * len(draws):
        return None
    low, high = np.quantile(known, [level / 2, 1 - level / 2])
    return float(low), float(high)


# ---------------------------------------------------------------- crossovers


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


def crossover(
    ladders: tuple[Ladder, Ladder], draws: tuple[np.ndarray, np.ndarray], level: float
) -> Crossover:
    """Return where the means of two ladders with the same budgets, two at least, cross.

    Args:
        ladders: Their scores.
        draws: Their drawn means, (draws, budgets), independent of each other.
        level: The interval covers 1 - level.
    """
    one, other = ladders
    observed = crossings(one.logs, (one.means - other.means)[None])[0]
    drawn = crossings(one.logs, draws[0] - draws[1])
    crossed = drawn[~np.isnan(drawn)]
    ends = interval(crossed, level) if len(crossed) else None
    first, last = (one.means[i] - other.means[i] for i in (0, -1))
    p = 1.0
    if first * last < 0:
        p = max(DEFAULT_TEST.p(one.scores[i], other.scores[i]) for i in (0, -1))
    return Crossover(
        None if math.isnan(observed) else math.exp(observed),
        ends and (math.exp(ends[0]), math.exp(ends[1])),
        1 - len(crossed) / len(drawn),
        p,
    )


def crossings(logs: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Return where differences, (n, budgets), change their sign for the last time, NaN if never.

    They are linear between the budgets; `logs` are the budgets' logarithms. A difference of zero at
    a budget between two signs is a change there, but not at an end.
    """
    places = np.full(len(differences), np.nan)
    signs = np.sign(differences[:, 0])
    for i in range(1, len(logs)):
        before, after = differences[:, i - 1], differences[:, i]
        changes = np.flatnonzero(signs * after < 0)
        share = before[changes] / (before[changes] - after[changes])
        places[changes] = logs[i - 1] + share * (logs[i] - logs[i - 1])
        signs = np.where(after == 0, signs, np.sign(after))
    return places


# ---------------------------------------------------------------- FLOPs at equal score


@dataclass(frozen=True)
class EqualScore:
    """Ratio of a run's FLOPs to the FLOPs that another objective needs for its score.

    Attributes:
        ratio: NaN if the other objective does not reach the score.
        interval: Its interval; None for a bound, or if too many draws do not reach the score.
        is_bound: Whether the other objective's first budget is enough, so that fewer FLOPs might
            be.
    """

    ratio: float
    interval: Ends | None = None
    is_bound: bool = False


def equal_score(
    base: tuple[float, float, np.ndarray],
    ladder: Ladder,
    draws: np.ndarray,
    lower_is_better: bool,
    level: float,
) -> EqualScore:
    """Return how many times fewer FLOPs a ladder needs for a score.

    Args:
        base: The FLOPs of the run with this score, the score, and draws of it, (draws,).
        ladder: The ladder of the objective that has to reach it.
        draws: Its drawn means, (draws, budgets).
        lower_is_better: The direction of the scores.
        level: The interval covers 1 - level.
    """
    budget, score, drawn = base
    sign = -1.0 if lower_is_better else 1.0
    reached = _logs_at(np.array([sign * score]), ladder.logs, sign * ladder.means[None])[0]
    if reached == ladder.logs[0]:
        return EqualScore(budget / ladder.budgets[0], is_bound=True)
    places = _logs_at(sign * drawn, ladder.logs, sign * draws)
    places[np.isnan(drawn)] = np.nan
    ends = None if math.isnan(reached) else interval(budget / np.exp(places), level)
    return EqualScore(float(budget / np.exp(reached)), ends)


def _logs_at(scores: np.ndarray, logs: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return where means, (n, budgets), first reach scores, (n,); NaN if they never do.

    Larger is better. If the first budget reaches a score, that budget is returned, as a bound.
    """
    reaches = means >= scores[:, None]
    places = np.where(reaches[:, 0], logs[0], np.nan)
    is_open = ~reaches[:, 0]
    for i in range(1, len(logs)):
        now = np.flatnonzero(is_open & reaches[:, i])
        before, after = means[now, i - 1], means[now, i]
        share = (scores[now] - before) / (after - before)
        places[now] = logs[i - 1] + share * (logs[i] - logs[i - 1])
        is_open &= ~reaches[:, i]
    return places
