"""The phases of a league: untrained models, tuning with widened grids, training, shuffled text."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from metaseq_lm.core.config import RunConfig, describe_tuned_loss
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import check_folder, temporary_name
from metaseq_lm.core.output import show, show_progress
from metaseq_lm.core.registry import nearest
from metaseq_lm.league.examination import examine
from metaseq_lm.league.expansion import (
    BUDGET,
    FINAL,
    PHASES,
    SHUFFLED,
    TUNE,
    UNTRAINED,
    DataSource,
    LeagueSweep,
    Prices,
    budget_values,
    build_sweep,
    describe_excluded,
    possible,
    stored_settings,
)
from metaseq_lm.league.plan import Objective, Plan, budget_text
from metaseq_lm.league.progress import LeagueProgress
from metaseq_lm.league.tuning import trials_of
from metaseq_lm.reporting.runs import Run, read_run
from metaseq_lm.reporting.settings import finished
from metaseq_lm.runs.records import write_plan, write_tuning
from metaseq_lm.sweeps.configs import Check, check_configs, compose_runs
from metaseq_lm.sweeps.expansion import PlannedRun as Planned
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import Code, code_at, is_same_plugin
from metaseq_lm.sweeps.launching import OPEN, adopt, run_locally, take_code
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.samplers import Grid, GridSampler, combinations
from metaseq_lm.sweeps.states import ACTIVE, read_states
from metaseq_lm.sweeps.submit import RunBatch, submit_slurm
from metaseq_lm.sweeps.trials import Trial, Trials, Values
from metaseq_lm.training.suites import request_of

WAIT = 15.0  # seconds between checks of jobs on Slurm
SILENCE = 600.0  # seconds without an answer on any job, after which the command ends


@dataclass(frozen=True)
class LeagueRequest:
    """The part of a league that a command runs.

    Attributes:
        objectives: The objectives.
        budgets: The budgets of the final runs.
        source: Their data and plug-in.
        prices: FLOPs of an update by objective, where known; budgets that whole updates cannot
            spend are left out.
    """

    objectives: tuple[Objective, ...]
    budgets: tuple[float, ...]
    source: DataSource
    prices: Prices = field(default_factory=dict)


@dataclass
class Runner:
    """Runs the phases of a request, each as sweeps in the folder of the league.

    Attributes:
        plan: The plan.
        request: The objectives and budgets to run.
        out: The folder of the league.
        launch: Executor and resources.
        plan_hash: The hash that runs record, of the plan without added objectives.
        check: Raises UsageError for a configuration that must not be launched.
    """

    plan: Plan
    request: LeagueRequest
    out: Path
    launch: Launch
    plan_hash: str
    check: Check | None = None
    progress: LeagueProgress = field(init=False)

    def __post_init__(self) -> None:
        planned = sum(map(self.planned_of, self.request.objectives), Counter[tuple[str, float]]())
        self.progress = LeagueProgress(planned, self.launch.max_parallel or 1)

    # ---------------------------------------------------------------- what there is to run

    def with_prices(self, prices: Prices) -> Runner:
        """Return a runner that leaves out budgets which objectives cannot spend.

        Raises UsageError if nothing is left to run.
        """
        request = replace(self.request, prices=prices)
        runner = replace(self, request=request)
        left = tuple(o for o in request.objectives if runner.budgets(o))
        if not left:
            raise UsageError(f"there is nothing to run. {' '.join(self.excluded(prices))}")
        return replace(runner, request=replace(request, objectives=left))

    def excluded(self, prices: Prices) -> list[str]:
        """Return sentences on objectives that cannot run at a budget of the request."""
        request = self.request
        return describe_excluded(self.plan, request.objectives, prices, request.budgets)

    def budgets(self, objective: Objective) -> list[float]:
        """Return the budgets of the request that an objective can run at."""
        return possible(self.plan, objective, self.request.prices, self.request.budgets)

    def _tuned_budgets(self, objective: Objective) -> list[float]:
        tuned = set(map(self.plan.tuning.nearest, self.budgets(objective)))
        if self.plan.once(objective):
            tuned.add(self.plan.tuning.middle)
        return sorted(tuned)

    def _shuffled_budgets(self, objective: Objective) -> list[float]:
        return [b for b in self.budgets(objective) if b in self.plan.controls.shuffled]

    def planned_of(self, objective: Objective) -> Counter[tuple[str, float]]:
        """Return the number of runs by phase and budget, before any grid is widened."""
        plan = self.plan
        count: Counter[tuple[str, float]] = Counter()
        for budget in self._tuned_budgets(objective):
            count[TUNE, budget] += plan.trials(objective, budget)
        for budget in self.budgets(objective):
            count[FINAL, budget] += len(plan.ladder.seeds)
        for budget in self._shuffled_budgets(objective):
            count[SHUFFLED, budget] += len(plan.controls.seeds)
        count[UNTRAINED, 0.0] += len(plan.controls.seeds) * plan.controls.untrained
        return count

    def sweep(self, objective: Objective, phase: str, settings: Sequence[Values]) -> LeagueSweep:
        """Return the sweep of an objective in a phase."""
        return build_sweep(self.plan, objective, phase, settings, self.request.source, self.out)

    def _first_trials(self, objective: Objective) -> dict[float, list[Values]]:
        """Return the settings of the plan's grid for each tuned budget.

        At other budgets than the middle one, options that are tuned once have the best value of the
        middle budget, or their first value before trials have decided it.
        """
        middle, grid = self.plan.tuning.middle, dict(objective.grid)
        if keys := self.plan.once(objective):
            at_middle = budget_values({middle: combinations(objective.grid)})
            sweep = self.sweep(objective, TUNE, at_middle)
            trials = trials_of(self.plan, objective, _started_runs(sweep)).get(middle)
            best = trials.best() if trials else None
            for key in keys:
                grid[key] = [best.values[key]] if best else objective.grid[key][:1]
        settings = dict.fromkeys(self._tuned_budgets(objective), combinations(grid))
        if middle in settings:
            settings[middle] = combinations(objective.grid)
        return settings

    def _tune_sweep(self, objective: Objective) -> LeagueSweep:
        return self.sweep(objective, TUNE, budget_values(self._first_trials(objective)))

    def _untrained_sweeps(self) -> list[LeagueSweep]:
        objectives = self.request.objectives if self.plan.controls.untrained else ()
        return [self.sweep(objective, UNTRAINED, []) for objective in objectives]

    def _compose(self, sweep: LeagueSweep) -> None:
        list(compose_runs(_of_one_seed(sweep.runs), sweep.definition, self.check))

    def check_all(self) -> None:
        """Raise UsageError for the first configuration that could not start.

        All trials and shuffled runs are composed; final runs and untrained models are built with
        their first values.
        """
        for objective in self.request.objectives:
            first = [objective.first]
            settings = budget_values(dict.fromkeys(self.budgets(objective), first))
            shuffled = budget_values(dict.fromkeys(self._shuffled_budgets(objective), first))
            try:
                if objective.grid:
                    self._compose(self._tune_sweep(objective))
                if shuffled:
                    self._compose(self.sweep(objective, SHUFFLED, shuffled))
                built = [self.sweep(objective, FINAL, settings)]
                if self.plan.controls.untrained:
                    built.append(self.sweep(objective, UNTRAINED, []))
                for sweep in built:
                    check_configs(_of_one_seed(sweep.runs), sweep.definition, self.check)
            except UsageError as error:
                raise UsageError(f"objective {objective.name}: {error}") from error

    def first_config(self, objective: Objective) -> RunConfig:
        """Return the configuration of a run of an objective, with the first values of its grid."""
        budget = self.request.budgets[0]
        sweep = self.sweep(objective, FINAL, budget_values({budget: [objective.first]}))
        (_, _, config), *_ = compose_runs(sweep.at([budget])[:1], sweep.definition, self.check)
        return config

    def examine_all(self) -> None:
        """Raise UsageError for the first objective that fails its examination.

        Warn of objectives with a grid that changes the loss that tunes them.
        """
        for objective in self.request.objectives:
            try:
                examine(config := self.first_config(objective))
            except UsageError as error:
                raise UsageError(f"objective {objective.name}: {error}") from error
            metric = self.plan.tuning_metric(objective)
            if reason := describe_tuned_loss(objective.grid, metric, config):
                say(f"metaseq-lm: warning: objective {objective.name}: {reason} (--tune-by)")

    # ---------------------------------------------------------------- the phases

    def run(self) -> bool:
        """Run all phases; return whether every run finished or diverged."""
        self._warn_of_changed_plugins()
        # Untrained models come first, as they cost little and show whether the metrics exist.
        over = self._run_sweeps(self._untrained_sweeps(), self.request.budgets)
        self._check_metrics()
        tuned = [objective for objective in self.request.objectives if objective.grid]
        middle = self.plan.tuning.middle
        # The middle budget comes first if it chooses for the others.
        once = [objective for objective in tuned if self.plan.once(objective)]
        self._run_trials({item.name: {middle: combinations(item.grid)} for item in once})
        self._run_trials({item.name: self._first_trials(item) for item in tuned})
        finals, shuffled = [], []
        for objective in self.request.objectives:
            chosen = self._chosen(objective)
            finals.append(self.sweep(objective, FINAL, budget_values(chosen)))
        over &= self._run_sweeps(finals, self.request.budgets)
        # The shuffled controls run even if other runs failed.
        for objective in self.request.objectives:
            if budgets := self._shuffled_budgets(objective):
                chosen = self._chosen(objective)
                settings = budget_values({budget: chosen[budget][:1] for budget in budgets})
                shuffled.append(self.sweep(objective, SHUFFLED, settings))
        return self._run_sweeps(shuffled, self.request.budgets) and over

    def _warn_of_changed_plugins(self) -> None:
        """Warn of objectives with runs of an older version of the plug-in, which are kept."""
        user_dir = self.request.source.user_dir
        if not user_dir:
            return
        for objective in self.request.objectives:
            for phase in PHASES:
                folder = SweepFolder(self.out / phase / objective.name)
                last = folder.last_code() if folder.path.is_dir() else None
                if last and not is_same_plugin(folder.path / "code" / last, user_dir):
                    say(
                        f"metaseq-lm: warning: {user_dir} has changed since the first runs of "
                        f"{objective.name}, which keep the copy that they began with; give "
                        "another --name for the changed one"
                    )
                    break

    def _check_metrics(self) -> None:
        """Raise an error for a metric of the plan that the untrained models lack.

        A secondary metric may belong to an optional suite.

        Raises:
            MetaseqError: All untrained models of an objective failed, so all its other runs would.
            UsageError: An untrained model lacks such a metric.
        """
        comparison = self.plan.comparison
        suites = [request_of(entry, self.request.source.data) for entry in comparison.suites]
        optional = tuple(f"{suite.name}." for suite in suites if suite.is_optional)
        shown = list(chain.from_iterable(map(comparison.parts_of, comparison.secondary)))
        for sweep in self._untrained_sweeps():
            objective = self.plan.objective(sweep.objective)
            decisive = [*comparison.parts_of(comparison.metric)]
            if objective.grid:
                decisive += comparison.parts_of(self.plan.tuning_metric(objective))
            runs = _started_runs(sweep)
            if runs and all(run.status == "failed" for run in runs):
                raise MetaseqError(
                    f"all untrained models of {objective.name} failed, so nothing is tuned: "
                    f"{runs[0].why_unended()}. Correct it in the plan and choose another --out, "
                    "or go on without it: --objectives"
                )
            for run in finished(runs):
                if doubled := [name for name in comparison.means if name in run.metrics]:
                    raise UsageError(
                        f"comparison.means.{doubled[0]}: the runs have a metric of this name; "
                        "choose another one, and another --out"
                    )
                for name in [*decisive, *shown]:
                    may_lack = name.startswith(optional) and name not in decisive
                    if name not in run.metrics and not may_lack:
                        raise UsageError(
                            f"the plan names a metric that no run of {sweep.objective} has, "
                            f"'{name}'.{nearest(name, list(run.metrics))} Metrics: "
                            f"{', '.join(run.metrics)}. Correct the plan and choose another --out"
                        )

    def _run_trials(self, settings: dict[str, dict[float, list[Values]]]) -> None:
        """Run trials of objectives by budget, until no best value is at an end of its grid."""
        budgets = set[float]().union(*settings.values())
        while settings:
            sweeps = []
            for name, of_budgets in settings.items():
                objective = self.plan.objective(name)
                sweeps.append(self.sweep(objective, TUNE, budget_values(of_budgets)))
            self._run_sweeps(sweeps, sorted(budgets))
            settings = {}
            for sweep in sweeps:
                if further := self._further_trials(sweep):
                    settings[sweep.objective] = further

    def _further_trials(self, sweep: LeagueSweep) -> dict[float, list[Values]]:
        """Return the settings of grids that are widened, by budget."""
        objective, tuning = self.plan.objective(sweep.objective), self.plan.tuning
        settings = {}
        for budget, trials in self._trials(objective, sweep).items():
            sampler = GridSampler(
                tuning.widen,
                lambda trials: [values for values, _ in trials.plausible(tuning.plausible)],
                partial(self._is_possible, objective, budget),
            )
            if proposed := sampler.propose(trials):
                settings[budget] = proposed
                place = f"{objective.name} at {budget_text(budget)}"
                show_progress(f"{place}: {_describe(trials, proposed)}")
        return settings

    def _is_possible(self, objective: Objective, budget: float, grid: Grid) -> bool:
        """Return whether all settings of a wider grid are valid values of their options."""
        try:
            self._compose(self.sweep(objective, TUNE, budget_values({budget: combinations(grid)})))
        except UsageError as error:
            show(f"{objective.name}: its grid is not widened: {error}")
            return False
        return True

    def _trials(self, objective: Objective, sweep: LeagueSweep) -> dict[float, Trials[Trial]]:
        trials = trials_of(self.plan, objective, _started_runs(sweep))
        tuned = self._tuned_budgets(objective)
        return {budget: trials[budget] for budget in tuned if budget in trials}

    def _chosen(self, objective: Objective) -> dict[float, list[Values]]:
        """Return the plausible settings of each budget, the first one the most frequent.

        Without a share of draws for plausible settings, it is the best setting alone. Settings of
        started runs are kept.

        Raises UsageError if no trial at a budget has a score.
        """
        share, metric = self.plan.tuning.plausible, self.plan.tuning_metric(objective)
        stored: dict[float, list[Values]] = {}
        if not share:
            for settings in stored_settings(self.out / FINAL / objective.name):
                (_, at), *values = settings.items()
                stored[float(at)] = [dict(values)]
        chosen = {budget: stored.get(budget, [{}]) for budget in self.budgets(objective)}
        if not objective.grid:
            return chosen
        sweep = self._tune_sweep(objective)
        trials = self._trials(objective, sweep)
        for budget in chosen:
            if budget in stored:
                continue
            tuned = self.plan.tuning.nearest(budget)
            shares = trials[tuned].plausible(share) if tuned in trials else ()
            if not shares:
                reason = None
                if tuned in trials:
                    reason = trials[tuned].runs[0].why_unscored(metric)
                reason = reason or "none could start; does an update cost more than the budget?"
                raise UsageError(
                    f"objective {objective.name}: no trial at {budget_text(tuned)} FLOPs has "
                    f"{metric} ({reason}); see 'metaseq-lm sweep status {sweep.folder}'"
                )
            chosen[budget] = [values for values, _ in shares]
        return chosen

    # ---------------------------------------------------------------- launching

    def _run_sweeps(self, sweeps: Sequence[LeagueSweep], budgets: Sequence[float]) -> bool:
        """Launch the open runs at budgets and wait; return whether all have ended."""
        pairs = [(SweepFolder(sweep.folder), sweep.at(budgets)) for sweep in sweeps]
        with contextlib.ExitStack() as stack:
            batches = []
            for sweep, (folder, requested) in zip(sweeps, pairs):
                check_folder(sweep.folder, self.out)
                folder.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(folder.lock())
                current = adopt(folder, sweep.definition, sweep.runs, self.launch)
                self.progress.add(sweep, current, requested)
                names = {state.run for state in current if state.state in OPEN}
                todo = [run for run in requested if run.name in names]
                # Before the runs, because a run without a hash would pass for one of any plan.
                for run in todo:
                    write_plan(folder.path / run.folder, self.plan_hash)
                if sweep.phase == FINAL:
                    self._record_tuning(sweep, todo)
                if todo:
                    batches.append(RunBatch(folder, todo, self.code(folder)))
            if self.launch.executor == "slurm":
                for batch in batches:
                    submit_slurm(batch.folder, batch.runs, self.launch, batch.code)
            elif batches:
                run_locally(batches, self.launch, self.progress.report)
        if self.launch.executor == "slurm":
            self._wait(pairs)
        known = chain.from_iterable(read_states(folder, runs) for folder, runs in pairs)
        return all(state.state in ("finished", "diverged") for state in known)

    def _record_tuning(self, sweep: LeagueSweep, runs: Sequence[Planned]) -> None:
        """Record in the folders of final runs the cost of the trials that chose their options."""
        objective = self.plan.objective(sweep.objective)
        if not objective.grid or not runs:
            return
        trials = self._trials(objective, self._tune_sweep(objective))
        for run in runs:
            budget = self.plan.tuning.nearest(float(run.values[BUDGET]))
            if budget in trials:
                values = {key: run.values[key] for key in objective.grid}
                # A gate of the league judges edges, by all values that were tried.
                record = {**trials[budget].record(values), "edges": {}}
                write_tuning(sweep.folder / run.folder, record)

    def code(self, folder: SweepFolder) -> Code:
        """Return the snapshot of the code that a sweep runs from.

        A new sweep gets a copy of the snapshot of other sweeps with the same plug-in, because rows
        that ran from different code are not compared.
        """
        if folder.last_code() is not None:
            return take_code(folder)
        definition = folder.definition()
        for file in sorted(self.out.glob("*/*/jobs.jsonl")):
            other = SweepFolder(file.parent)
            last = other.last_code()
            if last is None or other.definition().user_dir != definition.user_dir:
                continue
            copy = folder.path / "code" / last
            if not copy.is_dir():
                # A kill must not leave a part of a snapshot under its name.
                temporary = temporary_name(copy)
                shutil.copytree(other.path / "code" / last, temporary)
                temporary.rename(copy)
            return code_at(copy, definition.user_dir, definition.config_dir)
        return take_code(folder)

    def _wait(self, pairs: Sequence[tuple[SweepFolder, list[Planned]]]) -> None:
        """Wait for jobs on Slurm, which go on if this command is stopped.

        Raises MetaseqError if Slurm reports nothing on any job for SILENCE seconds.
        """
        over: set[tuple[str, str]] = set()
        silent = 0.0
        while True:
            active: Counter[str] = Counter()
            for folder, runs in pairs:
                for run, state in zip(runs, read_states(folder, runs)):
                    key = (str(folder.path), run.name)
                    if state.state in ACTIVE:
                        active[state.state] += 1
                        last = folder.path, state
                    if state.state not in ("pending", "unknown") and key not in over:
                        self.progress.report(folder, run)
                        if state.state not in ACTIVE:
                            over.add(key)
            if not active:
                return
            silent = silent + WAIT if set(active) == {"unknown"} else 0.0
            if silent > SILENCE:
                path, state = last
                raise MetaseqError(
                    f"Slurm has not said for {SILENCE / 60:g} minutes what became of "
                    f"{active['unknown']} jobs, such as {state.job} of {state.run}"
                    f"{f' ({state.reason})' if state.reason else ''}; they may go on. See "
                    f"'metaseq-lm sweep status {path}', and give the same command again when Slurm "
                    "answers"
                )
            time.sleep(WAIT)


def _started_runs(sweep: LeagueSweep) -> list[Run]:
    folders = [sweep.folder / run.folder for run in sweep.runs]
    return [read_run(folder) for folder in folders if (folder / "config.yaml").is_file()]


def _of_one_seed(runs: Sequence[Planned]) -> list[Planned]:
    """Return the runs of the first seed, since other seeds have the same configurations."""
    return [run for run in runs if run.seed == runs[0].seed]


def _describe(trials: Trials[Trial], proposed: Sequence[Values]) -> str:
    parts = []
    for key, tried in trials.grid.items():
        for further in dict.fromkeys(v[key] for v in proposed if v[key] not in tried):
            end = tried[0] if further < tried[0] else tried[-1]
            parts.append(f"{key} {end} is the best and the last of its grid, so {further} too")
    return "; ".join(parts)
