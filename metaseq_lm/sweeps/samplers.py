"""Samplers propose the values of the next trials, given those that there are."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from metaseq_lm.sweeps.definition import text_of
from metaseq_lm.sweeps.search import Choice, Range
from metaseq_lm.sweeps.trials import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    StudyTrial,
    Trials,
    Values,
)

Grid = Mapping[str, Sequence[Any]]


class _Sampler(Protocol):
    """Proposes trials."""

    def propose(self, trials: Trials[Any]) -> list[Values]:
        """Return the values of the next trials, [] if there is nothing left to try."""


def combinations(grid: Grid) -> list[Values]:
    """Return all combinations of the values of a grid."""
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


@dataclass(frozen=True)
class GridSampler:
    """All combinations of a grid, which is widened as long as the best value is at an end.

    Attributes:
        most: How many values beyond the ends of its grid an option gets, one at a time.
        candidates: Returns the settings whose values count, the best one first.
        is_possible: Whether the options may have the values of a wider grid.
    """

    most: int
    candidates: Callable[[Trials[Any]], Sequence[Values]]
    is_possible: Callable[[Grid], bool] = lambda grid: True

    def propose(self, trials: Trials[Any]) -> list[Values]:
        """Return all settings of the wider grid, [] if none is wider."""
        grid = trials.grid
        for key, values in self.wider(trials).items():
            if self.is_possible({**grid, key: values}):
                grid[key] = values
        return combinations(grid) if grid != trials.grid else []

    def wider(self, trials: Trials[Any]) -> dict[str, tuple[Any, ...]]:
        """Return the values of each option with the best value at an end, and one beyond it."""
        wider: dict[str, tuple[Any, ...]] = {}
        for best in self.candidates(trials):
            for key, values in trials.grid.items():
                first = trials.space[key]
                assert isinstance(first, Choice)
                if key in wider or len(values) - len(first.values) >= self.most:
                    continue
                if (value := Choice(values).beyond(best[key])) is not None:
                    wider[key] = tuple(sorted((*values, value)))
        return wider


@dataclass(frozen=True)
class OptunaSampler:
    """A sampler of Optuna (5), which is imported when it proposes.

    Its seed depends only on the number of trials. This makes a search repeatable, also after a
    kill, and keeps workers from drawing the same values.

    Attributes:
        kind: qmc, tpe or random.
        seed: The seed of the search.
    """

    kind: str
    seed: int

    def propose(self, trials: Trials[Any]) -> list[Values]:
        """Return the values of one trial."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = {key: _to_optuna(item) for key, item in trials.space.items()}
        study = optuna.create_study(
            direction="minimize" if trials.lower_is_better else "maximize",
            sampler=self._sampler(len(trials)),
        )
        if self.kind == "qmc":
            for _ in trials:  # a Sobol sequence goes on by what was asked for
                study.ask(space)
        else:
            study.add_trials([_to_frozen(trial, space, trials) for trial in trials])
        drawn = study.ask(space).params
        return [{key: _from_optuna(item, drawn[key]) for key, item in trials.space.items()}]

    def _sampler(self, number: int) -> Any:
        from optuna.exceptions import ExperimentalWarning
        from optuna.samplers import QMCSampler, RandomSampler, TPESampler

        if self.kind == "qmc":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return QMCSampler(scramble=True, seed=self.seed, warn_independent_sampling=False)
        drawn = int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])
        return TPESampler(seed=drawn) if self.kind == "tpe" else RandomSampler(seed=drawn)


def _to_optuna(item: Range | Choice) -> Any:
    """Return the distribution for Optuna; choices become texts, because it takes no lists."""
    from optuna import distributions

    if isinstance(item, Choice):
        texts = [text_of(value, "search") for value in item.values]
        return distributions.CategoricalDistribution(texts)
    kind = distributions.IntDistribution if item.is_whole else distributions.FloatDistribution
    return kind(item.low, item.high, log=item.log)


def _from_optuna(item: Range | Choice, drawn: Any) -> Any:
    if isinstance(item, Range):
        return item.rounded(drawn)
    return next(value for value in item.values if text_of(value, "search") == drawn)


def _to_frozen(trial: StudyTrial, space: Mapping[str, Any], trials: Trials[StudyTrial]) -> Any:
    """Return a trial as a record of Optuna."""
    from optuna.trial import TrialState, create_trial

    states = {
        FINISHED: TrialState.COMPLETE,
        FAILED: TrialState.FAIL,
        RUNNING: TrialState.RUNNING,
        INTERRUPTED: TrialState.RUNNING,
    }
    # A trial that ended at a rung counts as pruned there. So does a diverged one, by the worst
    # score if it had none, because the sampler has to learn that its values are bad.
    state = states.get(trial.state, TrialState.PRUNED)
    scores = dict(enumerate(trial.at_rungs, start=1))
    if state == TrialState.PRUNED and not scores:
        scores = {0: math.inf if trials.lower_is_better else -math.inf}
    params = {}
    for key, value in trial.values.items():
        is_choice = isinstance(trials.space[key], Choice)
        params[key] = text_of(value, "search") if is_choice else value
    return create_trial(
        state=state,
        value=trial.score if state == TrialState.COMPLETE else None,
        params=params,
        distributions={key: space[key] for key in params},
        intermediate_values=scores,
    )
