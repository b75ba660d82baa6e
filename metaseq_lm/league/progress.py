"""Progress of a league over all of its phases, and the time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from metaseq_lm.core.output import StatusLine, seconds_text, show_progress
from metaseq_lm.league.expansion import BUDGET, PHASES, TUNE, LeagueSweep
from metaseq_lm.sweeps.expansion import PlannedRun
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import read_json_if_valid
from metaseq_lm.sweeps.progress import active_text
from metaseq_lm.sweeps.states import ACTIVE, State, read_states

_Key = tuple[str, str]  # the folder of a sweep, and the name of a run


class LeagueProgress:
    """Counts ended runs and estimates the time of the others.

    The time of a run is its FLOPs at the rate of the finished runs, plus a time for start and
    scoring, which is the mean over the runs watched from start to end.
    """

    def __init__(self, planned: Counter[tuple[str, float]], slots: int) -> None:
        # Planned runs by phase and budget; runs of known sweeps are counted there.
        self.planned = planned
        self.slots = slots
        self.budgets: dict[_Key, tuple[str, float]] = {}
        self.over: set[_Key] = set()
        self.begun: dict[_Key, float] = {}
        self.active: dict[str, State] = {}
        self.seconds = self.flops = 0.0
        self.extra: dict[bool, list[float]] = {True: [], False: []}  # by whether it is a trial
        self.status = StatusLine()

    def add(self, sweep: LeagueSweep, known: Iterable[State], runs: Iterable[PlannedRun]) -> None:
        """Add runs of a sweep, with the states of its runs."""
        states_of = {state.run: state for state in known}
        for run in runs:
            key = (str(sweep.folder), run.name)
            if key in self.budgets:
                continue
            kind = sweep.phase, float(run.values.get(BUDGET) or 0)
            self.budgets[key] = kind
            if self.planned[kind]:
                self.planned[kind] -= 1
            state = states_of[run.name].state
            if state in ("finished", "diverged"):
                self._end(key, sweep.folder / run.folder, state)

    def report(self, folder: SweepFolder, run: PlannedRun) -> None:
        """Record that a run started or ended; print a line if it did not finish."""
        key = (str(folder.path), run.name)
        if key in self.over:  # its process had not ended yet
            return
        (state,) = read_states(folder, [run])
        name = "/".join((*folder.path.parts[-2:], run.name))
        self.active.pop(name, None)
        if state.state in ACTIVE:
            self.begun.setdefault(key, time.monotonic())
            self.active[name] = state
        else:
            self._end(key, folder.path / run.folder, state.state)
            if state.state != "finished":
                show_progress(f"{name}  {state.state}  {state.reason}".rstrip())
        total, done = Counter[str](), Counter(self.budgets[key][0] for key in self.over)
        for (phase, _), count in self._all_runs().items():
            total[phase] += count
        counts = [f"{phase} {done[phase]}/{total[phase]}" for phase in PHASES if total[phase]]
        if left := self._seconds_left():
            counts.append(f"about {seconds_text(left)} left")
        text = ", ".join(counts) + active_text(self.active)
        self.status.show(text, len(self.over) / max(1, total.total()))

    def _end(self, key: _Key, folder: Path, state: str) -> None:
        if state != "interrupted":
            self.over.add(key)
        results = read_json_if_valid(folder / "results.json")
        if state != "finished" or not results.get("flops"):
            return
        phase, budget = self.budgets[key]
        if budget:  # an untrained run's update says nothing of the rate
            self.seconds += results["seconds"]
            self.flops += results["flops"]
        if key in self.begun:
            watched = time.monotonic() - self.begun[key]
            self.extra[phase == TUNE].append(max(0.0, watched - results["seconds"]))

    def _all_runs(self) -> Counter[tuple[str, float]]:
        """Return the number of runs, including planned ones, by phase and budget."""
        return self.planned + Counter(self.budgets.values())

    def _seconds_left(self) -> float | None:
        """Return the seconds that the remaining runs will take; None if unknown."""
        if not self.flops:
            return None
        left, rate = 0.0, self.seconds / self.flops
        open_runs = self._all_runs() - Counter(self.budgets[key] for key in self.over)
        for (phase, budget), count in open_runs.items():
            watched = self.extra[phase == TUNE] or self.extra[phase != TUNE]
            start = sum(watched) / max(1, len(watched))
            left += count * (start + budget * rate)
        return left / self.slots
