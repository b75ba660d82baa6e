"""Checkpoints of a training run: selecting the best, saving, pruning and choosing one to resume."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metaseq_lm.core.config import RunConfig, TrainerConfig, as_dict, build
from metaseq_lm.core.errors import DivergedError, MetaseqError, UsageError
from metaseq_lm.core.files import free_bytes, human_bytes, require_folder
from metaseq_lm.core.output import present_time
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.secrets import mask_options
from metaseq_lm.data.storage.manifest import tokenizer_hash
from metaseq_lm.distributed import process_group, vectors
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.checkpoint import Checkpoint
from metaseq_lm.runs.facts import check_facts
from metaseq_lm.runs.folder import RESETS, changed_options, check_same, code_hash
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.tasks.protocols import facts_of
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import check_tokenizer


@dataclass
class _Pending:
    """A checkpoint whose files are being written; only the first replica's manifest counts.

    `names` are its links besides "last".
    """

    update: int
    manifest: dict[str, Any]
    names: Sequence[str]
    writing: Future[dict[str, str]]


class Checkpointer:
    """Saves and finds the checkpoints in `folder`. Its methods are collective calls."""

    def __init__(self, parts: Parts, folder: Path, start: dict[str, Any]) -> None:
        self.parts, self.folder = parts, folder
        self.start = start  # entries of manifests on init_from
        self.started: str | None = present_time()  # time of the first update; None if unknown
        self.options = parts.config.trainer
        self.saved_at = -1  # the update of the last complete checkpoint
        self.pending: _Pending | None = None

    @cached_property
    def description(self) -> dict[str, Any]:
        """Entries of every manifest: configuration, data, tokenizer and start of the run."""
        config = self.parts.config
        return {
            "config": mask_options(as_dict(config)),
            "data": self.parts.data_fingerprint,
            "tokenizer": tokenizer_hash(config.data),
            "code": code_hash(config.user_dir),
            "torch": str(torch.__version__),
            "facts": facts_of(self.parts.task),
            **self.start,
        }

    def check_weights(self, update: int) -> None:
        """Raise DivergedError if a weight is not finite, MetaseqError if the replicas disagree."""
        process_group.check_peers()
        weights = self.parts.model.state_dict()
        # A weight that is not finite on one replica must stop all replicas.
        local = {name: vectors.local_part(tensor) for name, tensor in weights.items()}
        by_replica = process_group.gather_objects(checkpoint.nonfinite_names(local))
        bad = list(dict.fromkeys(chain.from_iterable(by_replica)))
        if bad:
            raise DivergedError(
                f"after update {update} {', '.join(bad[:4])} is not finite, so "
                "nothing is saved. Resume from the last checkpoint with a lower optimizer.lr"
            )
        process_group.check_equal(weights, update)

    def save(
        self,
        update: int,
        state: dict[str, Any],
        valid: dict[str, float],
        names: Sequence[str],
        required: bool,
    ) -> str:
        """Write a checkpoint, remove old ones; return an error message or "".

        The first replica writes all but the shards; each process writes its own shards. With
        trainer.async_save, writing only starts here unless the checkpoint is `required`, and
        `finish` completes it. `valid` are the metrics of the last validation; `names`, such as
        "best", are links that will point at the checkpoint. If the checkpoint is `required` or
        trainer.on_save_error is stop, an error is raised as CheckpointError instead.
        """
        trouble = self.finish()  # an earlier checkpoint
        if self.saved_at == update and not trouble:
            self._tidy(update, names)
            return ""
        copy = self.options.async_save and not required
        trouble = self._begin(update, state, valid, names, copy) or trouble
        if trouble:
            return self._reported(trouble, required)
        if copy:
            return ""
        return self.finish(required)

    def _begin(
        self,
        update: int,
        state: dict[str, Any],
        valid: dict[str, float],
        names: Sequence[str],
        copy: bool,
    ) -> str:
        """Start writing a checkpoint; from a `copy` of the state if training goes on meanwhile.

        Returns an error message or "", the same on all replicas.
        """
        contents = checkpoint.stage(
            self.parts.model.state_dict(), state, process_group.rank() == 0, copy
        )
        contents.size = sum(process_group.gather_objects(contents.size))
        description = {**self.description, "started": self.started, "valid": valid}
        try:
            with checkpoint.agree_on_error():
                if process_group.rank() == 0:
                    require_folder(self.folder.parent)
                    checkpoint.prepare(self.folder, update, contents.size)
        except CheckpointError as error:
            return str(error)
        thread = ThreadPoolExecutor(1, "checkpoint")
        writing = thread.submit(checkpoint.write, self.folder, update, contents)
        # The thread ends once it has written.
        thread.shutdown(wait=False)
        self.pending = _Pending(update, contents.manifest(update, description), names, writing)
        return ""

    def outdate(self) -> str:
        """Make the next save rewrite a checkpoint of this update; raises as `save` does."""
        trouble = self.finish()
        self.saved_at = -1
        return trouble

    def is_written(self) -> bool:
        """Return whether this process has written its files of a pending checkpoint."""
        return self.pending is not None and self.pending.writing.done()

    def finish(self, required: bool = False) -> str:
        """Wait for a pending checkpoint, if there is one, and complete it; errors as in `save`."""
        if self.pending is None:
            return ""
        pending, self.pending = self.pending, None
        try:
            with checkpoint.agree_on_error():
                sums = pending.writing.result()
            sums = dict(ChainMap(*process_group.gather_objects(sums)))
            with checkpoint.agree_on_error():
                if process_group.rank() == 0:
                    checkpoint.commit(self.folder, pending.update, pending.manifest, sums)
                    self._tidy(pending.update, pending.names)
        except CheckpointError as error:
            return self._reported(str(error), required)
        self.saved_at = pending.update
        return ""

    def _tidy(self, update: int, names: Sequence[str]) -> None:
        """Link the checkpoint under its names, and remove old ones."""
        if process_group.rank() == 0:
            for name in names:
                checkpoint.link(self.folder, name, manifests.folder_of(self.folder, update))
            checkpoint.prune(self.folder, self.options.keep_last, update)

    def _reported(self, trouble: str, required: bool) -> str:
        if trouble and (required or self.options.on_save_error == "stop"):
            raise CheckpointError(trouble)
        return trouble

    def newest(self, reset: Collection[str] = ()) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that verifies and fits, and why newer ones were skipped.

        Loads its weights into the model. The parts of the run in `reset` need not fit. Raises
        CheckpointError if there are checkpoints and none fits.
        """
        stored, skipped = checkpoint.find_newest(self.folder, partial(self._read, reset))
        return stored, [f"skipped a checkpoint that cannot be used: {reason}" for reason in skipped]

    def _read(self, reset: Collection[str], path: Path) -> Checkpoint:
        """Return a checkpoint that fits except for the parts in `reset`; load its weights."""
        stored = checkpoint.open_lazily(path)
        with checkpoint.agree_on_error():
            self._check_fit(stored, reset)
        checkpoint.read_weights(self.parts.model, stored)
        return stored

    def origin(self, reset: Collection[str]) -> Checkpoint:
        """Return the checkpoint of branch_from as `newest` does.

        Raises UsageError if the run would make no update after the branch.
        """
        config = self.parts.config
        stored = self._read(reset, manifests.resolve(str(config.branch_from)))
        updates, last = stored.state["update"], config.trainer.max_update
        if updates >= last:
            raise UsageError(
                f"{stored.path} has made {updates} updates, and this run, which goes on from it, "
                f"is to end after {last}; give a larger --max-update, or --max-flops, which counts "
                "those of the updates before the branch too"
            )
        return stored

    def describe_resume(self, stored: Checkpoint, reset: Collection[str]) -> list[str]:
        """Return messages on the checkpoint, reset or changed options, and other code or torch."""
        config = self.parts.config
        pairs = changed_options(stored.manifest.get("config") or {}, config)
        pairs["data"] = (stored.manifest.get("data"), self.parts.data_fingerprint)
        changes = [f"{key} {then} -> {now}" for key, (then, now) in pairs.items() if then != now]
        updates = stored.state["update"]
        is_branch = stored.path.parent.resolve() != self.folder.resolve()
        verb = "branches" if is_branch else "resumed"
        message = f"{verb} from {stored.path} at update {updates}"
        if reset:
            message += f"; reset {', '.join(reset)}"
        if changes:
            message += f"; changed {', '.join(changes)}"
        messages = [message]
        others = [
            f"{name} {stored.manifest[name]} -> {self.description[name]}"
            for name in ("code", "torch")
            if stored.manifest.get(name) not in (None, self.description[name])
        ]
        if is_branch and (update := _first_other_rate(stored, config, updates)):
            messages.append(
                f"this run's schedule has another learning rate than the one before the branch at "
                f"update {update} of {updates}, so the run differs from one without a branch"
            )
        if others:
            messages.append(
                f"the checkpoint was made with other software ({', '.join(others)}), so the run "
                "may not be bitwise equal to an uninterrupted one"
            )
        return messages

    def resumed(
        self, stored: Checkpoint, update: int, best: int | None, words: Mapping[str, int]
    ) -> None:
        """Record that the run was resumed from a checkpoint, and correct the links.

        `best` is the update of the best checkpoint, `words` the updates of checkpoints at numbers
        of words.
        """
        self.saved_at = update
        self.started = stored.manifest.get("started")
        if process_group.rank() == 0:
            checkpoint.relink(self.folder, stored.path, best, words)

    def _check_fit(self, stored: Checkpoint, reset: Collection[str]) -> None:
        config = self.parts.config
        trained_on, current = stored.manifest.get("data"), self.parts.data_fingerprint
        if trained_on != current and "data" not in reset:
            names = [part for part in RESETS if part in reset or part == "data"]
            raise CheckpointError(
                f"{stored.path} was trained on other data than {config.data} holds now "
                f"({trained_on} then, {current} now); to go on with these data add --reset "
                f"{','.join(names)}, else choose another --save-dir"
            )
        differing = self.parts.engine.optimizers.keys() ^ stored.state.get("optimizers", {}).keys()
        try:
            check_tokenizer(stored, config.data)
            facts = self.description["facts"]
            check_facts(stored.manifest.get("facts"), facts, stored.path)
            checkpoint.check_fit(self.parts.model, stored.weights, stored.path)
            if differing and "optimizer" not in reset:
                raise CheckpointError(
                    f"{stored.path}: the optimizers {sorted(differing)} do not match"
                )
            check_same(stored.manifest.get("config") or {}, config, stored.path, reset)
        except UsageError as error:
            raise CheckpointError(str(error)) from error


