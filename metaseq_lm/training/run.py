"""A training run: trains, resumes and writes its results."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaseq_lm import __version__
from metaseq_lm.core.config import RunConfig, TrainerConfig, effects_of_plug_ins
from metaseq_lm.core.errors import DivergedError, Interrupted, MetaseqError, UsageError, say
from metaseq_lm.core.output import present_time, show
from metaseq_lm.data.storage.manifest import corpus_fingerprint
from metaseq_lm.distributed import process_group, signals
from metaseq_lm.evaluation.predictions import write_predictions
from metaseq_lm.runs import checkpoint, lineage_cost, manifests, suite_results
from metaseq_lm.runs.conditions import KEY
from metaseq_lm.runs.facts import check_facts
from metaseq_lm.runs.folder import RunFolder, altered_files, code_hash, has_started, read_results
from metaseq_lm.tasks.protocols import (
    LoadsFrozen,
    UsesOtherRuns,
    facts_of,
    flops_by_rule,
    submissions_of,
)
from metaseq_lm.training.checkpointing import Checkpointer, check_room
from metaseq_lm.training.conditions import check_best_metric
from metaseq_lm.training.loggers import check_installed
from metaseq_lm.training.parts import (
    build_parts,
    check_splits,
    count_parameters,
    peak_memory,
    prepare_config,
)
from metaseq_lm.training.price import resolve_budget
from metaseq_lm.training.run_log import RunLog
from metaseq_lm.training.start import initialise
from metaseq_lm.training.suites import (
    check_final_suites,
    describe_other_code,
    missing_suites,
    score_final_suites,
)
from metaseq_lm.training.trainer import Trainer
from metaseq_lm.training.words import check_words


class TrainingRun:
    """Builds a run from its configuration and trains it into `config.save_dir`.

    All methods are collective calls. `folder` is None on all but the first. The parts of the
    run in `reset` (see RESETS) restart with `config`'s options.
    """

    def __init__(self, config: RunConfig, reset: Collection[str] = ()) -> None:
        self.reset = reset
        if config.engine.loggers:
            check_installed(config.engine.loggers)
        config = prepare_config(config)
        if not config.trainer.max_update:
            config = resolve_budget(config)
        self.config = config
        checkpoints = Path(config.save_dir) / "checkpoints"
        resumes = checkpoints.is_dir() and manifests.newest_manifest(checkpoints) is not None
        self.parts = build_parts(config, empty=resumes or bool(config.branch_from))
        self.task, self.model, self.engine = self.parts.task, self.parts.model, self.parts.engine
        if isinstance(self.task, LoadsFrozen):
            self.task.load_frozen(self.model)
        self.initialisation = initialise(self.parts)
        if reset:
            _check_resettable(Path(config.save_dir), config.trainer)
        # A refused run leaves no folder, and damaged data show now, not at the first save.
        _ = self.parts.data_fingerprint
        check_splits(self.parts)
        check_final_suites(config, self.task, self.model)
        check_words(config.trainer, self.task)
        self.folder = RunFolder(config, reset) if process_group.rank() == 0 else None
        self.log = RunLog(config, self.folder)
        self.checkpointer = Checkpointer(self.parts, checkpoints, self.initialisation.record())
        self.trainer = Trainer(self.parts, self.checkpointer, self.log)

    def train(self) -> None:
        """Make the remaining updates, score the final splits and write the results."""
        trainer, options = self.trainer, self.config.trainer
        folder = Path(self.config.save_dir)
        results = read_results(folder)
        if results is not None and not _is_complete(results, options):
            results = None
        if results is not None and missing_suites(self.config):
            results = None
        if (results := process_group.from_first(results)) is not None:
            trained_on, current = results.get("data"), self.parts.data_fingerprint
            if trained_on not in (None, current):
                raise MetaseqError(
                    f"{folder} is finished, but was trained on other data than {self.config.data} "
                    f"holds now ({trained_on} then, {current} now); choose another --save-dir, or "
                    "go on with --reset data and a larger --max-update"
                )
            self._check_sources()
            if self.folder is not None:
                altered = altered_files(folder)
                if altered:
                    say(f"{folder}: {', '.join(altered)} changed after the results were written")
                self.folder.write_config(self.config)
                if not altered:
                    self.folder.write_results(results)
                show(f"{folder} is finished already ({results['updates']} updates)")
                if note := describe_other_code(self.config):
                    say(note)
            return
        messages = trainer.resume(self.reset)
        if 0 < self.config.trainer.max_update <= trainer.update:
            messages[-1] += "; no results.json of a finished run, it is written anew"
        check_best_metric(self.parts, trainer.last_valid)
        if self.folder is not None:
            self.folder.cut_log(trainer.update)
            self.folder.write_config(self.config)
        if self.initialisation.message:
            messages.insert(0, self.initialisation.message)
        self.log.start(options.max_update, trainer.update, self.engine.device)
        self.log.open_loggers(trainer.update)
        if self.folder is not None:
            check_room(folder, self.model, bool(options.average_decay))
            (folder / "results.json").unlink(missing_ok=True)
        for message in messages:
            self.log.event(trainer.update, trainer.seconds, message)
        try:
            trainer.train()
            if missed := trainer.words.missed:
                self.log.event(trainer.update, trainer.seconds, f"checkpoints: {missed}")
            with trainer.average.shown():
                self._finish()
        finally:
            self.log.close(failed=sys.exc_info()[0] is not None)

    def _check_sources(self) -> None:
        """Raise MetaseqError if a finished run's sources have other weights than at its start."""
        folder, source = Path(self.config.save_dir), self.config.init_from
        if self.initialisation.is_outdated:
            raise MetaseqError(
                f"{folder} is finished, but init_from {source} has other weights now than it "
                "started from; choose another --save-dir to start from those, or go on with its "
                "own weights with a larger --max-update"
            )
        stored = manifests.newest_manifest(folder / "checkpoints") or {}
        facts: dict[str, Any] = {}
        with contextlib.suppress(manifests.CheckpointError):  # a source was removed
            facts = facts_of(self.task)
        check_facts(stored.get("facts"), facts, folder)

    def _finish(self) -> None:
        metrics: dict[str, Any] = {}
        if self.config.trainer.valid_split and self.trainer.last_valid:
            metrics[self.config.trainer.valid_split] = self.trainer.last_valid
        self._load_best(metrics)
        for split in self.config.trainer.final_splits:
            process_group.stop_if_signalled(self.trainer.progress_text())
            try:
                metrics[split], rows = self.parts.score(split)
            except Interrupted as error:
                raise signals.make_interruption(
                    error.signal, self.trainer.progress_text()
                ) from None
            if self.folder is not None and rows:
                files = submissions_of(self.task, split, rows)
                write_predictions(self.folder.path, split, rows, files)
            text = "  ".join(f"{k} {v:.4g}" for k, v in metrics[split].items())
            self.log.message(f"{split}  {text or 'no targets, so no score'}", is_result=True)
        self._score_suites()
        self.record("finished", metrics=metrics)

    def _score_suites(self) -> None:
        """Score the run's last checkpoint with `trainer.final_suites`."""
        if self.folder is not None and (note := describe_other_code(self.config)):
            self.log.message(note)
        try:
            for results in score_final_suites(self.config, train_run):
                if self.folder is not None:
                    suite_results.write(self.folder.path, results)
                overall = results.groups[suite_results.OVERALL]["metrics"]
                text = "  ".join(f"{metric} {value:.4g}" for metric, value in overall.items())
                self.log.message(f"{results.name}  {text}", is_result=True)
        except Interrupted as error:
            raise signals.make_interruption(error.signal, self.trainer.progress_text()) from None

    def _load_best(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of the best checkpoint, if any, and load its weights if needed."""
        best = self.checkpointer.folder / "best"
        if not best.exists():
            return
        if valid := manifests.read_manifest(best.resolve()).get("valid"):
            metrics[self.config.trainer.valid_split] = valid
        if self.config.trainer.final_splits:
            checkpoint.read_weights(self.model, checkpoint.open_lazily(best.resolve()))

    def record(self, status: str, error: MetaseqError | None = None, metrics: Any = None) -> None:
        """Write results.json on the first replica.

        A collective call, unless the run "failed" and other replicas may have ended.
        """
        trainer, config = self.trainer, self.config
        spent = (trainer.flops.total, peak_memory(self.engine.device))
        by_replica = [spent]
        if status != "failed":
            by_replica = process_group.gather_objects(spent)
        by_rule = flops_by_rule(self.task, self.engine)
        costs = [self.initialisation.costs]
        if isinstance(self.task, UsesOtherRuns):
            costs.append(self.task.further_costs())
        ancestors = lineage_cost.merge_costs(costs)
        if self.folder is None:
            return
        # If the run was finished before this attempt, its results stay.
        if status == "failed" and self.folder.is_finished():
            return
        terms = self.engine.record.loss_terms
        criterion = type(self.task.criterion)
        self.folder.write_results(
            {
                "status": status,
                "message": str(error or ""),
                "exit_code": error.exit_code if error else 0,
                "signal": error.signal if isinstance(error, Interrupted) else 0,
                "stopped_by": trainer.stopped_by,
                "seed": config.seed,
                "updates": trainer.update,
                "max_update": config.trainer.max_update,
                "patience": config.trainer.patience,
                "started": self.checkpointer.started,
                "ended": present_time(),
                "seconds": trainer.seconds,
                "flops": sum(flops for flops, _ in by_replica),
                "words_seen": trainer.words.seen,
                "flops_by_rule": None if by_rule is None else by_rule * trainer.update,
                "peak_memory": max(memory for _, memory in by_replica),
                "parameters": count_parameters(self.model),
                "metrics": metrics or {},
                KEY: trainer.conditions,
                "losses": sorted(terms),
                "terms": {name: kind for name, kind in sorted(terms.items()) if kind},
                "effects": effects_of_plug_ins(config),
                "evaluates_as": vars(criterion).get("evaluates_as", ""),
                "data": self.parts.data_fingerprint,
                "corpus": corpus_fingerprint(config.data),
                "code": code_hash(config.user_dir),
                "versions": _versions(),
                # Bits of results depend on the vector instructions.
                "architecture": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
                "threads": torch.get_num_threads(),
                "replicas": process_group.world_size(),
                "pretraining": lineage_cost.total_cost(ancestors, config.init_from),
            }
        )


def train_run(config: RunConfig) -> None:
    """Start or continue a training run; results.json says if it diverged."""
    run = TrainingRun(config)
    try:
        run.train()
    except DivergedError as error:
        run.record("diverged", error)
        raise


def _versions() -> dict[str, str]:
    """Return the versions of the software that the results depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "metaseq-lm": __version__,
    }


def _check_resettable(folder: Path, options: TrainerConfig) -> None:
    """Raise UsageError if a folder has no run that --reset could change."""
    if not has_started(folder):
        raise UsageError(f"--reset goes on with a run, but {folder} holds none; leave it out")
    results = read_results(folder)
    if results is not None and _is_complete(results, options):
        raise UsageError(
            f"{folder} is finished after {results['updates']} updates, so --reset changes nothing; "
            "give a larger --max-update too"
        )


def _is_complete(results: dict[str, Any], options: TrainerConfig) -> bool:
    """Return whether results.json says that a run is finished under the limits of `options`."""
    if results["status"] != "finished":
        return False
    # It may be trained, but not all splits are scored.
    if set(options.final_splits) - set(results.get("metrics") or {}):
        return False
    spent = [
        (results["flops"], options.max_flops),
        (results["flops"], options.pause_flops),
        (results["seconds"], options.max_seconds),
        (results.get("words_seen") or 0, options.max_words),
    ]
    if results["stopped_by"] == "patience":
        spent.append((results.get("patience", 0), options.patience))
    reached = any(0 < limit <= amount for amount, limit in spent)
    return reached or results["updates"] >= options.max_update
