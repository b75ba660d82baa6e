"""The search of a sweep: its checks, its jobs, the chosen values, and the runs with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import RunConfig, describe_tuned_loss
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.output import show, show_progress
from metaseq_lm.runs.records import write_tuning
from metaseq_lm.sweeps import launching, optuna_records
from metaseq_lm.sweeps.configs import Check, check_configs, compose_runs
from metaseq_lm.sweeps.definition import Definition, list_differences
from metaseq_lm.sweeps.expansion import PlannedRun, expand, run_names
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import Code, outcome_of
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.search import Search
from metaseq_lm.sweeps.search_job import FOLDER, SearchJob, fail_lost, unknown_metric
from metaseq_lm.sweeps.states import WORKER, active_workers
from metaseq_lm.sweeps.studies import Setting, Studies
from metaseq_lm.sweeps.submit import RunBatch, parts_of_job, submit_slurm

_WHOLE_SWEEP = "all"  # the name of the setting of a sweep without grid and list


@dataclass(frozen=True)
class Searched:
    """A sweep with a search.

    Attributes:
        definition: The settings that are tuned, and the seeds of the runs with the chosen values.
        search: The rules of the search.
        out: The folder of the sweep.
        launch: Executor and resources.
        check: Raises UsageError for a configuration that must not be launched.
    """

    definition: Definition
    search: Search
    out: Path
    launch: Launch
    check: Check | None = None

    @property
    def names(self) -> list[str]:
        """The names of the settings."""
        names = run_names([(values, self.search.seed) for values in self.definition.settings])
        return [name.rpartition("seed=")[0].rstrip("-") or _WHOLE_SWEEP for name in names]

    def definition_of(
        self, values: Sequence[Mapping[str, Any]], seeds: Sequence[int]
    ) -> Definition:
        """Return the definition of runs of settings that include values of all searched options."""
        alternatives = [dict(setting) for setting in values]
        return replace(self.definition, grid={}, alternatives=alternatives, seeds=list(seeds))

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield searched values that together cover both ends of every range and every choice."""
        space = self.search.space
        for at in range(max(len(item.samples) for item in space.values())):
            yield {key: item.samples[at % len(item.samples)] for key, item in space.items()}

    def corner_runs(self) -> Iterator[tuple[str, list[PlannedRun]]]:
        """Yield the name of each setting, and its runs at the corners."""
        corners = list(self.corners())
        for name, values in zip(self.names, self.definition.settings):
            settings = [{**values, **item} for item in corners]
            yield name, expand(self.definition_of(settings, [self.search.seed]), self.out)

    def check_rules(self) -> None:
        """Raise UsageError for a search that contradicts the sweep, or if Optuna is missing."""
        if find_spec("optuna") is None:
            raise UsageError("a search needs optuna: pip install 'metaseq-lm[search]'")
        if len(self.definition.stages) > 1:
            raise UsageError(
                "a search tunes runs of one stage; score them with trainer.final_suites, or search "
                "in a sweep of that stage alone"
            )
        if self.launch.nodes > 1:
            raise UsageError("a search runs its trials on one node each; leave --nodes out")
        varied = {*self.definition.grid}.union(*self.definition.alternatives)
        self.search.check(varied, self.definition.seeds)

    def check_all(self) -> list[Setting]:
        """Return the settings with their budgets; UsageError for a run that could not start."""
        self.check_rules()
        for _, runs in self.corner_runs():
            check_configs(runs, self.definition, self.check)
        configs = zip(self.names, self.definition.settings, self.first_configs())
        return [Setting(name, values, self.budget_of(name, c)) for name, values, c in configs]

    def first_configs(self) -> Iterator[RunConfig]:
        """Yield the configuration of the first run of each setting."""
        runs = [runs[0] for _, runs in self.corner_runs()]
        yield from (config for *_, config in compose_runs(runs, self.definition, self.check))

    def budget_of(self, name: str, config: RunConfig) -> float:
        """Return the FLOPs of a run; raises UsageError if these alone do not end it."""
        options, search = config.trainer, self.search
        if not options.max_flops or options.max_update:
            raise UsageError(
                "a search compares runs of equal FLOPs, and its rungs are parts of them: give "
                "--max-flops, and trainer.max_update=0"
            )
        if search.flops < options.max_flops:
            raise UsageError(
                f"{name}: a trial takes {options.max_flops:.3g} FLOPs, more than the "
                f"{search.flops:.3g} of --search-flops; four times as many are usual"
            )
        return float(options.max_flops)

    def check_metric(self) -> None:
        """Raise UsageError for a metric without direction, or that a setting's validation lacks."""
        for config in self.first_configs():
            if reason := describe_tuned_loss(self.search.space, self.search.metric, config):
                say(f"metaseq-lm: warning: search: {reason} (metric)")
            split = config.trainer.valid_split
            if split and self.search.metric.startswith(f"{split}."):
                known = [f"{split}.{name}" for name in _valid_metrics(config)]
                if self.search.metric not in known:
                    raise UsageError(unknown_metric(self.search.metric, known))
        self.search.check_direction()

    # ---------------------------------------------------------------- before it runs

    def show_plan(self, settings: Sequence[Setting], divisor: int, rate: float) -> None:
        """Print trials, FLOPs and hours of the search and of the runs with the chosen values."""
        from metaseq_lm.training.price import price_of_run

        search, seeds = self.search, len(self.definition.seeds)
        flops, seconds, rows = 0.0, 0.0, []
        for setting, config in zip(settings, self.first_configs()):
            price, took, _ = price_of_run(config, divisor, rate)
            per_flop = took / price
            whole = most = int(search.flops // setting.run_flops)
            trials = f"{whole} trials"
            if search.prune != "none":
                most = int(search.flops // (search.rungs[0] * setting.run_flops))
                trials = (
                    f"{whole} trials if none is stopped, {most} if all are at the first of the "
                    f"rungs ({', '.join(f'{share:.0%}' for share in search.rungs[:-1])})"
                )
            hours = search.flops * per_flop / 3600
            show(f"{setting.name}: search {search.flops:.2g} FLOPs, {hours:.2g} hours, {trials}")
            spent = search.flops + seeds * setting.run_flops
            flops, seconds = flops + spent, seconds + spent * per_flop
            row = {"name": setting.name, "run_flops": setting.run_flops, "trials": [whole, most]}
            rows.append({**row, "seconds": search.flops * per_flop, "flops": search.flops})
        parallel = self.launch.max_parallel or 1
        show(
            f"{len(settings) * seeds} runs with the chosen values ({len(settings)} x {seeds} "
            f"seeds); in all {flops:.2g} FLOPs, {seconds / 3600:.2g} hours of one process without "
            f"validations, {seconds / 3600 / parallel:.2g} with --max-parallel {parallel}"
        )
        notes = self.notes()
        for note in notes:
            show(note)
        content = {"settings": rows, "runs": len(rows) * seeds, "flops": flops, "seconds": seconds}
        show_result("search-plan", {**content, "max_parallel": parallel, "notes": notes})

    def require_same(self, folder: SweepFolder) -> None:
        """Raise UsageError if the folder holds another search, or a sweep without one.

        Seeds may differ, and so may FLOPs as long as the search is not over.
        """
        if not (folder.path / "sweep.json").exists():
            return
        stored = folder.stored_search()
        if not stored:
            raise UsageError(f"{folder.path} holds a sweep without a search; choose another --out")
        moved: dict[str, Any] = dict(launching.relocated_paths(folder, self.definition))
        definition = replace(self.definition, **moved)
        current = {"search": self.search.as_json(), **definition.as_json()}
        earlier = {"search": dict(stored["rules"]), **stored["definition"]}
        for content in (current, earlier):
            content["seeds"] = []
            if not folder.runs():
                content["search"]["flops"] = 0.0
        if lines := list_differences(earlier, current):
            raise UsageError(
                f"{folder.path} holds another search ({'; '.join(lines[:5])}); choose another "
                "--out, or continue it with the same definition; --search-flops can be raised "
                "until the runs with the chosen values have begun"
            )

    # ---------------------------------------------------------------- the search

    def studies(self) -> Studies:
        """Return the studies in the folder of the sweep."""
        return Studies(self.out / FOLDER, self.search)

    def run(self, folder: SweepFolder, settings: list[Setting], new_code: bool) -> bool:
        """Run the rest of the search; return whether it is over.

        On Slurm, jobs are submitted and False is returned. The caller holds the lock.
        """
        studies = self.studies()
        recorded = {setting.name for setting in studies.settings()}
        # A deleted or restored journal knows less than the launched runs.
        is_over = recorded.issuperset(self.names) and not any(map(studies.is_open, settings))
        if (folder.path / "sweep.json").exists() and folder.runs() and is_over:
            return True
        rules = {"rules": self.search.as_json(), "definition": self.definition.as_json()}
        folder.adopt(self.definition, [], self.launch.non_default(), rules)
        workers = active_workers(folder)
        if workers:
            show(f"the search goes on in {', '.join(workers)}")
            return False
        self.show_failures(studies)
        studies.create(settings)
        # No job is active any more, so trials that count as running died with theirs.
        names = {trial.worker for trial in studies.running()}
        for trial in fail_lost(studies, str(self.out), names):
            show(f"{trial.setting} trial {trial.number} failed: its process died")
        if not any(map(studies.is_open, settings)):
            return True
        code = launching.take_code(folder, new_code or _has_earlier_code(folder))
        launch = replace(self.launch, runs_per_job=1)  # a job of the search continues by itself
        on_slurm = launch.executor == "slurm"
        count = launch.max_parallel or (len(settings) if on_slurm else 1)
        seed = self.search.seed
        jobs = [PlannedRun(f"{WORKER}{n}", FOLDER, {}, seed, ()) for n in range(1, count + 1)]
        if on_slurm:
            for job in submit_slurm(folder, jobs, launch, code, self.make_job):
                show(f"submitted a job of the search  job {job}")
            return False
        batch = RunBatch(folder, jobs, code, self.make_job)
        launching.run_locally([batch], launch, self.report)
        self.raise_failure(folder, jobs)
        if self.show_failures(studies):
            raise MetaseqError("the search cannot go on; see above, and give the command again")
        return not any(map(studies.is_open, settings))

    def show_failures(self, studies: Studies) -> bool:
        """Print the settings in which all recent trials failed; return whether there are any."""
        stuck = False
        for setting in studies.settings():
            if failed := studies.failures(setting.name):
                stuck = True
                show(f"{setting.name}: the last {len(failed)} trials failed; {failed[-1].message}")
        return stuck

    def make_job(
        self, folder: SweepFolder, runs: Sequence[PlannedRun], launch: Launch, code: Code
    ) -> SearchJob:
        """Return the job of the search for submitit to call."""
        (run,) = runs
        parts = parts_of_job(folder, launch, code)
        return SearchJob(run.name, str(folder.path), self.definition, self.search, *parts)

    def report(self, folder: SweepFolder, run: PlannedRun) -> None:
        """Print the progress of the search."""
        show_progress("\n".join(_search_lines(self.studies())))

    def raise_failure(self, folder: SweepFolder, jobs: Sequence[PlannedRun]) -> None:
        """Raise the error that ended a job of the search, if one did."""
        last = folder.submissions()
        for job in jobs:
            if job.name not in last:
                continue
            entry = last[job.name]
            outcome = outcome_of(folder.path / entry.folder, entry.job)
            if outcome.get("state") == "failed":
                is_usage = outcome.get("exit_code") == UsageError.exit_code
                raise (UsageError if is_usage else MetaseqError)(str(outcome.get("message")))
            if outcome.get("state") != "finished":
                raise MetaseqError(
                    f"{job.name} ended without a message ({folder.path / entry.folder}); the "
                    "same command goes on with the search"
                )

    def choose(self) -> list[dict[str, Any]]:
        """Print and return the best searched values of each setting, merged with its own values.

        Raises MetaseqError if no trial of a setting finished.
        """
        studies, chosen = self.studies(), []
        show("\n".join([*_search_lines(studies), *self.notes()]))
        for name, values in zip(self.names, self.definition.settings):
            trials = studies.trials(name)
            best = trials.best()
            if best is None:
                raise MetaseqError(
                    f"{name}: no trial finished, so there is nothing to choose; see {self.out}/"
                    f"{FOLDER}/{name}, or give more --search-flops"
                )
            for key, end in trials.edges(best.values).items():
                show(
                    f"warning: {name}: {key}={best.values[key]} lies at the {end} end of "
                    f"{self.search.space[key].as_json()}; the best value may be outside: search a "
                    "wider range, of all settings, into another --out"
                )
            chosen.append({**values, **best.values})
        return chosen

    def notes(self) -> list[str]:
        """Return a note if the metric chooses by items that reports show, else []."""
        from metaseq_lm.training.suites import chooses_by_reported

        metric, configs = self.search.metric, self.first_configs()
        if not any(chooses_by_reported(config, metric) for config in configs):
            return []
        return [
            f"note: {metric} chooses values by items on which reports compare the runs, so their "
            "scores are too good. Choose by other items: a suite in trainer.final_suites twice, "
            "such as 'blimp blimp name=dev first=200' with --search-metric dev.accuracy, and "
            "'blimp blimp skip=200' for reports"
        ]

    def record_tuning(self, runs: Sequence[PlannedRun]) -> None:
        """Record in the folders of runs how their options were chosen, and at which cost."""
        studies = self.studies()
        for name, values in zip(self.names, self.definition.settings):
            trials = studies.trials(name)
            best = trials.best()
            for run in runs:
                if best and values.items() <= run.values.items():
                    write_tuning(self.out / run.folder, trials.record(best.values))


def _has_earlier_code(folder: SweepFolder) -> bool:
    """Return whether the snapshot is of an earlier version, which cannot read a new journal."""
    last = folder.last_code()
    module = Path("metaseq_lm", "sweeps", Path(optuna_records.__file__).name)
    if last is None or (folder.path / "code" / last / module).is_file():
        return False
    show(f"code/{last} is of an earlier version; the search goes on with a new snapshot")
    return True


def _valid_metrics(config: RunConfig) -> list[str]:
    """Return the names of a run's validation metrics, from one batch."""
    from metaseq_lm.tasks import with_updates
    from metaseq_lm.training.parts import build_parts, evaluate_split, prepare_config

    parts = build_parts(prepare_config(with_updates(config, 1)), dry_run=True)
    return list(evaluate_split(parts, config.trainer.valid_split, most=1).metrics)


def _search_lines(studies: Studies) -> list[str]:
    lines = []
    for setting in studies.settings():
        trials = studies.trials(setting.name)
        states = [trial.state for trial in trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        line = f"{setting.name}: {len(trials)} trials ({counts or 'none yet'}), {trials.flops:.3g} "
        line += f"of {studies.search.flops:.3g} FLOPs"
        if best := trials.best():
            values = " ".join(f"{key}={value}" for key, value in best.values.items())
            line += f", best {studies.search.metric} {best.score:.5g}: {values}"
        lines.append(line)
    return lines


def status_lines(folder: SweepFolder) -> list[str]:
    """Return the lines of `sweep status` on the search in a folder, [] without a search."""
    stored = folder.stored_search()
    if not stored or not (folder.path / FOLDER).is_dir():
        return []
    studies = Studies(folder.path / FOLDER, Search.from_json(stored["rules"]))
    workers = [f"{name} {state}" for name, state in active_workers(folder).items()]
    over = bool(folder.runs())
    jobs = "the search is over" if over else f"jobs of the search: {', '.join(workers) or 'none'}"
    return [*_search_lines(studies), jobs]


def again_text(out: Path) -> str:
    """Return the message after submitting jobs of a search."""
    return (
        f"follow it with: metaseq-lm sweep status {shlex.quote(str(out))}; give the same command "
        "again when the search is over: it launches the runs with the chosen values"
    )
