"""Trials of tuned options, and the rule that chooses among them.

Leagues, searches and `report --choose` collect their runs in these classes.

Tuning seeds are a sample: other seeds would have chosen another setting with another expected
score. We therefore draw the tuning seeds with replacement, the same seeds for all settings, and
choose again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, combinations_with_replacement
from typing import Any, Generic, TypeVar

import numpy as np

from metaseq_lm.core.files import is_number
from metaseq_lm.sweeps.search import Space

MOST = 3  # settings of which final seeds run
_ENUMERATED = 8  # tuning seeds up to which all draws are counted (8 have 6,435 different ones)
DRAWS = 10_000  # random draws for more seeds


@lru_cache(maxsize=8)
def seed_draws(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return draws with replacement, (draws, seeds) counts of each seed, and probabilities."""
    if seeds > _ENUMERATED:
        rng = np.random.default_rng(0)
        return rng.multinomial(seeds, [1 / seeds] * seeds, DRAWS), np.full(DRAWS, 1 / DRAWS)
    drawn = combinations_with_replacement(range(seeds), seeds)
    counts = np.array([np.bincount(draw, minlength=seeds) for draw in drawn])
    orders = [math.factorial(seeds) / math.prod(map(math.factorial, row)) for row in counts]
    return counts, np.array(orders) / seeds**seeds


def shares_of_best(scores: np.ndarray, lower_is_better: bool) -> np.ndarray:
    """Return the share of draws of the seeds in which each setting has the best mean.

    Scores are (settings, seeds); the first of equal settings is the best.
    """
    counts, probabilities = seed_draws(scores.shape[1])
    sums = scores @ counts.T
    best = (sums if lower_is_better else -sums).argmin(axis=0)
    return np.bincount(best, probabilities, minlength=len(scores))


def plausible_settings(shares: np.ndarray, least: float) -> list[int]:
    """Return the settings that are best in a share of `least` or more of the draws, at least one.

    The most frequent ones come first; there are at most MOST.
    """
    order = np.argsort(-shares, kind="stable")[:MOST].tolist()
    return [i for i in order if shares[i] >= least - 1e-9] or order[:1]


def sd_of_choice(means: Sequence[float], shares: Sequence[float]) -> float:
    """Return the sd of the mean of the setting that a draw chooses, given the shares of draws."""
    centre = np.average(means, weights=shares)
    return math.sqrt(np.average((np.asarray(means) - centre) ** 2, weights=shares))


# States of trials.
STATES = "finished pruned unpaid diverged failed running interrupted".split()
FINISHED, PRUNED, OUT_OF_BUDGET, DIVERGED, FAILED, RUNNING, INTERRUPTED = STATES
Values = Mapping[str, Any]  # values of options by key
Shares = tuple[tuple[Values, float], ...]  # settings with the share of draws that choose each


@dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes:
        values: The values of the tuned options.
        scores: The score of each run; None for a run without one.
        flops: The spent FLOPs.
        state: One of STATES; a search chooses only finished trials.
        runs: The runs, in the order of the scores, where the reader needs them.
    """

    values: Values
    scores: tuple[float | None, ...] = ()
    flops: float = 0.0
    state: str = FINISHED
    runs: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float | None:
        """The mean score over runs; None if a run has no finite score."""
        known = [score for score in self.scores if score is not None and math.isfinite(score)]
        if not known or len(known) < len(self.scores):
            return None
        return math.fsum(known) / len(known)


@dataclass(frozen=True)
class StudyTrial(Trial):
    """A trial of a search, which is one run; `scores` has its last score.

    Attributes:
        setting: The name of the setting.
        number: Its number, from 0.
        share: The part of a run's budget that it may spend, or was told to spend.
        at_rungs: Its score at each rung that it reached, the last one for the end of the run.
        worker: The job that runs it.
        message: The reason for its failure.
    """

    setting: str = ""
    number: int = 0
    share: float = 1.0
    at_rungs: tuple[float, ...] = ()
    worker: str = ""
    message: str = ""


T = TypeVar("T", bound=Trial)


@dataclass(frozen=True)
class Trials(Generic[T]):
    """The trials of an objective, or of another setting, at one budget.

    Attributes:
        name: The name of the objective or setting.
        metric: The metric that chooses.
        lower_is_better: Its direction.
        trials: The trials.
        space: The range, or the values to begin with, of each tuned option.
        budget: FLOPs of a run.
    """

    name: str
    metric: str
    lower_is_better: bool
    trials: tuple[T, ...]
    space: Space = field(default_factory=dict)
    budget: float = 0.0

    def __iter__(self) -> Iterator[T]:
        return iter(self.trials)

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def runs(self) -> tuple[Any, ...]:
        """The runs of all trials."""
        return tuple(chain.from_iterable(trial.runs for trial in self))

    @property
    def flops(self) -> float:
        """The FLOPs that all trials spent."""
        return math.fsum(trial.flops for trial in self)

    @property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """The tried values of each tuned option, numbers ascending."""
        grid = {}
        for key in self.space:
            values: tuple[Any, ...] = tuple(dict.fromkeys(trial.values.get(key) for trial in self))
            grid[key] = tuple(sorted(values)) if all(map(is_number, values)) else values
        return grid

    def scores(self) -> list[tuple[T, float]]:
        """Return the trials that can be chosen, each with its score."""
        scored = []
        for trial in self:
            if trial.state == FINISHED and trial.score is not None:
                scored.append((trial, trial.score))
        return scored

    def best(self) -> T | None:
        """Return the trial with the best score, the first of equals; None without scores."""
        sign = 1 if self.lower_is_better else -1
        best, _ = min(self.scores(), key=lambda pair: sign * pair[1], default=(None, 0.0))
        return best

    def plausible(self, least: float) -> Shares:
        """Return the plausible settings with the shares of draws that choose them, which sum to 1.

        We draw the seeds that all settings have. The most frequent setting comes
        first. With `least` = 0 only the best setting is returned; () without scores.
        """
        best = self.best()
        if best is None or not least:
            return () if best is None else ((best.values, 1.0),)
        scored = [trial for trial, _ in self.scores()]
        by_seed = []
        for trial in scored:
            seeds = (run.seed for run in trial.runs)
            by_seed.append(dict(zip(seeds, trial.scores)))
        common = sorted(set.intersection(*map(set, by_seed)), key=lambda seed: seed or 0)
        scores = np.array([list(map(of_seed.get, common)) for of_seed in by_seed], float)
        shares = shares_of_best(scores, self.lower_is_better)
        chosen = plausible_settings(shares, least)
        total = math.fsum(shares[chosen])
        return tuple((scored[i].values, float(shares[i] / total)) for i in chosen)

    def edges(self, values: Values) -> dict[str, str]:
        """Return the options with a value at an end of their range, and that end."""
        ends = {key: self.space[key].edge_of(value) for key, value in values.items()}
        return {key: end for key, end in ends.items() if end}

    def record(self, values: Values) -> dict[str, Any]:
        """Return how `values` were chosen and at which cost, see `runs.records.write_tuning`."""
        return {
            "flops": self.flops,
            "trials": sum(len(trial.runs) or 1 for trial in self),
            "metric": self.metric,
            "values": dict(values),
            "edges": self.edges(values),
        }
