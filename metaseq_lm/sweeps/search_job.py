"""A job of a search: runs one trial after the other until the FLOPs of all settings are spent.

Several such jobs share the studies. A trial is trained in a child process up to its next rung, and
continues from its checkpoint if it may, so its result after a rung does not depend on the time of
the decision. At a signal the trial saves and waits, until the requeued job or another one continues
it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.helpers import DelayedSubmission

from metaseq_lm.core.config import flatten
from metaseq_lm.core.errors import DivergedError, UsageError
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import nearest
from metaseq_lm.runs import suite_results
from metaseq_lm.runs.folder import parse_results
from metaseq_lm.runs.records import write_trial
from metaseq_lm.sweeps.definition import Definition
from metaseq_lm.sweeps.expansion import arguments_of
from metaseq_lm.sweeps.job import JobRunner, describe_exit, is_interruption
from metaseq_lm.sweeps.search import Search
from metaseq_lm.sweeps.states import read_progress
from metaseq_lm.sweeps.studies import Setting, Studies
from metaseq_lm.sweeps.trials import DIVERGED, FAILED, INTERRUPTED, RUNNING, StudyTrial

FOLDER = "search"  # folder of studies and trials in the folder of the sweep
_VALID = "valid."


@dataclass
class SearchJob:
    """Trials of a search, one after the other; pickled by submitit.

    Attributes:
        name: Name of the job in jobs.jsonl.
        out: The folder of the sweep.
        definition: The definition of the sweep.
        search: The rules of the search.
        arguments: Options of `train` for all trials, from the snapshot and the processes.
        code: The snapshot.
        threads: OMP_NUM_THREADS of each process.
        lock: As in `Job`.
    """

    name: str
    out: str
    definition: Definition
    search: Search
    arguments: list[str]
    code: str
    threads: int = 1
    lock: str | None = None

    def __call__(self) -> None:
        """Run trials; raises MetaseqError if the search cannot go on."""
        runner = JobRunner(self)
        runner.start()
        runner.begin(self.name)
        JobRunner.import_all()
        studies = Studies(Path(self.out) / FOLDER, self.search)
        settings = {setting.name: setting for setting in studies.settings()}
        fail_lost(studies, self.out, {self.name})  # trials of a killed attempt
        while not runner.signals and (trial := studies.begin(self.name)) is not None:
            self.run_trial(runner, studies, settings[trial.setting], trial)
        if runner.signals:
            runner.interrupted("", -runner.signals[0], None)
        runner.record("finished", "", 0, "")

    def run_trial(
        self, runner: JobRunner, studies: Studies, setting: Setting, trial: StudyTrial
    ) -> None:
        """Train a trial from rung to rung until it ends."""
        folder = _trial_folder(Path(self.out), trial)
        values = dict(trial.values)
        show(f"{setting.name} trial {trial.number}: {values}")
        while trial.state == RUNNING:
            words = _trial_arguments(self.definition, self.search, setting, trial, self.out)
            code, results = runner.train(folder, [*words, *self.arguments])
            spent = _spent_flops(folder, setting.run_flops)
            if is_interruption(code):
                studies.interrupt(trial)
                runner.interrupted(setting.name, code, results.get("signal"))
            if code:
                state = DIVERGED if code == DivergedError.exit_code else FAILED
                message = f"{describe_exit(code)}: {results.get('message', '')}"
                trial = studies.end(trial, state, spent, message)
                break
            try:
                score = _score_of(folder, self.search.metric)
            except UsageError as error:
                studies.end(trial, FAILED, spent, str(error))
                runner.fail("failed", setting.name, error.exit_code, str(error))
            trial = studies.report(trial, score, spent)
        _record_trial(Path(self.out), self.search, trial)
        show(f"{setting.name} trial {trial.number}: {trial.state}, {trial.score}")

    def checkpoint(self) -> DelayedSubmission:
        """Return this job to requeue, because the studies know the progress of the search."""
        return DelayedSubmission(self)


def _trial_folder(out: Path, trial: StudyTrial) -> Path:
    return out / FOLDER / trial.setting / f"{trial.number:04d}"


def _trial_arguments(
    definition: Definition, search: Search, setting: Setting, trial: StudyTrial, out: str
) -> list[str]:
    (stage,) = definition.stages
    values = {**setting.values, **trial.values}
    folder = os.path.relpath(_trial_folder(Path(out), trial), out)
    (words,) = arguments_of(definition, values, search.seed, {stage.name: folder}, Path(out))
    pause = 0.0 if trial.share >= 1 else trial.share * setting.run_flops
    # Trials are not tested, and are scored only with the suite that chooses.
    words += [f"trainer.pause_flops={pause!r}", "trainer.final_splits=[]"]
    return [*words, "trainer.final_suites=[]"] if search.metric.startswith(_VALID) else words


def _spent_flops(folder: Path, run_flops: float) -> float:
    """Return the FLOPs that the run in a folder spent, up to its last log line if it was killed."""
    results = _read_results(folder)
    if isinstance(results.get("flops"), (int, float)):
        return float(results["flops"])
    update, max_update, _ = read_progress(folder)
    return run_flops * min(1.0, update / max_update) if max_update else 0.0


def _read_results(folder: Path) -> dict[str, Any]:
    try:
        return parse_results(folder / "results.json")
    except (OSError, ValueError):
        return {}


def _score_of(folder: Path, metric: str) -> float:
    """Return a final metric of a run or a metric of its suites; UsageError if it is missing."""
    metrics = flatten(_read_results(folder).get("metrics") or {})
    if metric not in metrics:
        for results in suite_results.of_last_checkpoint(folder)[0]:
            metrics |= results.metrics
    if not isinstance(metrics.get(metric), (int, float)):
        raise UsageError(unknown_metric(metric, list(metrics)))
    return float(metrics[metric])


def unknown_metric(metric: str, known: list[str]) -> str:
    """Return the message for a metric that runs do not have."""
    names = ", ".join(known) or "none; give a --valid-split, or a suite in trainer.final_suites"
    return f"search: runs have no metric '{metric}'.{nearest(metric, known)} Metrics: {names}"


def _record_trial(out: Path, search: Search, trial: StudyTrial) -> None:
    """Write trial.json into the folder, if any, of a trial that has ended."""
    folder = _trial_folder(out, trial)
    if trial.state in (RUNNING, INTERRUPTED) or not folder.is_dir():
        return
    names = "setting number values state flops share score".split()
    rules = {name: getattr(search, name) for name in ("metric", "lower_is_better")}
    trial_facts = {name: getattr(trial, name) for name in names}
    write_trial(folder, {**trial_facts, **rules, "independent": search.is_independent})


def fail_lost(studies: Studies, out: str, workers: set[str]) -> list[StudyTrial]:
    """Fail the running trials of ended workers; return these trials with their spent FLOPs."""
    flops = {setting.name: setting.run_flops for setting in studies.settings()}
    lost = []
    for trial in studies.running():
        if trial.worker in workers:
            spent = _spent_flops(_trial_folder(Path(out), trial), flops[trial.setting])
            lost.append(studies.end(trial, FAILED, spent, "its process died"))
            _record_trial(Path(out), studies.search, lost[-1])
    return lost
