"""The studies of a search, one per setting, in a journal that all workers share (Optuna 5).

Each study keeps an account: a trial reserves the FLOPs of a run up to its next rung before it
spends them, and is charged with the spent FLOPs, also if it was stopped or its process died.
Reading and then writing is one change of the journal, under a lock that works on NFS 3 and later.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from metaseq_lm.sweeps.definition import text_of
from metaseq_lm.sweeps.search import FACTOR, Search
from metaseq_lm.sweeps.space import Choice, Range
from metaseq_lm.sweeps.study_journal import StudyJournal
from metaseq_lm.sweeps.trials import (
    DIVERGED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    UNPAID,
    Setting,
    Trial,
)

_MOST_FAILURES = 3  # in a row, after which a setting is given up
_ROUNDING = 1e-9  # relative rounding error of sums of FLOPs


class Studies:
    """The studies of a search in a folder."""

    def __init__(self, folder: Path, search: Search) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.search = folder, search
        folder.mkdir(parents=True, exist_ok=True)
        self.distributions = {key: to_optuna(d) for key, d in search.space.items()}
        self.journal = StudyJournal(folder, self.distributions, search.rungs)
        self.storage = JournalStorage(self.journal)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self.journal.change():
                yield
        except BaseException:
            self.storage = JournalStorage(self.journal)  # without records that were not written
            raise

    def _study(self, name: str, sampler: BaseSampler | None = None) -> optuna.Study:
        pruner: Any = optuna.pruners.NopPruner()
        if self.search.prune == "halving":
            pruner = optuna.pruners.SuccessiveHalvingPruner(self.search.first_step, FACTOR)
        return optuna.load_study(
            study_name=name, storage=self.storage, sampler=sampler or RandomSampler(), pruner=pruner
        )

    def _sampler(self, number: int) -> BaseSampler:
        """Return the sampler of a trial, with a seed that depends only on its number.

        This makes a search repeatable, also after a kill, and keeps workers from drawing the same
        values.
        """
        seed = self.search.seed
        if self.search.sampler == "qmc":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
        drawn = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        return TPESampler(seed=drawn) if self.search.sampler == "tpe" else RandomSampler(seed=drawn)

    # ---------------------------------------------------------------- settings

    def create(self, settings: Sequence[Setting]) -> None:
        """Create missing studies, and try again settings that had failed."""
        direction = "minimize" if self.search.lower_is_better else "maximize"
        with self._locked():
            for setting in settings:
                study = optuna.create_study(
                    study_name=setting.name,
                    storage=self.storage,
                    direction=direction,
                    load_if_exists=True,
                )
                study.set_user_attr("values", dict(setting.values))
                study.set_user_attr("run_flops", setting.run_flops)
                study.set_user_attr("tries_from", len(study.trials))

    def settings(self) -> list[Setting]:
        """Return the settings in the order of their creation."""
        settings = []
        for study in self.storage.get_all_studies():
            attributes = study.user_attrs
            if not attributes.keys() >= {"values", "run_flops"}:
                continue  # torn in an earlier version, to be completed by `create`
            settings.append(
                Setting(study.study_name, attributes["values"], attributes["run_flops"])
            )
        return settings

    def trials(self, name: str) -> list[Trial]:
        """Return all trials of a setting by number."""
        return [self._trial(name, frozen) for frozen in self._study(name).trials]

    def _trial(self, name: str, frozen: FrozenTrial) -> Trial:
        attributes = frozen.user_attrs
        state = attributes.get("ended", RUNNING)
        if state == RUNNING and attributes.get("interrupted"):
            state = INTERRUPTED
        scores = frozen.intermediate_values
        score = scores[max(scores)] if scores else None
        if frozen.state == TrialState.COMPLETE:
            score = frozen.value
        return Trial(
            name,
            frozen.number,
            {key: self._value(key, raw) for key, raw in frozen.params.items()},
            state,
            attributes.get("flops", 0.0),
            attributes.get("share", 0.0),
            score if score is not None and math.isfinite(score) else None,
            attributes.get("worker", ""),
            attributes.get("message", ""),
        )

    def _value(self, key: str, raw: Any) -> Any:
        """Return the value of an option; numbers have 4 significant digits, for readable names."""
        distribution = self.search.space[key]
        if isinstance(distribution, Choice):
            return distribution.values[list(self.distributions[key].choices).index(raw)]
        if distribution.is_whole:
            return int(raw)
        return min(max(float(f"{raw:.4g}"), distribution.low), distribution.high)

    def spent(self, name: str) -> float:
        """Return the FLOPs that the trials of a setting spent."""
        return math.fsum(trial.flops for trial in self.trials(name))

    def _committed(self, setting: Setting) -> float:
        """Return the spent FLOPs plus the FLOPs that running trials may still spend."""
        amounts = []
        for trial in self.trials(setting.name):
            reserved = trial.share * setting.run_flops
            active = trial.state in (RUNNING, INTERRUPTED)
            amounts.append(max(trial.flops, reserved) if active else trial.flops)
        return math.fsum(amounts)

    def _pays(self, setting: Setting, flops: float) -> bool:
        return self._committed(setting) + flops <= self.search.flops * (1 + _ROUNDING)

    def failures(self, name: str) -> list[Trial]:
        """Return the trials that failed last, if too many failed in a row for chance."""
        start = self._study(name).user_attrs.get("tries_from", 0)
        last = self.trials(name)[start:][-_MOST_FAILURES:]
        failed = [trial for trial in last if trial.state == FAILED]
        return failed if len(failed) == _MOST_FAILURES else []

    def is_open(self, setting: Setting) -> bool:
        """Return whether a trial of a setting can go on, or begin with the FLOPs left."""
        if any(trial.state == INTERRUPTED for trial in self.trials(setting.name)):
            return True
        first = self.search.rungs[0] * setting.run_flops
        return self._pays(setting, first) and not self.failures(setting.name)

    # ---------------------------------------------------------------- trials

    def begin(self, worker: str) -> Trial | None:
        """Return a trial for a worker, None if nothing is left to do.

        It is an interrupted trial, or else a new trial of the setting that is furthest behind.
        """
        with self._locked():
            settings = self.settings()
            for setting in settings:
                for trial in self.trials(setting.name):
                    if trial.state == INTERRUPTED:
                        self._set(trial, interrupted=False, worker=worker)
                        return replace(trial, state=RUNNING, worker=worker)
            opened = [setting for setting in settings if self.is_open(setting)]
            if not opened:
                return None
            setting = min(opened, key=self._committed)
            study = self._study(setting.name)
            study.sampler = self._sampler(len(study.trials))
            created = study.ask(self.distributions)
            share = self.search.rungs[0]
            trial = self._trial(setting.name, study.trials[created.number])
            self._set(trial, worker=worker, share=share)
            return replace(trial, worker=worker, share=share)

    def _set(self, trial: Trial, **attributes: Any) -> None:
        for name, value in attributes.items():
            self.storage.set_trial_user_attr(self._id(trial), name, value)

    def _id(self, trial: Trial) -> int:
        study = self.storage.get_study_id_from_name(trial.setting)
        return int(self.storage.get_trial_id_from_study_id_trial_number(study, trial.number))

    def report(self, trial: Trial, score: float, flops: float) -> Trial:
        """Record the score of a trial at the end of its share; return its new state.

        A trial that goes on is `running` and has a larger share. Without a finite score it
        diverged.
        """
        if not math.isfinite(score):
            return self.end(trial, DIVERGED, flops)
        with self._locked():
            study = self._study(trial.setting)
            self._set(trial, flops=flops)
            if trial.share >= 1:
                self._set(trial, ended=FINISHED)
                study.tell(trial.number, score)
                return replace(trial, state=FINISHED, flops=flops, score=score)
            rungs = self.search.rungs
            rung = rungs.index(trial.share)
            live = optuna.trial.Trial(study, self._id(trial))
            live.report(score, self.search.first_step * FACTOR**rung)
            state, share = RUNNING, rungs[rung + 1]
            (setting,) = (item for item in self.settings() if item.name == trial.setting)
            # Whole updates spend a little beyond a rung.
            charged = max(flops, trial.share * setting.run_flops)
            if live.should_prune():
                state = PRUNED
            elif not self._pays(setting, share * setting.run_flops - charged):
                state = UNPAID
            if state == RUNNING:
                self._set(trial, share=share)
                return replace(trial, share=share, flops=flops, score=score)
            self._set(trial, ended=state)
            study.tell(trial.number, state=TrialState.PRUNED)
            return replace(trial, state=state, flops=flops, score=score)

    def end(self, trial: Trial, state: str, flops: float, message: str = "") -> Trial:
        """Record that a trial diverged or failed, and its spent FLOPs."""
        with self._locked():
            self._end(trial, state, flops, message)
        return replace(trial, state=state, flops=flops, message=message)

    def _end(self, trial: Trial, state: str, flops: float, message: str) -> None:
        study = self._study(trial.setting)
        self._set(trial, ended=state, flops=max(flops, trial.flops), message=message)
        if state == FAILED:
            study.tell(trial.number, state=TrialState.FAIL)
            return
        live = optuna.trial.Trial(study, self._id(trial))
        if trial.score is None:  # so that the sampler learns that these values are bad
            live.report(math.inf if self.search.lower_is_better else -math.inf, 0)
        study.tell(trial.number, state=TrialState.PRUNED)

    def interrupt(self, trial: Trial) -> None:
        """Record that a trial has saved and waits for a worker to continue it."""
        with self._locked():
            self._set(trial, interrupted=True)

    def running(self) -> list[Trial]:
        """Return the trials that are running, or whose process died."""
        trials = []
        for setting in self.settings():
            trials += [trial for trial in self.trials(setting.name) if trial.state == RUNNING]
        return trials

    def best(self, name: str) -> Trial | None:
        """Return the finished trial of a setting with the best score, the first of equals."""
        sign = 1 if self.search.lower_is_better else -1
        finished = [trial for trial in self.trials(name) if trial.state == FINISHED]
        scored = [trial for trial in finished if trial.score is not None]
        return min(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)


def to_optuna(distribution: Range | Choice) -> Any:
    """Return the distribution for Optuna; choices become texts, because it takes no lists."""
    if isinstance(distribution, Choice):
        return CategoricalDistribution([text_of(value, "search") for value in distribution.values])
    kind = IntDistribution if distribution.is_whole else FloatDistribution
    return kind(distribution.low, distribution.high, log=distribution.log)