def _first_other_rate(stored: Checkpoint, config: RunConfig, updates: int) -> int:
    """Return the first of `updates` at which the schedules of two runs differ, 0 if none does."""
    runs = (manifests.config_of(stored.manifest, stored.path), config)
    rates = [(run.optimizer.lr, build("schedule", run.schedule)) for run in runs]
    for update in range(1, updates + 1):
        before, now = (lr * schedule(update) for lr, schedule in rates)
        if before != now:
            return update
    return 0


class BestCheckpoint:
    """Best value of trainer.best_checkpoint_metric, its update, and the validations since then."""

    def __init__(self, options: TrainerConfig) -> None:
        self.metric: str = options.best_checkpoint_metric
        self.maximize = bool(options.maximize_best_checkpoint_metric)
        self.ties: str = options.ties
        self.value: float | None = None
        self.update = self.waited = 0

    def improves(self, metrics: Mapping[str, float], update: int) -> bool:
        """Record the validation at `update`; return whether it is the best so far.

        Raises UsageError if it does not give the metric.
        """
        if not self.metric:
            return False
        check_produced(self.metric, metrics)
        value, best = metrics[self.metric], self.value
        sign = 1 if self.maximize else -1
        better = best is None or sign * value > sign * best
        if math.isfinite(value) and (better or (value == best and self.ties == "latest")):
            self.value, self.update, self.waited = value, update, 0
            return True
        self.waited += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the value, its update, the validations since, and the metric."""
        names = ("metric", "maximize", "value", "update", "waited")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load a saved state; return False, and ignore it, if it records another metric."""
        if (state["metric"], state["maximize"]) != (self.metric, self.maximize):
            return False
        self.value, self.update, self.waited = (state[n] for n in ("value", "update", "waited"))
        return True


def check_produced(metric: str, metrics: Mapping[str, float]) -> None:
    """Raise UsageError if the metrics of a validation are not empty and lack `metric`."""
    if metric and metrics and metric not in metrics:
        raise UsageError(
            f"trainer.best_checkpoint_metric is '{metric}' but validation gives "
            f"{', '.join(sorted(metrics))}.{nearest(metric, list(metrics))}"
        )


def check_room(folder: Path, model: nn.Module, has_average: bool = False) -> None:
    """Raise MetaseqError if the disk cannot hold two checkpoints with two moments per weight."""
    size = (3 + has_average) * sum(
        w.numel() * w.element_size() for w in model.state_dict().values()
    )
    needed, free = int(2.2 * size), free_bytes(folder)
    if free < needed:
        raise MetaseqError(
            f"{folder}: there is no room for checkpoints: about {needed:,} bytes are needed and "
            f"{free:,} are free ({human_bytes(free)}). Make room, or choose another --save-dir"
        )
