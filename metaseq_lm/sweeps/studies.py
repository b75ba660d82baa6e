"""The account of a search: its settings and trials, in a journal that all workers share.

A trial reserves the FLOPs of a run up to its next rung before it spends them, and is charged with
the spent FLOPs, also if it was stopped or its process died. Reading and then writing is one change
of the journal, under a lock that works on NFS 3 and later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import AMOUNT, COUNT, FINITE, schema_error
from metaseq_lm.core.journal import Journal
from metaseq_lm.sweeps.definition import KEY
from metaseq_lm.sweeps.lock_file import LockFile
from metaseq_lm.sweeps.optuna_records import OptunaRecords
from metaseq_lm.sweeps.samplers import OptunaSampler
from metaseq_lm.sweeps.search import FACTOR, Search
from metaseq_lm.sweeps.trials import (
    DIVERGED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    OUT_OF_BUDGET,
    PRUNED,
    RUNNING,
    STATES,
    StudyTrial,
    Trials,
)

_MOST_FAILURES = 3  # in a row, after which a setting is given up
_ROUNDING = 1e-9  # relative rounding error of sums of FLOPs
_SETTING, _TRIAL = "setting", "trial"
# A line has its number and one record. Names of settings are folder names.
_NAME = re.compile(r"\w[\w.,=+@-]*")
_FORMS = {
    _SETTING: {"name": _NAME, "values": dict, "run_flops": AMOUNT, "tries_from": COUNT},
    _TRIAL: {
        "setting": _NAME,
        "number": COUNT,
        "values": dict,
        "state": re.compile("|".join(STATES)),
        "flops": AMOUNT,
        "share": AMOUNT,
        "at_rungs": [FINITE, ...],
        "worker": str,
        "message": str,
    },
}


@dataclass(frozen=True)
class Setting:
    """A setting of the sweep that the search tunes.

    Attributes:
        name: Its name, also the name of its folder of trials.
        values: The values of the grid and the list.
        run_flops: The budget of a run.
        tries_from: The number of the first trial since the command was given last.
    """

    name: str
    values: Mapping[str, Any]
    run_flops: float
    tries_from: int = 0


class Studies:
    """The settings of a search in a folder, each with its trials."""

    def __init__(self, folder: Path, search: Search) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.search = search
        remedy = f"Restore the file from a copy; or delete {folder}, and the search begins anew"
        self._lock = LockFile(folder / "account.lock")
        self._journal = Journal(folder / "journal.jsonl", remedy=remedy)
        self._earlier = OptunaRecords(search.space, search.rungs[0])
        self._settings: dict[str, Setting] = {}
        self._trials: dict[str, list[StudyTrial]] = {}
        self._read()

    # ---------------------------------------------------------------- the journal

    def _read(self) -> None:
        for number, row in self._journal.new_rows():
            try:
                problem = self._add_line(row, number)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                problem = f"not a record of a search: {error}"
            if problem:
                raise MetaseqError(
                    f"{self._journal.path}:{number}: damaged ({problem}). {self._journal.remedy}"
                )
        self._journal.warn_of_torn_line()

    def _add_line(self, row: dict[str, Any], number: int) -> str:
        if row.get("line", number) != number:
            return f"line {row['line']!r} of the file stands here; lines were added or removed"
        if "op_code" in row or "records" in row:
            records = self._earlier.convert(row)
        else:
            records = [(kind, row[kind]) for kind in _FORMS if kind in row]
            if not records:
                return "it has neither a setting nor a trial"
        return next(filter(None, (self._add(kind, record) for kind, record in records)), "")

    def _add(self, kind: str, record: dict[str, Any]) -> str:
        if problem := schema_error(record, _FORMS[kind]) or _unsafe_keys(record["values"]):
            return problem
        if kind == _SETTING:
            self._settings[record["name"]] = Setting(**record)
            self._trials.setdefault(record["name"], [])
            return ""
        trials = self._trials[record["setting"]]
        number, values, at_rungs = record["number"], record["values"], record["at_rungs"]
        if number > len(trials):
            return f"number is {number}, but the lines before have {len(trials)} trials"
        for key, value in values.items():
            if value not in self.search.space[key]:
                return f"{key} is {str(value)[:40]!r}, not of its range in this search"
        rungs = self.search.rungs
        if record["share"] not in rungs or len(at_rungs) > len(rungs):
            return f"share is {record['share']}, which is no rung"
        record |= {"at_rungs": tuple(at_rungs), "scores": tuple(at_rungs[-1:])}
        trials[number : number + 1] = [StudyTrial(**record)]
        return ""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of the account, with all that others have written read."""
        with self._lock.hold():
            self._read()
            yield

    def _write(self, *records: Setting | StudyTrial) -> None:
        rows = []
        for line, record in enumerate(records, start=self._journal.next):
            kind = _SETTING if isinstance(record, Setting) else _TRIAL
            content = {key: value for key, value in asdict(record).items() if key in _FORMS[kind]}
            rows.append({"line": line, kind: content})
        self._journal.append(rows)
        self._read()

    # ---------------------------------------------------------------- settings

    def create(self, settings: Sequence[Setting]) -> None:
        """Record new settings, and try again settings that had failed."""
        with self._changing():
            self._write(
                *(replace(s, tries_from=len(self._trials.get(s.name, ()))) for s in settings)
            )

    def settings(self) -> list[Setting]:
        """Return the settings in the order of their creation."""
        self._read()
        return list(self._settings.values())

    def trials(self, name: str) -> Trials[StudyTrial]:
        """Return all trials of a setting by number."""
        self._read()
        search, trials = self.search, tuple(self._trials.get(name, ()))
        return Trials(name, search.metric, search.lower_is_better, trials, search.space)

    def _committed(self, setting: Setting, without: StudyTrial | None = None) -> float:
        """Return the spent FLOPs plus the FLOPs that running trials may still spend."""
        amounts = []
        for trial in self._trials[setting.name]:
            if without is None or trial.number != without.number:
                amounts.append(_charge(trial, setting))
        return math.fsum(amounts)

    def _pays(self, setting: Setting, flops: float, without: StudyTrial | None = None) -> bool:
        return self._committed(setting, without) + flops <= self.search.flops * (1 + _ROUNDING)

    def failures(self, name: str) -> list[StudyTrial]:
        """Return the trials that failed last, if too many failed in a row for chance."""
        self._read()
        last = self._trials[name][self._settings[name].tries_from :][-_MOST_FAILURES:]
        failed = [trial for trial in last if trial.state == FAILED]
        return failed if len(failed) == _MOST_FAILURES else []

    def is_open(self, setting: Setting) -> bool:
        """Return whether a trial of a setting can go on, or begin with the FLOPs left."""
        if any(trial.state == INTERRUPTED for trial in self.trials(setting.name)):
            return True
        first = self.search.rungs[0] * setting.run_flops
        return self._pays(setting, first) and not self.failures(setting.name)

    # ---------------------------------------------------------------- trials

    def begin(self, worker: str) -> StudyTrial | None:
        """Return a trial for a worker, None if nothing is left to do.

        It is an interrupted trial, or else a new trial of the setting that is furthest behind.
        """
        with self._changing():
            trial = next(self._in_state(INTERRUPTED), None)
            if trial is None:
                opened = [setting for setting in self.settings() if self.is_open(setting)]
                if not opened:
                    return None
                trials = self.trials(min(opened, key=self._committed).name)
                (values,) = OptunaSampler(self.search.sampler, self.search.seed).propose(trials)
                number, share = len(trials), self.search.rungs[0]
                trial = StudyTrial(values, setting=trials.name, number=number, share=share)
            trial = replace(trial, state=RUNNING, worker=worker)
            self._write(trial)
            return trial

    def report(self, trial: StudyTrial, score: float, flops: float) -> StudyTrial:
        """Record the score of a trial at the end of its share; return the trial as it goes on.

        A trial that goes on is `running` and has a larger share. Without a finite score it
        diverged.
        """
        if not math.isfinite(score):
            return self.end(trial, DIVERGED, flops)
        with self._changing():
            trial = replace(trial, flops=flops, scores=(score,), at_rungs=(*trial.at_rungs, score))
            trial = self._judge(trial)
            self._write(trial)
            return trial

    def _judge(self, trial: StudyTrial) -> StudyTrial:
        if trial.share >= 1:
            return replace(trial, state=FINISHED)
        rung, setting = self.search.rungs.index(trial.share), self._settings[trial.setting]
        share = self.search.rungs[rung + 1]
        if not self._is_promoted(trial, rung):
            return replace(trial, state=PRUNED)
        if not self._pays(setting, share * setting.run_flops, without=trial):
            return replace(trial, state=OUT_OF_BUDGET)
        return replace(trial, share=share)

    def _is_promoted(self, trial: StudyTrial, rung: int) -> bool:
        """Return whether a trial is among the best 1 / FACTOR of those that reached a rung."""
        sign = 1 if self.search.lower_is_better else -1
        others = [other for other in self._trials[trial.setting] if other.number != trial.number]
        reached = [sign * t.at_rungs[rung] for t in (*others, trial) if len(t.at_rungs) > rung]
        worst = sorted(reached)[max(0, len(reached) // FACTOR - 1)]
        return sign * trial.at_rungs[rung] <= worst

    def end(self, trial: StudyTrial, state: str, flops: float, message: str = "") -> StudyTrial:
        """Record that a trial diverged or failed, and its spent FLOPs."""
        trial = replace(trial, state=state, flops=max(flops, trial.flops), message=message)
        with self._changing():
            self._write(trial)
        return trial

    def interrupt(self, trial: StudyTrial) -> None:
        """Record that a trial has saved and waits for a worker to continue it."""
        with self._changing():
            self._write(replace(trial, state=INTERRUPTED))

    def running(self) -> list[StudyTrial]:
        """Return the trials that are running, or whose process died."""
        self._read()
        return list(self._in_state(RUNNING))

    def _in_state(self, state: str) -> Iterator[StudyTrial]:
        for trials in self._trials.values():
            yield from (trial for trial in trials if trial.state == state)


def _charge(trial: StudyTrial, setting: Setting) -> float:
    """Return the FLOPs that a trial spent, or may have spent at its next rung."""
    is_active = trial.state in (RUNNING, INTERRUPTED)
    return max(trial.flops, trial.share * setting.run_flops) if is_active else trial.flops


def _unsafe_keys(values: Mapping[str, Any]) -> str:
    """Return the problem of keys of a record; they become arguments of runs, `user_dir` is code."""
    bad = [key for key in values if key in ("user_dir", "save_dir") or not KEY.fullmatch(key)]
    return f"values has the key {bad[0][:60]!r}" if bad else ""
